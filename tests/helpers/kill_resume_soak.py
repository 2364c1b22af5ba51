"""A soak test: a run is killed many times at random moments and resumed each time on a random mesh and process count.

    python -m tests.helpers.kill_resume_soak --kills 30 --seed 0

Every start is interrupted by SIGKILL or SIGTERM, sent to one process or to all, during start-up, training or a save (a
checkpoint is saved every other step).  The test asserts that each start resumes from the newest complete checkpoint,
that all processes end within a minute, and that every step is trained once and in order, with the loss of an
uninterrupted run.  The final parameters must equal those of the uninterrupted run to 1e-5 of the largest, and bit for
bit with --same-mesh.
"""

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from shmap_tp.data.token_files import open_token_file
from shmap_tp.errors import LostProcessError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.integrity import MANIFEST
from shmap_tp.training.step import State, build_step_functions
from tests.helpers.data_orders import order_of
from tests.helpers.run_fixtures import ROOT, bits, lines, overrides, tiny, together, write_tokens

SHAPES = [(2, 4, 1), (8, 1, 1), (1, 1, 1), (2, 4, 2), (4, 2, 2), (2, 2, 4)]
"""(dp, mp, processes)"""
SETTINGS = ["checkpoint.every=2", "evaluate.every=10", "run.lost_timeout_seconds=10", "run.join_timeout_seconds=25"]
TOLERANCE = 1e-5
LIMIT = 60
"""Seconds within which all processes must end after one was signalled."""


class Soak:
    """One run in `directory`, and the random numbers that decide where it runs and how it is killed."""

    def __init__(self, directory: Path, seed: int, same_mesh: bool):
        self.directory, self.random = directory, random.Random(seed)
        self.shapes = [(2, 4, 1)] if same_mesh else SHAPES

    def newest_checkpoint(self) -> int:
        """The step of the newest complete checkpoint, or 0."""
        found = (self.directory / "run" / "checkpoints").glob(f"*/{MANIFEST}")
        return max([int(path.parent.name) for path in found], default=0)

    def last_step(self) -> int:
        """The last step in metrics.jsonl, or 0."""
        return max([line["step"] for line in lines(self.directory)], default=0)

    def run(self, steps: int, *, kill: bool) -> None:
        """Start on a random mesh; with `kill` interrupt the run, otherwise let it finish."""
        dp, mp, processes = self.random.choice(self.shapes)
        before = self.newest_checkpoint()
        given = overrides(self.directory, *SETTINGS, f"mesh.dp={dp}", f"mesh.mp={mp}", f"train.steps={steps}")
        with together(processes, *given, "checkpoint.resume=if_present") as started:
            print(f"  {processes} on ({dp}, {mp}) from step {before}:", end=" ", flush=True)
            event = self.interrupt(started) if kill else "to the end"
            print(event, end="; ", flush=True)
            began = time.monotonic()
            outputs = [process.communicate(timeout=LIMIT if kill else 600) for process in started]
            took = time.monotonic() - began
        codes = [process.returncode for process in started]
        print(f"{codes} in {took:.1f} s, trained to {self.last_step()}, saved {self.newest_checkpoint()}", flush=True)
        self.check(event, codes, outputs, before)

    def interrupt(self, started: list[subprocess.Popen]) -> str:
        """Send a signal at a random moment: one time in five during start-up, else within 3 s of training."""
        number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
        targets = self.random.choice([started, [self.random.choice(started)]])
        seen, starting = len(lines(self.directory)), self.random.random() < 0.2
        if starting:
            time.sleep(self.random.uniform(0, 6))
        else:
            while len(lines(self.directory)) <= seen and started[0].poll() is None:
                seen = min(seen, len(lines(self.directory)))  # its first step makes others lost
                time.sleep(0.02)
            time.sleep(self.random.uniform(0, 3))
        for process in targets:
            process.send_signal(number)
        return f"{number.name} of {len(targets)} {'during start-up' if starting else 'during training'}"

    def check(self, event: str, codes: list[int], outputs: list[tuple[str, str]], before: int) -> None:
        """Assert what must hold after each start."""
        expected = (
            {0}
            if event == "to the end"
            else {STOPPED, LostProcessError.exit_code, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL}
        )
        logs = [file.read_text()[-5000:] for file in (self.directory / "run" / "logs").glob("*.log")]
        assert set(codes) <= expected, "\n".join([str(codes), *sum(outputs, ()), *logs])
        assert self.newest_checkpoint() >= before, "a complete checkpoint was lost"
        if before and (resumed := re.search(r"resuming from step (\d+)", outputs[0][0])):
            assert int(resumed[1]) == before, outputs[0][0]
        if "SIGTERM" in event and "training" in event:
            assert set(codes) == {STOPPED}, (codes, outputs)
            assert self.newest_checkpoint() == self.last_step(), "trained steps were not saved"

    def state(self, step: int) -> State:
        """The state of the checkpoint of `step`, on the host."""
        config = tiny(self.directory)
        shapes = build_step_functions(config, make_mesh(config.mesh), np.float32).shapes
        with Checkpoints(config.checkpoint, print) as checkpoints:
            return jax.device_get(checkpoints.restore(step, shapes))


def compared_arrays(state: State) -> list[np.ndarray]:
    """Parameters, optimizer state, and mean plus standard deviation of the loss.

    The variance alone would be a small difference of nearly equal losses.
    """
    return jax.tree.leaves((state.params, state.optimizer, state.guard.mean + np.sqrt(state.guard.variance)))


def compare(killed: Soak, uninterrupted: Soak, last: int, bitwise: bool) -> None:
    """Assert that the killed run equals the uninterrupted one at step `last`."""
    found, wanted = lines(killed.directory), lines(uninterrupted.directory)
    assert [line["step"] for line in found] == list(range(1, last + 1)), "a step is missing or repeated"
    worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(found, wanted, strict=True))
    config = tiny(killed.directory)
    file = open_token_file(config.data.dir, "train", context=config.model.context, vocabulary=64)
    count, batch, order = len(file), config.train.batch, order_of(file)
    read = [order((line["step"] - 1) * batch, line["step"] * batch)[1] for line in found]
    times = np.bincount(np.concatenate(read), minlength=count)
    assert times.max() - times.min() <= 1, "a sequence was read more often than another"
    ours, theirs = killed.state(last), uninterrupted.state(last)
    pairs = zip(compared_arrays(ours), compared_arrays(theirs), strict=True)
    distance = max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs)
    segments = len({line["segment"] for line in found})
    print(f"{last} steps of {batch} sequences, each step once, in {segments} starts that contributed steps")
    print(f"each of {count} sequences was read {times.min()} or {times.max()} times")
    print(f"against the uninterrupted run: losses within {worst:.1e}, parameters and optimizer within {distance:.1e}")
    if bitwise:
        assert bits(jax.tree.leaves(ours)) == bits(jax.tree.leaves(theirs))
    assert max(worst, distance) <= TOLERANCE


def main(argv: list[str] | None = None) -> None:
    """Run the soak test with command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random meshes, signals and moments")
    parser.add_argument("--same-mesh", action="store_true", help="always mesh (2, 4); the result is then bitwise equal")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        killed = Soak(Path(directory) / "killed", arguments.seed, arguments.same_mesh)
        uninterrupted = Soak(Path(directory) / "uninterrupted", arguments.seed, same_mesh=True)
        for each in (killed, uninterrupted):
            write_tokens(each.directory / "data")
        for kill in range(1, arguments.kills + 1):
            print(f"kill {kill}", end="", flush=True)
            killed.run(1_000_000, kill=True)
        last = killed.newest_checkpoint() + 4
        killed.run(last, kill=False)
        uninterrupted.run(last, kill=False)
        compare(killed, uninterrupted, last, arguments.same_mesh)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla-tests"))
    sys.exit(main())
