"""A step that was planned for GPUs beside the same step measured on them: time, memory, and the compiled programs."""

import re
from collections import Counter

from shmap_tp.plan.hlo_parser import Instruction, parse_hlo
from shmap_tp.plan.report import Row
from shmap_tp.plan.schedule_simulator import FREE

SHOWN = 12
"""Kinds of instructions that are listed at most."""


def compare_plan(planned: Row, measured: Row, planned_text: str | None, measured_text: str | None) -> str:
    """Planned : measured of time and peak memory, and the instructions whose number differs between the programs."""
    lines = ["PLANNED : MEASURED"]
    for name, of, unit, factor in (
        ("time", "step_seconds", "s", 1.0), ("peak memory", "peak_bytes_per_device", "GiB", 2**30),
        ("compile time", "compile_seconds", "s", 1.0),
    ):  # fmt: skip
        a, b = getattr(planned, of), getattr(measured, of)
        ratio = f", ratio {a / b:.2f}" if a and b else ""
        lines.append(f"  {name:13}{_format(a, unit, factor)} : {_format(b, unit, factor)}{ratio}")
    if planned_text and measured_text:
        lines.append(f"  {'program':13}{compare_programs(planned_text, measured_text)}")
    return "\n".join(lines)


def _format(value: float | None, unit: str, factor: float) -> str:
    return f"{value / factor:.3f} {unit}" if value is not None else "-"


def compare_programs(planned: str, measured: str) -> str:
    """The kinds of instructions whose number differs between two modules, those that differ most first."""
    a, b = instruction_counts(planned), instruction_counts(measured)
    differing = sorted((kind for kind in a | b if a[kind] != b[kind]), key=lambda kind: (-abs(a[kind] - b[kind]), kind))
    if not differing:
        return f"the same {a.total()} instructions, by kind"
    listed = [f"{kind} {a[kind]} : {b[kind]}" for kind in differing[:SHOWN]]
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return f"{len(a | b) - len(differing)} kinds of instructions as often; {', '.join(listed)}{more}"


def instruction_counts(text: str) -> Counter:
    """How many instructions of each kind a module has, a custom call by its target; without those that do nothing."""
    every = [each for one in parse_hlo(text).computations.values() for each in one.instructions.values()]
    return Counter(_kind(each) for each in every if each.opcode not in FREE)


def _kind(instruction: Instruction) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return target[1] if target else instruction.opcode
