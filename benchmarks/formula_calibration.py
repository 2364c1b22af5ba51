"""Fit the constants of the planner's formulas to the compiled steps of benchmarks/results, and test them on others.

    python benchmarks/formula_calibration.py            the constants, and the errors on models that were left out

Each constant is at least zero (non-negative least squares on relative errors); then one factor per TPU version is the
geometric mean of what is left, where at least three rows of it exist.  Left out: all rows of one model at a time.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.search.correction import rank_correlation
from shmap_tp.plan.search.formulas import Estimate, combined, estimate
from shmap_tp.plan.topologies import Slice

RESULTS = Path(__file__).parent / "results"
FILES = ("tpu.jsonl", "published.jsonl", "ring.jsonl")
FEWEST_ROWS = 3
"""Of a TPU version, for a factor of its own."""
FIXED = ("excess", "host_excess")
"""Waiting that no row of the results has: its constant stays 1."""
PRIOR = 0.1
"""Weight, in rows, of a constant's starting value 1, so that terms that few rows have do not vanish."""


def compiled_rows() -> list[dict]:
    """Every distinct compiled step of ours on one slice, once."""
    rows = [json.loads(line) for name in FILES for line in (RESULTS / name).read_text().splitlines()]
    ours = [row for row in rows if row["kind"] == "predicted" and row.get("program") == "explicit"]
    distinct = {json.dumps([settings(row), row["topology"]]): row for row in ours if row["compile_seconds"]}
    named = {file.stem for file in (CONF / "model").glob("*.yaml")}
    return [row for row in distinct.values() if row["slices"] == 1 and row["model"] in named]


def settings(row: dict) -> list[str]:
    """The overrides that make the configuration of a row."""
    keys = {"mesh.dp": "dp", "mesh.mp": "mp", "train.batch": "global_batch", "model.context": "context"}
    keys |= {"train.microbatches": "microbatches", "mesh.zero": "zero", "mesh.tensor_parallel": "tensor_parallel"}
    keys |= {"mesh.fsdp_gradients": "fsdp_gradients", "model.remat": "remat", "model.attention": "attention"}
    keys |= {"model.block": "block"}
    more = [f"{key}={row[name]}" for key, name in keys.items()]
    return [f"model={row['model']}", *more, f"model.offload=[{','.join(row['offload'])}]", f"mesh.tile={row['tile']}"]


def config_of(row: dict) -> Config:
    return load(str(CONF / "config.yaml"), settings(row))


def slice_of(row: dict) -> Slice:
    version = next(name for name, each in GENERATIONS.items() if each.kind == row["device_kind"])
    return Slice(version, tuple(map(int, row["topology"].split("x"))))


def fit(terms: list[dict[str, float]], totals: Iterable[float]) -> dict[str, float]:
    """Constants, none negative, that minimise the squares of the relative errors."""
    names, totals = list(terms[0]), np.array(list(totals))
    given = np.array([sum(row[name] for name in FIXED if name in names) for row in terms])
    names = [name for name in names if name not in FIXED]
    matrix = np.array([[row[name] for name in names] for row in terms]) / totals[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-9)
    prior = np.diag(math.sqrt(PRIOR) * scale)
    left = np.vstack([matrix, prior])
    right = np.concatenate([1 - given / totals, prior.sum(axis=1)])
    found = dict(zip(names, non_negative_least_squares(left, right), strict=True))
    return found | {name: 1.0 for name in FIXED if name in terms[0]}


def non_negative_least_squares(matrix: np.ndarray, right: np.ndarray, steps: int = 20000) -> np.ndarray:
    """By coordinate descent: each constant in turn takes its best value that is not negative."""
    gram, target = matrix.T @ matrix, matrix.T @ right
    x = np.ones(len(gram))
    for step in range(steps):
        i = step % len(x)
        if gram[i, i] > 0:
            x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
    return x


def scales(rows: list[dict], ratios: Iterable[float]) -> dict[str, float]:
    """Compiled seconds / those of the formulas, by device kind."""
    found: dict[str, list[float]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        found.setdefault(row["device_kind"], []).append(math.log(ratio))
    return {kind: math.exp(np.mean(logs)) for kind, logs in found.items() if len(logs) >= FEWEST_ROWS}


def fit_all(rows: list[dict], made: list[Estimate]) -> tuple[dict, dict, dict]:
    """(constants of time, constants of memory, factor of each device kind)."""
    timed = [(row, one) for row, one in zip(rows, made, strict=True) if row["step_seconds"]]
    time = fit([one.time_terms for _, one in timed], [row["step_seconds"] for row, _ in timed])
    memory = fit([one.memory_terms for one in made], [row["peak_bytes_per_device"] for row in rows])
    ratios = [row["step_seconds"] / combined(time, one.time_terms) for row, one in timed]
    return time, memory, scales([row for row, _ in timed], ratios)


def main() -> None:
    rows = compiled_rows()
    made = [estimate(config_of(row), slice_of(row)) for row in rows]
    time, memory, factors = fit_all(rows, made)
    for name, found in (("TIME", time), ("MEMORY", memory), ("SCALE", factors)):
        print(name, "= {", ", ".join(f'"{key}": {value:.3g}' for key, value in found.items()), "}")
    errors, sizes, pairs = [], [], []
    for model in sorted({row["model"] for row in rows}):
        kept = [i for i, row in enumerate(rows) if row["model"] != model]
        time, memory, factors = fit_all([rows[i] for i in kept], [made[i] for i in kept])
        for row, one in zip(rows, made, strict=True):
            if row["model"] != model:
                continue
            size = combined(memory, one.memory_terms) / row["peak_bytes_per_device"]
            sizes.append(size)
            seconds = factors.get(row["device_kind"], 1.0) * combined(time, one.time_terms)
            if row["step_seconds"]:
                errors.append(seconds / row["step_seconds"])
                pairs.append(
                    (
                        seconds / row["model_flops_per_device"],
                        row["step_seconds"] / row["model_flops_per_device"],
                        row["device_kind"],
                    )
                )
            print(
                f"{row['model']:>12} {row['device_kind']:12} ({row['dp']},{row['mp']}) {row['zero']} {row['tensor_parallel']} {row['remat']}"
                f": time {seconds / (row['step_seconds'] or math.nan):.2f}, memory {size:.2f}, host {one.host_bytes / max(1, row['host_bytes_per_device']):.2f}"
            )
    logs, memory_logs = np.abs(np.log(errors)), np.log(sizes)
    print(
        f"left out: time error median {np.median(logs):.1%}, largest {logs.max():.1%}; rank correlation of time per FLOP of each "
        f"version "
        + ", ".join(
            f"{kind} {rank_correlation([a for a, _, k in pairs if k == kind], [b for _, b, k in pairs if k == kind]):.2f}"
            for kind in sorted({k for *_, k in pairs})
            if sum(k == kind for *_, k in pairs) > 3
        )
    )
    print(
        f"memory error median {np.median(np.abs(memory_logs)):.1%}, from {math.exp(memory_logs.min()):.2f} to {math.exp(memory_logs.max()):.2f} times the compiled peak"
    )


if __name__ == "__main__":
    main()
