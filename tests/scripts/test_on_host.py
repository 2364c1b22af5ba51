"""scripts/on_host.sh, for real, on this machine: it starts, shows and ends its own process and no other."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

MAIN = """
import pathlib, signal, sys, time
if sys.argv[1] == "obeys":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
elif sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif sys.argv[1].isdecimal():
    sys.exit(int(sys.argv[1]))
print("up", sys.argv[1:], flush=True)
pathlib.Path("up").touch()
time.sleep(60)
"""


class Host:
    """A clone with a main.py that only waits."""

    def __init__(self, directory: Path):
        self.directory, self.lock = directory, directory / "lock"
        (directory / "scripts").mkdir(parents=True)
        (directory / ".venv" / "bin").mkdir(parents=True)
        (directory / ".venv" / "bin" / "python").symlink_to(sys.executable)
        (directory / "main.py").write_text(MAIN)
        shutil.copy(ROOT / "scripts" / "on_host.sh", directory / "scripts")

    def do(self, *arguments: str, code: int = 0) -> str:
        script = str(self.directory / "scripts" / "on_host.sh")
        environment = os.environ | {"TPU_LOCK": str(self.lock)}
        done = subprocess.run(
            [script, *arguments], cwd="/", env=environment, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == code, done
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> int:
        """The process that runs, once it is ready for signals."""
        process = int(self.do("start", *arguments).removeprefix("running "))
        self.until(lambda: (self.directory / "up").exists())
        return process

    def until(self, true) -> None:
        for _ in range(500):
            if true():
                return
            time.sleep(0.02)
        raise AssertionError("not in ten seconds")


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path / "clone")
    yield made
    made.do("stop", "0")


def test_a_host_starts_main_py_detached_and_stops_it_with_its_exit_code(host):
    assert host.do("status") == "never started\n"
    process = host.start("obeys", "run.name=it's")
    assert host.do("status") == f"running {process}\n" and os.getsid(process) != os.getsid(0)
    assert f"main.py is running here as process {process}" in host.do("start", "obeys", code=2)
    assert "main.py obeys run.name=it\\'s" in (log := host.do("log")) and "up ['obeys', \"run.name=it's\"]" in log
    assert host.do("stop", "20").splitlines()[-1] == "ended 75"
    assert host.do("stop", "20") == "ended 75\n"  # and once more, where nothing runs


def test_a_host_keeps_the_exit_code_of_what_ended_by_itself(host):
    host.do("start", "2")
    host.until(lambda: host.do("status") == "ended 2\n")


def test_what_does_not_end_in_time_is_killed(host):
    process = host.start("deaf")
    said = host.do("stop", "1")
    assert f"process {process} has not ended in 1 s: killing it" in said and said.endswith("ended 137\n")


def test_a_process_that_is_not_ours_is_left_alone(host, tmp_path):
    """Neither one that has got the id of ours since, nor one of another clone."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=host.directory)
    (host.directory / ".pod").mkdir()
    try:
        (host.directory / ".pod" / "process").write_text(f"{stranger.pid} 1\n")
        assert host.do("stop", "0") == "ended 137\n" and stranger.poll() is None
        started = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = Host(tmp_path / "other")
        (other.directory / ".pod").mkdir()
        (other.directory / ".pod" / "process").write_text(f"{stranger.pid} {started}\n")
        assert other.do("stop", "0") == "ended 137\n" and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert stranger.returncode == -signal.SIGKILL


def test_a_lock_that_no_process_holds_is_removed_and_no_other(host):
    host.lock.touch()
    with host.lock.open():
        assert f"{host.lock} is held by process {os.getpid()}: left alone" in host.do("stop", "0")
        assert host.lock.exists()
    assert "was held by no process: removed" in host.do("stop", "0") and not host.lock.exists()


def test_a_host_that_is_not_prepared_says_so(host):
    (host.directory / ".venv" / "bin" / "python").unlink()
    assert "has no .venv; run first: pod.sh setup NAME" in host.do("start", "obeys", code=2)
    assert "nothing was started here yet" in host.do("log", code=2)
