"""A Hugging Face directory read, trained two steps and written by one process or several on this machine.

    python -m tests.helpers.pretrained_processes DIR OUT --processes 2 --dp 2 --mp 4 [--zero fsdp] [--steps 0]

starts the processes, each with its share of dp x mp emulated devices, and prints for each the bytes of tensors that it
has read, and the peak of its memory while it loads and while it writes.  OUT gets logits.npy, losses.json, the
directories `loaded` and `trained`, and the run's checkpoint of the last step.
"""

import argparse
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import shmap_tp
from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.pretrained.reading import load_parameters
from shmap_tp.pretrained.source import open_source
from shmap_tp.pretrained.writing import save_model
from shmap_tp.runtime.distributed import Coordinator, initialize_distributed
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import build_step_functions
from tests.helpers.compiling import quick_environment
from tests.helpers.paths import ROOT
from tests.helpers.run_fixtures import free_port

MIB = 2**20


def configured(given: argparse.Namespace) -> Config:
    """The configuration of every process."""
    mesh = {"dp": given.dp, "mp": given.mp, "processes": given.processes, "zero": given.zero}
    overrides = [f"model.from_pretrained={given.directory}", *(f"mesh.{key}={value}" for key, value in mesh.items())]
    overrides += [f"model.context={given.context}", "train.batch=8", "optimizer.warmup_steps=0"]
    overrides += ["optimizer.learning_rate=1e-3", f"checkpoint.dir={given.out / 'checkpoints'}"]
    return shmap_tp.load_config(*overrides, file=ROOT / "conf" / "finetune.yaml")


def work(given: argparse.Namespace) -> None:
    """What each process does."""
    config = configured(given)
    coordinator = Coordinator(f"localhost:{given.port}", given.process) if given.processes > 1 else None
    initialize_distributed(config, coordinator)
    mesh, measured = make_mesh(config.mesh), {}
    functions = build_step_functions(config, mesh, jnp.float32)
    source = open_source(str(given.directory))
    with measuring(measured, "load"):
        parameters = jax.block_until_ready(load_parameters(source, config.model, functions.shapes.params))
    measured["shards_mib"] = sum(s.data.nbytes for x in jax.tree.leaves(parameters) for s in x.addressable_shards) / MIB
    if given.process == given.full_disk:
        os.pwrite = full_disk
    with measuring(measured, "export"):
        save_model(given.out / "loaded", config, parameters, source, "float32")
    if given.steps:
        train(given, config, functions, parameters, source)
    print(json.dumps(measured), flush=True)


def train(given: argparse.Namespace, config: Config, functions: Any, parameters: Any, source: Any) -> None:
    """Compute logits, train `given.steps` steps and write what came out."""
    tokens = np.random.default_rng(7).integers(0, config.model.vocabulary, functions.tokens.shape).astype(np.int32)
    placed = jax.make_array_from_callback(tokens.shape, functions.tokens.sharding, lambda index: tokens[index])
    mesh = functions.tokens.sharding.mesh
    logits = build_model_functions(config, mesh, jnp.float32).logits(parameters, placed[0, :, :-1])
    logits = multihost_utils.process_allgather(logits, tiled=True)
    state, losses = functions.init_from(parameters), []
    for _ in range(given.steps):
        state, metrics = functions.step(state, placed)
        losses.append(float(metrics["loss"]))
    with Checkpoints(config.checkpoint, print) as checkpoints:
        checkpoints.save(given.steps, state, {"config": to_dict(config)})
    save_model(given.out / "trained", config, state.params, source, "float32")
    if jax.process_index() == 0:
        np.save(given.out / "logits.npy", logits)
        (given.out / "losses.json").write_text(json.dumps(losses))


def full_disk(*arguments: Any) -> int:
    """In place of `os.pwrite`."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def measuring(measured: dict[str, float], what: str) -> Iterator[None]:
    """Record how many bytes of tensors the block reads, and the peak of this process's own memory (RssAnon)."""
    peak, stop, read, preadv = [anonymous_bytes()], threading.Event(), [0], os.preadv

    def watch() -> None:
        while not stop.wait(0.002):
            peak.append(max(peak.pop(), anonymous_bytes()))

    def counted(*arguments: Any) -> int:
        read[0] += (count := preadv(*arguments))
        return count

    watcher, began = threading.Thread(target=watch), time.monotonic()
    measured[f"before_{what}_mib"] = peak[0] / MIB
    watcher.start()
    os.preadv = counted
    try:
        yield
    finally:
        os.preadv = preadv
        stop.set()
        watcher.join()
        measured[f"{what}_peak_mib"] = max(*peak, anonymous_bytes()) / MIB
        measured[f"{what}_read_mb"] = read[0] / 1e6
        measured[f"{what}_seconds"] = time.monotonic() - began


def anonymous_bytes() -> int:
    """Memory of this process that is no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def run_processes(directory: Path, out: Path, processes: int, *arguments: str) -> list[dict[str, float]]:
    """Start `work` in as many processes and return what each measured."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.helpers.pretrained_processes", str(directory), str(out)]
    command += [*arguments, "--processes", str(processes), "--port", str(free_port())]
    given = quick_environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, "--process", str(number)], cwd=ROOT, env=os.environ | given, **pipes)
        for number in range(processes)
    ]
    try:
        output = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), output
    return [json.loads(text.splitlines()[-1]) for text, _ in output]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    for name, default in [("processes", 1), ("dp", 1), ("mp", 1), ("steps", 2), ("context", 64), ("port", 0)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zero", default="none")
    parser.add_argument("--full-disk", type=int, help="the number of a process whose disk is full while it writes")
    parser.add_argument("--process", type=int, help="the number of this process; without it, all are started")
    given = parser.parse_args()
    if given.process is not None:
        work(given)
        return
    options = ("dp", "mp", "steps", "context", "zero")
    arguments = [text for name in options for text in (f"--{name}", str(getattr(given, name)))]
    for number, measured in enumerate(run_processes(given.directory, given.out, given.processes, *arguments)):
        print(f"process {number}: " + ", ".join(f"{name} {value:.0f}" for name, value in measured.items()))


if __name__ == "__main__":
    main()
