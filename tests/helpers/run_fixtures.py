"""Fixtures of whole runs: a model of two layers, a few thousand random tokens, and ways to start and stop a run."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.typing import DTypeLike
from omegaconf import DictConfig, OmegaConf

from shmap_tp.config.compose import CONF, load, to_dict
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.data.metadata import META, SPLITS, TOKENIZER
from shmap_tp.hardware.xla_options import compile_with
from shmap_tp.layers.context import tokens_spec
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import path_name
from shmap_tp.training import loop, step
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.metrics import read_metrics
from shmap_tp.training.step import CONFIGURED, Components, State, StepFunctions, build_step_functions
from tests.helpers.compiling import quick_environment

ROOT = Path(__file__).parents[2]
FIRST = str(CONF / "base.yaml")
CONTEXT, VOCABULARY, BATCH = 16, 64, 8
STEPS = 8
"""Steps of the tiny run, which evaluates at 4 and 8 and saves at 2, 4, 6 and 8."""

TINY = [
    "mesh.dp=2", "mesh.mp=4",
    "model.width=32", "model.layers=2", "model.heads=8", "model.kv_heads=8", "model.head_dim=4", "model.ffn=64",
    f"model.vocabulary={VOCABULARY}", "model.vocabulary_multiple=64", f"model.context={CONTEXT}",
    f"model.attention_chunk={CONTEXT}",
    f"train.batch={BATCH}", "train.microbatches=1", f"train.steps={STEPS}",
    "optimizer.warmup_steps=2", "optimizer.decay_steps=20",
    "evaluate.every=4", "evaluate.batches=2", "checkpoint.every=2",
    "log.tensorboard=false", "log.every=1", "run.compilation_cache=null", "data.source=null",
]  # fmt: skip


def write_tokens(directory: Path, *, train: int = 3000, validation: int = 600, seed: int = 0) -> Path:
    """Write train.bin and validation.bin with random ids, of which 0 ends a document, a tokenizer.json that is none,
    and meta.json; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TOKENIZER).write_bytes(b"{}")
    sha256 = hashlib.sha256(b"{}").hexdigest()
    meta = {"dtype": "uint16", "tokenizer": "none.json", "tokenizer_sha256": sha256, "end_of_text": 0}
    (directory / META).write_text(json.dumps(meta))
    generator = np.random.default_rng(seed)
    for name, count in [("train", train), ("validation", validation)]:
        generator.integers(0, VOCABULARY, count).astype("<u2").tofile(directory / f"{name}.bin")
    return directory


def complete_meta(directory: Path, **changes: Any) -> None:
    """Write a meta.json with everything that data.cache=null needs."""
    files = {split: (directory / f"{split}.bin").read_bytes() for split in SPLITS}
    meta = json.loads((directory / META).read_text()) | {
        "vocabulary": 64,
        "tokens": {split: len(content) // 2 for split, content in files.items()},
        "sha256": {split: hashlib.sha256(content).hexdigest() for split, content in files.items()},
    }
    (directory / META).write_text(json.dumps(meta | changes))


def overrides(directory: Path, *more: str) -> list[str]:
    """Overrides of conf/base.yaml for the tiny run in `directory`/run on the tokens in `directory`/data.

    The tokens are written if they do not exist.
    """
    if not (directory / "data").exists():
        write_tokens(directory / "data")
    return [*TINY, f"run.dir={directory / 'run'}", f"data.dir={directory / 'data'}", *more]


def tiny(directory: Path, *more: str) -> Config:
    """The configuration of the tiny run; see `overrides`.

    Hydra composes the files once, in some tenths of a second, and keys of the form a.b=value are set in the result.
    """
    given = overrides(directory, *more)
    if any("{" in override or "." not in override.partition("=")[0] for override in given):
        return load(FIRST, given)
    keys = OmegaConf.from_dotlist(given[len(TINY) :])
    places = {"checkpoint": {"dir": f"{keys.run.dir}/checkpoints"}}
    result = OmegaConf.to_object(OmegaConf.merge(_composed(), places, keys))
    validate(result)
    return result


@cache
def _composed() -> DictConfig:
    return OmegaConf.structured(load(FIRST, [*TINY, "data.dir=data"]))


BUILT: dict[Any, StepFunctions] = {}


def shared_step_functions(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED, end_of_text: int | None = None
) -> StepFunctions:
    """`build_step_functions`, or what it made before of equal settings: the runs of a test share their programs.

    What a test replaces in the step is part of the key, so that it gets programs of its own.
    """
    train = replace(config.train, steps=0, profile=None, check_replicas_every=0, replay_every=0)
    settings = repr((config.model, config.mesh, config.optimizer, config.guard, train, config.run.seed))
    settings += repr([*config.data.sources])
    replaced = *filter(callable, vars(step).values()), step.Objective.__call__, step.Objective.counted
    key = settings, mesh, dtype, components, end_of_text, replaced
    if key not in BUILT:
        made = build_step_functions(config, mesh, dtype, components, end_of_text)
        BUILT[key] = replace(made, step=LoweredOnce(made.step))
    return BUILT[key]


class LoweredOnce:
    """A jitted step, which is lowered and compiled once for all runs that share it."""

    def __init__(self, step: Any):
        self._step, self.lower = step, cache(step.lower)

    def __call__(self, *arguments: Any) -> Any:
        return self._step(*arguments)


compiled_once = cache(lambda lowered, options: compile_with(lowered, dict(options)))


def make_runs_quick(patch: pytest.MonkeyPatch, *, draw: bool = False) -> None:
    """Runs share their programs, do not measure the peak FLOP/s, which takes a second, and do not `draw` the report."""
    patch.setattr("shmap_tp.training.run.build_step_functions", shared_step_functions)
    patch.setattr("shmap_tp.training.run.machine_peak", lambda devices: None)
    patch.setattr("shmap_tp.training.run.to_dict", _to_dict_once)
    patch.setattr("shmap_tp.training.run.compile_with", lambda step, options: compiled_once(step, (*options.items(),)))
    if not draw:
        patch.setattr("shmap_tp.training.run.write_report", _not_drawn)


def _to_dict_once(config: Config, made: dict[str, dict] = {}) -> dict:  # noqa: B006
    """As `to_dict`, which takes half of the time of a save."""
    if (key := repr(config)) not in made:
        made[key] = to_dict(config)
    return made[key]


def _not_drawn(directories: Sequence[Path], file: Path) -> Path:
    file.touch()
    return file


def run_uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the tiny run to its end and return its directory."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        make_runs_quick(patch, draw=True)
        assert loop.train(tiny(directory)) == 0
    return directory


def state_at(directory: Path, step: int) -> list[bytes]:
    """The bytes of every leaf of the checkpoint of `step`, each as a full array."""
    config = tiny(directory)
    shapes = shared_step_functions(config, make_mesh(config.mesh), jnp.float32).shapes
    with Checkpoints(config.checkpoint, print) as checkpoints:
        assert checkpoints._fault(step) is None
        return bits(checkpoints.restore(step, shapes))


def bits(state: State) -> list[bytes]:
    """The bytes of every leaf, each as a full array."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def lines(directory: Path, split: str = "train") -> list[dict]:
    """The lines of metrics.jsonl of one split."""
    return [line for line in read_metrics(directory / "run" / "metrics.jsonl") if line["split"] == split][::-1]


def values(directory: Path, split: str = "train") -> list[tuple]:
    """The part of metrics.jsonl that depends neither on the clock nor on how often the run was started."""
    names = "step", "loss", "grad_norm", "learning_rate"
    return [tuple(map(line.get, names)) for line in lines(directory, split)]


def assert_same_run(directory: Path, expected: Path) -> None:
    """Assert that two runs ended with the same state, bit for bit, and recorded the same losses."""
    for split in ("train", "validation"):
        assert values(directory, split) == values(expected, split), split
    assert state_at(directory, STEPS) == state_at(expected, STEPS)


MAIN = """
import runpy
from shmap_tp.hardware import devices
from shmap_tp.training import run_report
devices.matmul_rate = lambda: 1e12
run_report.write_report = lambda directories, file: file.touch() or file
runpy.run_path("main.py", run_name="__main__")
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    """Start main.py in another process, with the compilation cache of the tests; it neither measures the peak FLOP/s,
    which takes seconds, nor draws the report."""
    cache = jax.config.jax_compilation_cache_dir
    return start_python("-c", MAIN, *arguments, *([f"run.compilation_cache={cache}"] if cache else []), **environment)


def start_python(*arguments: str, **environment: str) -> subprocess.Popen:
    """Start `python ARGUMENTS` from the root of the repository, with the compilation cache of the tests."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | quick_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained_on_bytes(directory: Path) -> Path:
    """A run directory: two steps of the tiny run on bytes."""
    data = write_tokens(directory / "data")
    (data / "meta.json").write_text(json.dumps({"dtype": "uint16", "tokenizer": "bytes", "end_of_text": 0}))
    settings = ["model.vocabulary=256", "train.steps=2", "optimizer.warmup_steps=1", "optimizer.decay_steps=2"]
    with pytest.MonkeyPatch.context() as patch:
        make_runs_quick(patch)
        assert loop.train(tiny(directory, *settings)) == 0
    return directory / "run"


@contextmanager
def killed_at_the_end(processes: Iterable[subprocess.Popen]) -> Iterator[list[subprocess.Popen]]:
    """A context that kills the processes at its end."""
    with ExitStack() as stack:
        started = []
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def free_port() -> int:
    """A TCP port of this host that no process uses."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def together(count: int, *arguments: str, last: Sequence[str] = ()) -> AbstractContextManager[list[subprocess.Popen]]:
    """Start main.py in `count` processes with --coordinator; only the last process gets the arguments `last`."""
    address = ["--coordinator", f"localhost:{free_port()}", "--processes", str(count), "--process-id"]
    given = [[*arguments, *address, str(number)] if count > 1 else [*arguments] for number in range(count)]
    given[-1] += last
    return killed_at_the_end(start("--cfg", FIRST, *each, JAX_PLATFORMS="cpu") for each in given)


def wait_for_step(process: subprocess.Popen, directory: Path, step: int) -> None:
    """Wait until metrics.jsonl has `step`."""
    for _ in range(6000):
        seen = next(read_metrics(directory / "run" / "metrics.jsonl"), None)
        if seen and seen["step"] >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached within two minutes")


def file_contents(directory: Path) -> dict[str, bytes]:
    """The contents of every file below `directory`, by relative path, but for what a start notes of its token files."""
    found = (file for file in directory.rglob("*") if file.is_file() and file.suffix != ".scan")
    return {str(file.relative_to(directory)): file.read_bytes() for file in found}


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints of the run in `directory`, in order."""
    names = [path.name for path in (directory / "run" / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if ".damaged-" not in name)  # a kill may cut off a save


def signal_during(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, number: int, when: Callable[..., bool]
) -> None:
    """Make `owner.method` send this process the signal `number` the first time `when(arguments)` is true."""
    original, sent = getattr(owner, method), []

    def interrupted(self, *arguments):
        if not sent and when(*arguments):
            sent.append(number)
            os.kill(os.getpid(), number)
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, interrupted)


def flip_bit(state: State, name: str, device: int) -> State:
    """`state` with the lowest bit of the last element of one device's replica of one array flipped."""

    def flip(path, x):
        if path_name(path) != name:
            return x
        shards = []
        for shard in x.addressable_shards:
            values = np.array(shard.data)
            if shard.device.id == device:
                values.reshape(-1).view(np.uint8)[-values.itemsize] ^= 1
            shards.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.tree_util.tree_map_with_path(flip, state)


def tokens_of(config: Config) -> jax.ShapeDtypeStruct:
    """The tokens of a step with one microbatch, with their sharding."""
    on = make_mesh(config.mesh)
    sharding = jax.NamedSharding(on, tokens_spec(on.axis_names))
    return jax.ShapeDtypeStruct((1, BATCH, CONTEXT + 1), jnp.int32, sharding=sharding)
