"""A run, from its configuration to its last checkpoint.

The loop never waits for its own step: step N is dispatched before the metrics of N - 1 are read.  It looks for a
request to stop before every step and validation batch, and leaves by the same door as a run that is done: everything
read, saved and drawn.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shmap_tp.config.compose import save, to_dict
from shmap_tp.config.schema import Config, Precision, Resume
from shmap_tp.config.validate import resolve_auto
from shmap_tp.data.batches import Batches
from shmap_tp.data.prepare import prepare_stdlib
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import machine_peak
from shmap_tp.hardware.xla_options import compile_with, compiler_options
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.model.flops import flops_per_token, parameters
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.console import say
from shmap_tp.runtime.distributed import Coordinator
from shmap_tp.runtime.exit_codes import STOPPED, STOPPED_EARLY
from shmap_tp.runtime.files import make_directory, writing
from shmap_tp.runtime.peers import distributed_session
from shmap_tp.runtime.shutdown import StopRequest, watch_preemption
from shmap_tp.training.bad_steps import BadStepMonitor
from shmap_tp.training.checkpoint import Checkpoints, agreed
from shmap_tp.training.goodput import TimeCategory, WallClock
from shmap_tp.training.loss_plot import plot_losses
from shmap_tp.training.metrics import Meter, Recorder
from shmap_tp.training.profiler import Profile
from shmap_tp.training.replica_check import ReplicaCheck
from shmap_tp.training.resume import start
from shmap_tp.training.step import State, StepFunctions, build_step_functions


def train(config: Config, place: Coordinator | None = None) -> int:
    """Train as `config` says.  Returns 0, or STOPPED.  Raises InputError before anything is trained, or once too many
    steps in a row had to be skipped.

    Where it is one of several processes, and no environment tells how they meet, `place` does; there an error does not
    return, but ends all of them.
    """
    with StopRequest() as stop, WallClock() as clock, distributed_session(config, place, stop.told) as stop.peers:
        given, config = config, resolve_auto(config, len(jax.devices()))
        mesh = make_mesh(config.mesh)
        prepare_environment(config)
        programs = build_step_functions(config, mesh, dtype_of(config.train.precision))
        batches = Batches(config, programs.tokens)
        with watch_preemption(stop.told), Checkpoints(config.checkpoint, say) as checkpoints:
            run = Run(given, config, programs, batches, checkpoints, ReplicaCheck(programs.shapes), clock)
            return _loop(run, *start(config, programs, batches, checkpoints), stop)
    print(STOPPED_EARLY[1])
    return STOPPED


@dataclass(frozen=True)
class Run:
    """What a run works with."""

    given: Config
    """As the user gave it, mesh.dp=auto and all: what config.yaml of the run directory says."""
    config: Config
    programs: StepFunctions
    batches: Batches
    checkpoints: Checkpoints
    replicas: ReplicaCheck
    clock: WallClock


def _loop(run: Run, state: State, saved: int | None, stop: StopRequest) -> int:
    """Train on from `state`, which is the checkpoint of step `saved`, or new where that is None."""
    config, batches, clock = run.config, run.batches, run.clock
    first = done = saved or 0
    whole = True
    facts = {"config": to_dict(config), "data": batches.identity, "mesh": [config.mesh.dp, config.mesh.mp]}
    step_program = _compile(run, first)
    stop.training()
    watch = BadStepMonitor(config.guard, batches.windows, f"{config.data.dir}/train.bin")
    with Recorder(config, first, speaks=jax.process_index() == 0) as recorder:
        meter = _meter(config, lambda line: recorder.train(line | watch.of(line) | clock.of(line)))
        if first and _due(first, config.evaluate.every, config.train.steps) and not agreed(recorder.validated):
            with meter.paused(), clock.on(TimeCategory.evaluation):  # the run was stopped in the middle of it
                whole = _validate(run, done, state, recorder, stop)
        clock.turn(TimeCategory.steps)

        with _profile(run, first, meter) as profile:
            while done < config.train.steps and not stop.asked() and not watch.verdict:
                with profile.around(done + 1):
                    with clock.fetching():
                        tokens = batches.training(done)
                    state, metrics = step_program(state, tokens)
                    clock.dispatched(metrics)
                    done += 1
                    meter.hand(done, metrics)
                if config.train.check_replicas_every and done % config.train.check_replicas_every == 0:
                    with meter.paused(), clock.on(TimeCategory.replicas):
                        run.replicas.check(state, done)
                if _due(done, config.evaluate.every, config.train.steps):
                    with meter.paused(), clock.on(TimeCategory.evaluation):
                        whole = _validate(run, done, state, recorder, stop)
                if _due(done, config.checkpoint.every, config.train.steps):
                    with meter.paused(), clock.on(TimeCategory.checkpoint):
                        if not watch.in_a_row:  # the weights of the one before would replace older ones
                            run.checkpoints.save(done, state, facts)
                            saved = done

        with meter.paused(), clock.on(TimeCategory.checkpoint):
            if saved != done:
                run.checkpoints.save(done, state, facts)
            run.checkpoints.wait()
    finished = whole and done >= config.train.steps
    _close(run, done, finished)
    if watch.verdict:
        raise UserError(f"{watch.verdict};\n{_behind_skips(config, done, done - watch.in_a_row)}")
    return 0 if finished else STOPPED


def _compile(run: Run, first: int) -> Any:
    """The step's program.  The run is under way from here on: its directory says so."""
    config, programs, speaks = run.config, run.programs, jax.process_index() == 0
    directory = Path(config.run.dir)
    if speaks:
        with writing(file := directory / "config.yaml"):
            save(run.given, file)
    run.clock.open(directory if speaks else None, first, anew=config.checkpoint.resume == Resume.never)
    say(
        f"compiling the step of {config.model.name}, {parameters(config.model) / 1e6:,.1f}M parameters, "
        f"attention {kernel_name(programs.attention)} ..."
    )
    options = compiler_options(jax.devices()[0].device_kind, config)
    return compile_with(programs.step.lower(programs.shapes, programs.tokens), options)


def _profile(run: Run, first: int, meter: Meter) -> Profile:
    """The trace that was asked for, unless its first step was before this start."""
    steps, directory = run.config.train.profile, Path(run.config.run.dir) / "profile"
    if steps and steps[0] <= first:
        say(f"no profile: train.profile={steps} begins before step {first + 1}, the first from here on")
        steps = None

    @contextmanager
    def pause() -> Iterator[None]:
        with meter.paused(), run.clock.on(TimeCategory.profile):
            yield

    return Profile(steps, directory, pause)


def _behind_skips(config: Config, done: int, taken: int) -> str:
    """How to go on from step `done`, the last of which that was taken is `taken`."""
    return (
        f"checkpoint {config.checkpoint.dir}/{done} has the weights of step {taken}: --resume goes on with the next "
        f"batches; if those fail, too, remove it and go on from an older one with a lower optimizer.learning_rate"
    )


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def _validate(run: Run, done: int, state: State, recorder: Recorder, stop: StopRequest) -> bool:
    """Record the mean cross entropy over the validation batches, each of which counts the same number of tokens.

    False where it was broken off to stop; the run that goes on from here does it then.
    """
    losses: list[Any] = []
    for i in range(run.batches.validation_count):
        if stop.asked():
            return False
        losses.append(run.programs.evaluate(state.params, run.batches.validation(i)))
        jax.block_until_ready(losses[-2:-1])  # the next is under way, no more: a stop is heeded a batch later
    recorder.validation(done, float(np.mean(jax.device_get(losses))))
    return True


def prepare_environment(config: Config) -> None:
    """The run directory, the data where it can be made here, and the cache of compiled programs."""
    make_directory("run.dir", config.run.dir)
    data = Path(config.data.dir)
    if config.data.source == "stdlib" and not (data / "train.bin").exists():
        say(f"preparing {data} from the Python library on this machine ...")
        prepare_stdlib(data)
    if config.run.compilation_cache:
        make_directory("run.compilation_cache", config.run.compilation_cache)
        jax.config.update("jax_compilation_cache_dir", str(Path(config.run.compilation_cache).resolve()))


def dtype_of(precision: Precision) -> DTypeLike:
    if precision == Precision.auto:
        precision = Precision.float32 if jax.devices()[0].platform == "cpu" else Precision.bfloat16
    return jnp.dtype(str(precision))


def _meter(config: Config, record: Callable[[dict[str, Any]], None]) -> Meter:
    """A meter that knows this machine's peak, and says so."""
    peak = machine_peak(jax.devices())
    if peak is None:
        say(f"no MFU: the peak of {jax.devices()[0].device_kind} is not in shmap_tp/hardware.py")
    else:
        say(
            f"MFU = tokens/s x model FLOPs per token (causal attention at half, recomputation not counted) / "
            f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})"
        )
    return Meter(record, config.train.batch * config.model.context, flops_per_token(config.model), peak)


def _close(run: Run, done: int, finished: bool) -> None:
    if jax.process_index():
        return
    config, directory = run.config, Path(run.config.run.dir)
    with run.clock.on(TimeCategory.drawing), writing(directory / "loss.png"):
        picture = plot_losses(directory)
    say(run.clock.spent.table())
    say(f"{'done' if finished else 'stopped and saved'} at step {done} of {config.train.steps}")
    say(f"  metrics     {directory / 'metrics.jsonl'}")
    say(f"  loss curve  {picture}")
    say(f"  checkpoint  {config.checkpoint.dir}/{done}")
    more = f"train.steps={2 * config.train.steps} " if finished else ""
    say(f"  to go on    python main.py --cfg {directory / 'config.yaml'} {more}--resume")
    say("              (any mesh.dp=... mesh.mp=... will do)")
