"""Draws docs/pictures/journeys.png: a batch, a weight and a gradient on their way through the files.

python docs/pictures/journeys.py
"""

import hashlib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

COLOURS = {
    "data": "#e6efd9",
    "training": "#f4e1d2",
    "model": "#e3ddf0",
    "layers": "#d6e4f2",
    "parallel": "#f6efc8",
}

LANES = {
    "A batch:\nfrom token file\nto loss": [
        ("data/token_files", "reads sequences\nof T + 1 tokens"),
        ("data/batches", "chooses them by\n(seed, step); puts\nthem on devices"),
        ("training/step", "runs microbatches\nunder shard_map"),
        ("model/transformer", "embeds tokens,\nscans the blocks"),
        ("model/blocks", "norm, attention,\nMLP, residual sum"),
        ("layers/attention, mlp", "heads or hidden\nunits of this rank"),
        ("layers/linear", "holds the weight,\nsharded over mp"),
        ("parallel/tensor_parallel", "collectives around\nthe matmuls"),
        ("model/loss", "head and cross\nentropy, in chunks"),
    ],
    "A weight:\nfrom declaration\nto checkpoint": [
        ("layers/linear", "declares it:\nparam(...)"),
        ("parallel/partitioning", "derives its\nPartitionSpec"),
        ("training/step", "initialises it under\njit, as shards"),
        ("parallel/fsdp", "gathers it over dp\nbefore its block"),
        ("layers/linear", "is used in a\nmatmul, in bf16"),
        ("training/optimizer", "its shard is\nupdated, in fp32"),
        ("parallel/fsdp", "ZeRO-1: gathers\nthe update"),
        ("training/checkpoint", "saves each shard,\nthen the hashes"),
    ],
    "A gradient:\nfrom loss\nto update": [
        ("model/loss", "starts with the\nlogits' gradient"),
        ("parallel/tensor_parallel", "transposed\ncollectives over mp"),
        ("parallel/fsdp", "FSDP: reduces and\nscatters it per layer"),
        ("training/step", "adds up the micro-\nbatches, in fp32"),
        ("parallel/fsdp", "otherwise: reduces\nit over dp, once"),
        ("parallel/collectives", "replicated weights:\nsums it over mp"),
        ("training/optimizer", "clips by the\nglobal norm"),
        ("training/bad_steps", "skips the step if\nit is not finite"),
        ("training/optimizer", "AdamW"),
    ],
}

WIDTH, HEIGHT, GAP, LANE = 1.0, 1.0, 0.2, 1.45


def station(axes: Axes, x: float, y: float, file: str, what: str) -> None:
    colour = COLOURS[file.split("/")[0]]
    axes.add_patch(
        FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.03", facecolor=colour, edgecolor="0.4", lw=0.7)
    )
    axes.text(
        x + WIDTH / 2,
        y + 0.9,
        file.replace("/", "/\n"),
        ha="center",
        va="top",
        fontsize=7.8,
        fontweight="bold",
        linespacing=1.1,
    )
    axes.text(x + WIDTH / 2, y + 0.06, what, ha="center", va="bottom", fontsize=7.6, linespacing=1.2)


def main() -> None:
    longest = max(map(len, LANES.values()))
    figure, axes = plt.subplots(figsize=(13, 4.9), layout="constrained")
    for lane, (title, stations) in enumerate(LANES.items()):
        y = -lane * LANE
        axes.text(-0.15, y + HEIGHT / 2, title, ha="right", va="center", fontsize=9.5, linespacing=1.3)
        for place, (file, what) in enumerate(stations):
            x = place * (WIDTH + GAP)
            station(axes, x, y, file, what)
            if place:
                start, end = (x - GAP + 0.03, y + HEIGHT / 2), (x - 0.03, y + HEIGHT / 2)
                axes.add_patch(
                    FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0, color="0.3")
                )
    axes.set(xlim=(-1.25, longest * (WIDTH + GAP)), ylim=(-(len(LANES) - 1) * LANE - 0.1, HEIGHT + 0.1))
    axes.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="0.4") for colour in COLOURS.values()]
    names = [f"shmap_tp/{name}/" for name in COLOURS]
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # tests/test_documents.py compares it
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=105, metadata={"Software": None, "Source": source})


if __name__ == "__main__":
    main()
