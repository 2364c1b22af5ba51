"""Compile every candidate of three small searches, to see what the planner's formulas would have dropped.

    python benchmarks/whole_space.py            appends to benchmarks/results/whole_space.jsonl what it lacks

tests/plan/test_whole_space.py compares: the fastest candidate of each case must not be dropped.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from formula_calibration import rank_correlation

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.plan.search.candidates import Result, candidates, prune
from shmap_tp.plan.search.compiling import answer, request
from shmap_tp.plan.targets import Target, find_target

FILE = Path(__file__).parent / "results" / "whole_space.jsonl"


@dataclass(frozen=True)
class Case:
    """A search of a small model: where, for which batch, and the keys that are not searched."""

    name: str
    version: str
    batch: int
    fixed: dict[str, str]
    model: str = "gpt2"
    devices: int = 4

    @property
    def target(self) -> Target:
        return find_target(self.version, self.devices, None, 1)

    @property
    def config(self) -> Config:
        settings = [f"model={self.model}", f"train.batch={self.batch}", "mesh.dp=1", "mesh.mp=1", "mesh.processes=1"]
        return load(str(CONF / "base.yaml"), settings)

    def kept(self) -> list[Result]:
        """The candidates that the formulas keep, fastest first."""
        return prune(self.config, self.target, candidates(self.config, self.target, self.fixed))[0]


CASES = (
    Case("meshes", "v5e", 16, {"train.microbatches": "1", "model.remat": "full", "model.offload": "[]"}),
    Case(
        "remat", "v4", 32,
        {"mesh.mp": "1", "mesh.zero": "fsdp", "mesh.fsdp_gradients": "reduce_scatter", "model.offload": "[]"},
    ),
    Case(
        "offload", "v5e", 64,
        {"mesh.mp": "1", "mesh.zero": "zero1", "train.microbatches": "1", "model.remat": "attention"},
    ),
)  # fmt: skip


def recorded() -> dict[tuple[str, str], float]:
    """Compiled seconds by case and settings; infinite where a candidate does not fit."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["case"], row["candidate"]): row["seconds"] or math.inf for row in rows}


@dataclass(frozen=True)
class Ranks:
    """What the formulas say of a whole space."""

    compiled: int
    kept: int
    place: int | None
    """Place of the fastest candidate among those that are kept, from 1; None where it is dropped."""
    correlation: float
    """Rank correlation of the formulas with the compiled times, of those that are kept."""


def ranks(case: Case, done: dict[tuple[str, str], float]) -> Ranks:
    """Compare the formulas with the compiled times of every candidate of a case."""
    compiled = {words: seconds for (name, words), seconds in done.items() if name == case.name}
    kept = case.kept()
    order = [" ".join(one.candidate.settings()) for one in kept]
    fastest = min(compiled, key=compiled.__getitem__)
    correlation = rank_correlation([one.seconds for one in kept], [compiled[words] for words in order])
    place = order.index(fastest) + 1 if fastest in order else None
    return Ranks(len(compiled), len(kept), place, correlation)


def main() -> None:
    done = recorded()
    for case in CASES:
        every = candidates(case.config, case.target, case.fixed)
        for number, one in enumerate(every, 1):
            words = " ".join(one.settings())
            if (case.name, words) in done:
                continue
            found = answer(request(one.apply(case.config), case.target))
            if "error" in found:
                raise RuntimeError(f"{words}: {found['error']}")
            row = {"case": case.name, "candidate": words, "seconds": found["step_seconds"]}
            row |= {"peak_bytes": found["peak_bytes_per_device"], "versions": found["versions"]}
            with FILE.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{case.name} {number}/{len(every)}: {one}: {found['step_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
