"""A run that is killed over and over, at any moment, and goes on each time on another mesh and number of processes.

    python tests/soak.py --kills 30 --seed 0

Every start is broken off by SIGKILL or SIGTERM, of one process or of all: while it starts, trains, or writes one of the
checkpoints, of which there is one every other step.  What is shown: each start goes on from the newest checkpoint that
was complete; all processes end within a minute; every step is trained once and in order, each with the loss that an
uninterrupted run has there; and the parameters at the end are those of that run, to 1e-5 of the largest, or with
--same-mesh to the bit.
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

from shmap_tp.data.batches import training_order
from shmap_tp.data.token_files import open_token_file
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.exit_codes import LOST, STOPPED
from shmap_tp.training.checkpoint import MANIFEST, Checkpoints
from shmap_tp.training.step import State, build_step_functions
from tests.helpers.run_fixtures import ROOT, bits, lines, overrides, tiny, together, write_tokens

SHAPES = [(2, 4, 1), (8, 1, 1), (1, 1, 1), (2, 4, 2), (4, 2, 2), (2, 2, 4)]
"""(dp, mp, processes)"""
GIVEN = ["checkpoint.every=2", "evaluate.every=10", "run.lost_timeout_seconds=10", "run.join_timeout_seconds=25"]
TOLERANCE = 1e-5
LIMIT = 60
"""Seconds that processes may take to end, once one of them was told to or killed."""


class Soak:
    """One run in `directory`, and the dice that decide how it is treated."""

    def __init__(self, directory: Path, seed: int, same_mesh: bool):
        self.directory, self.dice = directory, random.Random(seed)
        self.shapes = [(2, 4, 1)] if same_mesh else SHAPES

    def sealed(self) -> int:
        """The step of the newest complete checkpoint, or 0."""
        found = (self.directory / "run" / "checkpoints").glob(f"*/{MANIFEST}")
        return max([int(path.parent.name) for path in found], default=0)

    def trained(self) -> int:
        return max([line["step"] for line in lines(self.directory)], default=0)

    def run(self, steps: int, *, kill: bool) -> None:
        """Start on a random shape and, to `kill`, break it off; else it ends by itself."""
        dp, mp, processes = self.dice.choice(self.shapes)
        before = self.sealed()
        given = overrides(self.directory, *GIVEN, f"mesh.dp={dp}", f"mesh.mp={mp}", f"train.steps={steps}")
        with together(processes, *given, "checkpoint.resume=if_present") as started:
            print(f"  {processes} on ({dp}, {mp}) from step {before}:", end=" ", flush=True)
            said = self.break_off(started) if kill else "to the end"
            print(said, end="; ", flush=True)
            began = time.monotonic()
            outputs = [process.communicate(timeout=LIMIT if kill else 600) for process in started]
            took = time.monotonic() - began
        codes = [process.returncode for process in started]
        print(f"{codes} in {took:.1f} s, trained to {self.trained()}, complete to {self.sealed()}", flush=True)
        self.judge(said, codes, outputs, before)

    def break_off(self, started: list[subprocess.Popen]) -> str:
        """Kill at a moment that dice choose: one in five while it starts, else within three seconds of training."""
        number = self.dice.choice([signal.SIGKILL, signal.SIGTERM])
        hit = self.dice.choice([started, [self.dice.choice(started)]])
        seen, starts = len(lines(self.directory)), self.dice.random() < 0.2
        if starts:
            time.sleep(self.dice.uniform(0, 6))
        else:
            while len(lines(self.directory)) <= seen and started[0].poll() is None:
                seen = min(seen, len(lines(self.directory)))  # lines of steps that were lost are removed
                time.sleep(0.02)
            time.sleep(self.dice.uniform(0, 3))
        for process in hit:
            process.send_signal(number)
        return f"{number.name} of {len(hit)} {'while it starts' if starts else 'while it trains'}"

    def judge(self, said: str, codes: list[int], outputs: list[tuple[str, str]], before: int) -> None:
        """What must be so after each start."""
        expected = {0} if said == "to the end" else {STOPPED, LOST, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL}
        logs = [file.read_text()[-5000:] for file in (self.directory / "run" / "logs").glob("*.log")]
        assert set(codes) <= expected, "\n".join([str(codes), *sum(outputs, ()), *logs])
        assert self.sealed() >= before, "a complete checkpoint was lost"
        if before and (going_on := re.search(r"going on from step (\d+)", outputs[0][0])):
            assert int(going_on[1]) == before, outputs[0][0]
        if "SIGTERM" in said and "trains" in said:
            assert set(codes) == {STOPPED}, (codes, outputs)
            assert self.sealed() == self.trained(), "what was trained was not saved"

    def state(self, step: int) -> State:
        config = tiny(self.directory)
        shapes = build_step_functions(config, make_mesh(config.mesh), np.float32).shapes
        with Checkpoints(config.checkpoint, print) as checkpoints:
            return jax.device_get(checkpoints.restore(step, shapes))


def learnt(state: State) -> list[np.ndarray]:
    """Parameters and optimizer, and of the guard's statistics what it judges by: a loss one deviation above the mean.
    (The variance alone is a small difference of losses that are nearly equal.)"""
    return jax.tree.leaves((state.params, state.optimizer, state.guard.mean + np.sqrt(state.guard.variance)))


def compare(soaked: Soak, straight: Soak, last: int, to_the_bit: bool) -> None:
    """What must be so at the end."""
    found, wanted = lines(soaked.directory), lines(straight.directory)
    assert [line["step"] for line in found] == list(range(1, last + 1)), "a step is missing, or there twice"
    worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(found, wanted, strict=True))
    config = tiny(soaked.directory)
    count = len(open_token_file(config.data.dir, "train", context=config.model.context, vocabulary=64))
    batch = config.train.batch
    read = [training_order(count, 0, (line["step"] - 1) * batch, line["step"] * batch) for line in found]
    times = np.bincount(np.concatenate(read), minlength=count)
    assert times.max() - times.min() <= 1, "a window was read more often than another"
    ours, theirs = soaked.state(last), straight.state(last)
    pairs = zip(learnt(ours), learnt(theirs), strict=True)
    apart = max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs)
    segments = len({line["segment"] for line in found})
    print(f"{last} steps of {batch} windows, each step once, in the {segments} starts of which something was kept")
    print(f"each of {count} windows was read {times.min()} or {times.max()} times")
    print(f"against the uninterrupted run: losses within {worst:.1e}, parameters and optimizer within {apart:.1e}")
    if to_the_bit:
        assert bits(jax.tree.leaves(ours)) == bits(jax.tree.leaves(theirs))
    assert max(worst, apart) <= TOLERANCE


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the dice: which shape, which signal, when")
    parser.add_argument("--same-mesh", action="store_true", help="always (2, 4) in one process; the same bits then")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as directory:
        soaked = Soak(Path(directory) / "soaked", arguments.seed, arguments.same_mesh)
        straight = Soak(Path(directory) / "straight", arguments.seed, same_mesh=True)
        for each in (soaked, straight):
            write_tokens(each.directory / "data")
        for kill in range(1, arguments.kills + 1):
            print(f"kill {kill}", end="", flush=True)
            soaked.run(1_000_000, kill=True)
        last = soaked.sealed() + 4
        soaked.run(last, kill=False)
        straight.run(last, kill=False)
        compare(soaked, straight, last, arguments.same_mesh)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla-tests"))
    sys.exit(main())
