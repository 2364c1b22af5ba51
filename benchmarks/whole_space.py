"""Compile every candidate of three small searches, to see what the planner's formulas would have dropped.

    python benchmarks/whole_space.py            appends to benchmarks/results/whole_space.jsonl what it lacks

tests/plan/test_whole_space.py compares: the fastest candidate of each case must not be dropped.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.plan.search.prune import Estimated, Pruned, prune
from shmap_tp.plan.search.space import candidates
from shmap_tp.plan.search.worker import answer, request
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
        return load(str(CONF / "config.yaml"), settings)

    def pruned(self) -> Pruned:
        return prune(self.config, self.target, candidates(self.config, self.target, self.fixed))


CASES = (
    Case("meshes", "v5e", 16, {"train.microbatches": "1", "model.remat": "full", "model.offload": "[]"}),
    Case(
        "remat", "v4", 32,
        {"mesh.mp": "1", "mesh.zero": "fsdp", "mesh.fsdp_gradients": "reduce_scatter", "model.offload": "[]"},
    ),
    Case("offload", "v5e", 64, {"mesh.mp": "1", "mesh.zero": "zero1", "train.microbatches": "1"}),
)  # fmt: skip


def recorded() -> dict[tuple[str, str], float]:
    """Compiled seconds by case and settings; infinite where a candidate does not fit."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["case"], row["candidate"]): row["seconds"] or math.inf for row in rows}


def settings(one: Estimated) -> str:
    return " ".join(one.candidate.settings())


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
