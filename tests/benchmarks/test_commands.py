"""The planner and the benchmarks as commands: what they print, and one-line errors for mistakes."""

import json

import pytest
from calibration import TABLE, Published, as_counted_here, config_of

from shmap_tp.config.compose import CONF, load
from shmap_tp.plan import __main__ as planner
from shmap_tp.plan.tpu import Slice, find_slice
from shmap_tp.runtime.command_line import run_command
from tests.helpers.commands import BENCHMARK_GPU, call

PLAN = ["-m", "shmap_tp.plan", "--model", "test"]


def test_the_plan_prints_the_analytic_communication_without_a_compiler():
    done = call(*PLAN, "--dp", "2", "--mp", "4", "--ledger")
    assert done.returncode == 0, done.stderr
    assert "block enter" in done.stdout and "reduce-scatter" in done.stdout and "total" in done.stdout


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_communicated_in_the_precision_of_the_step(precision):
    config = load(str(CONF / "config.yaml"), ["model=test", "mesh.dp=2", "mesh.mp=4", f"train.precision={precision}"])
    communicated = [entry for entry in planner.planned_communication(config) if entry.what == "block enter"]
    assert communicated and {entry.dtype for entry in communicated} == {precision}


def test_the_plan_of_a_mesh_prints_step_time_memory_and_communication(tmp_path):
    pytest.importorskip("libtpu")
    done = call(
        *PLAN, "--dp", "2", "--mp", "2", "--version", "v5e", "mesh.tensor_parallel=all_reduce", "mesh.zero=none",
        "--json", str(file := tmp_path / "rows.jsonl"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["model"] == "test"
    headings = ["compiling the step for", "PREDICTED  test", "MEMORY per device", "COMMUNICATION per step (analytic)"]
    for heading in [*headings, "COMPILED COLLECTIVES: as planned"]:
        assert heading in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_gpu_benchmark_runs_on_emulated_devices_with_the_gspmd_baseline():
    done = call(*BENCHMARK_GPU, "--dp", "1", "--mp", "2", "--emulate", "--steps", "2", "--compare-gspmd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED  test") and "EMULATED  gspmd of test" in done.stdout
    assert "explicit : gspmd  time " in done.stdout


MISTAKES = {
    "no GPU": ([*BENCHMARK_GPU, "--dp", "1", "--mp", "1"], "JAX finds no GPU, only cpu;"),
    "no token to time": (["benchmarks/benchmark_generate.py", "DIR", "--new", "1"], "--new must be at least 2"),
    "no such model": (["benchmarks/benchmark_generate.py", "/nowhere"], "/nowhere is not a directory"),
    "no mesh": (PLAN, "give --devices or --nodes to search the best configuration"),
    "torch on two": (
        [*BENCHMARK_GPU, "--dp", "1", "--mp", "2", "--emulate", "--torch"],
        "--torch runs on one GPU only; use it with --dp 1",
    ),
}
MISTAKES_OF_A_PLAN = {
    "--dp 2": "give --dp and --mp for one mesh",
    "--dp 2 --mp 2 --devices 4": "give --dp and --mp for one mesh",
    "--devices 4 --ledger": "--ledger applies to one mesh",
    "--dp 2 --mp 2 --ledger --json x": "--json writes predicted rows",
    "--devices 4 --plot x.png": "--plot draws the step of one mesh",
    "--dp 2 --mp 2 --plot nowhere/x.png": "--plot nowhere/x.png: cannot be",
    "--devices 5 --version v5e": "there is no v5e slice of 5 devices;",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_line(mistake):
    arguments, reason = MISTAKES[mistake]
    done = call(*arguments)
    assert_is_explained(done.returncode, done.stderr, reason)


@pytest.mark.parametrize("flags", MISTAKES_OF_A_PLAN)
def test_a_mistake_in_the_flags_of_a_plan_is_reported_in_one_line(flags, capsys):
    arguments = planner.make_parser().parse_args(["--model", "test", *flags.split()])
    code = run_command(lambda: planner.main(arguments))
    assert_is_explained(code, capsys.readouterr().err, MISTAKES_OF_A_PLAN[flags])


def assert_is_explained(code: int, printed: str, reason: str) -> None:
    assert code == 2 and printed.startswith("error: ") and reason in printed, printed
    assert len(printed.splitlines()) <= 2


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_the_mesh_of_every_published_row_covers_its_slice(row):
    mesh = config_of(row).mesh
    assert mesh.dp * mesh.mp == row.mesh[0] * row.mesh[1]
    target = Slice(row.version, row.sides, row.slices)
    assert target == find_slice(row.version, row.mesh[0] * row.mesh[1], target.topology, row.slices)


def test_a_published_mfu_that_counts_attention_in_full_is_converted():
    """Per token of model `test`, forward: 425984 FLOPs of weights, and 32768 of full attention."""
    half, full = (
        Published("any", "mfu", 0.5, "v4", (2, 2, 1), (4, 1), "test", 8, 1, full_attention=full)
        for full in (False, True)
    )
    assert as_counted_here(half, config_of(half)) == 0.5
    assert as_counted_here(full, config_of(full)) == pytest.approx(0.5 * (425984 + 16384) / (425984 + 32768))
