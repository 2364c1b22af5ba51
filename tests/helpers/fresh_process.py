"""Python in a process of its own, for tests of what happens before JAX is imported or has chosen its devices."""

import os
import subprocess
import sys
import textwrap
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
