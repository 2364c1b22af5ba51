"""What a search prints: the table of candidates, the Pareto front, the command and the recipe of the fastest."""

import math
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
from shmap_tp.plan.report import Row, format_calibration
from shmap_tp.plan.search.candidates import SURE, Candidate, Result, pareto_front
from shmap_tp.plan.search.cost import Cost
from shmap_tp.plan.search.formulas import TIME, Estimate
from shmap_tp.plan.targets import Target, machine_of
from shmap_tp.runtime.console import fitted_table, wrap_lines
from shmap_tp.runtime.files import replacing

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
    chosen = candidate.settings(config.mesh.cp, ep_of_file, config.model.row_major)
    words = [*base, *batch, *chosen, f"mesh.slices={config.mesh.slices}", f"mesh.processes={hosts}"]
    return [*as_installed("python main.py").split(), *words]


def write_recipe(file: Path, candidate: Candidate, config: Config, note: str, hosts: int) -> None:
    """The whole configuration of a candidate as YAML.  Raises UserError where the file cannot be written."""
    chosen = candidate.apply(config)
    chosen = replace(chosen, mesh=replace(chosen.mesh, processes=hosts))
    plain = yaml.safe_load(yaml.dump(asdict(chosen), Dumper=_PlainDumper, sort_keys=False))
    try:
        train = as_installed("python main.py")
        with replacing(file) as stream:
            stream.write(f"# {note}\n#\n#   {train} --cfg {file}\n{yaml.safe_dump(plain, sort_keys=False)}")
    except OSError as error:
        raise UserError(f"--recipe {file} cannot be written: {error.strerror}; choose another file") from error


class _PlainDumper(yaml.SafeDumper):
    """Writes the values of enumerations as text."""


_PlainDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))
