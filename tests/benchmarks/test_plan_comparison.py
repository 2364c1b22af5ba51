"""A plan beside a measurement of the same step: figures, and programs by what their instructions are."""

from dataclasses import replace

import benchmark_gpu
import jax
import jax.numpy as jnp
import pytest
from measuring import Measurement
from plan_comparison import compare_plan, compare_programs
from result_format import read_rows

from shmap_tp.errors import UserError
from shmap_tp.plan.report import Row

PLANNED = Row(**read_rows("gpu_plan")[0])


def module(function) -> str:
    return jax.jit(function).lower(jnp.ones((64, 64))).compile().as_text()


def test_figures_are_compared_where_both_are_known():
    measured = replace(PLANNED, step_seconds=2 * PLANNED.step_seconds, peak_bytes_per_device=None)
    lines = compare_plan(PLANNED, measured, None, None).splitlines()
    assert lines[1].startswith(f"  time         {PLANNED.step_seconds:.3f} s : ") and lines[1].endswith("ratio 0.50")
    assert lines[2].endswith("GiB : -") and len(lines) == 4


def test_programs_differ_by_the_instructions_that_one_has_more_of():
    one, two = module(lambda x: x @ x), module(lambda x: jnp.sort(x @ x))
    assert compare_programs(one, one).startswith("the same ")
    assert "sort 0 : 1" in compare_programs(one, two)


def arguments(*more: str):
    return benchmark_gpu.make_parser().parse_intermixed_args(["--dp", "1", "--mp", "1", "--model", "test", *more])


def test_the_gpu_benchmark_measures_and_compares_with_the_plan(monkeypatch, capsys):
    measured = Measurement(replace(PLANNED, kind="measured"), module(lambda x: x @ x), jax.make_mesh((1,), ("dp",)))
    monkeypatch.setattr(benchmark_gpu, "measure_attached", lambda config, steps: measured)
    monkeypatch.setattr(benchmark_gpu, "initialize_distributed", lambda config: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(benchmark_gpu, "planned_elsewhere", lambda given: (PLANNED, measured.text))
    benchmark_gpu.run(arguments("--compare-plan", "h100"))
    printed = capsys.readouterr().out
    assert "MEASURED" in printed and "ratio 1.00" in printed


def test_a_plan_that_fails_is_an_error_and_only_attached_gpus_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark_gpu, "__file__", str(tmp_path / "missing.py"))
    with pytest.raises(UserError, match=r"the step could not be planned \(exit code 2\)"):
        benchmark_gpu.planned_elsewhere(arguments("--compare-plan", "h100"))
    with pytest.raises(UserError, match="--compare-plan compares with attached GPUs; omit --emulate"):
        benchmark_gpu.run(arguments("--compare-plan", "h100", "--emulate"))
    with pytest.raises(UserError, match="--compare-plan needs attached devices"):
        benchmark_gpu.run(arguments("--compare-plan", "h100", "--version", "h100"))
