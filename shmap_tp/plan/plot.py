"""Draw a predicted training step: a timeline of the simulated schedule, and the memory by kind.

Rows of the timeline: compute, the collectives in flight over each mesh axis, transfers between slices and to host
memory, and the time that the device waits.  The first one or two iterations of a loop are drawn as they are; the
others are collapsed into a hatched strip.  The time axis shows the time of the full step.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from shmap_tp.plan.compiled_communication import axis_of_groups
from shmap_tp.plan.ledger import format_bytes
from shmap_tp.plan.schedule_simulator import LINKS, NETWORK, Interval, SimulatedSchedule
from shmap_tp.runtime.files import replacing

COMPUTE_COLORS = {
    "attention": "#4878cf",
    "mlp": "#d65f5f",
    "experts": "#b22222",
    "router": "#f4a582",
    "rows to experts": "#8c9c3c",
    "rows from experts": "#3c8c7c",
    "blocks, the rest": "#b0b0b0",
    "head": "#956cb4",
    "loss": "#d5bb67",
    "embedding": "#8c613c",
    "update": "#6acc65",
    "other": "#dddddd",
}
COLLECTIVE_COLORS = {
    "all-gather": "#1b9e77",
    "reduce-scatter": "#d95f02",
    "all-reduce": "#7570b3",
    "collective-permute": "#e6ab02",
    "all-to-all": "#66a61e",
}
MEMORY_COLORS = ["#4878cf", "#6acc65", "#d5bb67", "#d65f5f"]
NETWORK_COLOR, HOST_COLOR, WAITING_COLOR = "#a6761d", "#1f78b4", "black"

COLLAPSED_FRACTION = 0.05
"""Largest drawn width of the collapsed iterations of a loop, relative to everything that is drawn as it is."""


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes per device."""

    kinds: dict[str, float]
    limit: float
    host: float = 0.0


def plot_step(
    schedule: SimulatedSchedule, memory: PlannedMemory, sizes: dict[str, int], title: str, file: Path
) -> None:
    """Write a PNG of a schedule that was simulated with `record=True`, on a mesh with these axis sizes."""
    figure = Figure(figsize=(16, 7), layout="constrained")
    timeline, bar = figure.subplots(1, 2, width_ratios=[8, 1])
    figure.suptitle(title, fontsize=11)
    _draw_timeline(timeline, schedule, sizes)
    _draw_memory(bar, memory)
    with replacing(file, "wb") as stream:
        figure.savefig(stream, dpi=110, format="png")


class _TimeScale:
    """Maps the time of the step to drawn time, in which repeated iterations are collapsed."""

    def __init__(self, seconds: float, repeats: list[Interval]):
        drawn = seconds - sum(interval.end - interval.begin for interval in repeats)
        width = COLLAPSED_FRACTION * (drawn or seconds)
        times, positions = [0.0], [0.0]
        for interval in sorted(repeats, key=lambda interval: interval.begin):
            position = positions[-1] + interval.begin - times[-1]
            times += [interval.begin, interval.end]
            positions += [position, position + min(width, interval.end - interval.begin)]
        self._times, self._positions = [*times, seconds], [*positions, positions[-1] + seconds - times[-1]]

    @property
    def end(self) -> float:
        return self._positions[-1]

    def drawn(self, time: float) -> float:
        return float(np.interp(time, self._times, self._positions))

    def time(self, drawn: float) -> float:
        return float(np.interp(drawn, self._positions, self._times))


def _draw_timeline(axes: Axes, schedule: SimulatedSchedule, sizes: dict[str, int]) -> None:
    repeats = [interval for interval in schedule.timeline if interval.kind == "repeats"]
    scale = _TimeScale(schedule.seconds, repeats)
    rows: dict[str, list[tuple[Interval, str]]] = {"compute": []}
    for interval in schedule.timeline:
        if (placed := _row_and_color(interval, sizes)) is not None:
            rows.setdefault(placed[0], []).append((interval, placed[1]))
    order = sorted(rows, key=lambda name: (name != "compute", name.startswith("exposed"), name))
    for number, name in enumerate(order):
        spans = [(scale.drawn(one.begin), scale.drawn(one.end)) for one, _ in rows[name]]
        bars = [(begin, end - begin) for begin, end in spans]
        axes.broken_barh(bars, (number - 0.4, 0.8), facecolors=[color for _, color in rows[name]], linewidth=0)
    for interval in repeats:
        begin, end = scale.drawn(interval.begin), scale.drawn(interval.end)
        axes.axvspan(begin, end, facecolor="white", edgecolor="#999999", hatch="///", linewidth=0.5, zorder=3)
        if end - begin > 0.01 * scale.end:
            words = f"{interval.label} more iterations"
            style = {"boxstyle": "round", "facecolor": "white", "edgecolor": "#999999"}
            middle = (begin + end) / 2, (len(order) - 1) / 2
            axes.text(*middle, words, rotation=90, ha="center", va="center", fontsize=8, bbox=style, zorder=4)
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(0, scale.end)
    unit, factor = _time_unit(schedule.seconds)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda drawn, _: f"{scale.time(drawn) * factor:.3g}"))
    axes.set_xlabel(f"time of the step, {unit} (hatched: repeated iterations, collapsed)")
    _draw_legend(axes, schedule, rows)


def _row_and_color(interval: Interval, sizes: dict[str, int]) -> tuple[str, str] | None:
    """(row of the timeline, color); None for intervals that are not drawn, such as copies to on-chip memory."""
    if interval.kind == "compute":
        return "compute", COMPUTE_COLORS.get(interval.label, COMPUTE_COLORS["other"])
    if interval.kind == "waiting":
        return "exposed waiting", WAITING_COLOR
    if interval.kind == LINKS and interval.collective is not None:
        axis = axis_of_groups(interval.collective.attributes, sizes)
        kind = interval.collective.opcode.removesuffix("-start")
        name = f"collectives over {'other groups' if axis.startswith('[') else axis.replace(' ', ' and ')}"
        return name, COLLECTIVE_COLORS[kind]
    if interval.kind == NETWORK:
        return "transfers between slices", NETWORK_COLOR
    if interval.kind.startswith("the host"):
        return f"host memory {interval.kind.removeprefix('the host, ')}", HOST_COLOR
    return None


def _draw_legend(axes: Axes, schedule: SimulatedSchedule, rows: dict[str, list[tuple[Interval, str]]]) -> None:
    """The totals of the step, and the colors of collectives."""
    unit, factor = _time_unit(schedule.seconds)

    def total(name: str, seconds: float) -> str:
        return f"{name}: {seconds * factor:.3g} {unit} ({seconds / schedule.seconds:.1%})"

    handles = [Patch(color="none", label=f"step: {schedule.seconds * factor:.4g} {unit}")]
    handles += [
        Patch(color=color, label=total(name, schedule.scopes[name]))
        for name, color in COMPUTE_COLORS.items()
        if schedule.scopes[name]
    ]
    waits = {name: seconds for name, seconds in schedule.scopes.items() if name.startswith("waiting") and seconds}
    handles += [Patch(color=WAITING_COLOR, label=total(name, seconds)) for name, seconds in waits.items()]
    overlapped = schedule.comm_seconds - schedule.exposed_comm_seconds
    handles.append(Patch(color="none", label=total("all collectives", schedule.comm_seconds)))
    handles.append(Patch(color="none", label=total("overlapped collectives", overlapped)))
    used = {color for intervals in rows.values() for _, color in intervals}
    handles += [Patch(color=color, label=name) for name, color in COLLECTIVE_COLORS.items() if color in used]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4, fontsize=9, frameon=False)


def _time_unit(seconds: float) -> tuple[str, float]:
    """A unit in which the step is at least 1, and its number per second."""
    return next(((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if seconds * factor >= 1), ("us", 1e6))


def _draw_memory(axes: Axes, memory: PlannedMemory) -> None:
    """The kinds stacked in one bar, host memory in another, and the limit where it is near."""
    bottom, peak = 0.0, sum(memory.kinds.values())
    unit, size_of_unit = ("GiB", 2**30) if max(peak, memory.host) >= 2**30 else ("MiB", 2**20)
    for (name, size), color in zip(memory.kinds.items(), MEMORY_COLORS, strict=True):
        label = f"{name}: {format_bytes(int(size))}"
        axes.bar(0, size / size_of_unit, bottom=bottom / size_of_unit, color=color, width=0.8, label=label)
        bottom += size
    if memory.host:
        label = f"host: {format_bytes(int(memory.host))}"
        axes.bar(1, memory.host / size_of_unit, color=HOST_COLOR, width=0.8, label=label)
    axes.set_xticks([0, 1] if memory.host else [0], ["device", "host"] if memory.host else ["device"])
    axes.set_xlim(-0.6, 1.6 if memory.host else 0.6)
    if max(peak, memory.host) > memory.limit / 4:  # else the limit is far above the bar
        axes.hlines(memory.limit / size_of_unit, -0.5, 0.5, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel(unit)
    axes.set_title(
        f"memory per device\npeak {format_bytes(int(peak))} of {format_bytes(int(memory.limit))}", fontsize=9
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=9, frameon=False)
