"""The start of a run: which starts are refused, what a new or resumed run starts from, and its config.yaml.

config.yaml of the run directory is the configuration of the newest start, as it was requested; `--cfg
RUN_DIRECTORY/config.yaml` loads it again.  What a start would overwrite is kept: a file of this program with other
values is copied to config.1.yaml, config.2.yaml, ...; a file of anybody else is refused.
"""

import itertools
import shutil
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import equinox as eqx

from shmap_tp.config.choices import MomentumDtype, OptimizerName, Resume
from shmap_tp.config.compose import to_dict, to_yaml
from shmap_tp.config.schema import Config, ModelConfig
from shmap_tp.config.validate import named_sizes
from shmap_tp.config.yaml_files import HEADER, flat_values
from shmap_tp.data.batches import Batches
from shmap_tp.data.metadata import SPLITS
from shmap_tp.errors import DivergedError, UserError, shown
from shmap_tp.model.adapters import split_factors
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import writing
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.components_file import require_components
from shmap_tp.training.step import CONFIGURED, Components, State, StepFunctions

NOT_OF_THE_RUN = {"checkpoint.resume"}
"""Keys that say how to start, not what to train; a change of them alone is not reported."""
MAY_CHANGE = {
    *("name", "from_pretrained", "remat", "offload", "row_major", "attention", "attention_chunk"),
    *("expert_capacity", "router_bias_rate"),
}
"""Keys of the section `model` that may change within a run: names, and how the same result is computed."""
MAX_LISTED = 10

STREAK_LIMITS = 3
"""A checkpoint saved after this many times guard.max_consecutive consecutive skipped steps is not resumed."""

BASE = "base"
"""The fact that a checkpoint without frozen parameters has besides: what these are."""
FROM = "model.from_pretrained"

Start = tuple[int, dict[str, Any]]
"""The step and the facts of the checkpoint that a run continues from."""

TOKENIZER_HASH = "data.dir (sha256 of tokenizer.json)"
DATA_ORDER = "the data order"


def find_start(
    config: Config, batches: Batches, checkpoints: Checkpoints, components: Components = CONFIGURED
) -> Start | None:
    """The newest intact checkpoint, or None for a new state, as `checkpoint.resume` says.

    Raises `UserError` if there is a checkpoint but resuming was not requested, if resuming was requested but nothing
    can be resumed, or if the checkpoint is of a run with another model, components or data order.
    """
    directory, resume = config.checkpoint.dir, config.checkpoint.resume
    steps, local = checkpoints.steps(), checkpoints.newest_local
    if resume == Resume.never and (steps or local):
        raise UserError(
            f"{directory} has checkpoints of this run up to step {max([*steps, local or 0])}; resume it with --resume, "
            f"or start another run with run.dir=..."
        )
    if resume == Resume.must and not (steps or local):
        raise UserError(
            f"checkpoint.resume=must (--resume): no checkpoint in {directory}; leave it out to start a new run there "
            f"(checkpoint.resume=never), or name the run with run.dir=..."
        )
    first_save_unfinished = checkpoints.first_save_unfinished()
    step = checkpoints.newest_intact() if steps or local else None
    if step is None:
        if steps and not (resume == Resume.if_present and first_save_unfinished):
            raise UserError(
                f"no checkpoint in {directory} is intact (found: {', '.join(map(str, steps))}); restore one from a "
                f"copy, or start another run with run.dir=..."
            )
        return None
    facts = _facts(step, config, batches, checkpoints)
    require_components(facts, components, f"{directory}/{step}")
    return step, facts


def restore_or_initialize(
    start: Start | None,
    config: Config,
    functions: StepFunctions,
    checkpoints: Checkpoints,
    components: Components = CONFIGURED,
    base: dict[str, str] | None = None,
) -> State:
    """The state of the checkpoint that `find_start` has found, or a new one.

    A new state has the parameters of `components.load_parameters`, if it is given, instead of random ones; so have the
    frozen parameters that a checkpoint leaves out, if `base` says that they are the same.
    """
    load_parameters = components.load_parameters
    if start is None:
        checkpoints.set_aside_after(-1)
        if load_parameters is None:
            return functions.init()
        return functions.init_from(load_parameters(config, functions.shapes.params))
    step, facts = start
    state = _restore(step, config, functions, checkpoints, with_base=BASE not in facts)
    if BASE in facts:
        if load_parameters is None or base is None:
            raise UserError(
                f"{config.checkpoint.dir} has the adapter alone; name its base: {FROM}={facts[BASE]['path']}"
            )
        require_same_base(base, facts[BASE], config.checkpoint.dir)
        _, frozen = split_factors(load_parameters(config, functions.shapes.params))
        state = replace(state, params=eqx.combine(state.params, frozen))
    _announce(step, facts, config.checkpoint.dir, checkpoints.place(step))
    return state


def _announce(step: int, facts: dict[str, Any], directory: str, place: str) -> None:
    """Print where the run goes on, and what is not as it was."""
    mesh = ", ".join(named_sizes(facts["mesh"]))
    print_on_process_0(f"resuming from step {step} of {place}, saved on mesh {mesh}")
    if "order" not in facts["data"]:
        print_on_process_0(
            f"checkpoint {directory}/{step} was saved by a version that shuffled otherwise: in the epoch of that "
            f"step some sequences are read twice and others not; every later epoch has each once"
        )


def _facts(step: int, config: Config, batches: Batches, checkpoints: Checkpoints) -> dict[str, Any]:
    """The facts of the checkpoint of `step`, if the run can go on from it."""
    directory = config.checkpoint.dir
    if step > config.train.steps:
        raise UserError(
            f"train.steps={config.train.steps} is below step {step}, which the checkpoint in {checkpoints.place(step)} "
            f"has done; nothing was changed.\nGive train.steps={step} or more, or move newer checkpoints elsewhere to "
            f"resume an earlier one"
        )
    facts = checkpoints.facts(step)
    if not (isinstance(facts, dict) and facts.keys() >= {"config", "data", "mesh"}):
        raise UserError(
            f"checkpoint {directory}/{step} was saved by Trainer.save or by another program, without the data, so "
            f"a run cannot resume from it.\nContinue with Trainer.restore, or name another checkpoint.dir"
        )
    _refuse_differences(facts, config, batches.identity, step)
    return facts


def _restore(
    step: int, config: Config, functions: StepFunctions, checkpoints: Checkpoints, *, with_base: bool
) -> State:
    """The state of the checkpoint of `step`, frozen parameters `with_base`; newer ones, which are damaged, are
    renamed."""
    directory = config.checkpoint.dir
    state = checkpoints.restore(step, functions.shapes if with_base else without_base(functions.shapes))
    if int(state.step) != step:
        raise UserError(
            f"checkpoint {directory}/{step} contains the state after step {int(state.step)}: rename the directory to "
            f"that number"
        )
    _refuse_endless_streak(int(state.guard.in_a_row), step, config, checkpoints)
    checkpoints.set_aside_after(step)
    return state


def require_same_base(
    found: dict[str, str], recorded: dict[str, str], checkpoint: str, given_by: str = f"{FROM}=..."
) -> None:
    """Raise `UserError` unless the adapter was trained beside the weights `found`; `given_by` is what names them."""
    if found["sha256"] != recorded["sha256"]:
        raise UserError(
            f"{checkpoint} has an adapter of other weights than those of {found['path']} (sha256 "
            f"{found['sha256'][:12]}):\nit was trained beside {recorded['path']} (sha256 {recorded['sha256'][:12]}); "
            f"restore those, or name a copy of them with {given_by}"
        )


def without_base(state: State) -> State:
    """A state (arrays or shapes), its parameters the factors of adapters alone."""
    return eqx.tree_at(lambda state: state.params, state, split_factors(state.params)[0])


def _refuse_endless_streak(skipped: int, step: int, config: Config, checkpoints: Checkpoints) -> None:
    """Raise `DivergedError` if so many steps before `step` were skipped that more attempts do not help.

    Its exit code is one after which neither pod.sh nor slurm.sh starts the run again.
    """
    limit = config.guard.max_consecutive
    if limit is None or skipped < STREAK_LIMITS * limit:
        return
    older = [str(other) for other in checkpoints.steps() if other < step]
    raise DivergedError(
        f"checkpoint {config.checkpoint.dir}/{step} was saved after {skipped} skipped steps in a row, at least "
        f"{STREAK_LIMITS} times guard.max_consecutive={limit}: it is not resumed again.\n"
        f"Remove it to resume from "
        + (f"an older one ({', '.join(older)})" if older else "the beginning")
        + " with a lower optimizer.learning_rate, or raise guard.max_consecutive"
    )


def _refuse_differences(saved: dict[str, Any], config: Config, identity: dict[str, Any], step: int) -> None:
    """Raise `UserError` if the model, or what was read until `step`, differs from what was saved."""
    checkpoint = f"checkpoint {config.checkpoint.dir}/{step}"
    only_source = "sources" not in {**saved["data"], **identity}
    before = _fixed_settings(saved["config"]["model"], saved["data"], only_source)
    now = _fixed_settings(to_dict(config.model), identity, only_source)
    # What a run from before there was Muon, or another dtype of the momentum, does not name.
    for key, first in (("name", OptimizerName.adamw), ("momentum_dtype", MomentumDtype.float32)):
        before[f"optimizer.{key}"] = str(saved["config"].get("optimizer", {}).get(key, first))
        now[f"optimizer.{key}"] = str(getattr(config.optimizer, key))
    if not only_source:
        _refuse_another_past(saved["data"], identity, step, checkpoint)
    for key in (TOKENIZER_HASH, DATA_ORDER):
        if None in (before[key], now[key]):  # bytes, or from before it was recorded
            del before[key], now[key]
    for key in _different(before, now):
        raise UserError(
            f"{checkpoint} is of another run: {key} was {before.get(key)}, is {now.get(key)};\n"
            f"restore the old value to resume, or start another run with run.dir=..."
        )


def _refuse_another_past(saved: dict[str, Any], identity: dict[str, Any], step: int, checkpoint: str) -> None:
    """Raise UserError if the identities `saved` in the checkpoint of `step` and of this run differ in what the steps
    before `step` read.

    Later steps may read other sources, with other shares.  A source is known by its files, so its name may change, and
    data.dir may become one of several sources.
    """
    for was, now in zip_longest(_phases(saved, step), _phases(identity, step), fillvalue=(None, None, "as before")):
        if was[:2] != now[:2]:
            raise UserError(
                f"{checkpoint} is of another run, which read {was[2]}, and this one {now[2]};\nwhat was read cannot "
                f"change. Let changes begin at step {step}: from_step: {step}, or weight: {{0: 0.7, {step}: 0.5}} with "
                f"the weight of then"
            )


def _phases(identity: dict[str, Any], step: int) -> list[tuple[int, dict[tuple[str | None, ...], str], str]]:
    """(first step, share by the sha256 of the files, both in words) of each phase that begins before `step`."""
    only = {"data.dir": {split: identity[split] for split in SPLITS if split in identity}}
    sources, phases = identity.get("sources", only), identity.get("phases", {"0": {"data.dir": "1"}})
    found = []
    for first, shares in phases.items():
        if not first.isdecimal() or int(first) >= step:
            continue
        files = {
            name: tuple(each[split].get(key) for key in ("sha256", "counted") for split in SPLITS)
            for name, each in sources.items()
        }
        texts = [f"{share} {name} (sha256 {files[name][0][:12]})" for name, share in shares.items() if name in files]
        share_of = {files.get(name, (name,)): share for name, share in shares.items()}
        found.append((int(first), share_of, f"from step {first} {' + '.join(texts)}"))
    return sorted(found, key=lambda phase: phase[0])


def require_same_model(saved: ModelConfig, now: ModelConfig, checkpoint: str) -> None:
    """Raise `UserError` unless both compute the same of the same parameters."""
    before, after = _model_settings(to_dict(saved)), _model_settings(to_dict(now))
    if keys := _different(before, after):
        changed = ", ".join(f"{key} was {before.get(key)}, is {after.get(key)}" for key in keys)
        raise UserError(f"checkpoint {checkpoint} is of another model: {changed}; give the values of the checkpoint")


def _different(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The keys whose values differ, in order; an adapter that only one of them has is named by its rank."""
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    has_no_adapter = 0 in (before.get("model.adapter.rank"), after.get("model.adapter.rank"))
    return [key for key in keys if not has_no_adapter or key == "model.adapter.rank" or ".adapter." not in key]


def _model_settings(model: dict[str, Any]) -> dict[str, Any]:
    """The values of the section `model` that must not change within a run, by key."""
    settings = {f"model.{key}": model[key] for key in model.keys() - MAY_CHANGE - {"adapter"}}
    settings["model.router_bias_rate"] = None if model.get("router_bias_rate") is None else "a number"
    adapter = model.get("adapter", {"rank": 0})  # a run from before there were adapters has none
    return settings | {f"model.adapter.{key}": adapter[key] for key in (adapter if adapter["rank"] else ["rank"])}


def _fixed_settings(model: dict[str, Any], identity: dict[str, Any], only_source: bool = True) -> dict[str, Any]:
    """What must not change within a run, by configuration key; the files only if data.dir has all of them."""
    files = {
        f"data.dir ({split}.bin)": f"{identity[split]['tokens']} tokens of sha256 {identity[split]['sha256'][:12]}"
        for split in (SPLITS if only_source else ())
    }
    for split in SPLITS if only_source else ():
        files[f"data.dir ({split}.counted)"] = str(identity[split].get("counted"))[:12]
    files[TOKENIZER_HASH] = identity.get("tokenizer", {}).get("sha256")
    end = identity.get("isolated")  # a run from before documents were isolated has none
    documents = "joined" if end is None else f"isolated (id {end} ends them)"
    files[DATA_ORDER] = identity.get("order")
    data = {"run.seed": identity["seed"], "train.batch": identity["batch"], "data.documents": documents}
    return _model_settings(model) | files | data


def refuse_foreign_config(directory: str) -> None:
    """Raise UserError if `directory` has a config.yaml that this program did not write."""
    file = Path(directory) / "config.yaml"
    try:
        with file.open("rb") as stream:
            if stream.readline().rstrip() == HEADER.encode():
                return
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; make it readable, or use another run.dir") from error
    raise UserError(
        f"run.dir={directory} has a config.yaml that was not written by a run, and that this one would overwrite;\n"
        f"use another run.dir, or rename the file"
    )


def write_run_config(config: Config, directory: Path) -> None:
    """Write config.yaml.  If it had other values, print the differences, and keep a copy."""
    file = directory / "config.yaml"
    with writing(file):
        new = directory / "config.yaml.new"
        new.write_text(f"{HEADER}\n{to_yaml(config)}", encoding="utf-8")
        if file.exists() and (changes := _changes(flat_values(file), flat_values(new))):
            number = next(n for n in itertools.count(1) if not (directory / f"config.{n}.yaml").exists())
            earlier = directory / f"config.{number}.yaml"
            shutil.copyfile(file, earlier)
            print_on_process_0(f"the configuration differs from that of the last start, which is now in {earlier}:")
            for line in changes[:MAX_LISTED]:
                print_on_process_0(f"  {line}")
            if len(changes) > MAX_LISTED:
                print_on_process_0(f"  and {len(changes) - MAX_LISTED} more")
        new.replace(file)


def _changes(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """One line for each key whose value differs, "key: old -> new"."""
    if old is None:
        return ["the earlier file is damaged"]
    keys = [key for key in {**new, **old} if key not in NOT_OF_THE_RUN and old.get(key) != new.get(key)]
    return [f"{key}: {shown(old.get(key))} -> {shown(new.get(key))}" for key in keys]
