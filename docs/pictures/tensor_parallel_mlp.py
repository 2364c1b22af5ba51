"""Draws docs/pictures/tensor_parallel_mlp.png: one MLP over four devices in each of the three tensor-parallel modes.

python docs/pictures/tensor_parallel_mlp.py
"""

import hashlib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DEVICES = 4
REPLICATED, SHARDED, PARTIAL, COLLECTIVE = "#dbe6f4", "#8fb3dd", "#f3d9b1", "#c0504d"
HALF_WIDTH, HALF_HEIGHT = 0.43, 0.27

MODES = {
    "all_reduce": (
        "all_reduce (Megatron)",
        [
            ("x [B T D]", REPLICATED, None),
            ("", None, "nothing forward; backward: all-reduce of dx"),
            ("gelu(x @ up)\n[B T F/4]", SHARDED, None),
            ("@ down\n[B T D] {+mp}", PARTIAL, None),
            ("", None, "all-reduce of y"),
            ("y [B T D]", REPLICATED, None),
        ],
    ),
    "sequence": (
        "sequence (sequence parallelism)",
        [
            ("x [B T/4 D]", SHARDED, None),
            ("", None, "all-gather of x along T"),
            ("gelu(x @ up)\n[B T F/4]", SHARDED, None),
            ("@ down\n[B T D] {+mp}", PARTIAL, None),
            ("", None, "reduce-scatter of y along T"),
            ("y [B T/4 D]", SHARDED, None),
        ],
    ),
    "collective_matmul": (
        "collective_matmul",
        [
            ("x [B T/4 D]", SHARDED, None),
            ("", "ring", "3 ppermutes of [B T/4 D], each overlapped with\nthe matmul of the chunk that has arrived"),
            ("gelu(x @ up)\n4 x [B T/4 F/4]", SHARDED, None),
            ("@ down, 4 x\n[B T/4 D]\n{+mp}", PARTIAL, None),
            ("", "ring", "3 ppermutes of [B T/4 D] {+mp}, each overlapped\nwith the matmul of the next chunk"),
            ("y [B T/4 D]", SHARDED, None),
        ],
    ),
}


def box(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    corner = (x - HALF_WIDTH, y - HALF_HEIGHT)
    size = (2 * HALF_WIDTH, 2 * HALF_HEIGHT)
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="0.4", lw=0.7))
    axes.text(x, y, text, ha="center", va="center", fontsize=6.8, linespacing=1.25)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=7, shrinkA=0, shrinkB=0, **style))


def collective(axes: Axes, y: float, text: str, ring: bool) -> None:
    """A band over all devices, or arrows from each device to the next around a ring."""
    left, right = -HALF_WIDTH, DEVICES - 1 + HALF_WIDTH
    if ring:
        for device in range(DEVICES - 1):
            arrow(axes, (device + 0.12, y + 0.27), (device + 0.88, y + 0.27), color=COLLECTIVE, lw=1.2)
        arrow(axes, (DEVICES - 1, y + 0.34), (0, y + 0.34), color=COLLECTIVE, lw=1.0, connectionstyle="arc3,rad=0.09")
        axes.text((left + right) / 2, y - 0.1, text, ha="center", va="center", fontsize=7.2, color=COLLECTIVE)
        return
    axes.add_patch(plt.Rectangle((left, y - 0.17), right - left, 0.34, facecolor="white", edgecolor=COLLECTIVE, lw=1.2))
    axes.text((left + right) / 2, y, text, ha="center", va="center", fontsize=7.2, color=COLLECTIVE)


def panel(axes: Axes, title: str, rows: list[tuple]) -> None:
    axes.set_title(title, fontsize=10, pad=8)
    heights = [-0.95 * row for row in range(len(rows))]
    for device in range(DEVICES):
        axes.text(device, 0.48, f"device {device}", ha="center", fontsize=7, color="0.35")
    for (text, colour, extra), y in zip(rows, heights, strict=True):
        if text:
            for device in range(DEVICES):
                box(axes, device, y, text, colour)
        else:
            collective(axes, y, extra, ring=colour == "ring")
    axes.set(xlim=(-0.6, DEVICES - 0.4), ylim=(heights[-1] - 0.4, 0.75))
    axes.axis("off")


def draw() -> Figure:
    figure, panels = plt.subplots(1, 3, figsize=(12, 5), dpi=125, layout="constrained")
    for axes, (title, rows) in zip(panels, MODES.values(), strict=True):
        panel(axes, title, rows)
    legend = [("replicated over mp", REPLICATED), ("sharded over mp", SHARDED), ("partial sum {+mp}", PARTIAL)]
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="0.4") for _, colour in legend]
    handles.append(plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=COLLECTIVE))
    names = [name for name, _ in legend] + ["communication over mp"]
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def main() -> None:
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # tests/test_documents.py compares it
    draw().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None, "Source": source})


if __name__ == "__main__":
    main()
