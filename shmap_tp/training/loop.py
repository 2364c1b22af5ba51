"""The training loop: a run from its configuration to its last checkpoint.

The loop never waits for its own step: step N is dispatched before the metrics of step N - 1 are read.  It checks for a
stop request before every step and every validation batch.  A stopped run ends like a finished one: its metrics are
recorded, a checkpoint is saved and the report is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from shmap_tp.config.schema import Config
from shmap_tp.runtime.agreement import on_process_0
from shmap_tp.runtime.distributed import Coordinator
from shmap_tp.runtime.exit_codes import STOPPED, STOPPED_EARLY
from shmap_tp.runtime.shutdown import StopRequest
from shmap_tp.runtime.workers import in_background, result_of
from shmap_tp.training.evaluation import Evaluation, mixed
from shmap_tp.training.goodput import Profile, TimeCategory
from shmap_tp.training.metrics import Recorder
from shmap_tp.training.run import MakeSampler, Run, end_run, open_run
from shmap_tp.training.save_schedule import SaveSchedule
from shmap_tp.training.step import CONFIGURED, Components, State


def train(
    config: Config,
    coordinator: Coordinator | None = None,
    components: Components = CONFIGURED,
    make_sampler: MakeSampler | None = None,
) -> int:
    """Train as configured.  Returns the exit code: 0 if all steps are done, STOPPED if the run was stopped.

    `components` replace parts of the model and the step that the configuration names (docs/extending.md).
    `make_sampler` makes what writes the texts of sample.prompts; None writes none.
    With several processes, `coordinator` is the address of process 0 if the environment does not provide it; an error
    then ends all processes instead of being raised.
    Raises `UserError` before anything is trained; `DivergedError` after too many consecutive skipped steps, also those
    before the start, and if the last step was skipped; `HardwareError` if replicas of an array, or two
    computations of a microbatch, differ.
    """
    with StopRequest() as stop, open_run(config, stop, coordinator, components, make_sampler) as run:
        start = run.find_start()
        compiling = in_background(lambda: run.compile(run.functions.step))  # while the state is read or made
        state, saved_step = run.restore_or_initialize(start), start[0] if start else None
        run.begin(saved_step or 0)
        compiled_step = result_of(compiling)
        stop.begin_training()
        return _train_from(run, compiled_step, state, saved_step)
    print(STOPPED_EARLY[1])
    return STOPPED


def _train_from(run: Run, compiled_step: Any, state: State, saved_step: int | None) -> int:
    """Train on from `state`: the state saved at `saved_step`, or a new state if that is None."""
    config, clock, step, texts = run.config, run.clock, saved_step or 0, None
    monitor = run.make_monitor(int(state.guard.in_a_row))
    with Recorder(config, step, enabled=jax.process_index() == 0) as recorder:
        meter = run.make_meter(lambda line: recorder.train(line | monitor.update(line) | clock.step_fields(line)))

        @contextmanager
        def pause(category: TimeCategory) -> Iterator[None]:
            """A context in which no step is in flight and whose time is accounted to `category`."""
            with meter.paused(), clock.on(category):
                yield

        def due(every: int) -> bool:
            return _is_due(step, every, config.train.steps)

        schedule = SaveSchedule(config, clock.breakdown, meter, run.checkpoints, step)
        evaluated = True  # unless a stop request interrupts the newest evaluation
        is_wanted = (step or run.components.load_parameters) and due(config.evaluate.every)  # else nothing was learned
        if is_wanted and not on_process_0("evaluated", lambda: recorder.has_validation):
            with pause(TimeCategory.evaluation):
                evaluated = _evaluate(run, step, state, recorder)
        clock.switch_to(TimeCategory.steps)

        with Profile(config, step, lambda: pause(TimeCategory.profile)) as profile:
            while step < config.train.steps and not run.stop.requested() and not monitor.verdict:
                with profile.annotate(step + 1):
                    with clock.fetching():
                        rows = run.rows(step)
                    if config.train.replay_every and (step + 1) % config.train.replay_every == 0:
                        with pause(TimeCategory.replicas):
                            run.replay.check(state, rows, partial(run.rows, step), step + 1)
                    state, metrics = compiled_step(state, *rows)
                    clock.dispatched(metrics)
                    step += 1
                    meter.record(step, metrics)
                run.checkpoints.raise_failure()
                if config.train.check_replicas_every and step % config.train.check_replicas_every == 0:
                    with pause(TimeCategory.replicas):
                        run.replicas.check(state, step)
                if due(config.evaluate.every):
                    with pause(TimeCategory.evaluation):
                        evaluated = _evaluate(run, step, state, recorder)
                if run.sampler and due(config.sample.every):
                    with pause(TimeCategory.samples):
                        if texts := run.sampler(state.params, run.stop.requested):
                            recorder.samples(step, texts)
                if schedule.is_due(step):
                    with pause(TimeCategory.checkpoint):
                        if schedule.save(step, partial(run.save, step, state, 0), monitor.in_a_row):
                            saved_step = step
                if saved_step != step and run.checkpoints.is_due_locally(step):
                    with pause(TimeCategory.checkpoint):
                        run.save_locally(step, state, monitor.in_a_row)

        with pause(TimeCategory.checkpoint):
            if saved_step != step:
                run.save(step, state, monitor.in_a_row)
            run.checkpoints.wait()
    return end_run(run, step, evaluated, monitor, profile, texts)


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done every `every` steps (0: only at the end) is done after `step`."""
    return step == last or (every > 0 and step % every == 0)


def _evaluate(run: Run, step: int, state: State, recorder: Recorder) -> bool:
    """Record the mean loss over the targets, or pairs, of the validation batches that count, of each source and of all.

    Returns False if a stop request interrupted it; the resumed run then evaluates this step.
    """
    sums: dict[str, Evaluation] = {}
    for source, batches in run.batches.validation_counts.items():
        found: list[Any] = []
        for i in range(batches):
            if run.stop.requested():
                return False
            found.append(run.functions.evaluate(state.params, run.batches.validation(i, source)))
            jax.block_until_ready(found[-2:-1])  # at most one batch in flight, so that a stop request is noticed soon
        *sums_of_each, dropped = zip(*jax.device_get(found), strict=True)
        losses, counted = np.array(sums_of_each, np.float64)
        is_text = run.validation_bytes and run.config.train.dpo_beta is None
        size = run.validation_bytes[source] if is_text else None
        share = None if dropped[0] is None else float(np.mean(dropped))
        sums[source] = Evaluation(float(losses @ counted), float(counted.sum()), size, share)
    recorder.validation(step, mixed(sums, run.batches.weights), {name: each for name, each in sums.items() if name})
    return True
