"""Ctrl-C and SIGTERM while a command still starts end it without a traceback."""

import os
import runpy
import signal
import subprocess
import sys
import time

import pytest

from shmap_tp.runtime import command_line
from shmap_tp.runtime.exit_codes import INTERRUPTED
from tests.helpers.fresh_process import ctrl_c_of_a_terminal, python
from tests.helpers.paths import ROOT


def at_import(module: str, number: int) -> str:
    """The beginning of a program that gets the signal `number` when it first imports `module`."""
    return f"""
import builtins, os
original = builtins.__import__
def interrupted(name, *arguments, **more):
    if name == {module!r} and not os.environ.pop("SENT", None):
        os.environ["SENT"] = "1"
        os.kill(os.getpid(), {int(number)})
    return original(name, *arguments, **more)
builtins.__import__ = interrupted
"""


@pytest.mark.parametrize(
    ("module", "number"), [("yaml", signal.SIGINT), ("jax", signal.SIGTERM), ("equinox", signal.SIGINT)]
)
@ctrl_c_of_a_terminal()
def test_training_that_is_stopped_during_its_imports_exits_with_75(tmp_path, module, number):
    done = python(at_import(module, number) + "from shmap_tp import train\ntrain.run([])", cwd=tmp_path)
    assert done.returncode == 75 and done.stderr == "stopped before the first training step; there is nothing to save\n"


COMMANDS = """
prepare --source stdlib --out nowhere
plan --model test --dp 1 --mp 1 --ledger
pretrained inspect nowhere
generate --checkpoint nowhere --prompt a
evaluate --checkpoint nowhere
chat --checkpoint nowhere
verify checkpoint nowhere
"""


@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
@ctrl_c_of_a_terminal()
def test_ctrl_c_during_the_imports_of_a_command_ends_it_without_a_traceback(tmp_path, command):
    """Its exception would be swallowed, or crash the interpreter, in places."""
    name, *arguments = command.split()
    argv = [name, *arguments]
    run = f"import runpy, sys\nsys.argv = {argv}\nrunpy.run_module('shmap_tp.{name}', run_name='__main__')"
    done = python(at_import("numpy", signal.SIGINT) + run, cwd=tmp_path)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


@pytest.mark.parametrize(
    ("flags", "where"), [("search --devices 4", "search.command.candidates"), ("step --dp 2 --mp 2", "predict.predict")]
)
@ctrl_c_of_a_terminal()
def test_ctrl_c_while_the_planner_estimates_or_compiles_ends_it_at_once(monkeypatch, flags, where):
    """Without a handler: a raised exception would wait for the end of a compilation, or be swallowed by a callback of
    the garbage collector."""
    handlers = []

    def reached(*_: object, **__: object) -> None:
        handlers.append(signal.getsignal(signal.SIGINT))
        raise SystemExit

    monkeypatch.setattr(f"shmap_tp.plan.{where}", reached)
    monkeypatch.setattr(sys, "argv", ["plan", *flags.split(), "--model", "test", "--version", "v5e"])
    monkeypatch.delitem(sys.modules, "shmap_tp.plan.__main__", raising=False)
    with pytest.raises(SystemExit):
        runpy.run_module("shmap_tp.plan", run_name="__main__")
    assert handlers == [signal.SIG_DFL]


@ctrl_c_of_a_terminal()
def test_ctrl_c_during_a_callback_that_cannot_raise_still_ends_the_command():
    class Freed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))

    def command() -> None:
        Freed()
        for _ in range(100):
            time.sleep(0.1)

    assert command_line.run_command(command) == INTERRUPTED


@pytest.mark.parametrize("at_start", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_the_end_of_the_terminal_stops_a_search_as_ctrl_c_does_but_not_under_nohup(monkeypatch, at_start):
    before = {signal.SIGINT: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: at_start}
    handlers = dict(before)
    monkeypatch.setattr(command_line.signal, "getsignal", handlers.__getitem__)
    monkeypatch.setattr(command_line.signal, "signal", handlers.__setitem__)
    with command_line.raising():
        assert handlers[signal.SIGINT] is handlers[signal.SIGTERM] is signal.default_int_handler
        assert handlers[signal.SIGHUP] == (at_start or signal.default_int_handler)
    assert handlers == before


@ctrl_c_of_a_terminal()
def test_ctrl_c_at_any_moment_of_the_start_of_main_py_leaves_no_traceback(tmp_path):
    """From its first import on."""
    for seconds in (0, 0.02, 0.05, 0.1, 0.3):
        program = [sys.executable, "-X", "importtime", ROOT / "main.py", "model=test"]
        with subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if line.split("|")[-1].strip() == "argparse":  # the first import of the command
                    break
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode in (75, -signal.SIGINT) and "Traceback" not in err, err


def test_a_second_ctrl_c_while_training_leaves_no_traceback():
    done = python(
        """
        import jax
        from shmap_tp import train

        def main(argv, command):
            raise KeyboardInterrupt

        train.main = main
        train.run([])
        """
    )
    assert done.returncode == 130
    assert done.stderr == "interrupted without saving: --resume continues from the newest checkpoint, if any\n"
