"""What the tests of a whole run share: a model of two layers, a few thousand random tokens, and how to start a run."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import loop as train
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.metrics import read_metrics
from shmap_tp.training.step import State, build_step_functions

ROOT = Path(__file__).parents[2]
FIRST = str(CONF / "config.yaml")
CONTEXT, VOCABULARY, BATCH = 16, 64, 8

TINY = [
    "mesh.dp=2", "mesh.mp=4",
    "model.width=32", "model.layers=2", "model.heads=8", "model.kv_heads=8", "model.head_dim=4", "model.ffn=64",
    f"model.vocabulary={VOCABULARY}", "model.vocabulary_multiple=64", f"model.context={CONTEXT}",
    f"model.attention_chunk={CONTEXT}",
    f"train.batch={BATCH}", "train.microbatches=1", "train.steps=8",
    "optimizer.warmup_steps=2", "optimizer.decay_steps=20",
    "evaluate.every=4", "evaluate.batches=2", "checkpoint.every=2",
    "log.tensorboard=false", "log.every=1", "run.compilation_cache=null", "data.source=null",
]  # fmt: skip


def write_tokens(directory: Path, *, train: int = 3000, validation: int = 600, seed: int = 0) -> Path:
    """train.bin and validation.bin of random ids; no meta.json."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for name, count in [("train", train), ("validation", validation)]:
        generator.integers(0, VOCABULARY, count).astype("<u2").tofile(directory / f"{name}.bin")
    return directory


def overrides(directory: Path, *more: str) -> list[str]:
    """The tiny run in `directory`/run on the tokens in `directory`/data, which are written if need be."""
    if not (directory / "data").exists():
        write_tokens(directory / "data")
    return [*TINY, f"run.dir={directory / 'run'}", f"data.dir={directory / 'data'}", *more]


def tiny(directory: Path, *more: str) -> Config:
    """The configuration of the tiny run; see `overrides`."""
    return load(FIRST, overrides(directory, *more))


def run_straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny run from step 0 to 8 without a break; its peak, which takes a second, is not measured."""
    directory = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "machine_peak", lambda devices: None)
        assert train.train(tiny(directory)) == 0
    return directory


def state_at(directory: Path, step: int) -> list[bytes]:
    """The bits of every leaf of the checkpoint of `step`, each as one array."""
    config = tiny(directory)
    shapes = build_step_functions(config, make_mesh(config.mesh), jnp.float32).shapes
    with Checkpoints(config.checkpoint, print) as checkpoints:
        assert checkpoints._fault(step) is None
        return bits(checkpoints.restore(step, shapes))


def bits(state: State) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def lines(directory: Path, split: str = "train") -> list[dict]:
    return [line for line in read_metrics(directory / "run" / "metrics.jsonl") if line["split"] == split]


def values(directory: Path, split: str = "train") -> list[tuple]:
    """What of metrics.jsonl does not depend on the clock or on how often the run was started."""
    return [
        (line["step"], line["loss"], line.get("grad_norm"), line.get("learning_rate"))
        for line in lines(directory, split)
    ]


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    """main.py as a process of its own, which may use the programs that the tests have compiled."""
    cache = jax.config.jax_compilation_cache_dir
    given = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        [sys.executable, "main.py", *arguments, *([f"run.compilation_cache={cache}"] if cache else [])],
        cwd=ROOT,
        env=os.environ | given | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def killed_at_the_end(processes: Iterable[subprocess.Popen]) -> Iterator[list[subprocess.Popen]]:
    """None of them outlives the context."""
    with ExitStack() as stack:
        started = []
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def together(count: int, *arguments: str, last: Sequence[str] = ()) -> AbstractContextManager[list[subprocess.Popen]]:
    """main.py as `count` processes that find each other by --coordinator; `last` are given to the last of them only."""
    place = ["--coordinator", f"localhost:{free_port()}", "--processes", str(count), "--process-id"]
    given = [[*arguments, *place, str(number)] if count > 1 else [*arguments] for number in range(count)]
    given[-1] += last
    return killed_at_the_end(start("--cfg", FIRST, *each, JAX_PLATFORMS="cpu") for each in given)


def wait_for_step(process: subprocess.Popen, directory: Path, step: int) -> None:
    """Until metrics.jsonl tells of `step`."""
    for _ in range(6000):
        seen = read_metrics(directory / "run" / "metrics.jsonl")
        if seen and seen[-1]["step"] >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come in two minutes")
