"""A training run outlives the readers of its output; other commands end with them."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.run_fixtures import FIRST, checkpoint_steps, overrides, start


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_training_goes_on_after_its_output_is_closed(tmp_path, stream):
    with start("--cfg", FIRST, *overrides(tmp_path, "mesh.dp=1", "mesh.mp=1"), JAX_PLATFORMS="cpu") as process:
        getattr(process, stream).close()
        assert process.wait(120) == 0
    assert checkpoint_steps(tmp_path)[-1] == 8


def test_a_command_ends_without_a_traceback_when_its_output_is_closed():
    arguments = ["plan", "--model", "test", "--dp", "1", "--mp", "1", "--ledger"]
    program = [sys.executable, "-c", CLOSED, *arguments]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_text_that_the_terminal_has_no_characters_for_is_printed_as_escapes(tmp_path):
    """A sample that a training run prints must not end it."""
    program = """
from shmap_tp.runtime.output import end_without_readers, outlive_readers
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


CLOSED = """
import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
del sys.argv[0]
runpy.run_module("shmap_tp." + sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A program that runs a command whose output nobody reads."""
