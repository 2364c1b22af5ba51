"""scripts/on_host.sh, run on this machine: it starts, shows and stops its own process and no other."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

MAIN = """
import pathlib, signal, sys, time
if sys.argv[1] == "handles-sigterm":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
elif sys.argv[1] == "ignores-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif sys.argv[1].isdecimal():
    sys.exit(int(sys.argv[1]))
print("up", sys.argv[1:], flush=True)
pathlib.Path("up").touch()
time.sleep(60)
"""


class Host:
    """A clone whose main.py only waits."""

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
        options = {"capture_output": True, "text": True, "timeout": 30}
        done = subprocess.run([script, *arguments], cwd="/", env=environment, **options)
        assert done.returncode == code, done
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> int:
        """The id of the started process, once it is ready for signals."""
        process = int(self.do("start", *arguments).removeprefix("running "))
        self.wait_until(lambda: (self.directory / "up").exists())
        return process

    def wait_until(self, condition) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "the condition was not met within thirty seconds"
            time.sleep(0.01)


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path / "clone")
    yield made
    made.do("stop", "0")


def test_start_detaches_main_py_and_stop_with_a_number_of_seconds_reports_its_exit_code(host):
    assert host.do("status") == "never started\n"
    process = host.start("handles-sigterm", "run.name=it's")
    assert host.do("status") == f"running {process}\n" and os.getsid(process) != os.getsid(0)
    assert f"main.py is running here as process {process}" in host.do("start", "handles-sigterm", code=2)
    log = host.do("log")
    assert "main.py handles-sigterm run.name=it\\'s" in log and "up ['handles-sigterm', \"run.name=it's\"]" in log
    for seconds in ["", "-3", "+3", "3.5", "3s", "0x8", "a[0]", "٣", "9" * 20]:
        assert f"stop {seconds}: give the number of seconds to wait" in host.do("stop", seconds, code=2)
    assert host.do("status") == f"running {process}\n"
    assert host.do("stop", "08").splitlines()[-1] == "ended 75"  # a number with leading zeros is decimal
    assert host.do("stop", "0010") == "ended 75\n"  # again, with nothing running


def test_status_reports_the_exit_code_of_a_run_that_ended_without_stop(host):
    host.do("start", "2")
    host.wait_until(lambda: host.do("status") == "ended 2\n")


def test_stop_kills_a_process_that_does_not_end_in_time(host):
    process = host.start("ignores-sigterm")
    output = host.do("stop", "1")
    assert f"process {process} has not ended in 1 s: killing it" in output and output.endswith("ended 137\n")


def test_stop_never_signals_a_process_that_start_did_not_create(host, tmp_path):
    """Neither a process that reuses the recorded id, nor one started in another clone."""
    unrelated = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=host.directory)
    (host.directory / ".pod").mkdir()
    try:
        (host.directory / ".pod" / "process").write_text(f"{unrelated.pid} 1\n")
        assert host.do("stop", "0") == "ended 137\n" and unrelated.poll() is None
        started = Path(f"/proc/{unrelated.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = Host(tmp_path / "other")
        (other.directory / ".pod").mkdir()
        (other.directory / ".pod" / "process").write_text(f"{unrelated.pid} {started}\n")
        assert other.do("stop", "0") == "ended 137\n" and unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()
    assert unrelated.returncode == -signal.SIGKILL


def test_stop_removes_only_a_lock_that_no_process_holds(host):
    host.lock.touch()
    with host.lock.open():
        assert f"{host.lock} is held by process {os.getpid()}: not removed" in host.do("stop", "0")
        assert host.lock.exists()
    assert "was held by no process: removed" in host.do("stop", "0") and not host.lock.exists()


def test_start_and_log_on_an_unprepared_host_name_the_missing_step(host):
    (host.directory / ".venv" / "bin" / "python").unlink()
    assert "has no .venv; run first: pod.sh setup NAME" in host.do("start", "handles-sigterm", code=2)
    assert "nothing was started here yet" in host.do("log", code=2)
