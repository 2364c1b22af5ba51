"""A training run outlives the readers of its output; other commands end with them."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.run_fixtures import FIRST, checkpoint_steps, killed_at_the_end, overrides, start, wait_for_step


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_training_goes_on_after_its_output_is_closed_and_saves_when_it_is_stopped(tmp_path, stream):
    settings = overrides(tmp_path, "mesh.dp=1", "mesh.mp=1", "train.steps=100000", "checkpoint.every=0")
    with killed_at_the_end([start("--cfg", FIRST, *settings, JAX_PLATFORMS="cpu")]) as (process,):
        getattr(process, stream).close()
        wait_for_step(process, tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    assert len(checkpoint_steps(tmp_path)) == 1


def test_a_command_ends_without_a_traceback_when_its_output_is_closed():
    arguments = ["plan", "--model", "test", "--dp", "1", "--mp", "1", "--ledger"]
    program = [sys.executable, "-c", CLOSED, *arguments]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_command_whose_output_fills_the_disk_takes_one_line():
    arguments = ["plan", "--model", "test", "--dp", "1", "--mp", "1", "--ledger"]
    program = [sys.executable, "-m", "shmap_tp", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    line = "error: the output cannot be written: the disk is full; write it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("command", ["main.py --check mesh.mp=3", "-m shmap_tp.prepare --text /nowhere --out x"])
def test_a_stream_that_is_closed_at_the_start_is_the_null_device(command):
    for closed in ("0", "1", "2"):
        line = f"exec {sys.executable} {command} {closed}>&-"
        done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr.count("\n")) == (2, 0 if closed == "2" else 1), done.stderr


def test_text_that_the_terminal_has_no_characters_for_is_printed_as_escapes(tmp_path):
    """A sample that a training run prints must not end it."""
    program = """
from shmap_tp.runtime.command_line import end_without_readers, outlive_readers
end_without_readers(lambda: print("\\N{SNOWMAN}", ascii(input())))
outlive_readers()
print("\\N{SNOWMAN}")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": str(ROOT)},
        input=b"\xff\n",
        capture_output=True,
        timeout=60,
    )
    assert done.stdout == b"\\u2603 '\\udcff'\n\\u2603\n", done.stderr


def test_an_interrupted_command_ends_without_the_end_of_the_interpreter():
    """At which programs that still run on emulated devices crash it: exit code -11 instead of 130."""
    program = """
import atexit
from shmap_tp.runtime.command_line import end_without_readers
atexit.register(print, "the interpreter ends")
end_without_readers(lambda: print("written") or 130)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "written\n"), done.stderr


CLOSED = """
import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
del sys.argv[0]
runpy.run_module("shmap_tp." + sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A program that runs a command whose output nobody reads."""
