"""A command ends once its output cannot be written; that a training run goes on: tests/test_cli.py."""

import os
import subprocess
import sys

import pytest

from tests.helpers.fresh_process import python
from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("nobody reads", 141, ""),
        ("/dev/full", 2, "error: the output cannot be written: the disk is full; write it elsewhere\n"),
    ],
)
def test_a_command_whose_output_can_no_longer_be_written_ends_without_a_traceback(tmp_path, output, code, said):
    (tmp_path / "a.txt").write_text("text " * 100)
    program = [sys.executable, "-m", "shmap_tp.prepare", "--text", "a.txt", "--out", "tokens"]
    if output == "/dev/full":
        if not os.path.exists(output):
            pytest.skip("only Linux has a device that is always full")
        descriptor = os.open(output, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with os.fdopen(descriptor, "w") as stdout:
        given = {"env": environment, "stdout": stdout, "stderr": subprocess.PIPE, "text": True, "timeout": 60}
        done = subprocess.run(program, cwd=tmp_path, **given)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    "command",
    [
        f"{ROOT}/main.py --check mesh.mp=3 1>&- 2>&-",
        *[f"-m shmap_tp.prepare --text /nowhere --out x {number}>&-" for number in range(3)],
    ],
)
def test_a_stream_that_is_closed_at_the_start_is_the_null_device(tmp_path, command):
    line, given = f"exec {sys.executable} {command}", {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, **given)
    assert (done.returncode, done.stderr.count("\n")) == (2, 0 if "2>&-" in command else 1), done.stderr


def test_text_that_the_terminal_has_no_characters_for_is_printed_as_escapes():
    """A sample that a training run prints must not end it."""
    program = """
from shmap_tp.runtime.command_line import end_without_readers, outlive_readers
end_without_readers(lambda: print("\\N{SNOWMAN}", ascii(input())))
outlive_readers()
print("\\N{SNOWMAN}")
"""
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": str(ROOT)}
    given = {"env": environment, "input": b"\xff\n", "capture_output": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", program], **given)
    assert done.stdout == b"\\u2603 '\\udcff'\n\\u2603\n", done.stderr


def test_an_interrupted_command_ends_without_the_end_of_the_interpreter():
    """At which programs that still run on emulated devices crash it: exit code -11 instead of 130."""
    done = python(
        """
        import atexit
        from shmap_tp.runtime.command_line import end_without_readers
        atexit.register(print, "the interpreter ends")
        end_without_readers(lambda: print("written") or 130)
        """
    )
    assert (done.returncode, done.stdout) == (130, "written\n"), done.stderr
