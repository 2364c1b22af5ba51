"""Metrics of a run: timed by a meter; recorded in metrics.jsonl, TensorBoard and W&B; printed; shown in report.html."""

import json
import math
import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import mesh_shape
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import Peak
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.files import NUMBER, appending, having, read_lines_backwards, write_atomically, writing
from shmap_tp.training.evaluation import Evaluation, describe

LONGEST_SILENCE = 30.0
"""Seconds without a line, as far as steps end within them."""
RENEWAL_SECONDS = 30.0
"""Between two renewals of the report, each of which takes 3 seconds of a processor."""


class Recorder:
    """Writes the metrics on process 0: metrics.jsonl, TensorBoard, W&B, and a progress bar or plain lines.

    If not `enabled`, as on every other process, all methods do nothing.

    Each line of samples.jsonl is one object: step, prompt, text (what the model wrote after it).  Each line of
    metrics.jsonl is one object: step, split, loss, mesh ([dp, mp], or [dp, cp, mp] where rows are split along time),
    segment (number of earlier starts of the run).  Lines of split `validation` also have bits_per_byte, where the
    tokenizer is known, and with experts experts_dropped; with data.sources those with `source` are of one source, and
    the others of their mixture.  Lines of split `train` also have, with sources, NAME/loss of each that has a target
    (else null), tokens_per_second, seconds_per_step, grad_norm, param_norm (before the step), updated_param_norm (after
    it, even if it is skipped), learning_rate, tokens (seen so far), mfu (or null), skipped and skipped_in_a_row
    (numbers of skipped steps, up to this one), time (end of the step) and goodput (so far); with experts expert_load,
    router_entropy and experts_dropped (`layers/experts.py`).  Lines of skipped steps also have why_skipped and
    sequences (`Batches.sequences`).  Values that are not finite are null.  Lines of others are left (`read_lines`).
    """

    def __init__(self, config: Config, first_step: int, *, enabled: bool):
        """Append to the metrics.jsonl of the same run; lines after `first_step` are of lost steps (`read_metrics`)."""
        self._enabled, self._every, self._steps = enabled, config.log.every, config.train.steps
        self._printed = -math.inf  # when the last line was printed: the first step has one
        self._writers: list[Any] = []
        self.has_validation = False
        """Whether metrics.jsonl has the validation loss of `first_step`."""
        if not enabled:
            return
        directory = Path(config.run.dir)
        self._file = directory / "metrics.jsonl"
        last = takewhile(lambda line: line["step"] >= first_step, read_lines_backwards(self._file, is_metric))
        self.has_validation = any(line["step"] == first_step and line["split"] == "validation" for line in last)
        segment = next((line["segment"] + 1 for line in read_lines_backwards(self._file, is_metric)), 0)
        self._common = {"mesh": mesh_shape(config.mesh), "segment": segment}
        if config.log.tensorboard:
            self._writers.append(TensorBoardWriter(directory / "tensorboard"))
        if config.log.wandb:
            self._writers.append(WeightsAndBiasesWriter(config))
        self._writers.append(ReportRenewal(directory))
        self._samples = directory / "samples.jsonl"
        with writing(self._file):
            self._stream = appending(self._file)
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
        accuracy = f"  accuracy {line['reward_accuracy']:.3f}" if "reward_accuracy" in line else ""
        accuracy += f"  dropped {line['experts_dropped']:.1%}" if line.get("experts_dropped") else ""
        speed = f"lr {line['learning_rate']:.2e}  {line['tokens_per_second']:,.0f} tokens/s"
        text = f"loss {line['loss']:.4f}{accuracy}  {speed}"
        text += f"  MFU {line['mfu']:.1%}" if line["mfu"] is not None else ""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        is_silent = time.monotonic() - self._printed + line["seconds_per_step"] > LONGEST_SILENCE
        due = line["step"] % self._every == 0 or line["step"] == self._steps or is_silent
        if self._bar.disable and due:
            self._printed = time.monotonic()
            left = (self._steps - line["step"]) * line["seconds_per_step"]
            write_line(f"step {line['step']}/{self._steps}  {text}  {left:,.0f} s left")

    def validation(self, step: int, found: Evaluation, sources: Mapping[str, Evaluation] = {}) -> None:
        """Record one evaluation, and those of its `sources` where it has several."""
        if not self._enabled:
            return
        for source, each in {"": found, **sources}.items():
            of = {"source": source} if source else {}
            self._write({"split": "validation", "step": step} | of | each.values())
        write_line(f"step {step}  validation loss {describe(found, sources)}")

    def samples(self, step: int, texts: dict[str, str]) -> None:
        """Record what the model wrote after each prompt; print it unless the last step is done."""
        if not self._enabled:
            return
        with writing(self._samples), appending(self._samples) as stream:
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
        line = line | self._common
        for name in (name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)):
            line[name] = None  # JSON has no infinities and no NaN
        with writing(self._file):
            self._stream.write(json.dumps(line) + "\n")
        for writer in self._writers:
            writer.write(line)


class Meter:
    """Reads the metrics of each step after the next one is dispatched, and times the steps by when they end.

    Step time is the mean over the last 10 steps, because a step that is read late makes the next one look short.  Time
    within `paused` belongs to no step.
    """

    def __init__(self, record: Callable[[dict], None], tokens_per_step: int, flops_per_token: int, peak: Peak | None):
        """`record` receives the metrics of each step; MFU is None if `peak` is."""
        self._record, self._tokens, self._flops, self._peak = record, tokens_per_step, flops_per_token, peak
        self._pending: tuple[int, Any] | None = None
        self.seconds_per_step = math.nan
        """As of the last step that was recorded."""
        self._restart()

    def record(self, step: int, metrics: Any) -> None:
        """Take the metrics of the step just dispatched, and record those of the step before, waiting for it if it is
        still running."""
        self._read_pending()
        self._pending = step, metrics

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the last step and record it; the time inside the context belongs to no step."""
        self._read_pending()
        yield
        self._restart()

    def _restart(self) -> None:
        self._ends = deque([time.perf_counter()], maxlen=11)

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        jax.block_until_ready(metrics)  # on all devices: device_get waits for one, and a profile would lack the others
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self._ends.append(time.perf_counter())
        seconds = self.seconds_per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        rate = self._tokens / seconds
        timing = {"tokens_per_second": rate, "seconds_per_step": seconds, "tokens": step * self._tokens}
        mfu = rate * self._flops / self._peak.flops if self._peak else None
        self._record({"step": step} | values | timing | {"mfu": mfu})


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, if there is one, the last one first, but those of steps that a later start has
    trained again.  One that was taken for lost trains until its next save, so lines of two starts may alternate."""
    trained = (line for line in read_lines_backwards(file, is_metric) if line["split"] == "train")
    begins = {line["segment"]: line["step"] for line in trained}

    @cache
    def end(segment: int) -> int | float:
        return min((begins[later] for later in begins if later > segment), default=math.inf)

    return (line for line in read_lines_backwards(file, is_metric) if line["step"] < end(line["segment"]))


is_metric = having(split=str, step=int, segment=int, loss=NUMBER | None, mesh=list)
"""Whether an object has what every line of metrics.jsonl has."""


def format_samples(step: int, texts: dict[str, str]) -> str:
    """The samples of a step, for the terminal: each prompt and what the model wrote after it, indented."""
    shown = (textwrap.indent(prompt + text, "    ", lambda _: True) for prompt, text in texts.items())
    return "\n".join([f"step {step}  the model writes:", *shown])


class TensorBoardWriter:
    """Writes a TensorBoard event file in the calling thread.

    tensorboardX.SummaryWriter is not used: a full disk kills its background thread, and it then waits forever.
    """

    def __init__(self, directory: Path):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar, text

        self._event, self._scalar, self._text = Event, scalar, text
        self._directory, self._flushed = directory, time.monotonic()
        with writing(directory):
            directory.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"))

    def write(self, line: dict[str, Any]) -> None:
        """Write every float of a line of metrics.jsonl as a scalar."""
        with writing(self._directory):
            for name, value in _floats(line).items():
                self._write(line["step"], self._scalar(name, value))
            if time.monotonic() - self._flushed > 30:
                self._writer.flush()
                self._flushed = time.monotonic()

    def write_samples(self, step: int, texts: dict[str, str]) -> None:
        """Write the samples of a step as texts, in a code block each."""
        with writing(self._directory):
            for number, (prompt, text) in enumerate(texts.items()):
                self._write(step, self._text(f"sample/{number}", textwrap.indent(prompt + text, "    ")))

    def close(self) -> None:
        with writing(self._directory):
            self._writer.close()

    def _write(self, step: int, summary: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))


class WeightsAndBiasesWriter:
    """Logs to Weights & Biases, to the same W&B run after each restart.

    The id of the W&B run is in the file wandb_id of the run directory; WANDB_RUN_ID, where it is set, overrides it.
    Raises `UserError` if W&B does not start the run.
    """

    def __init__(self, config: Config):
        settings = {"project": config.log.wandb_project, "name": config.run.name, "dir": config.run.dir}
        settings |= {"id": _wandb_id(Path(config.run.dir)), "resume": "allow"}
        with _wandb() as self._wandb:
            self._run = self._wandb.init(**settings, config=to_dict(config))
        self._run.define_metric("*", step_metric="step")  # the default axis counts lines, including those of validation

    def write(self, line: dict[str, Any]) -> None:
        """Log every float of a line of metrics.jsonl."""
        self._run.log(_floats(line) | {"step": line["step"]})

    def write_samples(self, step: int, texts: dict[str, str]) -> None:
        """Log the samples of a step as a table."""
        table = self._wandb.Table(columns=["prompt", "text"], data=[list(item) for item in texts.items()])
        self._run.log({"samples": table, "step": step})

    def close(self) -> None:
        self._run.finish()


def check_weights_and_biases(config: Config) -> None:
    """Check, before anything is compiled, what logging to W&B needs if log.wandb asks for it.

    Raises `UserError` if wandb is not installed, if log.wandb_project cannot be the name of a project, or if nobody is
    logged in although W&B is not offline.
    """
    if not config.log.wandb:
        return
    with _wandb() as wandb:
        wandb.Settings(project=config.log.wandb_project)
        if os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
            wandb.login(verify=True)  # asks for a key on a terminal; raises without one; does nothing if W&B is offline


@contextmanager
def _wandb() -> Iterator[Any]:
    """Context with the module wandb, whose errors become `UserError`, with a way out."""
    try:
        import wandb
    except ImportError as error:
        raise UserError("log.wandb=true needs wandb: pip install -e '.[wandb]'") from error
    try:
        yield wandb
    except (wandb.Error, ValueError) as error:  # its settings raise ValueError
        raise UserError(
            f"log.wandb=true, but W&B cannot start: {str(error).splitlines()[0]}\ncorrect log.wandb_project, log in "
            f"(`wandb login`), log locally with WANDB_MODE=offline, or set log.wandb=false"
        ) from error


def _wandb_id(directory: Path) -> str:
    """The id of the W&B run of a run directory, which is made and stored at its first start."""
    if given := os.environ.get("WANDB_RUN_ID"):
        return given
    file = directory / "wandb_id"
    if not file.exists():
        with writing(file):
            write_atomically(file, uuid.uuid4().hex[:16] + "\n")
    return file.read_text().strip()


def _floats(line: dict[str, Any]) -> dict[str, float]:
    """The floats of a line of metrics.jsonl, by split/name, or by split/source/name."""
    where = "/".join(filter(None, [line["split"], line.get("source")]))
    return {f"{where}/{name}": value for name, value in line.items() if isinstance(value, float)}


class ReportRenewal:
    """Renews report.html of a run directory after evaluations, in a process of its own of the lowest priority.

    The run never waits for it: an evaluation within RENEWAL_SECONDS of the last renewal, or while that still runs,
    starts none.  The run itself writes the last report.
    """

    def __init__(self, directory: Path):
        self._directory, self._process, self._started = directory, None, time.monotonic()

    def write(self, line: dict[str, Any]) -> None:
        """Renew the report if `line` is of an evaluation."""
        due = line["split"] == "validation" and time.monotonic() - self._started >= RENEWAL_SECONDS
        if not due or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None and (said := self._process.communicate()[1]):
            write_line(f"the report was not renewed: {' '.join(said.split())[-300:]}")
        program = "import os; os.nice(19); from shmap_tp.report import main; raise SystemExit(main())"
        path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
        self._process, self._started = None, time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(self._directory)],
                env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                start_new_session=True,  # Ctrl-C of the terminal is for the run
            )  # fmt: skip
        except OSError as error:  # no memory or no process is left: the run needs neither
            write_line(f"the report was not renewed: {error.strerror}")

    def write_samples(self, step: int, texts: dict[str, str]) -> None:
        """Samples are in the next report."""

    def close(self) -> None:
        """End a renewal that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
