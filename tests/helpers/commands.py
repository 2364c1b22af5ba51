"""Run this project's commands as processes, from the root of the repository."""

import os
import subprocess
import sys

from tests.helpers.paths import ROOT

BENCHMARK_GPU = ["benchmarks/benchmark_gpu.py"]


def call(*arguments: str) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` on the CPU, with its output captured."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
