#!/usr/bin/env python
"""A training of a small model among preemptions, failing disks and a slow bucket, for as long as it is told.

    python scripts/simulate_preemptions.py --minutes 60 --seed 0

From each start to the next event passes a random time, exponentially distributed (a Poisson process).  An event is

    kill      SIGKILL of one process or of all: a preemption without notice
    notice    SIGTERM to one process or to all, and SIGKILL after --notice seconds: a spot machine
    disk      from now on no file of the run can grow, as on a full disk: the run has to end by itself
    damage    SIGKILL of all, and one bit of the newest checkpoint is flipped
    slow      for some seconds each read of the bucket takes a second longer; the run goes on
    host      with --local: SIGKILL of all, and the local checkpoints of one host are gone

After each the run is started again, on another mesh and with another number of processes.  A step takes --step seconds
at least, as if the devices were busy: emulated devices take a few milliseconds.

At its end it prints goodput beside the optimum for the events, restarts and saves that were measured (`optimum`), what
was lost, and how the run differs from an uninterrupted one.  It fails (an AssertionError) if a start does not resume
from the newest intact checkpoint, if a process ends with an unexpected code or is left, if a step is missing or
repeated, or if losses or parameters differ by more than 1e-5 (with --same-mesh: in one bit).  Differences of rounding
between meshes grow with the steps, so steps should not be short: in one run losses were 1e-6 apart after 7,900 steps,
1e-5 after 18,500 and 5e-3 after 21,000.
"""

import argparse
import json
import math
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# ruff: noqa: E402

import jax

from shmap_tp.errors import LostProcessError, UserError
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.files import read_lines
from shmap_tp.training.goodput import TimeBreakdown, TimeCategory
from shmap_tp.training.integrity import MANIFEST
from shmap_tp.training.metrics import is_metric
from tests.helpers.kill_resume_soak import Soak, compare
from tests.helpers.run_fixtures import FIRST, complete_meta, free_port, killed_at_the_end, overrides, start_python

MESHES = [(2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 4, 1), (2, 2, 1), (1, 1, 1), (2, 2, 2)]
"""(dp, mp, processes)"""
EVENTS = {"kill": 8, "notice": 6, "disk": 2, "damage": 1, "slow": 3}
"""How often each happens, relative to the others."""
LOSING = {"kill", "disk", "damage", "host"}
"""The events after which steps since the last save are lost."""
LIMIT = 60
"""Seconds within which all processes must end after an event."""
STOP_SECONDS = 8
"""How long the others run on after one process has ended."""
SLOW_SECONDS = 5
SETTINGS = [
    "train.steps=1000000", "evaluate.every=0", "train.check_replicas_every=0", "log.every=1000000",
    "checkpoint.resume=if_present", "optimizer.final_learning_rate=1e-4",
    "run.lost_timeout_seconds=5", "run.join_timeout_seconds=60",
]  # fmt: skip

PROGRAM = """
import os, runpy, time
import fsspec
from shmap_tp.hardware import devices
from shmap_tp.training.goodput import WallClock
from tests.helpers.buckets import Bucket

class SlowBucket(Bucket):
    def cat_ranges(self, *given, **named):
        if os.path.exists(os.environ["BUCKETS"] + "/slow"):
            time.sleep(1)
        return super().cat_ranges(*given, **named)

def dispatched(self, outputs, real=WallClock.dispatched):
    real(self, outputs)
    time.sleep(float(os.environ["STEP_SECONDS"]))

fsspec.register_implementation("gs", SlowBucket, True)
WallClock.dispatched = dispatched
devices.matmul_rate = lambda: 1e12
runpy.run_path("main.py", run_name="__main__")
"""
"""What each process runs: main.py, with a directory in the place of the bucket and steps that take their time."""


@dataclass
class Start:
    """What was seen of one start, in seconds since 1970 and in steps."""

    begin: float
    event: str
    signalled: float
    ended: float = 0.0
    first_step: float | None = None
    """When its first step began; None if there was none."""
    lost: int = 0
    """Steps after the newest checkpoint: the next start trains them again."""


def optimum(rate: float, losing: float, save: float) -> tuple[float, float]:
    """(the largest share of the time after the first step of a start that can go to steps that count, the time between
    saves that gives it).

    Events come at `rate` a second; after the share `losing` of them what was trained since the last save is lost, after
    the others it is saved; the loop waits `save` seconds for each save.  With saves after each t seconds of steps there
    remain, of 1 / rate seconds,

        losing t / (exp(rate (t + save)) - 1) + (1 - losing) (1 - exp(-rate t)) / (1 - exp(-rate (t + save))) / rate

    For losing = 1 and small rates the best t is Young's sqrt(2 save / rate).  Daly 2006, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", section 3, with restarts left out.
    """

    def share(t: float) -> float:
        saved = math.exp(-rate * (t + save))  # the probability that no event comes before the next save
        return (rate * losing * t * saved - (1 - losing) * math.expm1(-rate * t)) / (1 - saved)

    return max((share(t), t) for t in (1.02**n * 1e-3 for n in range(800)))


class Preemptions(Soak):
    """One run in `directory`/killed, its starts, and the random numbers that decide where it runs and what happens."""

    def __init__(self, directory: Path, given: argparse.Namespace):
        super().__init__(directory / "killed", given.seed, given.same_mesh)
        self.shapes, self.given, self.mark = self.shapes if given.same_mesh else MESHES, given, uuid.uuid4().hex
        self.starts: list[Start] = []
        self.damaged: dict[int, float] = {}
        self.slowed = 0
        self.events = EVENTS | ({"host": 3} if given.local else {})
        saves = [f"checkpoint.every={given.every}"]
        saves += [f"checkpoint.hours_between_failures={given.mean / 3600}"] if given.every == "auto" else []
        saves += [f"checkpoint.local_every={given.local}"] if given.local else []
        self.settings = overrides(self.directory, *SETTINGS, *saves)
        complete_meta(self.directory / "data")

    def intact(self) -> list[int]:
        """The steps of the complete checkpoints that were not damaged since they were written, newest first."""
        manifests = (self.directory / "run" / "checkpoints").glob(f"*/{MANIFEST}")
        written = {int(file.parent.name): file.stat().st_mtime for file in manifests if file.parent.name.isdecimal()}
        return sorted((step for step, at in written.items() if at > self.damaged.get(step, 0)), reverse=True)

    def newest(self, processes: int) -> int:
        """The newest step that these processes can restore, from the bucket or from their hosts; 0 if none."""
        held: dict[str, dict[tuple, int]] = {}
        for host in range(processes):
            for file in (self.directory / f"host-{host}").glob(f"run-*/*/{MANIFEST}"):
                saved = json.loads(file.read_text().partition("\n")[2])
                of = held.setdefault(file.parent.name.rpartition("-")[0], {})
                for name, ranges, _ in saved["shards"]:
                    of[name, str(ranges)] = math.prod(end - first for first, end in ranges)
        whole = max((sum(of.values()) for of in held.values()), default=0)
        local = [int(name.partition("-")[0]) for name, of in held.items() if sum(of.values()) == whole]
        return max([0, *self.intact()[:1], *local])

    def start(self, until: float) -> None:
        """Start on a random mesh, wait for the next event, let it happen, and check what is left."""
        dp, mp, processes = self.random.choice(self.shapes)
        before, (last_before, _) = self.newest(processes), self.trained_since(0)
        meshes = [f"mesh.dp={dp}", f"mesh.mp={mp}", f"data.dir=gs://{self.directory.name}/data", "data.cache=null"]
        with killed_at_the_end(self.processes(processes, *self.settings, *meshes)) as started:
            print(f"{len(self.starts) + 1:4}  {processes} on ({dp}, {mp}) from step {before}: ", end="", flush=True)
            here = Start(time.time(), *self.happen(started, until))
            print(f"{here.event} after {here.signalled - here.begin:.1f} s; ", end="", flush=True)
            outputs = self.communicate(started, here)
        here.ended = time.time()
        codes = [process.returncode for process in started]
        last, here.first_step = self.trained_since(here.begin)
        if here.event.startswith("damage") and len(steps := self.intact()) > 1:
            self.damage(steps[0])
        if here.event == "host":
            shutil.rmtree(self.directory / f"host-{self.random.randrange(processes)}", ignore_errors=True)
        saved = self.newest(processes)
        here.lost = max(last, last_before) - saved if here.first_step else 0
        self.starts.append(here)
        print(f"{codes} in {here.ended - here.signalled:.1f} s, trained to {last}, saved {saved}", flush=True)
        self.check_start(here, codes, outputs, before, saved, last)

    def processes(self, count: int, *arguments: str) -> list[subprocess.Popen]:
        """Start main.py `count` times."""
        environment = {
            "JAX_PLATFORMS": "cpu",
            "SIMULATION": self.mark,
            "BUCKETS": str(self.directory.parent),
            "STEP_SECONDS": str(self.given.step),
        }
        cache = f"run.compilation_cache={jax.config.jax_compilation_cache_dir}"
        given = ["-c", PROGRAM, "--cfg", FIRST, *arguments, cache]
        address = f"localhost:{free_port()}"
        together = ["--coordinator", address, "--processes", str(count), "--process-id"] if count > 1 else []
        each = [[*given, *together, str(number)] if together else given for number in range(count)]
        if self.given.local:
            each = [[*one, f"checkpoint.local_dir={self.directory / f'host-{n}'}"] for n, one in enumerate(each)]
        return [start_python(*one, **environment) for one in each]

    def finish(self, last: int, *settings: str) -> None:
        """Train to step `last`, with the settings of this run or others."""
        with killed_at_the_end(self.processes(1, *(settings or self.settings), f"train.steps={last}")) as (alone,):
            output = alone.communicate()
            assert alone.returncode == 0, output

    def happen(self, started: list[subprocess.Popen], until: float) -> tuple[str, float]:
        """(the event that ends this start, when it happened)."""
        while True:
            wait(min(self.random.expovariate(1 / self.given.mean), max(0.0, until - time.time())), started)
            if time.time() >= until:
                kind, targets = "notice", started
            else:
                kind = self.random.choices([*self.events], [*self.events.values()])[0]
                targets = self.random.choice([started, [self.random.choice(started)]])
            if any(process.poll() is not None for process in started):
                return "it ended by itself", time.time()
            if kind != "slow":
                break
            self.slowed += 1
            (slow := self.directory.parent / "slow").touch()
            wait(SLOW_SECONDS, started)
            slow.unlink()
        for process in started if kind in ("disk", "damage", "host") else targets:
            if kind == "disk":
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
            else:
                process.send_signal(signal.SIGTERM if kind == "notice" else signal.SIGKILL)
        return f"{kind} of {len(targets)}" if kind in ("kill", "notice") else kind, time.time()

    def communicate(self, started: list[subprocess.Popen], here: Start) -> list[tuple[str, str]]:
        """The outputs of the processes, which end within LIMIT seconds.  Once one has ended, the others are stopped
        after STOP_SECONDS, as by pod.sh; after a notice the rest is killed."""
        by = here.signalled + (self.given.notice if here.event.startswith("notice") else LIMIT)
        wait(by - time.time(), started)
        wait(min(STOP_SECONDS, by - time.time()), started, everyone=True)
        for process in started:
            process.terminate()
        wait(by - time.time(), started, everyone=True)
        if here.event.startswith("notice"):
            for process in started:
                process.kill()
        return [process.communicate(timeout=LIMIT) for process in started]

    def damage(self, step: int) -> None:
        """Flip a bit in the middle of the largest file of a checkpoint."""
        file = max((self.directory / "run" / "checkpoints" / str(step)).rglob("*"), key=lambda at: at.stat().st_size)
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            (byte,) = stream.read(1)
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte ^ 1]))
        self.damaged[step] = time.time()

    def trained_since(self, begin: float) -> tuple[int, float | None]:
        """(the last step in metrics.jsonl, when the first one that ended after `begin` had begun)."""
        last, first = 0, None
        for line in read_lines(self.directory / "run" / "metrics.jsonl", is_metric):
            ended = datetime.fromisoformat(line["time"]).timestamp()
            if ended > begin and first is None:
                first = ended - self.given.step
            last = line["step"]
        return last, first

    def check_start(
        self, here: Start, codes: list[int], outputs: list[tuple[str, str]], before: int, saved: int, last: int
    ) -> None:
        """Assert what must hold after each start."""
        text = "\n".join([str(codes), *sum(outputs, ())])
        expected = {STOPPED, LostProcessError.exit_code, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL}
        assert {*codes} <= expected | ({UserError.exit_code} if here.event == "disk" else set()), text
        assert here.event != "it ended by itself", text
        assert here.event in ("damage", "host") or saved >= before, "a complete checkpoint was lost"
        if before and (resumed := re.search(r"resuming from step (\d+)", outputs[0][0])):
            assert int(resumed[1]) == before, text
        if here.event.startswith("notice") and here.first_step:
            assert {*codes} == {STOPPED}, text
            assert saved == last, f"trained steps were not saved\n{text}"

    def report(self) -> float:
        """Print what happened; the share of the optimum that goodput is."""
        seconds = self.starts[-1].ended - self.starts[0].begin
        spent, saves = self.times()
        assert spent.total <= seconds, "time.jsonl has more time than there was"
        trained = [start for start in self.starts if start.first_step]
        training = sum(start.signalled - start.first_step for start in trained)
        losing = sum(start.event.split()[0] in LOSING for start in trained) / len(trained)
        save, restart = statistics.mean(saves), statistics.mean(start.first_step - start.begin for start in trained)
        share, interval = optimum(len(trained) / training, losing, save)
        goodput, best = spent.seconds(TimeCategory.steps) / seconds, share * training / seconds
        lost, events = [start.lost for start in self.starts], Counter(start.event.split()[0] for start in self.starts)
        events["slow"] = self.slowed
        named = ", ".join(f"{count} {kind}" for kind, count in sorted(events.items()))
        unreached = len(self.starts) - len(trained)
        print(
            f"{seconds / 60:.1f} minutes, {len(self.starts)} starts, {events.total()} events ({named})\n"
            f"{spent.table()}\n"
            f"measured: {restart:.1f} s from a start to its first step, which {unreached} starts did not reach; then "
            f"{training / len(trained):.1f} s to an event, of which {losing:.0%} lose steps; the loop "
            f"waited {save:.2f} s for each of {len(saves)} saves\n"
            f"steps lost: {sum(lost)}, at most {max(lost)} at once; saved steps lost: none, but for "
            f"{len(self.damaged)} checkpoints that were damaged on purpose\n"
            f"goodput {goodput:.3f}; optimum {best:.3f} = {training / seconds:.3f} of the time after first steps x "
            f"{share:.3f} with a save each {interval:.1f} s; goodput is {goodput / best:.2f} of the optimum",
            flush=True,
        )
        return goodput / best

    def times(self) -> tuple[TimeBreakdown, list[float]]:
        """(where the time of the run went, the seconds that the loop waited for each save between steps)."""
        spent, saves, before = TimeBreakdown(), [], None
        for line in read_lines(self.directory / "run" / "time.jsonl", lambda line: "cause" in line):
            spent.add(line)
            if line["cause"] == TimeCategory.steps and before and before["cause"] == TimeCategory.checkpoint:
                saves.append(before["seconds"])
            before = before if line["cause"] == TimeCategory.data else line
        return spent, saves

    def left(self) -> list[str]:
        """The processes that the simulation has started and that are still there."""
        mark, found = f"SIMULATION={self.mark}".encode(), []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (directory / "environ").read_bytes():
                    found.append(directory.name)
            except OSError:
                continue
        return found


def wait(seconds: float, started: list[subprocess.Popen], *, everyone: bool = False) -> None:
    """Wait so long, or until a process, or `everyone`, has ended."""
    until, reached = time.time() + seconds, all if everyone else any
    while time.time() < until and not reached(process.poll() is not None for process in started):
        time.sleep(min(0.05, max(0.0, until - time.time())))


def main(argv: list[str] | None = None) -> None:
    """Simulate with command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random meshes, events and moments")
    parser.add_argument("--mean", type=float, default=12, help="mean seconds from a start to its event")
    parser.add_argument("--notice", type=float, default=30, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--step", type=float, default=0.25, help="seconds that a step takes at least")
    parser.add_argument("--every", default="5", help="checkpoint.every, also auto")
    parser.add_argument("--local", type=int, default=0, help="checkpoint.local_every; 0: no local checkpoints")
    parser.add_argument("--same-mesh", action="store_true", help="always mesh (2, 4); the result is then bitwise equal")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        run = Preemptions(Path(directory), given)
        until = time.time() + 60 * given.minutes
        while time.time() < until:
            run.start(until)
        assert not run.left(), f"processes are left: {run.left()}"
        run.report()
        last = run.trained_since(0)[0] + 4
        run.finish(last)
        uninterrupted = Soak(Path(directory) / "uninterrupted", given.seed, same_mesh=True)
        overrides(uninterrupted.directory)  # writes the same tokens
        given.step = given.local = 0
        run.finish(last, *overrides(uninterrupted.directory, *SETTINGS, "checkpoint.every=0"))
        compare(run, uninterrupted, last, given.same_mesh)
        assert not run.left(), f"processes are left: {run.left()}"
        print("no process is left")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla-tests"))
    sys.exit(main())
