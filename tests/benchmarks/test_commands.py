"""The other doors of the planner and the benchmarks, as a user meets them: what they print, and mistakes in a line."""

import os
import subprocess
import sys

import pytest
from published import TABLE, Published, as_counted_here, configuration

from shmap_tp.plan.topologies import Slice, find_slice
from tests.helpers.paths import ROOT

PLAN = ["-m", "shmap_tp.plan", "--model", "test"]
GPU = ["benchmarks/benchmark_gpu.py"]


def call(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_plan_prints_the_ledger_without_a_compiler():
    done = call(*PLAN, "--dp", "2", "--mp", "4", "--ledger")
    assert done.returncode == 0, done.stderr
    assert "block enter" in done.stdout and "reduce-scatter" in done.stdout and "in all" in done.stdout


def test_the_plan_of_a_mesh_tells_memory_wires_and_time():
    pytest.importorskip("libtpu")
    done = call(
        *PLAN, "--dp", "2", "--mp", "2", "--version", "v5e", "mesh.tensor_parallel=all_reduce", "mesh.zero=none"
    )
    assert done.returncode == 0, done.stderr
    for part in ("PREDICTED  test", "WHAT FILLS THE MEMORY", "ON THE WIRE", "WHAT THE COMPILER MADE OF IT: as planned"):
        assert part in done.stdout


def test_a_gpu_benchmark_runs_on_emulated_devices_with_its_twin():
    done = call(*GPU, "--dp", "1", "--mp", "2", "--emulate", "--steps", "2", "--compare-gspmd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED  test") and "EMULATED  gspmd of test" in done.stdout
    assert "explicit : gspmd  time " in done.stdout


MISTAKES = {
    "no GPU": ([*GPU, "--dp", "1", "--mp", "1"], "no GPU here that JAX can use, only cpu;"),
    "no mesh": (PLAN, "give --dp and --mp for one mesh, or --devices for every mesh of so many"),
    "half a mesh": ([*PLAN, "--dp", "2"], "give --dp and --mp for one mesh"),
    "both": ([*PLAN, "--dp", "2", "--mp", "2", "--devices", "4"], "give --dp and --mp for one mesh"),
    "torch on two": (
        [*GPU, "--dp", "1", "--mp", "2", "--emulate", "--torch"],
        "--torch is of one GPU; use it with --dp 1",
    ),
    "ledger of all": ([*PLAN, "--devices", "4", "--ledger"], "--ledger is of one mesh"),
    "no such size": ([*PLAN, "--devices", "5", "--version", "v5e"], "there is no v5e slice of 5 devices;"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_a_line(mistake):
    arguments, reason = MISTAKES[mistake]
    done = call(*arguments)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and reason in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_published_row_has_a_slice_that_its_mesh_covers(row):
    assert configuration(row).mesh.dp * configuration(row).mesh.mp == row.mesh[0] * row.mesh[1]
    asked = Slice(row.version, row.sides, row.slices)
    assert asked == find_slice(row.version, row.mesh[0] * row.mesh[1], asked.topology, row.slices)


def test_a_figure_that_counts_attention_whole_is_compared_as_we_count():
    """By hand, for a token of model `test`: 425984 FLOPs of weights forward, and of attention, whole, 32768."""
    half, whole = (
        Published("any", "mfu", 0.5, "v4", (2, 2, 1), (4, 1), "test", 8, 1, whole=whole) for whole in (False, True)
    )
    assert as_counted_here(half, configuration(half)) == 0.5
    assert as_counted_here(whole, configuration(whole)) == pytest.approx(0.5 * (425984 + 16384) / (425984 + 32768))
