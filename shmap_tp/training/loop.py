"""The training loop: a run from its configuration to its last checkpoint.

The loop never waits for its own step: step N is dispatched before the metrics of step N - 1 are read.  It checks for a
stop request before every step and every validation batch.  A stopped run ends like a finished one: its metrics are
recorded, a checkpoint is saved and the loss curve is drawn.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config, Resume
from shmap_tp.config.validate import resolve_auto
from shmap_tp.data.batches import Batches
from shmap_tp.data.metadata import TOKENIZER
from shmap_tp.hardware.devices import machine_peak
from shmap_tp.hardware.xla_options import compile_with, compiler_options
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.model.flops import flops_per_token, parameters
from shmap_tp.model.matmul_count import UncountedError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.agreement import data_facts, on_process_0, require_agreement
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.distributed import Coordinator
from shmap_tp.runtime.exit_codes import STOPPED, STOPPED_EARLY
from shmap_tp.runtime.files import writing
from shmap_tp.runtime.peers import distributed_session
from shmap_tp.runtime.run_lock import lock_directories
from shmap_tp.runtime.shutdown import StopRequest, watch_preemption
from shmap_tp.training.bad_steps import BadStepMonitor
from shmap_tp.training.checkpoint import Checkpoints, broadcast_from_process_0
from shmap_tp.training.end_of_run import exit_code, report_end
from shmap_tp.training.environment import (
    compute_dtype,
    explained_memory_errors,
    prepare_environment,
    require_host_memory,
)
from shmap_tp.training.goodput import TimeCategory, WallClock
from shmap_tp.training.metric_writers import check_weights_and_biases
from shmap_tp.training.metrics import Meter, Recorder, format_samples
from shmap_tp.training.optimizer import describe_schedule
from shmap_tp.training.profiler import Profile
from shmap_tp.training.replica_check import ReplicaCheck
from shmap_tp.training.resume import restore_or_initialize
from shmap_tp.training.run_config import refuse_foreign_config, write_run_config
from shmap_tp.training.samples import MakeSampler, Sampler, text_tools
from shmap_tp.training.step import CONFIGURED, Components, State, StepFunctions, build_step_functions

Pause = Callable[[TimeCategory], Any]
"""Returns a context in which no step is in flight and whose time is accounted to a category."""


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
    before the start, and if the last step was skipped; `HardwareError` if replicas of an array differ.
    """
    with (
        StopRequest() as stop,
        WallClock() as clock,
        distributed_session(config, coordinator, stop.stop_event) as stop.peers,
        explained_memory_errors(),
    ):
        requested, config = config, resolve_auto(config, len(jax.devices()))
        mesh = make_mesh(config.mesh)
        with lock_directories({"run.dir": config.run.dir, "checkpoint.dir": config.checkpoint.dir}, stop.peers):
            on_process_0("log.wandb", lambda: check_weights_and_biases(config))
            on_process_0("config.yaml", lambda: refuse_foreign_config(config.run.dir))
            prepare_environment(config)
            functions = build_step_functions(config, mesh, compute_dtype(config.train.precision), components)
            require_host_memory(functions.shapes)
            batches = Batches(config, functions.tokens)
            require_agreement("data", data_facts(batches.identity))
            with watch_preemption(stop.stop_event), Checkpoints(config.checkpoint, print_on_process_0) as checkpoints:
                run = Run(
                    requested,
                    config,
                    functions,
                    batches,
                    checkpoints,
                    ReplicaCheck(functions.shapes),
                    clock,
                    components,
                    *text_tools(config, mesh, batches, components, make_sampler),
                )
                state, saved_step = restore_or_initialize(
                    config, functions, batches, checkpoints, components.load_parameters
                )
                return _train_from(run, state, saved_step, stop)
    print(STOPPED_EARLY[1])
    return STOPPED


@dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from its first step to its last."""

    requested: Config
    """The configuration as the user gave it (mesh.dp=auto is not resolved), for config.yaml of the run directory."""
    config: Config
    functions: StepFunctions
    batches: Batches
    checkpoints: Checkpoints
    replicas: ReplicaCheck
    clock: WallClock
    components: Components
    sampler: Sampler | None
    validation_bytes: int | None
    """UTF-8 bytes of the text of an evaluation, on process 0; None where the tokenizer is not known."""

    def save(self, step: int, state: State, skipped_in_a_row: int) -> None:
        """Start to save the checkpoint of `step`."""
        mesh = [self.config.mesh.dp, self.config.mesh.mp]
        facts = {"config": to_dict(self.config), "data": self.batches.identity, "mesh": mesh}
        self.checkpoints.save(step, state, facts, skipped_in_a_row)


def _train_from(run: Run, state: State, saved_step: int | None, stop: StopRequest) -> int:
    """Train on from `state`: that of the checkpoint of `saved_step`, or a new one if that is None."""
    config, clock = run.config, run.clock
    first_step = saved_step or 0
    compiled_step = _compile_step(run, first_step)
    stop.begin_training()
    skipped = int(state.guard.in_a_row)
    monitor = BadStepMonitor(config.guard, run.batches.sequence_indices, f"{config.data.dir}/train.bin", skipped)
    with Recorder(config, first_step, enabled=jax.process_index() == 0) as recorder:
        meter = _make_meter(run, lambda line: recorder.train(line | monitor.update(line) | clock.step_fields(line)))

        @contextmanager
        def pause(category: TimeCategory) -> Iterator[None]:
            with meter.paused(), clock.on(category):
                yield

        evaluated = True
        if _evaluation_is_missing(run, first_step, recorder):
            with pause(TimeCategory.evaluation):
                evaluated = _evaluate(run, first_step, state, recorder, stop)
        clock.switch_to(TimeCategory.steps)

        step, texts = first_step, None
        profiled = config.train.profile, Path(config.run.dir) / "profile", first_step
        with Profile(*profiled, lambda: pause(TimeCategory.profile)) as profile:
            while step < config.train.steps and not stop.requested() and not monitor.verdict:
                with profile.annotate(step + 1):
                    with clock.fetching():
                        tokens = run.batches.training(step)
                    state, metrics = compiled_step(state, tokens)
                    clock.dispatched(metrics)
                    step += 1
                    meter.record(step, metrics)
                if config.train.check_replicas_every and step % config.train.check_replicas_every == 0:
                    with pause(TimeCategory.replicas):
                        run.replicas.check(state, step)
                if _is_due(step, config.evaluate.every, config.train.steps):
                    with pause(TimeCategory.evaluation):
                        evaluated = _evaluate(run, step, state, recorder, stop)
                if run.sampler and _is_due(step, config.sample.every, config.train.steps):
                    with pause(TimeCategory.samples):
                        if texts := run.sampler(state.params, stop.requested):
                            recorder.samples(step, texts)
                if _is_due(step, config.checkpoint.every, config.train.steps):
                    with pause(TimeCategory.checkpoint):
                        if not monitor.in_a_row:  # else the weights are those of an earlier checkpoint
                            run.save(step, state, 0)
                            saved_step = step

        with pause(TimeCategory.checkpoint):
            if saved_step != step:
                run.save(step, state, monitor.in_a_row)
            run.checkpoints.wait()
    all_steps = evaluated and step >= config.train.steps
    report_end(config, clock, step, all_steps and not monitor.in_a_row)
    if all_steps and texts:
        print_on_process_0(format_samples(step, texts))
    return exit_code(config, step, all_steps, monitor, profile)


def _compile_step(run: Run, first_step: int) -> Any:
    """The compiled training step.  Writes config.yaml and tokenizer.json, opens time.jsonl: the run has started."""
    config, functions, is_main = run.config, run.functions, jax.process_index() == 0
    directory = Path(config.run.dir)
    if is_main:
        write_run_config(run.requested, directory)
        if run.batches.tokenizer is not None:
            with writing(file := directory / TOKENIZER):
                file.write_bytes(run.batches.tokenizer)
    run.clock.open(directory if is_main else None, first_step, new_run=config.checkpoint.resume == Resume.never)
    print_on_process_0(
        f"compiling the training step of {config.model.name}, "
        f"{parameters(config.model, components=run.components) / 1e6:,.1f}M parameters, "
        f"attention {kernel_name(functions.attention)} ..."
    )
    if config.train.steps > config.optimizer.decay_steps:
        print_on_process_0(f"learning rate {describe_schedule(config.optimizer, config.train.steps)}")
    options = compiler_options(jax.devices()[0].device_kind, config)
    return compile_with(functions.step.lower(functions.shapes, functions.tokens), options)


def _make_meter(run: Run, record: Callable[[dict[str, Any]], None]) -> Meter:
    """A meter that computes MFU from this machine's peak; prints the formula, or why there is none."""
    config, peak = run.config, machine_peak(jax.devices())
    try:
        flops = flops_per_token(config.model, components=run.components)
    except UncountedError as error:
        print_on_process_0(f"no MFU: {error}")
        return Meter(record, config.train.batch * config.model.context, 0, None)
    if peak is None:
        print_on_process_0(
            f"no MFU: shmap_tp/hardware/devices.py does not list the peak of {jax.devices()[0].device_kind}"
        )
    else:
        print_on_process_0(
            f"MFU = tokens/s x model FLOPs per token (causal attention at half, recomputation not counted) / "
            f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})"
        )
    return Meter(record, config.train.batch * config.model.context, flops, peak)


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done every `every` steps (0: only at the end) is done after `step`."""
    return step == last or (every > 0 and step % every == 0)


def _evaluation_is_missing(run: Run, first_step: int, recorder: Recorder) -> bool:
    """Whether the run was stopped during the evaluation of the step that it resumes from."""
    due = first_step > 0 and _is_due(first_step, run.config.evaluate.every, run.config.train.steps)
    return due and not broadcast_from_process_0(recorder.has_validation)


def _evaluate(run: Run, step: int, state: State, recorder: Recorder, stop: StopRequest) -> bool:
    """Record the mean cross entropy over the validation batches, all of which have the same number of tokens.

    Returns False if a stop request interrupted it; the resumed run then evaluates this step.
    """
    losses: list[Any] = []
    for i in range(run.batches.validation_count):
        if stop.requested():
            return False
        losses.append(run.functions.evaluate(state.params, run.batches.validation(i)))
        jax.block_until_ready(losses[-2:-1])  # at most one batch in flight, so that a stop request is noticed soon
    loss, size = float(np.mean(jax.device_get(losses))), run.validation_bytes
    tokens = run.config.train.batch * run.config.model.context * len(losses)
    recorder.validation(step, loss, loss * tokens / math.log(2) / size if size else None)
    return True
