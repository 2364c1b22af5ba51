"""Optional destinations of metrics besides metrics.jsonl: TensorBoard event files, and Weights & Biases."""

import os
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import write_atomically, writing

LOG_IN = "log in with `wandb login`, log locally with WANDB_MODE=offline"


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
                scalar = self._scalar(f"{line['split']}/{name}", value)
                self._writer.write_event(self._event(wall_time=time.time(), step=line["step"], summary=scalar))
            if time.monotonic() - self._flushed > 30:
                self._writer.flush()
                self._flushed = time.monotonic()

    def write_samples(self, step: int, texts: dict[str, str]) -> None:
        """Write the samples of a step as texts, in a code block each."""
        with writing(self._directory):
            for number, (prompt, text) in enumerate(texts.items()):
                summary = self._text(f"sample/{number}", textwrap.indent(prompt + text, "    "))
                self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        with writing(self._directory):
            self._writer.close()


class WeightsAndBiasesWriter:
    """Logs to Weights & Biases, to the same W&B run after each restart.

    The id of the W&B run is in the file wandb_id of the run directory; WANDB_RUN_ID, where it is set, overrides it.
    Raises `UserError` if W&B does not start the run.
    """

    def __init__(self, config: Config):
        wandb = _import_wandb()
        settings = {"project": config.log.wandb_project, "name": config.run.name, "dir": config.run.dir}
        settings |= {"id": _wandb_id(Path(config.run.dir)), "resume": "allow"}
        self._wandb = wandb
        with _wandb_errors(wandb):
            self._run = wandb.init(**settings, config=to_dict(config))
        self._run.define_metric("*", step_metric="step")  # the default axis counts lines, including those of validation

    def write(self, line: dict[str, Any]) -> None:
        """Log every float of a line of metrics.jsonl."""
        values = {f"{line['split']}/{name}": value for name, value in _floats(line).items()}
        self._run.log(values | {"step": line["step"]})

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
    wandb = _import_wandb()
    with _wandb_errors(wandb, "choose another log.wandb_project"):
        wandb.Settings(project=config.log.wandb_project)
    with _wandb_errors(wandb):
        if os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
            wandb.login(verify=True)  # asks for a key on a terminal; raises without one; does nothing if W&B is offline


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError("log.wandb=true needs wandb: pip install -e '.[wandb]'") from error
    return wandb


@contextmanager
def _wandb_errors(wandb: Any, way_out: str = LOG_IN) -> Iterator[None]:
    """Raise errors of wandb as `UserError`, with a way out."""
    try:
        yield
    except (wandb.Error, ValueError) as error:  # its settings raise ValueError
        raise UserError(
            f"log.wandb=true, but W&B cannot start: {str(error).splitlines()[0]}\n{way_out}, or set log.wandb=false"
        ) from error


def _wandb_id(directory: Path) -> str:
    """The id of the W&B run of a run directory, which is made and stored at its first start."""
    if given := os.environ.get("WANDB_RUN_ID"):
        return given
    file = directory / "wandb_id"
    if file.is_file() and (stored := file.read_text().strip()):
        return stored
    made = uuid.uuid4().hex[:16]
    with writing(file):
        write_atomically(file, made + "\n")
    return made


def _floats(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, float)}
