"""`python benchmarks/benchmark_tpu.py` as a command: consistent rows, and one-line errors for mistakes."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import measuring
import pytest

from benchmarks import benchmark_tpu
from shmap_tp.config.compose import CONF, load
from shmap_tp.hardware.devices import DEVICES, GIB
from shmap_tp.model.flops import flops_per_token, hardware_flops_per_token, parameters
from shmap_tp.plan.hlo_parser import parse_hlo
from tests.helpers.paths import ROOT

CONTRACT = {
    "kind": str, "model": str, "params": int, "dp": int, "mp": int, "device_kind": str, "devices": int, "topology": str,
    "slices": int, "global_batch": int, "context": int, "microbatches": int, "tokens_per_step": int,
    "step_seconds": float, "tokens_per_second": float, "mfu": float, "hfu": float, "peak_flops_per_device": float,
    "model_flops_per_device": float, "peak_bytes_per_device": (int, float), "limit_bytes_per_device": (int, float),
    "fits": bool, "compile_seconds": float, "comm_seconds": float, "exposed_comm_seconds": float,
}  # fmt: skip
"""Fields that users of a row rely on, and their types; None where a value is unknown."""
V5E = ["--model", "test", "--version", "v5e", "--dp", "2", "--mp", "2", "--topology", "2x2"]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the benchmark as a process in `folder`."""
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if "--emulate" in arguments else {}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "benchmark_tpu.py"), *arguments], cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | quick,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def output_of(process: subprocess.CompletedProcess) -> str:
    """The output of a process that succeeded without warnings."""
    assert process.returncode == 0, process.stderr
    assert not re.search("Traceback|Error|Warning", process.stderr), process.stderr
    return process.stdout


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_row(row: dict, *overrides: str) -> None:
    """Check the fields of a row and the relations between them; the model is `test` with `overrides`."""
    for name, kind in CONTRACT.items():
        assert isinstance(row[name], kind) or row[name] is None, (name, row[name])
    overrides = ("mesh.mp=1", "mesh.dp=1", f"model.attention={row['attention']}", *overrides)
    model = load(str(CONF / "base.yaml"), ["model=test", *overrides]).model
    assert (row["model"], row["context"]) == ("test", model.context) and row["params"] == parameters(model)
    assert row["dp"] * row["mp"] == row["devices"]
    assert row["global_batch"] % (row["dp"] * row["microbatches"]) == 0
    assert row["tokens_per_step"] == row["global_batch"] * row["context"]
    assert row["model_flops_per_device"] == row["tokens_per_step"] * flops_per_token(model) / row["devices"]
    assert row["step_seconds"] > 0 and row["compile_seconds"] > 0
    assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / row["step_seconds"])
    per_second = row["model_flops_per_device"] / row["step_seconds"]
    assert row["mfu"] == pytest.approx(per_second / row["peak_flops_per_device"])
    assert 0 < row["mfu"] <= row["hfu"] <= 1
    assert row["hfu"] / row["mfu"] == pytest.approx(hardware_flops_per_token(model) / flops_per_token(model))
    assert row["fits"] and row["peak_bytes_per_device"] > (4 + 8 / row["dp"]) * row["params"] / row["mp"]


# Measured on emulated devices


def test_an_emulated_row_is_consistent_and_the_program_is_written_with_its_metadata(tmp_path):
    """Batch, microbatches and context are those of the flags, and the row is appended."""
    (tmp_path / "rows.jsonl").write_text('{"kind": "older"}\n')
    flags = "--dp 2 --mp 2 --steps 3 --batch 12 --microbatches 3 --context 16 --json rows.jsonl --hlo step.hlo"
    printed = output_of(call(tmp_path, "--emulate", *flags.split(), "model.remat=full"))
    older, row = rows(tmp_path / "rows.jsonl")
    check_row(row, "model.context=16", "model.remat=full")
    assert older == {"kind": "older"}
    assert (row["kind"], row["device_kind"], row["devices"]) == ("emulated", "cpu", 4)
    assert (row["dp"], row["mp"], row["slices"], row["topology"]) == (2, 2, 1, None)
    assert row["chips"] == 4 and row["tile"] is None
    assert (row["global_batch"], row["microbatches"], row["context"]) == (12, 3, 16)
    assert row["comm_seconds"] is row["exposed_comm_seconds"] is row["limit_bytes_per_device"] is None
    low, high = row["step_seconds_range"]
    assert low <= row["step_seconds"] <= high and row["hfu"] > row["mfu"]
    assert printed.startswith("EMULATED  test, ") and f"{row['tokens_per_step']} tokens" in printed
    assert "MFU = tokens/s x model FLOPs per token (causal attention counted at half" in printed
    assert row["command"].endswith("--hlo step.hlo model.remat=full")
    text, meta = (tmp_path / "step.hlo").read_text(), json.loads((tmp_path / "step.hlo.meta.json").read_text())
    assert text.startswith("HloModule") and "num_partitions=4" in text and "all-reduce" in text
    assert meta == {"device_kind": "cpu", "coords": None, "model_flops_per_device": row["model_flops_per_device"]}


# Predicted


@pytest.fixture(scope="module")
def predicted(tmp_path_factory) -> tuple[list[str], Path]:
    """(printed output of two identical runs, the directory with their files)."""
    pytest.importorskip("libtpu")
    folder = tmp_path_factory.mktemp("predicted")
    flags = [*V5E, "--json", "rows.jsonl", "--hlo", "step.hlo"]
    return [output_of(call(folder, *flags)) for _ in range(2)], folder


def test_a_predicted_row_is_consistent_and_the_second_run_uses_the_compilation_cache(predicted):
    row, second = rows(predicted[1] / "rows.jsonl")
    check_row(row)
    assert (row["kind"], row["device_kind"], row["topology"], row["slices"]) == ("predicted", "TPU v5 lite", "2x2", 1)
    assert row["peak_flops_per_device"] == 197e12 == DEVICES["TPU v5 lite"].flops
    assert row["limit_bytes_per_device"] == 15.75 * GIB > row["peak_bytes_per_device"]
    assert 0 < row["exposed_comm_seconds"] <= row["comm_seconds"] * (1 + 1e-9) < row["step_seconds"]
    assert sum(row["scopes"].values()) == pytest.approx(row["step_seconds"])
    assert row["scopes"]["waiting for collectives"] == pytest.approx(row["exposed_comm_seconds"])
    assert {"attention", "mlp", "head", "loss", "embedding", "update"} <= row["scopes"].keys()
    assert row["versions"].keys() == {"jax", "libtpu"} and sorted(row["tile"]) == [1, 1, 1, 2]
    assert predicted[0][0].startswith("PREDICTED  test, ") and "on 4 x TPU v5 lite, 2x2 chips" in predicted[0][0]
    assert row == second and predicted[0][0] == predicted[0][1], "even the compile time, which is cached"
    assert len(list((predicted[1] / ".cache" / "tpu").iterdir())) == 1


def test_the_predicted_schedule_is_written_with_its_metadata(predicted):
    text = (predicted[1] / "step.hlo").read_text()
    assert "is_scheduled=true" in text and '"estimated_cycles"' in text
    row, meta = rows(predicted[1] / "rows.jsonl")[0], json.loads((predicted[1] / "step.hlo.meta.json").read_text())
    assert meta["device_kind"] == "TPU v5 lite"
    assert meta["model_flops_per_device"] == row["model_flops_per_device"]
    assert sorted(meta["coords"]) == [[x, y, 0, 0] for x in range(2) for y in range(2)]
    for group in (meta["coords"][:2], meta["coords"][2:]):
        distance = [abs(a - b) for a, b in zip(*group, strict=True)]
        assert distance == [size - 1 for size in row["tile"]], "mp ranks are adjacent in mesh order"


def test_the_compiled_head_has_three_matmuls(predicted):
    """Logits, dh and dw, of 64 positions, 128 rows and a width of 64; none is computed twice."""
    module, found = parse_hlo((predicted[1] / "step.hlo").read_text()), Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "convolution" and re.search(r'op_name="[^"]*\bhead\b', instruction.attributes):
                dtype, dims = instruction.shape.split("]")[0].split("[")
                found[dtype, math.prod(map(int, dims.split(",")))] += module.runs[computation.name]
    microbatches = rows(predicted[1] / "rows.jsonl")[0]["microbatches"]
    assert found == {("f32", 64 * 128): 2 * microbatches, ("bf16", 64 * 64): microbatches}


def test_float32_communicates_more_than_bfloat16(predicted):
    folder = predicted[1]
    output_of(call(folder, *V5E, "train.precision=float32", "--json", "float32.jsonl", "--hlo", "float32.hlo"))
    of_bfloat16 = r"= bf16\[\S* reduce-scatter\("
    assert re.search(of_bfloat16, (folder / "step.hlo").read_text())
    assert not re.search(of_bfloat16, (folder / "float32.hlo").read_text())
    (row,) = rows(folder / "float32.jsonl")
    assert row["comm_seconds"] > rows(folder / "rows.jsonl")[0]["comm_seconds"]


def test_a_row_that_does_not_fit_has_a_size_and_no_step_time(tmp_path):
    """Parameters and moments of 4.3 billion parameters over two chips: 12 bytes each."""
    pytest.importorskip("libtpu")
    wide = ["model.width=16384", "model.ffn=65536", "model.layers=1", "model.heads=16", "model.kv_heads=16"]
    wide += ["model.head_dim=1024", "model.context=128", "model.attention_chunk=128"]
    process = call(tmp_path, *V5E, "--batch", "2", *wide, "--json", "rows.jsonl", "--hlo", "step.hlo")
    assert process.returncode == 2
    assert process.stderr == "error: --hlo step.hlo: a program that does not fit has no schedule; make it fit first\n"
    assert "DOES NOT FIT" in process.stdout
    (row,) = rows(tmp_path / "rows.jsonl")
    assert not row["fits"] and row["step_seconds"] is row["mfu"] is row["comm_seconds"] is None
    assert row["peak_bytes_per_device"] > 3 * 4 * row["params"] / 2 > row["limit_bytes_per_device"] > 15 * GIB
    assert not (tmp_path / "step.hlo").exists()


# Mistakes

MISTAKES = {
    "--dp 3 --mp 2 --version v5e": "there is no v5e slice of 6 devices; slices have 1, 4,",
    f"{' '.join(V5E)} --topology 3x3": "--topology 3x3: there is no such v5e slice; use one of 1x1, 2x2, 2x4,",
    f"{' '.join(V5E)} --topology 4x4": "4 devices differ from the 16 of v5e 4x4",
    f"{' '.join(V5E)} --slices 3": "--slices 3 does not divide --dp 2: mp must lie within one slice; choose a divisor",
    "--dp 1 --mp 3 --emulate": "mesh.mp=3 does not divide heads=16 (model test); use mesh.mp in {1, 2, 4, 8, 16}",
    f"{' '.join(V5E)} model=huge": "model=huge: there is no such model; use one of 11b,",
    f"{' '.join(V5E)} --batch 3": "mesh.dp=2 does not divide a microbatch of 3 sequences",
    f"{' '.join(V5E)} --microbatches 0": "--microbatches 0 is too small; it must be 1 or more",
    f"{' '.join(V5E)} --context 0": "--context 0 is too small; it must be 1 or more",
    "--dp 1 --mp 1 --emulate --steps 0": "--steps 0 is too small; it must be 1 or more",
    "--dp 0 --mp 1 --emulate": "--dp 0 is too small; it must be 1 or more",
    "--dp 2 --mp 1 --emulate --slices 2": "--topology and --slices apply to TPUs only; omit them, or omit --emulate",
    f"{' '.join(V5E)} --json nowhere/rows": "--json nowhere/rows cannot be written: ",
    f"{' '.join(V5E)} --hlo .": "--hlo . cannot be written: ",
}


def check_error(code: int, out: str, err: str, reason: str) -> None:
    assert code == 2, err
    assert err.startswith("error: ") and reason in err and len(err.splitlines()) <= 2, err
    assert out == ""


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_reported_before_anything_is_compiled_or_written(monkeypatch, capsys, tmp_path, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "argv", ["benchmark_tpu.py", *flags.split()])
    monkeypatch.setattr(measuring, "measure", None)
    monkeypatch.setattr(benchmark_tpu, "predict", None)
    check_error(benchmark_tpu.main(), *capsys.readouterr(), MISTAKES[flags])
    assert not list(tmp_path.iterdir())


def test_a_process_prints_only_the_error(tmp_path):
    done = call(tmp_path, "--dp", "2", "--mp", "1", "--emulate", "mesh.tile=[1,1,1,1]")
    check_error(done.returncode, done.stdout, done.stderr, "cpu devices are not on a torus")


def test_an_invalid_tile_is_rejected_with_the_valid_ones(tmp_path):
    pytest.importorskip("libtpu")
    done = call(tmp_path, *V5E, "mesh.tile=[1,1,2,1]")
    check_error(done.returncode, done.stdout, done.stderr, "use one of 1,2,1,1; 2,1,1,1")
