"""A run that starts from pretrained weights: reading them, and recording where they came from."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

from shmap_tp.config.choices import HeldIn
from shmap_tp.config.schema import Config, ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.model.adapters import split_factors
from shmap_tp.model.sharded_model import held_in
from shmap_tp.model.transformer import Transformer
from shmap_tp.pretrained.peft import SavedAdapter, load_factors
from shmap_tp.pretrained.reading import load_parameters
from shmap_tp.pretrained.source import Source, open_source
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import writing
from shmap_tp.training.checkpoint_files import read_facts, restore_parameters, saved_config
from shmap_tp.training.environment import USE, compute_dtype, precision_of, require_host_memory
from shmap_tp.training.resume import BASE, require_same_base
from shmap_tp.training.step import CONFIGURED, Components

RECORD = "pretrained"
"""The directory in run.dir with config.json and the tokenizer of the model that the run started from."""
RECORD_FILE = "source.json"


def with_pretrained(config: Config, components: Components = CONFIGURED) -> Components:
    """`components` with the parameters of model.from_pretrained, if `config` has one."""
    if config.model.from_pretrained is None or components.load_parameters is not None:
        return components
    return replace(components, load_parameters=load_and_record, identify_parameters=identify)


def identify(config: Config) -> dict[str, str]:
    """Where model.from_pretrained is, and the hash of all its weights.  Raises UserError if it cannot be read."""
    source = _open_base(config.model.from_pretrained, "if it was moved, name it with model.from_pretrained=DIR")
    return {"path": str(source.directory.resolve()), "sha256": source.sha256()}


def _open_base(directory: str, way_out: str) -> Source:
    """The weights beside which an adapter was trained.  Raises UserError if they cannot be read."""
    try:
        return open_source(directory)
    except UserError as error:
        raise UserError(f"the base of the adapter cannot be read: {error};\n{way_out}") from error


def load_and_record(config: Config, shapes: Transformer) -> Transformer:
    """The parameters of model.from_pretrained, and no factors of adapters.  Their origin is recorded in the run
    directory."""
    source = open_source(config.model.from_pretrained)
    parameters = load_parameters(source, config.model, split_factors(shapes)[1])
    if jax.process_index() == 0:
        record(source, Path(config.run.dir))
    print_on_process_0(f"starting from {source.directory} ({source.family.architecture}, {source.fingerprint()[:12]})")
    return parameters


def record(source: Source, run: Path) -> None:
    """Write RUN/pretrained: config.json, the tokenizer's files, and where the weights are and what they are."""
    directory = run / RECORD
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for file in [source.directory / "config.json", *source.companions()]:
            shutil.copyfile(file, directory / file.name)
        origin = {
            "from": str(source.directory.resolve()),
            "architecture": source.family.architecture,
            "sha256 of config.json and of the description and first bytes of each tensor": source.fingerprint(),
        }
        (directory / RECORD_FILE).write_text(json.dumps(origin, indent=2) + "\n")


def recorded_source(checkpoint: PathLike, config: Config) -> Source | None:
    """What the run of a checkpoint started from, as `record` wrote it: config.json and tokenizer, without weights.

    None if the run did not start from pretrained weights, or its directory is not there any more.
    """
    for run in (Path(checkpoint).parents[1], Path(config.run.dir)):
        if (run / RECORD / "config.json").is_file():
            return replace(open_source(str(run / RECORD)), run=run)
    return None


def pretrained_parameters(
    config: Config, shapes: Transformer, dtype: str | None = None, adapter: SavedAdapter | None = None
) -> tuple[Transformer, Source]:
    """(the parameters of model.from_pretrained, where they are from); their matrices are held in `dtype`, or as in
    `shapes`, and the factors are those of `adapter`, or None.

    Raises UserError if they cannot be read, or the memory of a machine with emulated devices is too small.
    """
    source = open_source(config.model.from_pretrained)
    held = shapes
    if dtype is not None:
        held = held_in(shapes, compute_dtype(precision_of(dtype)), int8=dtype == HeldIn.int8)
    require_host_memory(held, purpose=USE)
    base = load_parameters(source, config.model, split_factors(held)[1])
    return base if adapter is None else eqx.combine(load_factors(adapter, config.model, held), base), source


def restored_parameters(checkpoint: PathLike, shapes: Transformer, held: Transformer | None = None) -> Transformer:
    """The parameters of a checkpoint, as `restore_parameters` reads them; one that has adapters alone is completed with
    the frozen parameters that it names.

    Raises UserError if these are not there any more, or are others.
    """
    base, held = recorded_base(checkpoint), shapes if held is None else held
    if base is None:
        return restore_parameters(checkpoint, shapes, held)
    factors = restore_parameters(checkpoint, split_factors(shapes)[0], split_factors(held)[0])
    return eqx.combine(factors, base_of(checkpoint, base, saved_config(checkpoint).model, held))


def with_base_on_disk(
    parameters: Transformer, config: Config, base: Mapping[str, str] | None, shapes: Transformer
) -> Transformer:
    """`parameters` of a model with adapters, the frozen ones in float32 as they are on disk, if what is held of them is
    their rounding to another dtype.

    They are read from `base`, or without it from model.from_pretrained.  Raises UserError if they cannot be.
    """
    factors, held = split_factors(parameters)
    directory = config.model.from_pretrained if base is None else base["path"]
    if directory is None or all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(held)):
        return parameters
    source = _open_base(directory, "put it back there to merge it; or write the adapter alone, which needs no base")
    exact = load_parameters(source, config.model, split_factors(held_in(shapes, jnp.float32))[1])
    is_rounding = jax.jit(lambda w, of: jnp.all(w == of.astype(w.dtype)))
    found = jax.tree.map(lambda w, of: of if is_rounding(w, of) else w, held, exact)
    return eqx.combine(factors, found)


def recorded_base(checkpoint: PathLike) -> dict[str, str] | None:
    """ "path" and "sha256" of the frozen parameters that a checkpoint leaves out; None if it has all."""
    facts = read_facts(checkpoint)
    return facts.get(BASE) if isinstance(facts, dict) else None


def base_of(checkpoint: PathLike, recorded: dict[str, str], model: ModelConfig, shapes: Transformer) -> Transformer:
    """The frozen parameters that a checkpoint leaves out and names as `recorded`; the factors are None."""
    way_out = (
        f"put it back there, since checkpoint {checkpoint} has the adapter alone; or export the adapter with "
        f"`python -m shmap_tp.pretrained export`, and use --pretrained DIR --adapter OUT"
    )
    source = _open_base(recorded["path"], way_out)
    require_same_base(recorded | {"sha256": source.sha256()}, recorded, f"checkpoint {checkpoint}")
    return load_parameters(source, model, split_factors(shapes)[1])
