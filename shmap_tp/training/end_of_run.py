"""The end of a run: what process 0 prints, and the exit code."""

from pathlib import Path

import jax

from shmap_tp.config.schema import Config
from shmap_tp.errors import DivergedError
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.files import writing
from shmap_tp.training.bad_steps import BadStepMonitor
from shmap_tp.training.goodput import TimeCategory, WallClock
from shmap_tp.training.loss_plot import plot_losses
from shmap_tp.training.profiler import Profile


def report_end(config: Config, clock: WallClock, step: int, finished: bool) -> None:
    """On process 0, draw the loss curve and print where the time went, where the outputs are and how to resume."""
    if jax.process_index():
        return
    directory = Path(config.run.dir)
    with clock.on(TimeCategory.drawing), writing(directory / "loss.png"):
        plot = plot_losses(directory)
    more_steps = f"train.steps={2 * config.train.steps} " if finished else ""
    lines = [
        clock.breakdown.table(),
        f"{'done' if finished else 'stopped and saved'} at step {step} of {config.train.steps}",
        f"  metrics     {directory / 'metrics.jsonl'}",
        f"  loss curve  {plot}",
        f"  checkpoint  {config.checkpoint.dir}/{step}",
        f"  to resume   python main.py --cfg {directory / 'config.yaml'} {more_steps}--resume",
        "              (on any mesh.dp=... mesh.mp=...)",
    ]
    write_line("\n".join(lines))


def exit_code(config: Config, step: int, all_steps: bool, monitor: BadStepMonitor, profile: Profile) -> int:
    """The exit code of a run that ended after `step`.  Raises DivergedError, or why the profile was not written."""
    if verdict := monitor.verdict or (all_steps and monitor.last_steps_skipped(step)):
        raise DivergedError(f"{verdict};\n{_how_to_continue(config, step, step - monitor.in_a_row)}")
    if all_steps and profile.error and jax.process_index() == 0:
        raise profile.error
    return 0 if all_steps else STOPPED


def _how_to_continue(config: Config, step: int, last_taken: int) -> str:
    """Advice after a diverged run that saved `step` with the weights of step `last_taken`."""
    more = f"train.steps={2 * config.train.steps} --resume" if step >= config.train.steps else "--resume"
    return (
        f"checkpoint {config.checkpoint.dir}/{step} has the weights of step {last_taken}: {more} continues with the "
        f"next batches; if those fail too, remove it and resume from an older one with a lower optimizer.learning_rate"
    )
