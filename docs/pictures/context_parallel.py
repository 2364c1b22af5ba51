"""Draws docs/pictures/context_parallel.png: which positions of a row four ranks of cp have, and their attention work.

python docs/pictures/context_parallel.py
"""

import hashlib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RANKS = 4
COLOURS = ["#8fb3dd", "#f3c98b", "#a8cf9a", "#d99694"]
CHUNKS = 2 * RANKS


def rank_of(chunk: int) -> int:
    """The rank that has a chunk of a row: one of either end."""
    return min(chunk, CHUNKS - 1 - chunk)


def scores(axes: Axes, owner: list[int], title: str) -> None:
    """The pairs of queries (downwards) and keys (to the right) that are computed, in the colour of the rank."""
    for query in range(CHUNKS):
        for key in range(query + 1):
            corners = [(key, query), (key + 1, query), (key + 1, query + 1), (key, query + 1)]
            visible = corners if key < query else [corners[0], corners[2], corners[3]]
            axes.add_patch(plt.Polygon(visible, facecolor=COLOURS[owner[query]], edgecolor="white", lw=0.8))
        axes.text(-0.2, query + 0.5, f"rank {owner[query]}", ha="right", va="center", fontsize=8)
    axes.text(CHUNKS, 0.3, "queries downwards, keys to the right", ha="right", fontsize=8, color="0.35")
    axes.set(xlim=(-1.4, CHUNKS), ylim=(CHUNKS, -0.3), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def work(axes: Axes, owners: dict[str, list[int]]) -> None:
    """The share of the pairs that each rank computes."""
    whole = CHUNKS**2 / 2
    for group, (name, owner) in enumerate(owners.items()):
        for rank in range(RANKS):
            pairs = sum(chunk + 0.5 for chunk in range(CHUNKS) if owner[chunk] == rank)
            axes.bar(group * (RANKS + 1) + rank, pairs / whole, color=COLOURS[rank], width=0.9)
        axes.text(group * (RANKS + 1) + (RANKS - 1) / 2, -0.015, name, ha="center", va="top", fontsize=8)
    axes.axhline(1 / RANKS, color="0.4", lw=0.8, ls="--")
    axes.set_title("share of the attention work", fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([0, 0.25, 0.5], ["0", "1/4", "1/2"], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw() -> Figure:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4), dpi=110, layout="constrained")
    consecutive = [chunk // 2 for chunk in range(CHUNKS)]
    ours = [rank_of(chunk) for chunk in range(CHUNKS)]
    scores(left, ours, "two chunks of a row for each rank, one of either end")
    scores(middle, consecutive, "consecutive positions (not used)")
    work(right, {"one of either end": ours, "consecutive": consecutive})
    return figure


def main() -> None:
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # tests/test_documents.py compares it
    draw().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None, "Source": source})


if __name__ == "__main__":
    main()
