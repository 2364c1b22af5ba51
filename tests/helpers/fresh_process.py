"""Python in a process of its own, for tests of what happens before JAX is imported or has chosen its devices."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.compiling import quick_environment
from tests.helpers.run_fixtures import ROOT


def python(script: str, *, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """`script` in a process of its own, in which nothing has imported JAX or chosen a number of devices."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    given = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | quick_environment()
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=cwd, env=inherited | given | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@contextmanager
def ctrl_c_of_a_terminal() -> Iterator[None]:
    """Context, or decorator of a test, in which Ctrl-C raises KeyboardInterrupt here and in a new Python process.

    A background job of a shell script starts with Ctrl-C ignored, and hands that down to what it starts: all of pytest
    under `nohup sh -c 'pytest & wait'`.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
