"""What a search prints: the table of candidates, the Pareto front, the command and the recipe of the fastest."""

import math
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB
from shmap_tp.model.flops import flops_per_token
from shmap_tp.plan.gpu import Nodes
from shmap_tp.plan.report import Row, format_calibration
from shmap_tp.plan.search.candidates import Candidate, Estimated, pareto_front
from shmap_tp.plan.search.formulas import TIME
from shmap_tp.plan.search.loop import Found
from shmap_tp.plan.targets import Machine, Target, machine_of

COMPILED, FORMULAS = "compiled", "formulas"
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

    @property
    def fits(self) -> bool:
        """What the compiler says of a compiled step, whose peak may include vector memory (`aot_compile.Compiled`)."""
        return math.isfinite(self.seconds) and (self.basis == COMPILED or self.peak_bytes <= self.limit_bytes)

    @property
    def place(self) -> tuple[bool, float, float]:
        """What lines are sorted by: those that fit come first, fastest first, of equally fast ones the smaller."""
        return not self.fits, self.seconds, self.peak_bytes


def compiled_line(one: Found) -> Line:
    """What the compiled step says of a candidate."""
    row = one.outcome.row
    return Line(
        one.estimated.candidate, one.seconds, row.tokens_per_second or 0.0, row.mfu or 0.0,
        float(row.peak_bytes_per_device), row.limit_bytes_per_device,
        limited_by(row) if row.fits else "memory: does not fit", COMPILED,
    )  # fmt: skip


def formula_line(one: Estimated, config: Config, machine: Machine) -> Line:
    """What the formulas say of it."""
    tokens = config.train.batch * config.model.context
    mfu = tokens * flops_per_token(config.model) / machine.devices / one.seconds / machine.flops
    fits = "memory: may not fit" if one.peak_bytes > machine.memory else largest_term(one)
    return Line(one.candidate, one.seconds, tokens / one.seconds, mfu, one.peak_bytes, machine.memory, fits, FORMULAS)


def limited_by(row: Row) -> str:
    """The largest of what keeps a compiled step from its peak, with its share of the step."""
    scopes, step = row.scopes or {}, row.step_seconds
    shares = {
        "exposed communication": (row.exposed_comm_seconds or 0.0) / step,
        "waiting for copies": scopes.get("waiting for copies", 0.0) / step,
        "waiting for the host": sum(v for name, v in scopes.items() if name.startswith("waiting for the host")) / step,
        "recomputation": ((row.hfu or 0.0) - (row.mfu or 0.0)) / (row.hfu or 1.0),
    }
    name, share = max(shares.items(), key=lambda item: item[1])
    return f"{name} {share:.0%}" if share >= NOTABLE else "matmuls and kernels"


TERMS = {
    "chunked": "chunked attention", "scores": "attention scores", "once": "communication once a step",
    "overlapped": "overlapped communication", "scatters": "reduce-scatters", "host": "offload",
    "host_excess": "waiting for the host", "all_reduce": "all-reduces over mp",
    "sequence": "communication over mp", "collective_matmul": "communication over mp",
}  # fmt: skip
"""What a term of the formulas is called in the table, where its name does not say it."""


def largest_term(one: Estimated) -> str:
    """The largest term of the formulas beside matmuls and attention."""
    terms = {name: TIME[name] * value for name, value in one.estimate.time_terms.items()}
    name, value = max(((k, v) for k, v in terms.items() if k not in ("matmuls", "kernel")), key=lambda item: item[1])
    return f"{TERMS.get(name, name)} {value / one.seconds:.0%}"


def table(lines: list[Line], cost: "Cost | None") -> str:
    """The candidates as an aligned table, by `Line.place`; * marks the Pareto front of memory and speed."""
    front = pareto_front(line for line in lines if line.fits)
    head = ["", "step s", "tokens/s", "MFU", "GiB", "basis", "limited by", *(cost.head if cost else ()), "candidate"]
    rows = [head]
    for line in sorted(lines, key=lambda each: each.place):
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
    "basis compiled: by the compiler of the device, its schedule simulated; formulas: estimated, see docs/planning.md."
)
FORMULA_ERRORS = (
    "by formulas only: on models that were left out of their fit their time was 5 % off in the median, 35 % at most"
)


def trust(line: Line, target: Target) -> str:
    """How far the figures of a candidate can be trusted, in one line."""
    if line.basis == FORMULAS:
        return FORMULA_ERRORS
    if isinstance(target, Nodes):
        return "estimated, not calibrated: no GPU has confirmed it"
    return f"calibration: {format_calibration(machine_of(target).kind, line.seconds)}"


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


def slices_table(fastest: list[tuple[Target, Line, Cost | None]]) -> str:
    """A line for the fastest candidate of each target."""
    lines = []
    for target, line, cost in fastest:
        cells = zip(cost.head, cost.cells(line.tokens_per_second), strict=True) if cost else ()
        figures = [f"{line.tokens_per_second:,.0f} tokens/s", f"MFU {line.mfu:.1%}"]
        figures += [f"{cell} {name}" for name, cell in cells]
        lines.append(f"  {target}: {', '.join(figures)}; {line.candidate} ({line.basis})")
    return "\n".join(lines)


def fits_nowhere(least: Estimated, memory: float, peak_bytes: int | float | None = None) -> str:
    """By how much the smallest candidate exceeds the memory of a device, and what would make it fit.

    `peak_bytes` is its compiled peak; without it the formulas' is printed.
    """
    peak = least.peak_bytes if peak_bytes is None else peak_bytes
    state = least.estimate.memory_terms["state"]
    advice = "more devices (--devices)" if state > memory / 2 else "a shorter --context or a smaller --batch"
    return (
        f"the smallest, {least.candidate}, needs about {peak / GIB:.1f} of {memory / GIB:.1f} GiB per "
        f"device ({state / GIB:.1f} GiB of it for parameters, optimizer state and gradients);\n"
        f"use {advice}, or devices with more memory"
    )


def command(candidate: Candidate, config: Config, base: list[str], hosts: int) -> str:
    """The exact command that trains so; `base` are the words that name the file and the model."""
    batch = [f"train.batch={config.train.batch}", f"model.context={config.model.context}"]
    if config.train.max_sequences_per_device is not None:  # it would raise train.microbatches
        batch.append("train.max_sequences_per_device=null")
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
