"""Metrics of a run: the meter that reads and times steps, and the recorder that writes metrics.jsonl and prints."""

import json
import math
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import Peak
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.files import writing
from shmap_tp.training.json_lines import drop_lost, read_lines
from shmap_tp.training.metric_writers import TensorBoardWriter, WeightsAndBiasesWriter


class Recorder:
    """Writes the metrics on process 0: metrics.jsonl, TensorBoard, W&B, and a progress bar or plain lines.

    If not `enabled`, as on every other process, all methods do nothing.

    Each line of samples.jsonl is one object: step, prompt, text (what the model wrote after it).

    Each line of metrics.jsonl is one object: step, split, loss, mesh [dp, mp], segment (number of earlier starts of the
    run).  Lines of split `validation` also have bits_per_byte, where the tokenizer is known.  Lines of split `train`
    also have tokens_per_second, seconds_per_step, grad_norm, param_norm (before the step), updated_param_norm (after
    it, or what it would be if the step is skipped), learning_rate, tokens (seen so far), mfu (or null), skipped and
    skipped_in_a_row (numbers of skipped steps, up to this one), time (end of the step) and goodput (so far).  Lines of
    skipped steps also have why_skipped and sequences (the indices that the step read).  Values that are not finite are
    null.  Lines of other programs are left alone (`json_lines`).
    """

    def __init__(self, config: Config, first_step: int, *, enabled: bool):
        """Append to the metrics.jsonl of the same run, without the lines after `first_step`: those steps were lost."""
        self._enabled = enabled
        self._every = config.log.every
        self._steps = config.train.steps
        self._writers: list[Any] = []
        self.has_validation = False
        """Whether metrics.jsonl has the validation loss of `first_step`."""
        if not enabled:
            return
        directory = Path(config.run.dir)
        self._file = directory / "metrics.jsonl"
        kept = drop_lost(
            self._file, is_metric, lambda line: line["step"] > first_step, lambda line: line["step"] < first_step
        )
        self.has_validation = any(line["step"] == first_step and line["split"] == "validation" for line in kept)
        self._common = {
            "mesh": [config.mesh.dp, config.mesh.mp],
            "segment": kept[0]["segment"] + 1 if kept else 0,
        }
        if config.log.tensorboard:
            self._writers.append(TensorBoardWriter(directory / "tensorboard"))
        if config.log.wandb:
            self._writers.append(WeightsAndBiasesWriter(config))
        self._samples = directory / "samples.jsonl"
        drop_lost(self._samples, is_sample, lambda line: line["step"] > first_step, lambda _: True)
        with writing(self._file):
            self._stream = self._file.open("a", buffering=1)
        self._bar = tqdm(
            total=self._steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True, smoothing=0.1,
            bar_format="{n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}",
        )  # fmt: skip

    def train(self, line: dict[str, Any]) -> None:
        """Record one training step."""
        if not self._enabled:
            return
        self._write({"split": "train"} | line)
        if why := line.get("why_skipped"):
            write_line(f"step {line['step']} is skipped, the weights are unchanged: {why}")
        text = f"loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s" + (
            f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        )
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if self._bar.disable and (line["step"] % self._every == 0 or line["step"] == self._steps):
            left = (self._steps - line["step"]) * line["seconds_per_step"]
            write_line(f"step {line['step']}/{self._steps}  {text}  {left:,.0f} s left")

    def validation(self, step: int, loss: float, bits_per_byte: float | None = None) -> None:
        """Record one evaluation."""
        if not self._enabled:
            return
        known = {} if bits_per_byte is None else {"bits_per_byte": bits_per_byte}
        self._write({"split": "validation", "step": step, "loss": loss} | known)
        text = "" if bits_per_byte is None else f", {bits_per_byte:.3f} bits per byte"
        write_line(f"step {step}  validation loss {loss:.4f}{text}")

    def samples(self, step: int, texts: dict[str, str]) -> None:
        """Record what the model wrote after each prompt; print it unless the last step is done."""
        if not self._enabled:
            return
        with writing(self._samples), self._samples.open("a") as stream:
            for prompt, text in texts.items():
                stream.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        for writer in self._writers:
            writer.write_samples(step, texts)
        if step < self._steps:
            write_line(format_samples(step, texts))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._enabled:
            self._bar.close()
            with writing(self._file):
                self._stream.close()
            for writer in self._writers:
                writer.close()

    def _write(self, line: dict[str, Any]) -> None:
        line = {name: value if _is_json_value(value) else None for name, value in (line | self._common).items()}
        with writing(self._file):
            self._stream.write(json.dumps(line) + "\n")
        for writer in self._writers:
            writer.write(line)


class Meter:
    """Reads the metrics of each step after the next one is dispatched, and times the steps by when they end.

    Step time is the mean over the last steps, at most 10, because a step that is read late makes the next one look
    short.  Time within `paused`, for evaluation and checkpoints, belongs to no step.
    """

    def __init__(
        self, record: Callable[[dict[str, Any]], None], tokens_per_step: int, flops_per_token: int, peak: Peak | None
    ):
        """`record` receives the metrics of each step; MFU is None if `peak` is."""
        self._record = record
        self._tokens = tokens_per_step
        self._flops = flops_per_token
        self._peak = peak
        self._pending: tuple[int, Any] | None = None
        self._restart()

    def record(self, step: int, metrics: Any) -> None:
        """Take the metrics of the step just dispatched, and record those of the step before, waiting for it if it is
        still running."""
        previous, self._pending = self._pending, (step, metrics)
        self._read(previous)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the last step and record it; the time inside the context belongs to no step."""
        previous, self._pending = self._pending, None
        self._read(previous)
        yield
        self._restart()

    def _restart(self) -> None:
        self._ends = deque([time.perf_counter()], maxlen=11)

    def _read(self, pending: tuple[int, Any] | None) -> None:
        if pending is None:
            return
        step, metrics = pending
        jax.block_until_ready(metrics)  # on all devices: device_get waits for one, and a profile would lack the others
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self._ends.append(time.perf_counter())
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        rate = self._tokens / seconds
        timing = {
            "tokens_per_second": rate,
            "seconds_per_step": seconds,
            "tokens": step * self._tokens,
            "mfu": rate * self._flops / self._peak.flops if self._peak else None,
        }
        self._record({"step": step} | values | timing)


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, one at a time; none if there is no file."""
    return read_lines(file, is_metric)


def is_metric(line: dict[str, Any]) -> bool:
    """Whether an object has what every line of metrics.jsonl has."""
    step, loss, segment, mesh = (line.get(name) for name in ("step", "loss", "segment", "mesh"))
    return (
        line.get("split") in ("train", "validation")
        and all(type(number) is int and 0 <= number < 2**63 for number in (step, segment))
        and (loss is None or (isinstance(loss, float) and math.isfinite(loss)))
        and isinstance(mesh, list)
        and [type(size) for size in mesh] == [int, int]
    )


def is_sample(line: dict[str, Any]) -> bool:
    """Whether an object has what every line of samples.jsonl has."""
    return type(line.get("step")) is int and all(isinstance(line.get(name), str) for name in ("prompt", "text"))


def format_samples(step: int, texts: dict[str, str]) -> str:
    """The samples of a step, for the terminal: each prompt and what the model wrote after it, indented."""
    shown = (textwrap.indent(prompt + _printable(text), "    ", lambda _: True) for prompt, text in texts.items())
    return "\n".join([f"step {step}  the model writes:", *shown])


def _printable(text: str) -> str:
    """`text` without the control characters that would disturb a terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _is_json_value(value: Any) -> bool:
    """JSON has no infinities and no NaN."""
    return not isinstance(value, float) or math.isfinite(value)
