"""The loss curve of a run as loss.png."""

import math
from array import array
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float64

from shmap_tp.training.metrics import read_metrics


def plot_losses(directory: Path) -> Path:
    """Draw loss.png from metrics.jsonl and return its path.

    It shows training and validation loss by step: one colour per mesh shape, a dashed line at each restart.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, validation, scale = _read_losses(directory / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours: dict[tuple[int, int], str] = {}
    for segment, (mesh, losses) in sorted(curves.items()):
        label = None if mesh in colours else f"mesh dp={mesh[0]}, mp={mesh[1]}"
        colour = colours.setdefault(mesh, f"C{len(colours) % 10}")
        axes.plot(*_pairs(losses).T, color=colour, linewidth=1, label=label)
        if segment and len(losses):
            axes.axvline(losses[0] - 1, color="0.6", linewidth=0.8, linestyle="--")
    axes.plot(*_pairs(validation).T, "o", color="black", markersize=4, label="validation")
    if scale is not None:
        right = axes.secondary_yaxis("right", functions=(lambda nats: nats * scale, lambda bits: bits / scale))
        right.set_ylabel("validation, bits per byte")
    axes.set(xlabel="step", ylabel="cross entropy, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(directory / "loss.png", dpi=130)
    plt.close(figure)
    return directory / "loss.png"


def _read_losses(file: Path) -> tuple[dict[int, tuple[tuple[int, int], array]], array, float | None]:
    """(by segment its mesh and its training losses, the validation losses, bits per byte of one nat per token if it is
    known), losses as step, loss, step, loss, ..."""
    curves: dict[int, tuple[tuple[int, int], array]] = {}
    validation, scale = array("d"), None
    for line in read_metrics(file):
        losses = curves.setdefault(line["segment"], (tuple(line["mesh"]), array("d")))[1]
        loss = math.nan if line["loss"] is None else line["loss"]
        (losses if line["split"] == "train" else validation).extend((line["step"], loss))
        if line["loss"] and isinstance(bits := line.get("bits_per_byte"), float):
            scale = bits / line["loss"]
    return curves, validation, scale


def _pairs(values: array) -> Float64[np.ndarray, "lines 2"]:
    """(step, loss) of each line."""
    return np.frombuffer(values, np.float64).reshape(-1, 2) if values else np.empty((0, 2))
