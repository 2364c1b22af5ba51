"""Where a run begins: anew, or from the newest intact checkpoint of the same run; and what is refused."""

from pathlib import Path
from typing import Any

import jax
import yaml
from omegaconf import OmegaConf

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config, Resume
from shmap_tp.data.batches import Batches
from shmap_tp.data.token_files import SPLITS
from shmap_tp.errors import UserError
from shmap_tp.runtime.console import say
from shmap_tp.training.checkpoint import Checkpoints, agreed
from shmap_tp.training.metrics import read_metrics
from shmap_tp.training.step import State, StepFunctions


def start(
    config: Config, programs: StepFunctions, batches: Batches, checkpoints: Checkpoints
) -> tuple[State, int | None]:
    """As `checkpoint.resume` says, the newest intact checkpoint's state and step, or a new state and None."""
    where, resume = config.checkpoint.dir, config.checkpoint.resume
    there = checkpoints.steps()
    if resume == Resume.never and there:
        raise UserError(
            f"{where} holds this run up to step {there[0]}; go on from it with --resume, "
            f"or start another with run.name=... or run.dir=..."
        )
    if not there and resume == Resume.must:
        raise UserError(
            f"checkpoint.resume=must (--resume): no checkpoint in {where}; leave it out to start there "
            f"(checkpoint.resume=never), or name the run with run.dir=..."
        )
    if not there:
        _refuse_to_empty(config)
        return programs.init(), None
    unfinished = checkpoints.first_save_unfinished()
    step = checkpoints.newest_intact()
    if step is None and resume == Resume.if_present and unfinished:
        _refuse_to_empty(config)
        checkpoints.discard_after(-1)
        return programs.init(), None
    if step is None:
        raise UserError(
            f"no checkpoint in {where} is intact (there: {', '.join(map(str, there))}); restore one from a copy, "
            f"or start another run with run.dir=..."
        )
    _refuse_differences(checkpoints.facts(step), config, batches.identity, f"checkpoint {where}/{step}")
    state = checkpoints.restore(step, programs.shapes)
    if int(state.step) != step:
        raise UserError(
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
        try:  # as it stands there: a file of an earlier version may lack keys
            saved = OmegaConf.load(file.with_name("config.yaml"))
        except (OSError, yaml.YAMLError):
            saved = OmegaConf.create()
        held = -1 if OmegaConf.select(saved, "checkpoint.dir") == where else held
    if (held := agreed(held)) >= 0:
        raise UserError(
            f"{file} holds a run up to step {held} and a new one would empty it: {where} has no checkpoint;\n"
            f"name its own checkpoint.dir=... with --resume, start another with run.dir=..., or remove the file"
        )


def _refuse_differences(saved: dict[str, Any], config: Config, order: dict[str, Any], where: str) -> None:
    """Raises InputError where the model, or what decides which sample comes when, is not the one that was saved."""
    then, now = _decisive(saved["config"]["model"], saved["data"]), _decisive(to_dict(config.model), order)
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            raise UserError(
                f"{where} is of another run: {key} was {then.get(key)}, is {now.get(key)};\n"
                f"make it the same again to go on, or start another run with run.dir=..."
            )


def _decisive(model: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    """All that must not change within a run, by the key that sets it.  Names and ways to compute the same may."""
    same = {"name", "remat", "offload", "attention", "attention_chunk"}
    shape = {f"model.{key}": model[key] for key in model.keys() - same}
    files = {
        f"data.dir ({split}.bin)": f"{order[split]['tokens']} tokens of sha256 {order[split]['sha256'][:12]}"
        for split in SPLITS
    }
    return shape | files | {"run.seed": order["seed"], "train.batch": order["batch"]}
