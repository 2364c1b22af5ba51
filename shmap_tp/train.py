"""A run, from its configuration to its last checkpoint.

The loop never waits for its own step: step N is dispatched before the metrics of N - 1 are read.  It looks for a
request to stop before every step, and leaves by the same door as a run that is done: everything read, saved and drawn.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shmap_tp.checkpoint import Checkpoints, agreed
from shmap_tp.config import Config, InputError, Precision, Resume
from shmap_tp.data import SPLITS, Batches
from shmap_tp.disk import make_directory, writing
from shmap_tp.flops import flops_per_token, parameters
from shmap_tp.hardware import compiler_options, machine_peak
from shmap_tp.layers.choice import named
from shmap_tp.mesh import join, make_mesh
from shmap_tp.metrics import Meter, Recorder, plot_losses, read_metrics
from shmap_tp.prepare import prepare_stdlib
from shmap_tp.replicas import Replicas
from shmap_tp.settings import load, save, to_dict
from shmap_tp.step import Programs, State, build_programs
from shmap_tp.stop import StopRequest

STOPPED = 75
"""Exit code of a run that was told to stop and has saved: start it again with --resume (EX_TEMPFAIL of sysexits.h)."""


def train(config: Config) -> int:
    """Train as `config` says.  Returns 0, or STOPPED.  Raises InputError before anything is trained."""
    join(config.mesh)
    with StopRequest() as stop:
        mesh = make_mesh(config.mesh)
        make_ready(config)
        programs = build_programs(config, mesh, dtype_of(config.train.precision))
        batches = Batches(config, programs.tokens)
        with Checkpoints(config.checkpoint, say) as checkpoints:
            run = Run(config, programs, batches, checkpoints, Replicas(programs.shapes))
            return _loop(run, *_start(run), stop)


@dataclass(frozen=True)
class Run:
    """What a run works with."""

    config: Config
    programs: Programs
    batches: Batches
    checkpoints: Checkpoints
    replicas: Replicas


def _loop(run: Run, state: State, saved: int | None, stop: StopRequest) -> int:
    """Train on from `state`, which is the checkpoint of step `saved`, or new where that is None."""
    config, programs, batches = run.config, run.programs, run.batches
    if jax.process_index() == 0:
        with writing(file := Path(config.run.dir) / "config.yaml"):
            save(config, file)
    first = saved or 0
    facts = {"config": to_dict(config), "data": batches.identity, "mesh": [config.mesh.dp, config.mesh.mp]}
    say(
        f"compiling the step of {config.model.name}, {parameters(config.model) / 1e6:,.1f}M parameters, "
        f"attention {named(programs.attention)} ..."
    )
    options = compiler_options(jax.devices()[0].device_kind)
    step_program = programs.step.lower(programs.shapes, programs.tokens).compile(compiler_options=options)
    with Recorder(config, first, speaks=jax.process_index() == 0) as recorder:
        tokens = config.train.batch * config.model.context
        meter = Meter(recorder.train, tokens, flops_per_token(config.model), _peak())
        done = first

        while done < config.train.steps and not stop.asked(done):
            state, metrics = step_program(state, batches.training(done))
            done += 1
            meter.hand(done, metrics)
            if config.train.check_replicas_every and done % config.train.check_replicas_every == 0:
                with meter.paused():
                    run.replicas.check(state, done)
            if _due(done, config.evaluate.every, config.train.steps):
                with meter.paused():
                    recorder.validation(done, _evaluate(run, state))
            if _due(done, config.checkpoint.every, config.train.steps):
                with meter.paused():
                    run.checkpoints.save(done, state, facts)
                    saved = done

        with meter.paused():
            if saved != done:
                run.checkpoints.save(done, state, facts)
            run.checkpoints.wait()
    _close(config, done)
    return 0 if done >= config.train.steps else STOPPED


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def _evaluate(run: Run, state: State) -> float:
    """Mean cross entropy over the validation batches, each of which counts the same number of tokens."""
    batches = run.batches
    losses = [run.programs.evaluate(state.params, batches.validation(i)) for i in range(batches.validation_count)]
    return float(np.mean(jax.device_get(losses)))


def _start(run: Run) -> tuple[State, int | None]:
    """As `checkpoint.resume` says, the newest intact checkpoint's state and step, or a new state and None."""
    config, checkpoints = run.config, run.checkpoints
    where, resume = config.checkpoint.dir, config.checkpoint.resume
    there = checkpoints.steps()
    if resume == Resume.never and there:
        raise InputError(
            f"{where} holds this run up to step {there[0]}; go on from it with --resume, "
            f"or start another with run.name=... or run.dir=..."
        )
    if not there and resume == Resume.must:
        raise InputError(
            f"checkpoint.resume=must (--resume): no checkpoint in {where}; leave it out to start there "
            f"(checkpoint.resume=never), or name the run with run.dir=..."
        )
    if not there:
        _refuse_to_empty(config)
        return run.programs.init(), None
    unfinished = checkpoints.first_save_unfinished()
    step = checkpoints.newest_intact()
    if step is None and resume == Resume.if_present and unfinished:
        _refuse_to_empty(config)
        checkpoints.discard_after(-1)
        return run.programs.init(), None
    if step is None:
        raise InputError(
            f"no checkpoint in {where} is intact (there: {', '.join(map(str, there))}); restore one from a copy, "
            f"or start another run with run.dir=..."
        )
    _refuse_differences(checkpoints.facts(step), config, run.batches.identity, f"checkpoint {where}/{step}")
    state = checkpoints.restore(step, run.programs.shapes)
    if int(state.step) != step:
        raise InputError(
            f"checkpoint {where}/{step} holds the state after step {int(state.step)}: give the directory that name back"
        )
    checkpoints.discard_after(step)
    mesh = checkpoints.facts(step)["mesh"]
    say(f"going on from step {step} of {where}, saved on mesh dp={mesh[0]}, mp={mesh[1]}")
    return state, step


def _refuse_to_empty(config: Config) -> None:
    """Raises InputError where a new run would empty the metrics.jsonl of one whose checkpoints are elsewhere.

    With if_present, one that was killed before its first checkpoint begins again: its lines are of steps that are lost.
    """
    file, where = Path(config.run.dir) / "metrics.jsonl", config.checkpoint.dir
    held = max([line["step"] for line in read_metrics(file)], default=-1) if jax.process_index() == 0 else -1
    if held >= 0 and config.checkpoint.resume == Resume.if_present:
        try:
            same = load(str(file.with_name("config.yaml")), []).checkpoint.dir == where
        except InputError:
            same = False
        held = -1 if same else held
    if (held := agreed(held)) >= 0:
        raise InputError(
            f"{file} holds a run up to step {held} and a new one would empty it: {where} has no checkpoint;\n"
            f"name its own checkpoint.dir=... with --resume, start another with run.dir=..., or remove the file"
        )


def _refuse_differences(saved: dict[str, Any], config: Config, order: dict[str, Any], where: str) -> None:
    """Raises InputError where the model, or what decides which sample comes when, is not the one that was saved."""
    then, now = _decisive(saved["config"]["model"], saved["data"]), _decisive(to_dict(config.model), order)
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            raise InputError(
                f"{where} is of another run: {key} was {then.get(key)}, is {now.get(key)};\n"
                f"make it the same again to go on, or start another run with run.dir=..."
            )


def _decisive(model: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    """All that must not change within a run, by the key that sets it.  Names and ways to compute the same may."""
    shape = {f"model.{key}": model[key] for key in model.keys() - {"name", "remat", "attention", "attention_chunk"}}
    files = {
        f"data.dir ({split}.bin)": f"{order[split]['tokens']} tokens of sha256 {order[split]['sha256'][:12]}"
        for split in SPLITS
    }
    return shape | files | {"run.seed": order["seed"], "train.batch": order["batch"]}


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


def _peak() -> Any:
    peak = machine_peak(jax.devices())
    if peak is None:
        say(f"no MFU: the peak of {jax.devices()[0].device_kind} is not in shmap_tp/hardware.py")
    else:
        say(
            f"MFU = tokens/s x model FLOPs per token (causal attention at half, recomputation not counted) / "
            f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})"
        )
    return peak


def _close(config: Config, done: int) -> None:
    if jax.process_index():
        return
    directory = Path(config.run.dir)
    with writing(directory / "loss.png"):
        picture = plot_losses(directory)
    finished = done >= config.train.steps
    say(f"{'done' if finished else 'stopped and saved'} at step {done} of {config.train.steps}")
    say(f"  metrics     {directory / 'metrics.jsonl'}")
    say(f"  loss curve  {picture}")
    say(f"  checkpoint  {config.checkpoint.dir}/{done}")
    more = f"train.steps={2 * config.train.steps} " if finished else ""
    say(f"  to go on    python main.py --cfg {directory / 'config.yaml'} {more}--resume")
    say("              (any mesh.dp=... mesh.mp=... will do)")


def say(text: str) -> None:
    """One line, from process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)
