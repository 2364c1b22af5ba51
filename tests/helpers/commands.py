"""Run this project's commands as processes, from the root of the repository."""

import os
import subprocess
import sys

import pytest

from shmap_tp import train
from tests.helpers.compiling import quick_environment
from tests.helpers.paths import ROOT

BENCHMARK_GPU = ["benchmarks/benchmark_gpu.py"]


def call(*arguments: str) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` on the CPU, with its output captured."""
    environment = os.environ | quick_environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def call_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run main.py in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    try:
        return train.main()
    except SystemExit as exit_:
        return exit_.code
