"""What a search prints: the table of candidates, the Pareto front, days and dollars as published runs took, the command
and the recipe of the fastest."""

import argparse
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from shmap_tp.config.schema import Config
from shmap_tp.config.yaml_files import as_installed
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB
from shmap_tp.model.flops import flops_per_token
from shmap_tp.plan.gpu import Nodes
from shmap_tp.plan.report import CALIBRATIONS, Calibration, Row, format_calibration
from shmap_tp.plan.search.candidates import SURE, Candidate, Result, pareto_front
from shmap_tp.plan.search.formulas import TIME, Estimate
from shmap_tp.plan.targets import Machine, Target, machine_of
from shmap_tp.runtime.console import fitted_table, wrap_lines
from shmap_tp.runtime.files import replacing, writing_output

UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def token_count(text: str) -> float:
    """The number of `1e11`, `100B` or `1.5T`; for argparse."""
    found = re.fullmatch(r"([-+.\d_e]*?)([KMBT]?)", text, re.IGNORECASE)
    try:
        return float(found[1]) * UNITS[found[2].upper()]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens; give one such as 1e11, 100B or 1.5T"
        ) from None


def short_count(number: float) -> str:
    """1e11 -> '100B'."""
    unit, size = next(((unit, size) for unit, size in reversed(UNITS.items()) if number >= size), ("", 1))
    return f"{number / size:g}{unit}"


def parse_prices(text: str | None, versions: list[str]) -> dict[str, float]:
    """Dollars per chip hour by version: of `2.5` for all, of `v5e=1.2,v6e=2.7` by name.  Raises UserError."""
    if text is None:
        return {}
    try:
        words = [word.split("=", 1) for word in text.split(",")] if "=" in text else [(name, text) for name in versions]
        prices = {version: float(price) for version, price in words}
    except ValueError:
        raise UserError(f"--price {text} is no price; give dollars per chip hour: 1.2, or v5e=1.2,v6e=2.7") from None
    for version in versions:
        if not 0 <= prices.get(version, -1.0) < float("inf"):
            raise UserError(f"--price {text} has no price of 0 or more for {version}; add {version}=DOLLARS")
    for version in set(prices) - set(versions):
        raise UserError(f"--price {text}: {version} is not searched; omit it, or add it to --versions")
    return prices


@dataclass(frozen=True)
class Cost:
    """A token budget, what a chip costs for an hour, and how much longer than predicted published steps took."""

    tokens: float
    price: float | None
    chips: int
    kind: str
    """jax.Device.device_kind."""

    @classmethod
    def on(cls, machine: Machine, tokens: float, price: float | None) -> "Cost":
        return cls(tokens, price, machine.chips, machine.kind)

    @property
    def calibration(self) -> Calibration | None:
        return CALIBRATIONS.get(self.kind)

    @property
    def names(self) -> list[str]:
        return ["days", *(["dollars"] if self.price is not None else [])]

    @property
    def factors(self) -> list[float]:
        """What a predicted step is multiplied by: as expected, at least, at most."""
        found = self.calibration
        return [found.constant, found.lowest, found.highest] if found else [1.0]

    def figures(self, tokens_per_second: float) -> list[list[float]]:
        """By name, at this speed, which is a predicted one: as expected, at least, at most."""
        days = [factor * self.tokens / tokens_per_second / 86400 for factor in self.factors]
        dollars = [[24 * self.chips * self.price * each for each in days]] if self.price is not None else []
        return [days, *dollars]

    def cells(self, tokens_per_second: float) -> list[str]:
        """As expected, by name."""
        return [self._format(name, values[0]) for name, values in self._by_name(tokens_per_second)]

    def text(self, tokens_per_second: float) -> str:
        """As expected, and the range of published runs."""
        words = []
        for name, values in self._by_name(tokens_per_second):
            value, *ends = (self._format(name, each) for each in values)
            words.append(f"{value} {name}{_range(ends)}")
        return f"{', '.join(words)}, {self.basis}"

    @property
    def basis(self) -> str:
        """What the predicted step is multiplied by."""
        if self.calibration is None:
            return "by the step as planned, not calibrated"
        constant, *ends = (f"{factor:.2f}" for factor in self.factors)
        return f"at {constant}{_range(ends)} times the step"

    @property
    def legend(self) -> str:
        return f"{' and '.join(self.names)}: {self.basis}{', as published runs took' if self.calibration else ''}"

    def _by_name(self, tokens_per_second: float) -> list[tuple[str, list[float]]]:
        return list(zip(self.names, self.figures(tokens_per_second), strict=True))

    def _format(self, name: str, value: float) -> str:
        return f"{value:,.1f}" if name == "days" else f"{value:,.0f}"


def _range(ends: list[str]) -> str:
    """The lowest and the highest, in brackets, where they differ."""
    return f" ({ends[0]} to {ends[1]})" if len(set(ends)) == 2 else ""


COMPILED, FORMULAS = "compiled", "formulas"
NOTABLE = 0.1
"""Share of a step from which something is said to limit it."""


@dataclass(frozen=True)
class Task:
    """The search of one target: what was asked."""

    config: Config
    """What candidates are applied to."""
    target: Target
    cost: Cost | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.batch * self.config.model.context

    def mfu(self, seconds: float) -> float:
        """Model FLOP/s utilisation of a step that takes so long."""
        machine = machine_of(self.target)
        return self.tokens * flops_per_token(self.config.model) / machine.devices / seconds / machine.flops

    def sort_key(self, one: Result) -> float:
        """What targets are compared by: dollars or days of the run where they are asked for, else seconds of a
        token."""
        return self.cost.figures(self.tokens / one.seconds)[-1][0] if self.cost else one.seconds / self.tokens


def basis(one: Result) -> str:
    """What the figures of a candidate come from: compiled, or formulas."""
    return FORMULAS if one.row is None else COMPILED


def limited_by(one: Result, memory: float) -> str:
    """What keeps a candidate from its peak: that it does not fit, or the largest share of its step."""
    if not one.fits_in(memory):
        return "memory: may not fit" if one.row is None else "memory: does not fit"
    return largest_term(one.estimate) if one.row is None else largest_share(one.row)


def largest_share(row: Row) -> str:
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


def largest_term(estimate: Estimate) -> str:
    """The largest term of the formulas beside matmuls and attention."""
    terms = {name: TIME[name] * value for name, value in estimate.time_terms.items()}
    name, value = max(((k, v) for k, v in terms.items() if k not in ("matmuls", "kernel")), key=lambda item: item[1])
    return f"{TERMS.get(name, name)} {value / estimate.seconds:.0%}"


def place(one: Result, memory: float) -> tuple[bool, float, float]:
    """What candidates are sorted by: whether they fit, then how fast they are, then how small."""
    return not one.fits_in(memory), one.seconds, one.peak_bytes


def table(task: Task, results: Iterable[Result]) -> str:
    """The candidates as a table, by `place`; * marks the Pareto front of memory and speed."""
    memory, cost = machine_of(task.target).memory, task.cost
    results = sorted(results, key=lambda one: place(one, memory))
    front = pareto_front(one for one in results if one.fits_in(memory))
    head = ["", "step s", "tokens/s", "MFU", "GiB", "basis", "limited by", *(cost.names if cost else ()), "candidate"]
    rows = [head]
    for one in results:
        has_time, speed = math.isfinite(one.seconds), task.tokens / one.seconds
        figures = [f"{one.seconds:.3f}", f"{speed:,.0f}", f"{task.mfu(one.seconds):.1%}"] if has_time else ["-"] * 3
        money = (cost.cells(speed) if has_time else ["-"] * len(cost.names)) if cost else []
        size, mark = f"{one.peak_bytes / GIB:.2f} of {memory / GIB:.2f}", "*" if one in front else ""
        rows.append([mark, *figures, size, basis(one), limited_by(one, memory), *money, str(one.candidate)])
    return fitted_table(rows, ["limited by", "tokens/s", "MFU", "basis"], wrap="candidate", least=40)


def legend(task: Task) -> str:
    """What the table's words mean."""
    lines = [
        "*: on the Pareto front: no other is both faster and smaller.  (dp, mp) tensor-parallel mode, ZeRO stage "
        "(+ring: mesh.fsdp_gradients=ring), mb: microbatches.",
        "basis compiled: by the compiler of the device, its schedule simulated; formulas: estimated, see "
        "docs/planning.md.",
        *([task.cost.legend] if task.cost else []),
    ]
    return wrap_lines("\n".join(lines))


FORMULA_ERRORS = (
    "by formulas only: on models that were left out of their fit their time was 5 % off in the median, 35 % at most, "
    f"their memory 2 % and 14 %; so what needs at most {SURE:.0%} of the memory by formulas is taken to fit"
)


def trust(one: Result, target: Target) -> str:
    """How far the figures of a candidate can be trusted, in one line."""
    if one.row is None:
        return FORMULA_ERRORS
    if isinstance(target, Nodes):
        return "estimated, not calibrated: no GPU has confirmed it"
    return f"calibration: {format_calibration(machine_of(target).kind, one.seconds)}"


def slice_lines(task: Task, one: Result, note: str) -> str:
    """The fastest candidate of a target, its speed, time and cost; `note` says why it was not compiled, or nothing."""
    speed = task.tokens / one.seconds
    why = f"{basis(one)}: {note}" if note else basis(one)
    lines = [f"{one.candidate} ({why})", f"{speed:,.0f} tokens/s, MFU {task.mfu(one.seconds):.1%}"]
    return "\n      ".join([*lines, *([task.cost.text(speed)] if task.cost else [])])


def fits_nowhere(least: Result, memory: float) -> str:
    """By how much the smallest candidate exceeds the memory of a device, and what would make it fit."""
    state = least.estimate.memory_terms["state"]
    advice = "more devices (--devices)" if state > memory / 2 else "a shorter --context or a smaller --batch"
    return (
        f"the smallest, {least.candidate}, needs about {least.peak_bytes / GIB:.1f} of {memory / GIB:.1f} GiB per "
        f"device ({state / GIB:.1f} GiB of it for parameters, optimizer state and gradients);\n"
        f"use {advice}, or devices with more memory"
    )


def command(candidate: Candidate, config: Config, base: list[str], hosts: int) -> list[str]:
    """The words of the command that trains so; `base` are those that name the file and the model."""
    batch = [f"train.batch={config.train.batch}", f"model.context={config.model.context}"]
    if config.train.max_sequences_per_device is not None:  # it would raise train.microbatches
        batch.append("train.max_sequences_per_device=null")
    ep_of_file = 0 if config.model.experts else 1  # not known: the search loads every file with mesh.ep=1
    chosen = candidate.settings(config.mesh.cp, ep_of_file, config.model.row_major, config.train.matmul_precision)
    words = [*base, *batch, *chosen, f"mesh.slices={config.mesh.slices}", f"mesh.processes={hosts}"]
    return [*as_installed("python main.py").split(), *words]


def write_recipe(file: Path, candidate: Candidate, config: Config, note: str, hosts: int) -> None:
    """The whole configuration of a candidate as YAML.  Raises UserError where the file cannot be written."""
    chosen = candidate.apply(config)
    chosen = replace(chosen, mesh=replace(chosen.mesh, processes=hosts))
    plain = yaml.safe_load(yaml.dump(asdict(chosen), Dumper=_PlainDumper, sort_keys=False))
    train = as_installed("python main.py")
    with writing_output(f"--recipe {file}"), replacing(file) as stream:
        stream.write(f"# {note}\n#\n#   {train} --cfg {file}\n{yaml.safe_dump(plain, sort_keys=False)}")


class _PlainDumper(yaml.SafeDumper):
    """Writes the values of enumerations as text."""


_PlainDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))
