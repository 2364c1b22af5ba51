"""The loss curve of a run as loss.png."""

from pathlib import Path

import matplotlib
import numpy as np

from shmap_tp.training.metrics import read_metrics


def plot_losses(directory: Path) -> Path:
    """Draw loss.png from metrics.jsonl and return its path.

    It shows training and validation loss by step: one colour per mesh shape, a dashed line at each restart.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read_metrics(directory / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours: dict[tuple[int, int], str] = {}
    for segment in sorted({line["segment"] for line in lines}):
        segment_lines = [line for line in lines if line["segment"] == segment]
        mesh = tuple(segment_lines[0]["mesh"])
        label = None if mesh in colours else f"mesh dp={mesh[0]}, mp={mesh[1]}"
        colour = colours.setdefault(mesh, f"C{len(colours) % 10}")
        train = np.array([(line["step"], line["loss"]) for line in segment_lines if line["split"] == "train"], float)
        train = train.reshape(-1, 2)
        axes.plot(*train.T, color=colour, linewidth=1, label=label)
        if segment and len(train):
            axes.axvline(train[0, 0] - 1, color="0.6", linewidth=0.8, linestyle="--")
    validation = np.array([(line["step"], line["loss"]) for line in lines if line["split"] == "validation"], float)
    axes.plot(*validation.reshape(-1, 2).T, "o", color="black", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="cross entropy, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(directory / "loss.png", dpi=130)
    plt.close(figure)
    return directory / "loss.png"
