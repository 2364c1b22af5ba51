"""Draws docs/loss.png: the loss of one run by optimizer step, a colour for each mesh shape that it was continued on.

    python docs/pictures/loss_across_meshes.py RUN_DIRECTORY [--out docs/loss.png]

The run directory of docs/loss.png was made by

    python main.py --cfg conf/config.yaml
    python main.py --cfg runs/first/config.yaml mesh.dp=8 mesh.mp=1 train.steps=900 --resume
    python main.py --cfg runs/first/config.yaml mesh.dp=1 mesh.mp=8 train.steps=1200 --resume
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1]


def read_metrics(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def draw(lines: list[dict], out: Path) -> None:
    """`lines` are those of metrics.jsonl; each start of the run is one segment, on one mesh."""
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    training = [line for line in lines if line["split"] == "train"]
    segments = sorted({line["segment"] for line in training})
    first_steps = []
    for segment in segments:
        own = [line for line in training if line["segment"] == segment]
        dp, mp = own[0]["mesh"]
        steps = [line["step"] for line in own]
        axes.plot(steps, [line["loss"] for line in own], color=f"C{segment}", linewidth=1, label=f"({dp}, {mp})")
        first_steps.append(steps[0] - 1)
    for boundary in first_steps[1:]:
        axes.axvline(boundary, color="0.55", linewidth=0.8, linestyle="--")
    last = max(line["step"] for line in training)
    for begin, end in pairwise([*first_steps, last]):
        text = "first run" if begin == 0 else "resumed"
        axes.text((begin + end) / 2, 0.93, text, transform=axes.get_xaxis_transform(), ha="center", color="0.35")
    validation = [(line["step"], line["loss"]) for line in lines if line["split"] == "validation"]
    axes.plot(*zip(*validation, strict=True), "o", color="black", markersize=4, label="validation")
    axes.set(xlabel="optimizer step", ylabel="cross entropy, nats per token", xlim=(0, last + 8), ylim=(3, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="mesh (dp, mp)", bbox_to_anchor=(0.46, 0.9), loc="upper right")
    figure.savefig(out, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="run.dir of the run: holds metrics.jsonl")
    parser.add_argument("--out", type=Path, default=DOCS / "loss.png", help="the picture (default docs/loss.png)")
    arguments = parser.parse_args()
    draw(read_metrics(arguments.run / "metrics.jsonl"), arguments.out)


if __name__ == "__main__":
    main()
