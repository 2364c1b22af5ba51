"""Compilations of candidates in child processes, as many at a time as cores and memory allow.

A child process runs this module.  It reads a request as JSON on stdin and writes a row as JSON on the last line of
stdout:

    {"config": ..., "version": "v5e", "devices": 16, "topology": "4x4"}  ->  the row, or {"error": "..."}

A crash of the compiler, or the end of a child that took too much memory, ends no other compilation.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from shmap_tp.config.compose import from_values
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.plan.predict import predict
from shmap_tp.plan.report import Row
from shmap_tp.plan.search.candidates import Result
from shmap_tp.plan.targets import Target, find_target

MEMORY_PER_JOB = 5e9
"""Bytes that a compilation of a large step takes; 16b on 256 chips takes about 4 GB."""


@runtime_checkable
class Job(Protocol):
    """A compilation that has been started."""

    def poll(self) -> Result | None:
        """Its result, or None while it runs."""

    def stop(self) -> None:
        """End it without a result."""


class ChildProcess:
    """A `Job` of this module.  What the compiler writes to temporary files is removed with it, also if it is killed."""

    def __init__(self, estimated: Result, config: Config, target: Target):
        """`config` is what candidates are applied to."""
        self.estimated = estimated
        self.begin, self.files = time.monotonic(), tempfile.TemporaryDirectory()
        folder = Path(self.files.name)
        (folder / "in").write_text(request(estimated.candidate.apply(config), target))
        with (folder / "in").open() as given, (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shmap_tp.plan.search.jobs"], stdin=given, stdout=out, stderr=err,
                start_new_session=True,  # Ctrl-C is for the search, which keeps what was found
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": self.files.name},
            )  # fmt: skip

    def poll(self) -> Result | None:
        code = self.process.poll()
        if code is None:
            return None
        seconds, folder = time.monotonic() - self.begin, Path(self.files.name)
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        self.files.cleanup()
        return ended(self.estimated, code, out, err, seconds)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.files.cleanup()


def ended(estimated: Result, code: int, out: str, err: str, seconds: float) -> Result:
    """The result of a child process that ended with this exit code, or was ended by a signal (a negative one)."""
    if code < 0:
        lacked_memory = code == -signal.SIGKILL
        error = f"killed by signal {-code}" + (" (out of memory?)" if lacked_memory else "")
        return replace(estimated, error=error, compile_seconds=seconds, lacked_memory=lacked_memory)
    if code:
        error = f"exit code {code}: {(err.strip().splitlines() or ['no message'])[-1]}"
        return replace(estimated, error=error, compile_seconds=seconds)
    made = json.loads(out.strip().splitlines()[-1])
    if "error" in made:
        return replace(estimated, error=made["error"], compile_seconds=seconds)
    return replace(estimated, row=Row(**made), compile_seconds=seconds)


def jobs_at_a_time() -> int:
    """One per core, as far as the free memory suffices; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_free_memory() / MEMORY_PER_JOB)))


def _free_memory() -> float:
    """Bytes that new processes can use; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    found = dict(line.split(":", 1) for line in lines)
    return 1024.0 * int(found["MemAvailable"].split()[0])


# The child process


def request(config: Config, target: Target) -> str:
    """What the child process reads."""
    place = {"version": target.version, "devices": target.devices, "topology": getattr(target, "topology", None)}
    return json.dumps(place | {"config": asdict(config)})


def answer(text: str) -> dict:
    """The row of a request, or its error."""
    given = json.loads(text)
    try:
        config = from_values(given["config"], "the configuration of a candidate")
        target = find_target(given["version"], given["devices"], given["topology"], config.mesh.slices)
        return predict(config, target).row.to_json()
    except UserError as error:
        return {"error": str(error).splitlines()[0]}


if __name__ == "__main__":
    print(json.dumps(answer(sys.stdin.read())))
