"""The planner and the benchmarks as commands: what they print, and one-line errors for mistakes."""

import json

import benchmark_generate
import benchmark_gpu
import jax
import pytest
from calibration import TABLE, Published, as_counted_here, config_of

from shmap_tp.plan import __main__ as planner
from shmap_tp.plan.tpu import Slice, find_slice
from shmap_tp.runtime.command_line import run_command
from tests.helpers.commands import call

PLAN = ["-m", "shmap_tp.plan", "step", "--model", "test"]


def test_the_plan_prints_the_communication_of_the_traced_step_without_a_compiler(capsys):
    planner.main(planner.parse(["ledger", "--model", "test", "--dp", "2", "--mp", "4"]))
    printed = capsys.readouterr().out
    assert "block " in printed and "reduce-scatter" in printed and "total" in printed


def test_the_plan_of_a_mesh_prints_step_time_memory_and_communication(tmp_path):
    pytest.importorskip("libtpu")
    done = call(
        *PLAN, "--dp", "2", "--mp", "2", "--version", "v5e", "mesh.tensor_parallel=all_reduce", "mesh.zero=none",
        "--json", str(file := tmp_path / "rows.jsonl"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["model"] == "test"
    headings = ["compiling the step for", "PREDICTED  test", "MEMORY per device", "COMMUNICATION of the traced step"]
    for heading in [*headings, "COMPILED COLLECTIVES: "]:
        assert heading in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_gpu_benchmark_runs_on_emulated_devices_with_the_gspmd_baseline(capsys):
    assert len(jax.devices()) == 8, "in use, so that no other number is set"
    flags = "--dp 4 --mp 2 --emulate --steps 2 --compare-gspmd model.layers=1 train.microbatches=1"
    benchmark_gpu.run(benchmark_gpu.make_parser().parse_intermixed_args(flags.split()))
    printed = capsys.readouterr().out
    assert printed.startswith("EMULATED  test") and "EMULATED  gspmd of test" in printed
    assert "explicit : gspmd  time " in printed


GPU, GENERATE = (benchmark_gpu.run, benchmark_gpu.make_parser), (benchmark_generate.main, benchmark_generate.parser)
MISTAKES = {
    "--dp 1 --mp 1": (GPU, "JAX finds no GPU, only cpu;"),
    "--dp 1 --mp 2 --emulate --torch": (GPU, "--torch runs on one GPU only; use it with --dp 1"),
    "DIR --new 1": (GENERATE, "--new must be at least 2"),
    "/nowhere": (GENERATE, "/nowhere is not a directory"),
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_reported_in_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_gpu, "initialize_distributed", lambda config: None)  # it sets the number of devices
    (program, parser), reason = MISTAKES[flags]
    arguments = parser().parse_intermixed_args(flags.split())
    assert run_command(lambda: program(arguments)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and reason in printed and len(printed.splitlines()) <= 2, printed


def test_the_mesh_of_every_published_row_covers_its_slice_and_every_model_has_a_configuration():
    for row in TABLE:
        devices, target = row.mesh[0] * row.mesh[1], Slice(row.version, row.sides, row.slices)
        assert target == find_slice(row.version, devices, target.topology, row.slices), row.name
    for row in {row.model: row for row in TABLE}.values():
        assert (config_of(row).mesh.dp, config_of(row).mesh.mp) == row.mesh, row.name


def test_a_published_mfu_that_counts_attention_in_full_is_converted():
    """Per token of model `test`, forward: 425984 FLOPs of weights, and 32768 of full attention."""
    half, full = (
        Published("any", "mfu", 0.5, "v4", (2, 2, 1), (4, 1), "test", 8, 1, full_attention=full)
        for full in (False, True)
    )
    assert as_counted_here(half, config_of(half)) == 0.5
    assert as_counted_here(full, config_of(full)) == pytest.approx(0.5 * (425984 + 16384) / (425984 + 32768))
