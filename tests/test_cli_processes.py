"""main.py as a process: stopped, killed, resumed, and its exit."""

import signal
import subprocess
import sys

import pytest

from shmap_tp.training import loop
from tests.helpers.commands import call_main
from tests.helpers.run_fixtures import (
    FIRST,
    ROOT,
    lines,
    overrides,
    start,
    state_at,
    tiny,
    values,
    wait_for_step,
    write_tokens,
)

QUIET = ["evaluate.every=0", "checkpoint.keep=3"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopped_process_saves_and_its_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, capsys, number):
    given = ["--cfg", FIRST, *overrides(tmp_path, *QUIET, "checkpoint.every=0")]
    process = start(*given, "train.steps=100000")
    wait_for_step(process, tmp_path, 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    stopped = lines(tmp_path)[-1]["step"]
    assert f"stopped and saved at step {stopped} of 100000" in out
    assert f"--cfg {tmp_path}/run/config.yaml --resume" in out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(stopped)]
    last = stopped + 3

    assert call_main(monkeypatch, "--cfg", f"{tmp_path}/run/config.yaml", f"train.steps={last}", "--resume") == 0
    assert f"resuming from step {stopped}" in capsys.readouterr().out
    other = tmp_path / "straight"
    write_tokens(other / "data")
    assert call_main(monkeypatch, "--cfg", FIRST, *overrides(other, *QUIET), f"train.steps={last}") == 0
    assert state_at(tmp_path, last) == state_at(other, last)
    assert values(tmp_path) == values(other)


def test_a_killed_process_loses_only_the_steps_after_its_newest_complete_checkpoint(tmp_path):
    given = ["--cfg", FIRST, *overrides(tmp_path, *QUIET, "checkpoint.every=3")]
    process = start(*given, "train.steps=100000")
    wait_for_step(process, tmp_path, 10)
    process.kill()
    process.communicate(timeout=60)
    reached = lines(tmp_path)[-1]["step"]
    complete = [int(path.parent.name) for path in (tmp_path / "run" / "checkpoints").glob("*/sha256.json")]
    assert reached - 6 <= max(complete) <= reached, (complete, reached)
    last = reached + 2

    process = start(*given, f"train.steps={last}", "--resume")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"resuming from step {max(complete)}" in out
    other = tmp_path / "straight"
    assert loop.train(tiny(other, *QUIET, f"train.steps={last}")) == 0
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, last + 1))
    assert values(tmp_path) == values(other)
    assert state_at(tmp_path, last) == state_at(other, last)


def test_a_process_with_bad_input_exits_with_2_and_without_a_traceback(tmp_path):
    process = start("--cfg", FIRST, *overrides(tmp_path, "data.dir=nowhere"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith("error: nowhere/train.bin does not exist") and len(err.splitlines()) <= 2, err
    assert "Traceback" not in out + err


# The exit of the interpreter


@pytest.mark.parametrize(("code", "output"), [(75, b""), (0, b"the interpreter exits")])
def test_a_stopped_process_exits_before_the_interpreter_is_torn_down(code, output):
    """Programs that still run on the devices could crash the interpreter at its exit."""
    script = (
        "import atexit, runpy, sys\n"
        "from shmap_tp.training import loop\n"
        "atexit.register(print, 'the interpreter exits', end='')\n"
        f"loop.train = lambda config, *_: {code}\n"
        f"sys.argv = ['main.py', '--cfg', {FIRST!r}]\n"
        "runpy.run_path('main.py', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert (ended.returncode, ended.stdout) == (code, output), ended.stderr
