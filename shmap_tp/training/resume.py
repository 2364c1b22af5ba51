"""Where a run starts: from new parameters or from the newest intact checkpoint; and which starts are refused."""

from collections.abc import Callable
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
from shmap_tp.model.transformer import Transformer
from shmap_tp.runtime.console import say
from shmap_tp.training.checkpoint import Checkpoints, broadcast_from_process_0
from shmap_tp.training.metrics import read_metrics
from shmap_tp.training.step import State, StepFunctions


def restore_or_initialize(
    config: Config,
    functions: StepFunctions,
    batches: Batches,
    checkpoints: Checkpoints,
    load_parameters: Callable[[Config, Transformer], Transformer] | None = None,
) -> tuple[State, int | None]:
    """(state, step) of the newest intact checkpoint, or (new state, None), as `checkpoint.resume` says.

    A new state has the parameters of `load_parameters`, if it is given, instead of random ones.

    Raises `UserError` if there is a checkpoint but resuming was not requested, if resuming was requested but nothing
    can be resumed, or if the checkpoint is of a run with another model or data order.
    """
    directory, resume = config.checkpoint.dir, config.checkpoint.resume
    steps = checkpoints.steps()
    if resume == Resume.never and steps:
        raise UserError(
            f"{directory} has checkpoints of this run up to step {steps[0]}; resume it with --resume, "
            f"or start another run with run.name=... or run.dir=..."
        )
    if resume == Resume.must and not steps:
        raise UserError(
            f"checkpoint.resume=must (--resume): no checkpoint in {directory}; leave it out to start a new run there "
            f"(checkpoint.resume=never), or name the run with run.dir=..."
        )
    first_save_unfinished = checkpoints.first_save_unfinished()
    step = checkpoints.newest_intact() if steps else None
    if step is None:
        if steps and not (resume == Resume.if_present and first_save_unfinished):
            raise UserError(
                f"no checkpoint in {directory} is intact (found: {', '.join(map(str, steps))}); restore one from a "
                f"copy, or start another run with run.dir=..."
            )
        _refuse_to_overwrite_metrics(config)
        checkpoints.set_aside_after(-1)
        if load_parameters is None:
            return functions.init(), None
        return functions.init_from(load_parameters(config, functions.shapes.params)), None
    return _restore(step, config, functions, batches, checkpoints), step


def _restore(step: int, config: Config, functions: StepFunctions, batches: Batches, checkpoints: Checkpoints) -> State:
    """The state of the checkpoint of `step`; newer ones, which are damaged, are renamed."""
    directory, facts = config.checkpoint.dir, checkpoints.facts(step)
    _refuse_differences(facts, config, batches.identity, f"checkpoint {directory}/{step}")
    state = checkpoints.restore(step, functions.shapes)
    if int(state.step) != step:
        raise UserError(
            f"checkpoint {directory}/{step} contains the state after step {int(state.step)}: rename the directory to "
            f"that number"
        )
    checkpoints.set_aside_after(step)
    dp, mp = facts["mesh"]
    say(f"resuming from step {step} of {directory}, saved on mesh dp={dp}, mp={mp}")
    return state


def _refuse_to_overwrite_metrics(config: Config) -> None:
    """Raise `UserError` if a new run would empty the metrics.jsonl of a run whose checkpoints are elsewhere.

    With if_present, a run that was killed before its first checkpoint starts again: its metrics are of lost steps.
    """
    file, directory = Path(config.run.dir) / "metrics.jsonl", config.checkpoint.dir
    last = max([line["step"] for line in read_metrics(file)], default=-1) if jax.process_index() == 0 else -1
    if last >= 0 and config.checkpoint.resume == Resume.if_present:
        try:  # read without validation: a file of an earlier version may lack keys
            saved = OmegaConf.load(file.with_name("config.yaml"))
        except (OSError, yaml.YAMLError):
            saved = OmegaConf.create()
        last = -1 if OmegaConf.select(saved, "checkpoint.dir") == directory else last
    if (last := broadcast_from_process_0(last)) >= 0:
        raise UserError(
            f"{file} has the metrics of a run up to step {last}, which a new run would delete: {directory} has no "
            f"checkpoint;\n"
            f"name its own checkpoint.dir=... with --resume, start another run with run.dir=..., or remove the file"
        )


def _refuse_differences(saved: dict[str, Any], config: Config, identity: dict[str, Any], checkpoint: str) -> None:
    """Raise `UserError` if the model or the data order differs from what was saved."""
    before = _fixed_settings(saved["config"]["model"], saved["data"])
    now = _fixed_settings(to_dict(config.model), identity)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{checkpoint} is of another run: {key} was {before.get(key)}, is {now.get(key)};\n"
                f"restore the old value to resume, or start another run with run.dir=..."
            )


def _fixed_settings(model: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Everything that must not change within a run, by configuration key.

    Names may change, and settings that choose how the same result is computed.
    """
    may_change = {"name", "from_pretrained", "remat", "offload", "attention", "attention_chunk"}
    shape = {f"model.{key}": model[key] for key in model.keys() - may_change}
    files = {
        f"data.dir ({split}.bin)": f"{identity[split]['tokens']} tokens of sha256 {identity[split]['sha256'][:12]}"
        for split in SPLITS
    }
    return shape | files | {"run.seed": identity["seed"], "train.batch": identity["batch"]}
