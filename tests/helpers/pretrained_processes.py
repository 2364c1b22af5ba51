"""A Hugging Face directory read, trained two steps and written by one process or several on this machine.

    python -m tests.helpers.pretrained_processes DIR OUT --processes 2 --mesh 2-4-none [--mesh 4-2-fsdp] [--steps 0]

starts the processes, each with its share of dp x mp emulated devices, and prints for each process and mesh (dp, mp,
zero) the bytes of tensors that it has read, and the peak of its memory while it loads and while it writes.  OUT gets
for each mesh, such as OUT/2-4-none, the directory `loaded`, and for the last one logits.npy, losses.json, `trained`,
and the run's checkpoint of the last step.
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
from shmap_tp.errors import ShmapTpError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.pretrained.reading import load_parameters
from shmap_tp.pretrained.source import open_source
from shmap_tp.pretrained.tensor_files import StoredTensor
from shmap_tp.pretrained.writing import Form, save_model
from shmap_tp.runtime.distributed import Coordinator, initialize_distributed
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import build_step_functions
from tests.helpers.compiling import quick_environment
from tests.helpers.paths import ROOT
from tests.helpers.run_fixtures import free_port

MIB = 2**20


def configured(given: argparse.Namespace, mesh: str) -> Config:
    """The configuration of every process."""
    dp, mp, zero = mesh.split("-")
    overrides = [f"model.from_pretrained={given.directory}", f"mesh.dp={dp}", f"mesh.mp={mp}", f"mesh.zero={zero}"]
    overrides += [f"mesh.processes={given.processes}", f"model.context={given.context}", "train.batch=8"]
    overrides += ["optimizer.warmup_steps=0", "optimizer.learning_rate=1e-3"]
    overrides += [f"checkpoint.dir={given.out / mesh / 'checkpoints'}"]
    return shmap_tp.load_config(*overrides, file=ROOT / "conf" / "finetune.yaml")


def work(given: argparse.Namespace) -> dict[str, Any]:
    """What each process does; returns what it measured on each mesh."""
    coordinator = Coordinator(f"localhost:{given.port}", given.process) if given.processes > 1 else None
    initialize_distributed(configured(given, given.mesh[0]), coordinator)
    found, source = {}, open_source(str(given.directory))
    for mesh in given.mesh:
        config, measured = configured(given, mesh), {}
        functions = build_step_functions(config, make_mesh(config.mesh), jnp.float32)
        with measuring(measured, "load"):
            parameters = jax.block_until_ready(load_parameters(source, config.model, functions.shapes.params))
        shards = [shard.data.nbytes for x in jax.tree.leaves(parameters) for shard in x.addressable_shards]
        measured["shards_mib"] = sum(shards) / MIB
        with measuring(measured, "export"):
            save_model(given.out / mesh / "loaded", config, parameters, source, Form("float32"))
        if given.steps and mesh == given.mesh[-1]:
            parameters = train(given, given.out / mesh, config, functions, parameters, source)
        found[mesh] = measured
    if given.full_disk is not None:
        os.pwrite = full_disk if given.process == given.full_disk else os.pwrite
        try:
            save_model(given.out / "full", config, parameters, source, Form("float32"))
        except ShmapTpError as error:
            found["error"] = str(error)
    return found


def train(given: argparse.Namespace, out: Path, config: Config, functions: Any, parameters: Any, source: Any) -> Any:
    """Compute logits, train `given.steps` steps and write what came out; returns the parameters."""
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
    save_model(out / "trained", config, state.params, source, Form("float32"))
    if jax.process_index() == 0:
        np.save(out / "logits.npy", logits)
        (out / "losses.json").write_text(json.dumps(losses))
    return state.params


def full_disk(*arguments: Any) -> int:
    """In place of `os.pwrite`."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def measuring(measured: dict[str, float], what: str) -> Iterator[None]:
    """Record how many bytes of tensors the block reads, and the peak of this process's own memory (RssAnon)."""
    peak, stop, count, read = [anonymous_bytes()], threading.Event(), [0], StoredTensor.read

    def watch() -> None:
        while not stop.wait(0.002):
            peak.append(max(peak.pop(), anonymous_bytes()))

    def counted(tensor: StoredTensor, box: Any) -> np.ndarray:
        found = read(tensor, box)
        count[0] += found.nbytes
        return found

    watcher, began = threading.Thread(target=watch), time.monotonic()
    measured[f"before_{what}_mib"] = peak[0] / MIB
    watcher.start()
    StoredTensor.read = counted
    try:
        yield
    finally:
        StoredTensor.read = read
        stop.set()
        watcher.join()
        measured[f"{what}_peak_mib"] = max(*peak, anonymous_bytes()) / MIB
        measured[f"{what}_read_mb"] = count[0] / 1e6
        measured[f"{what}_seconds"] = time.monotonic() - began


def anonymous_bytes() -> int:
    """Memory of this process that is no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def run_processes(directory: Path, out: Path, processes: int, *arguments: str) -> list[dict[str, Any]]:
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


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    for name, default in [("processes", 1), ("steps", 2), ("context", 64), ("port", 0)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh", action="append", metavar="DP-MP-ZERO", help="one after the other", required=True)
    parser.add_argument("--full-disk", type=int, help="the number of a process whose disk is full at the end")
    parser.add_argument("--process", type=int, help="the number of this process; without it, all are started")
    return parser.parse_args(arguments)


def main() -> None:
    given = parsed(None)
    if given.process is not None:
        print(json.dumps(work(given)), flush=True)
        return
    arguments = [text for name in ("steps", "context") for text in (f"--{name}", str(getattr(given, name)))]
    arguments += [text for mesh in given.mesh for text in ("--mesh", mesh)]
    for number, found in enumerate(run_processes(given.directory, given.out, given.processes, *arguments)):
        for mesh, measured in found.items():
            values = ", ".join(f"{name} {value:.0f}" for name, value in measured.items())
            print(f"process {number}, mesh {mesh}: {values}")


if __name__ == "__main__":
    main()
