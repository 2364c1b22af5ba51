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

from shmap_tp.checkpoint import Checkpoints, agreed
from shmap_tp.config import Config, InputError, Precision, Resume
from shmap_tp.data import Batches
from shmap_tp.disk import make_directory, writing
from shmap_tp.exits import STOPPED, STOPPED_EARLY
from shmap_tp.flops import flops_per_token, parameters
from shmap_tp.goodput import Cause, Clock
from shmap_tp.guard import Watch
from shmap_tp.hardware import compile_with, compiler_options, machine_peak
from shmap_tp.layers.choice import named
from shmap_tp.meeting import Place
from shmap_tp.mesh import make_mesh
from shmap_tp.metrics import Meter, Recorder, plot_losses, say
from shmap_tp.notice import heeded
from shmap_tp.prepare import prepare_stdlib
from shmap_tp.processes import joined
from shmap_tp.profile import Profile
from shmap_tp.replicas import Replicas
from shmap_tp.settings import save, settled, to_dict
from shmap_tp.start import start
from shmap_tp.step import Programs, State, build_programs
from shmap_tp.stop import StopRequest


def train(config: Config, place: Place | None = None) -> int:
    """Train as `config` says.  Returns 0, or STOPPED.  Raises InputError before anything is trained, or once too many
    steps in a row had to be skipped.

    Where it is one of several processes, and no environment tells how they meet, `place` does; there an error does not
    return, but ends all of them.
    """
    with StopRequest() as stop, Clock() as clock, joined(config, place, stop.told) as stop.peers:
        given, config = config, settled(config, len(jax.devices()))
        mesh = make_mesh(config.mesh)
        make_ready(config)
        programs = build_programs(config, mesh, dtype_of(config.train.precision))
        batches = Batches(config, programs.tokens)
        with heeded(stop.told), Checkpoints(config.checkpoint, say) as checkpoints:
            run = Run(given, config, programs, batches, checkpoints, Replicas(programs.shapes), clock)
            return _loop(run, *start(config, programs, batches, checkpoints), stop)
    print(STOPPED_EARLY[1])
    return STOPPED


@dataclass(frozen=True)
class Run:
    """What a run works with."""

    given: Config
    """As the user gave it, mesh.dp=auto and all: what config.yaml of the run directory says."""
    config: Config
    programs: Programs
    batches: Batches
    checkpoints: Checkpoints
    replicas: Replicas
    clock: Clock


def _loop(run: Run, state: State, saved: int | None, stop: StopRequest) -> int:
    """Train on from `state`, which is the checkpoint of step `saved`, or new where that is None."""
    config, batches, clock = run.config, run.batches, run.clock
    first = done = saved or 0
    whole = True
    facts = {"config": to_dict(config), "data": batches.identity, "mesh": [config.mesh.dp, config.mesh.mp]}
    step_program = _compile(run, first)
    stop.training()
    watch = Watch(config.guard, batches.windows, f"{config.data.dir}/train.bin")
    with Recorder(config, first, speaks=jax.process_index() == 0) as recorder:
        meter = _meter(config, lambda line: recorder.train(line | watch.of(line) | clock.of(line)))
        if first and _due(first, config.evaluate.every, config.train.steps) and not agreed(recorder.validated):
            with meter.paused(), clock.on(Cause.evaluation):  # the run was stopped in the middle of it
                whole = _validate(run, done, state, recorder, stop)
        clock.turn(Cause.steps)

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
                    with meter.paused(), clock.on(Cause.replicas):
                        run.replicas.check(state, done)
                if _due(done, config.evaluate.every, config.train.steps):
                    with meter.paused(), clock.on(Cause.evaluation):
                        whole = _validate(run, done, state, recorder, stop)
                if _due(done, config.checkpoint.every, config.train.steps):
                    with meter.paused(), clock.on(Cause.checkpoint):
                        if not watch.in_a_row:  # the weights of the one before would replace older ones
                            run.checkpoints.save(done, state, facts)
                            saved = done

        with meter.paused(), clock.on(Cause.checkpoint):
            if saved != done:
                run.checkpoints.save(done, state, facts)
            run.checkpoints.wait()
    finished = whole and done >= config.train.steps
    _close(run, done, finished)
    if watch.verdict:
        raise InputError(f"{watch.verdict};\n{_behind_skips(config, done, done - watch.in_a_row)}")
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
        f"attention {named(programs.attention)} ..."
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
        with meter.paused(), run.clock.on(Cause.profile):
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


def make_ready(config: Config) -> None:
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
    with run.clock.on(Cause.drawing), writing(directory / "loss.png"):
        picture = plot_losses(directory)
    say(run.clock.spent.table())
    say(f"{'done' if finished else 'stopped and saved'} at step {done} of {config.train.steps}")
    say(f"  metrics     {directory / 'metrics.jsonl'}")
    say(f"  loss curve  {picture}")
    say(f"  checkpoint  {config.checkpoint.dir}/{done}")
    more = f"train.steps={2 * config.train.steps} " if finished else ""
    say(f"  to go on    python main.py --cfg {directory / 'config.yaml'} {more}--resume")
    say("              (any mesh.dp=... mesh.mp=... will do)")
