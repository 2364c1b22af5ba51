"""What the files of a run directory record: its configuration, metrics, starts, wall time, samples and checkpoints.

Only reads, so the run may be under way; what a later start has trained again is left out.
"""

import math
import shlex
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from shmap_tp.config.yaml_files import as_installed, flat_values, saved_checkpoint_dir
from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.files import NUMBER, having, read_lines
from shmap_tp.training.checkpoint_files import absolute, checkpoint_steps
from shmap_tp.training.goodput import TimeBreakdown, read_breakdown
from shmap_tp.training.metrics import read_metrics

NEEDED = {"run.name", "model.name", "model.vocabulary", "train.steps"}
NEEDED |= {"optimizer.warmup_steps", "optimizer.decay_steps"}
"""Keys of every config.yaml of a run."""


@dataclass
class Start:
    """The steps of one start of a run that count, and the mesh that it used, [dp, mp] or [dp, cp, mp]."""

    mesh: tuple[int, ...]
    first: int
    last: int


@dataclass
class RunRecord:
    """The content of a run directory."""

    directory: Path
    values: dict[str, Any]
    """The value of each key of config.yaml, such as train.steps."""
    time: TimeBreakdown
    checkpoint_dir: str
    checkpoints: list[int]
    """Steps, the newest first; none if checkpoint.dir is in a bucket, which is not listed."""
    starts: dict[int, Start] = field(default_factory=dict)
    """By segment."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """(step, why) of the steps that were skipped."""
    samples: dict[tuple[int, str], str] = field(default_factory=dict)
    """What the model wrote, by step and prompt."""
    sources: dict[str, float] = field(default_factory=dict)
    """The newest validation loss of each source."""
    wanted: Collection[str] = ()
    """The `series` that are kept, beside the validation loss."""
    _series: dict[str, array] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last step that counts; 0 before the first."""
        return max((start.last for start in self.starts.values()), default=0)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, the last one was not skipped, and its validation loss is there."""
        is_skipped = bool(self.skipped) and self.skipped[-1][0] == self.step
        evaluated = self.series("validation/loss")[-1:, 0]
        return self.step >= self.values["train.steps"] and not is_skipped and self.step in evaluated

    def series(self, name: str) -> Float64[np.ndarray, "points 2"]:
        """(step, value) of "train/loss", "validation/bits_per_byte" and so on; NaN where a value was not finite."""
        values = self._series.get(name)
        return np.frombuffer(values, np.float64).reshape(-1, 2) if values else np.empty((0, 2))

    def median(self, name: str, start: Start) -> float | None:
        """The median over the steps of a start; None if no value is finite."""
        steps, values = self.series(name).T
        finite = values[(start.first <= steps) & (steps <= start.last) & np.isfinite(values)]
        return float(np.median(finite)) if finite.size else None

    def read_metrics(self) -> None:
        """Add what metrics.jsonl has, of which the last line is read first."""
        wanted = {*self.wanted, "validation/loss"}
        for line in read_metrics(self.directory / "metrics.jsonl"):
            step, split, source, loss = line["step"], line["split"], line.get("source"), line["loss"]
            if source is not None:
                self.sources.setdefault(str(source), math.nan if loss is None else loss)
                continue
            if split == "train":
                self.starts.setdefault(line["segment"], Start(tuple(line["mesh"]), step, step)).first = step
                if "why_skipped" in line:
                    self.skipped.append((step, str(line["why_skipped"])))
            for name, value in line.items():
                if f"{split}/{name}" in wanted and isinstance(value, NUMBER | None):
                    value = math.nan if value is None else value
                    self._series.setdefault(f"{split}/{name}", array("d")).extend((value, step))
        for values in (self.skipped, *self._series.values()):
            values.reverse()
        self.starts, self.sources = (dict(reversed(each.items())) for each in (self.starts, self.sources))


def shown_path(directory: Path) -> str:
    """The name of a directory where a program would take one that begins with _ or - for something else."""
    name = str(directory)
    return f"./{name}" if name.startswith(("_", "-")) else name


def read_run(directory: Path, wanted: Collection[str] = ()) -> RunRecord:
    """What is recorded of the run in `directory`, with the `wanted` series.  Raises UserError if no run has started
    there."""
    values = flat_values(directory / "config.yaml")
    if values is None or not values.keys() >= NEEDED:
        raise UserError(f"{shown(directory)} has no config.yaml of a run; name a run.dir, such as runs/first")
    checkpoint_dir = saved_checkpoint_dir(directory / "config.yaml") or ""
    saved = [] if "://" in checkpoint_dir or not checkpoint_dir else checkpoint_steps(absolute(checkpoint_dir))
    record = RunRecord(directory, values, read_breakdown(directory)[0], checkpoint_dir, saved, wanted=wanted)
    record.read_metrics()
    for line in read_lines(directory / "samples.jsonl", having(step=int, prompt=str, text=str)):
        if line["step"] <= record.step:
            record.samples[line["step"], line["prompt"]] = line["text"]
    return record


def continue_command(directory: Path, values: Mapping[str, Any], finished: bool) -> str:
    """The command that continues a run of these `flat_values`, to twice its steps if it is `finished`."""
    steps, more = values["train.steps"], []
    if finished:
        more.append(f"train.steps={2 * steps}")
        if values["optimizer.decay_steps"] <= values["optimizer.warmup_steps"]:  # the decay has not begun
            more.append(f"optimizer.decay_steps={2 * steps}")
    words = ["--cfg", shown_path(directory / "config.yaml"), *more, "--resume"]
    return f"{as_installed('python main.py')} {shlex.join(words)}"
