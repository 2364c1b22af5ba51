"""Draws docs/pictures/experts.png: which devices have which tokens and experts, over mp and over ranks of tokens.

python docs/pictures/experts.py
"""

import hashlib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {0: "#8fb3dd", 1: "#f3c98b", 2: "#a8cf9a", 3: "#d99694"}
"""The colour of each expert."""
CHOSEN = {"a": 0, "b": 2, "c": 1, "d": 3}
"""The expert of each token."""
EXPERTS = {0: (0, 1), 1: (2, 3)}
"""The experts of each device."""


def cell(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.add_patch(plt.Rectangle((x, y), 0.9, 0.7, facecolor=colour, edgecolor="white"))
    axes.text(x + 0.45, y + 0.35, text, ha="center", va="center", fontsize=9)


def device(axes: Axes, number: int, tokens: str, name: str) -> dict[str, tuple[float, float]]:
    """One device: its tokens above, the rows of its experts below; where the tokens are."""
    left, places = 6.0 * number, {}
    axes.text(left + 2.2, 4.1, name, ha="center", fontsize=9)
    for i, token in enumerate(tokens):
        places[token] = left + i, 3.2
        cell(axes, left + i, 3.2, token, COLOURS[CHOSEN[token]])
    for i, expert in enumerate(EXPERTS[number]):
        row = next(token for token, chosen in CHOSEN.items() if chosen == expert)
        cell(axes, left + 2 * i, 0.6, row, COLOURS[expert])
        axes.text(left + 2 * i + 0.45, 0.2, f"expert {expert}", ha="center", va="center", fontsize=8)
    return places


def way(axes: Axes, tokens: tuple[str, str], names: tuple[str, str], title: str) -> None:
    """Two devices, and an arrow from each token to the rows of its expert: from the device itself where it has it."""
    places = [device(axes, number, tokens[number], names[number]) for number in (0, 1)]
    for number, experts in EXPERTS.items():
        for i, expert in enumerate(experts):
            row = next(token for token, chosen in CHOSEN.items() if chosen == expert)
            at = places[number].get(row) or places[1 - number][row]
            sent = row not in places[number]
            end = 6.0 * number + 2 * i + 0.45, 1.35
            style = {"arrowstyle": "->", "color": "#c0392b" if sent else "0.5", "lw": 1.4 if sent else 0.8}
            axes.annotate("", end, (at[0] + 0.45, at[1] - 0.05), arrowprops=style)
    axes.set(xlim=(-0.5, 10.5), ylim=(0, 4.6), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def draw() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.2), dpi=110, layout="constrained")
    ours = "over mp: all tokens are there, partial sums are reduced"
    way(left, ("abcd", "abcd"), ("mp rank 0", "mp rank 1"), ours)
    way(right, ("ab", "cd"), ("ep rank 0", "ep rank 1"), "over ep: tokens are sent (red), and results back")
    return figure


def main() -> None:
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # tests/test_documents.py compares it
    draw().savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None, "Source": source})


if __name__ == "__main__":
    main()
