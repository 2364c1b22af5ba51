"""What a run says: metrics.jsonl, TensorBoard and W&B where asked, a progress bar or plain lines, a loss plot."""

import time
from pathlib import Path
from typing import Any

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import writing


class _TensorBoard:
    """An event file, written here and now: SummaryWriter has a thread that a full disk kills, and then waits for it."""

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
        with writing(self._directory):
            for name, value in _numbers(line).items():
                scalar = self._scalar(f"{line['split']}/{name}", value)
                self._writer.write_event(self._event(wall_time=time.time(), step=line["step"], summary=scalar))
            if time.monotonic() - self._flushed > 30:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with writing(self._directory):
            self._writer.close()


class _WeightsAndBiases:
    def __init__(self, config: Config):
        try:
            import wandb
        except ImportError as error:
            raise UserError("log.wandb=true needs wandb: pip install -e '.[wandb]'") from error
        given = {"project": config.log.wandb_project, "name": config.run.name, "dir": config.run.dir}
        try:
            self._run = wandb.init(**given, config=to_dict(config))
        except wandb.Error as error:
            raise UserError(
                f"log.wandb=true, but W&B cannot begin: {str(error).splitlines()[0]}\n"
                f"log in with `wandb login`, keep it here with WANDB_MODE=offline, or set log.wandb=false"
            ) from error
        self._run.define_metric("*", step_metric="step")  # else its axis counts lines, those of validation too

    def write(self, line: dict[str, Any]) -> None:
        named = {f"{line['split']}/{name}": value for name, value in _numbers(line).items()}
        self._run.log(named | {"step": line["step"]})

    def close(self) -> None:
        self._run.finish()


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, float)}
