"""What a search prints: the table of candidates, the Pareto front, the command and the recipe of the fastest."""

import math
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB
from shmap_tp.model.flops import flops_per_token
from shmap_tp.plan.report import Row
from shmap_tp.plan.search.fitted import TIME
from shmap_tp.plan.search.loop import Found
from shmap_tp.plan.search.prune import Estimated
from shmap_tp.plan.search.space import Candidate
from shmap_tp.plan.topologies import Slice

NOTABLE = 0.1
"""Share of a step from which something is said to limit it."""


@dataclass(frozen=True)
class Line:
    """A candidate in the table, compiled or by formulas."""

    candidate: Candidate
    seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: float
    limit_bytes: float
    limited_by: str
    basis: str
    """compiled, or formulas."""


def compiled_line(one: Found) -> Line:
    row = one.outcome.row
    return Line(
        one.estimated.candidate, one.seconds, row.tokens_per_second or 0.0, row.mfu or 0.0, row.peak_bytes_per_device,
        row.limit_bytes_per_device, limited_by(row) if row.fits else "memory: does not fit", "compiled",
    )  # fmt: skip


def formula_line(one: Estimated, config: Config, target: Slice, peak_flops: float, limit: float) -> Line:
    tokens = config.train.batch * config.model.context
    mfu = tokens * flops_per_token(config.model) / target.devices / one.seconds / peak_flops
    fits = "memory: may not fit" if one.peak_bytes > limit else largest_term(one)
    return Line(one.candidate, one.seconds, tokens / one.seconds, mfu, one.peak_bytes, limit, fits, "formulas")


def limited_by(row: Row) -> str:
    """The largest of what keeps a compiled step from its peak, with its share of the step."""
    scopes, step = row.scopes or {}, row.step_seconds
    shares = {
        "exposed communication": (row.exposed_comm_seconds or 0.0) / step,
        "waiting for copies": scopes.get("waiting for copies", 0.0) / step,
        "recomputation": ((row.hfu or 0.0) - (row.mfu or 0.0)) / (row.hfu or 1.0),
    }
    name, share = max(shares.items(), key=lambda item: item[1])
    return f"{name} {share:.0%}" if share >= NOTABLE else "matmuls and kernels"


def largest_term(one: Estimated) -> str:
    """The largest term of the formulas beside matmuls and attention."""
    terms = {name: TIME[name] * value for name, value in one.estimate.time_terms.items()}
    name, value = max(((k, v) for k, v in terms.items() if k not in ("matmuls", "kernel")), key=lambda item: item[1])
    return f"{name} {value / one.seconds:.0%}"


def pareto_front(lines: Iterable[Line]) -> list[Line]:
    """Of those that fit, the ones that no other equals or beats in both speed and memory, fastest first."""
    front: list[Line] = []
    for line in sorted((each for each in lines if math.isfinite(each.seconds)), key=lambda each: each.seconds):
        if not front or line.peak_bytes < front[-1].peak_bytes:
            front.append(line)
    return front


def table(lines: list[Line], cost: "Cost | None") -> str:
    """The candidates as an aligned table, fastest first; * marks the Pareto front of memory and speed."""
    front = pareto_front(lines)
    head = ["", "step s", "tokens/s", "MFU", "GiB", "basis", "limited by", *(cost.head if cost else ()), "candidate"]
    rows = [head]
    for line in sorted(lines, key=lambda each: each.seconds):
        fits = math.isfinite(line.seconds)
        figures = [f"{line.seconds:.3f}", f"{line.tokens_per_second:,.0f}", f"{line.mfu:.1%}"] if fits else ["-"] * 3
        money = (cost.cells(line.tokens_per_second) if fits else ["-"] * len(cost.head)) if cost else []
        memory = f"{line.peak_bytes / GIB:.2f} of {line.limit_bytes / GIB:.2f}"
        mark = "*" if line in front else ""
        rows.append([mark, *figures, memory, line.basis, line.limited_by, *money, str(line.candidate)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in cells)


LEGEND = (
    "*: on the Pareto front: no other is both faster and smaller.  (dp, mp) tensor-parallel mode, ZeRO stage (+ring: "
    "mesh.fsdp_gradients=ring), mb: microbatches.\n"
    "basis compiled: by the TPU compiler, its schedule simulated; formulas: estimated, see docs/planning.md."
)


@dataclass(frozen=True)
class Cost:
    """A token budget, and what a chip costs for an hour."""

    tokens: float
    price: float | None
    chips: int

    @property
    def head(self) -> list[str]:
        return ["days", *(["dollars"] if self.price is not None else [])]

    def cells(self, tokens_per_second: float) -> list[str]:
        hours = self.tokens / tokens_per_second / 3600
        dollars = [f"{hours * self.chips * self.price:,.0f}"] if self.price is not None else []
        return [f"{hours / 24:,.1f}", *dollars]


def command(candidate: Candidate, config: Config, base: list[str], hosts: int) -> str:
    """The exact command that trains so; `base` are the words that name the file and the model."""
    batch = [f"train.batch={config.train.batch}", f"model.context={config.model.context}"]
    words = [*base, *batch, *candidate.settings(), f"mesh.slices={config.mesh.slices}", f"mesh.processes={hosts}"]
    return shlex.join(["python", "main.py", *words])


def write_recipe(file: Path, candidate: Candidate, config: Config, note: str, hosts: int) -> None:
    """The whole configuration of a candidate as YAML.  Raises UserError where the file cannot be written."""
    chosen = candidate.apply(config)
    chosen = replace(chosen, mesh=replace(chosen.mesh, processes=hosts))
    plain = yaml.safe_load(yaml.dump(asdict(chosen), Dumper=_PlainDumper, sort_keys=False))
    try:
        file.write_text(f"# {note}\n#\n#   python main.py --cfg {file}\n{yaml.safe_dump(plain, sort_keys=False)}")
    except OSError as error:
        raise UserError(f"--recipe {file} cannot be written: {error.strerror}; choose another file") from error


class _PlainDumper(yaml.SafeDumper):
    """Writes the values of enumerations as text."""


_PlainDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))
