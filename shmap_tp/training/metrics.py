"""What a run says: metrics.jsonl, TensorBoard and W&B where asked, a progress bar or plain lines, a loss plot."""

import json
import math
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
from shmap_tp.runtime.files import write_lines, writing
from shmap_tp.training.metric_writers import _TensorBoard, _WeightsAndBiases


class Recorder:
    """Writes what process 0 is told; on every other process the same calls say nothing.

    One line of metrics.jsonl is one object: step, split, loss, mesh [dp, mp], segment (how often the run was started
    before), and for split `train` tokens_per_second, grad_norm, learning_rate, tokens (seen so far), mfu (or null),
    skipped and skipped_in_a_row (steps, up to this one), time (of its end) and goodput (so far); of a skipped step also
    why_skipped and the windows that it read.  What is not finite is null.
    """

    def __init__(self, config: Config, first_step: int, *, speaks: bool):
        """Continues the file of the same run; lines past `first_step` were of steps that were lost, and are removed."""
        self._speaks = speaks
        self._every = config.log.every
        self._steps = config.train.steps
        self._writers: list[Any] = []
        self.validated = False
        """Whether the file has the validation of `first_step`."""
        if not speaks:
            return
        directory = Path(config.run.dir)
        self._file = directory / "metrics.jsonl"
        kept = [line for line in read_metrics(self._file) if line["step"] <= first_step]
        self.validated = any(line["step"] == first_step and line["split"] == "validation" for line in kept)
        self._common = {
            "mesh": [config.mesh.dp, config.mesh.mp],
            "segment": kept[-1]["segment"] + 1 if kept else 0,
        }
        write_lines(self._file, kept)
        if config.log.tensorboard:
            self._writers.append(_TensorBoard(directory / "tensorboard"))
        if config.log.wandb:
            self._writers.append(_WeightsAndBiases(config))
        self._stream = self._file.open("a", buffering=1)
        self._bar = tqdm(
            total=self._steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True, smoothing=0.1,
            bar_format="{n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}",
        )  # fmt: skip

    def train(self, line: dict[str, Any]) -> None:
        """Record one step's metrics."""
        if not self._speaks:
            return
        self._write({"split": "train"} | line)
        if why := line.get("why_skipped"):
            self.say(f"step {line['step']} is skipped, the weights stay as they are: {why}")
        text = f"loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s" + (
            f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        )
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if self._bar.disable and (line["step"] % self._every == 0 or line["step"] == self._steps):
            left = (self._steps - line["step"]) * line["seconds_per_step"]
            self.say(f"step {line['step']}/{self._steps}  {text}  {left:,.0f} s left")

    def validation(self, step: int, loss: float) -> None:
        """Record one evaluation."""
        if self._speaks:
            self._write({"split": "validation", "step": step, "loss": loss})
            self.say(f"step {step}  validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._speaks:
            self._bar.clear()
            print(text, flush=True)
            self._bar.refresh()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._speaks:
            self._bar.close()
            with writing(self._file):
                self._stream.close()
            for writer in self._writers:
                writer.close()

    def _write(self, line: dict[str, Any]) -> None:
        line = {name: value if _is_told(value) else None for name, value in (line | self._common).items()}
        with writing(self._file):
            self._stream.write(json.dumps(line) + "\n")
        for writer in self._writers:
            writer.write(line)


class Meter:
    """Reads each step's metrics late, once the next step is under way, and times the steps by when they end.

    A rate is the mean of the last steps, 10 at most: a step that was read late makes the one after it look short.
    Evaluation and saving count for no step: they happen while the meter is paused.
    """

    def __init__(
        self, record: Callable[[dict[str, Any]], None], tokens_per_step: int, flops_per_token: int, peak: Peak | None
    ):
        """`record` takes one step's metrics; `peak` is None where an MFU cannot be told."""
        self._record = record
        self._tokens = tokens_per_step
        self._flops = flops_per_token
        self._peak = peak
        self._pending: tuple[int, Any] | None = None
        self._restart()

    def hand(self, step: int, metrics: Any) -> None:
        """Take the metrics of the step just dispatched, and record those of the one before, waiting for it if need
        be."""
        before, self._pending = self._pending, (step, metrics)
        self._read(before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the last step and record it; what is done inside counts for no step."""
        before, self._pending = self._pending, None
        self._read(before)
        yield
        self._restart()

    def _restart(self) -> None:
        self._ends = deque([time.perf_counter()], maxlen=11)

    def _read(self, pending: tuple[int, Any] | None) -> None:
        if pending is None:
            return
        step, metrics = pending
        jax.block_until_ready(metrics)  # on every device: device_get waits for one, and a trace would lack the others'
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


def _is_told(value: Any) -> bool:
    """JSON has no number that is not finite."""
    return not isinstance(value, float) or math.isfinite(value)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics.jsonl; a last line that a kill cut short is left out.  No file, no lines."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line.endswith("}")]
