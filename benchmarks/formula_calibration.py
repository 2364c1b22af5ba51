"""Fit the constants of the planner's formulas to the compiled steps of benchmarks/results, and test them on others.

    python benchmarks/formula_calibration.py            the constants, and the errors on models that were left out

Each constant is at least zero (non-negative least squares on relative errors); then one factor per TPU version is the
geometric mean of what is left, where at least three rows of it exist.  Left out: all rows of one model at a time.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.gpu import GPUS
from shmap_tp.plan.report import ESTIMATED, PREDICTED
from shmap_tp.plan.search.formulas import TIME, Estimate, combined, estimate
from shmap_tp.plan.targets import Target, find_target

RESULTS = Path(__file__).parent / "results"
FILES = ("tpu.jsonl", "published.jsonl", "ring.jsonl", "gpu_plan.jsonl", "fastest.jsonl")
FEWEST_ROWS = 3
"""Rows that a TPU version needs for a factor of its own."""
FEWEST_RANKED = 4
"""Rows that a kind of device needs for a rank correlation."""
FIXED = ("host", "host_excess", "heads")
"""Terms whose constants stay those of `TIME`: pairs of steps, not of this fit, and an assumption (formulas.py)."""
PRIOR = 0.1
"""Weight, in rows, of a constant's starting value 1, so that terms that few rows have do not vanish."""


def compiled_rows() -> list[dict]:
    """Every distinct compiled step of ours on one slice, or on nodes of GPUs, once."""
    rows = [json.loads(line) | {"file": name} for name in FILES for line in (RESULTS / name).read_text().splitlines()]
    ours = [row for row in rows if row["kind"] in (PREDICTED, ESTIMATED) and row.get("program") == "explicit"]
    distinct = {json.dumps([settings(row), row["topology"], row["device_kind"]]): row for row in ours}
    named = {file.stem for file in (CONF / "model").glob("*.yaml")}
    return [row for row in distinct.values() if row["slices"] == 1 and row["model"] in named and row["compile_seconds"]]


def settings(row: dict) -> list[str]:
    """The overrides that make the configuration of a row."""
    keys = {"mesh.dp": "dp", "mesh.mp": "mp", "train.batch": "global_batch", "model.context": "context"}
    keys |= {"train.microbatches": "microbatches", "mesh.zero": "zero", "mesh.tensor_parallel": "tensor_parallel"}
    keys |= {"mesh.fsdp_gradients": "fsdp_gradients", "model.remat": "remat", "model.attention": "attention"}
    keys |= {"model.block": "block"}
    more = [f"{key}={row[name]}" for key, name in keys.items()]
    return [
        f"model={row['model']}",
        *more,
        f"model.offload=[{','.join(row['offload'])}]",
        f"mesh.tile={row['tile'] or 'null'}",
    ]


def config_of(row: dict) -> Config:
    return load(str(CONF / "base.yaml"), [*settings(row), "data.documents=joined"])


def target_of(row: dict) -> Target:
    kinds = {name: each.kind for name, each in (GENERATIONS | GPUS).items()}
    version = next(name for name, kind in kinds.items() if kind == row["device_kind"])
    return find_target(version, row["devices"], row["topology"], 1)


def estimate_of(row: dict) -> Estimate:
    """The formulas for a row.  All but the fastest steps were compiled before kernels brought heads to attention."""
    made = estimate(config_of(row), target_of(row))
    return made if row["file"] == "fastest.jsonl" else replace(made, time_terms=made.time_terms | {"heads": 0.0})


def fit(terms: list[dict[str, float]], totals: Iterable[float]) -> dict[str, float]:
    """Constants, none negative, that minimise the squares of the relative errors."""
    names, totals = list(terms[0]), np.array(list(totals))
    given = np.array([sum(TIME[name] * row[name] for name in FIXED if name in names) for row in terms])
    names = [name for name in names if name not in FIXED]
    matrix = np.array([[row[name] for name in names] for row in terms]) / totals[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-9)
    prior = np.diag(math.sqrt(PRIOR) * scale)
    left = np.vstack([matrix, prior])
    right = np.concatenate([1 - given / totals, prior.sum(axis=1)])
    found = dict(zip(names, non_negative_least_squares(left, right), strict=True))
    return found | {name: TIME[name] for name in FIXED if name in terms[0]}


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


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 to 1 (ties share their mean rank); nan for fewer than two values."""
    if len(xs) < 2:
        return float("nan")
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(xs) - 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    spread = (sum((p - mean) ** 2 for p in a) * sum((q - mean) ** 2 for q in b)) ** 0.5
    return covariance / spread if spread else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


@dataclass(frozen=True)
class LeftOut:
    """A row beside the formulas whose constants were fitted without its model."""

    row: dict
    seconds: float
    peak_bytes: float
    host_bytes: float

    @property
    def time_ratio(self) -> float:
        """Formulas / compiled; nan where the step does not fit."""
        return self.seconds / (self.row["step_seconds"] or math.nan)

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes / self.row["peak_bytes_per_device"]

    def __str__(self) -> str:
        row, host = self.row, self.host_bytes / max(1, self.row["host_bytes_per_device"])
        step = f"({row['dp']}, {row['mp']}) {row['zero']} {row['tensor_parallel']} {row['remat']}"
        ratios = f"time {self.time_ratio:.2f}, memory {self.memory_ratio:.2f}, host {host:.2f}"
        return f"{row['model']:>12} {row['device_kind']:12} {step}: {ratios}"


def leave_one_model_out(rows: list[dict], made: list[Estimate]) -> list[LeftOut]:
    """Every row, by the formulas fitted to the rows of all other models."""
    found = []
    for model in sorted({row["model"] for row in rows}):
        kept = [i for i, row in enumerate(rows) if row["model"] != model]
        time, memory, factors = fit_all([rows[i] for i in kept], [made[i] for i in kept])
        for row, one in zip(rows, made, strict=True):
            if row["model"] == model:
                seconds = factors.get(row["device_kind"], 1.0) * combined(time, one.time_terms)
                found.append(LeftOut(row, seconds, combined(memory, one.memory_terms), one.host_bytes))
    return found


def summary(every: list[LeftOut]) -> str:
    """The errors of the formulas, and how well they rank steps of one kind of device by time per FLOP."""
    timed = [one for one in every if one.row["step_seconds"]]
    times, sizes = [np.log([one.time_ratio for one in timed]), np.log([one.memory_ratio for one in every])]
    lines = [
        f"time: error {np.median(abs(times)):.1%} in the median, "
        f"{math.exp(times.min()):.2f} to {math.exp(times.max()):.2f} times the compiled step",
        f"memory: error {np.median(abs(sizes)):.1%} in the median, "
        f"{math.exp(sizes.min()):.2f} to {math.exp(sizes.max()):.2f} times the compiled peak",
    ]
    for kind in sorted({one.row["device_kind"] for one in timed}):
        of_kind = [one for one in timed if one.row["device_kind"] == kind]
        if len(of_kind) >= FEWEST_RANKED:
            flops = [one.row["model_flops_per_device"] for one in of_kind]
            ours = [one.seconds / each for one, each in zip(of_kind, flops, strict=True)]
            compiled = [one.row["step_seconds"] / each for one, each in zip(of_kind, flops, strict=True)]
            lines.append(f"{kind}: rank correlation {rank_correlation(ours, compiled):.2f} of {len(of_kind)} steps")
    return "\n".join(lines)


def main() -> None:
    rows = compiled_rows()
    made = [estimate_of(row) for row in rows]
    print(f"fitted to {len(rows)} compiled steps")
    for name, found in zip(("TIME", "MEMORY", "SCALE"), fit_all(rows, made), strict=True):
        print(name, "= {", ", ".join(f'"{key}": {value:.3g}' for key, value in found.items()), "}")
    every = leave_one_model_out(rows, made)
    print("left out: formulas / compiled", *every, summary(every), sep="\n")


if __name__ == "__main__":
    main()
