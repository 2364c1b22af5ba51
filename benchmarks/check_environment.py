"""Imported before all packages: ends a benchmark with a line if Python is too old or the packages are not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where a Python without the packages finds the one that asks for them

import shmap_tp  # noqa: F401
