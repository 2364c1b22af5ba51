"""Optional destinations of metrics besides metrics.jsonl: TensorBoard event files, and Weights & Biases."""

import time
from pathlib import Path
from typing import Any

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import writing


class TensorBoardWriter:
    """Writes a TensorBoard event file in the calling thread.

    tensorboardX.SummaryWriter is not used: a full disk kills its background thread, and it then waits forever.
    """

    def __init__(self, directory: Path):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
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

    def close(self) -> None:
        with writing(self._directory):
            self._writer.close()


class WeightsAndBiasesWriter:
    """Logs to Weights & Biases.  Raises `UserError` if wandb is not installed or cannot log in."""

    def __init__(self, config: Config):
        try:
            import wandb
        except ImportError as error:
            raise UserError("log.wandb=true needs wandb: pip install -e '.[wandb]'") from error
        settings = {"project": config.log.wandb_project, "name": config.run.name, "dir": config.run.dir}
        try:
            self._run = wandb.init(**settings, config=to_dict(config))
        except wandb.Error as error:
            raise UserError(
                f"log.wandb=true, but W&B cannot start: {str(error).splitlines()[0]}\n"
                f"log in with `wandb login`, log locally with WANDB_MODE=offline, or set log.wandb=false"
            ) from error
        self._run.define_metric("*", step_metric="step")  # the default axis counts lines, including those of validation

    def write(self, line: dict[str, Any]) -> None:
        """Log every float of a line of metrics.jsonl."""
        values = {f"{line['split']}/{name}": value for name, value in _floats(line).items()}
        self._run.log(values | {"step": line["step"]})

    def close(self) -> None:
        self._run.finish()


def _floats(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, float)}
