"""A run that starts from pretrained weights: reading them, and recording where they came from."""

import json
import shutil
from dataclasses import replace
from os import PathLike
from pathlib import Path

import jax

from shmap_tp.config.schema import Config, Precision
from shmap_tp.errors import UserError
from shmap_tp.model.transformer import Transformer
from shmap_tp.pretrained.reading import held_in, load_parameters
from shmap_tp.pretrained.source import Source, open_source
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import writing
from shmap_tp.training.environment import USE, compute_dtype, require_host_memory
from shmap_tp.training.step import CONFIGURED, Components

RECORD = "pretrained"
"""The directory in run.dir with config.json and the tokenizer of the model that the run started from."""
RECORD_FILE = "source.json"


def with_pretrained(config: Config, components: Components = CONFIGURED) -> Components:
    """`components` with the parameters of model.from_pretrained, if `config` has one."""
    if config.model.from_pretrained is None or components.load_parameters is not None:
        return components
    return replace(components, load_parameters=load_and_record)


def load_and_record(config: Config, shapes: Transformer) -> Transformer:
    """The parameters of model.from_pretrained.  Their origin is recorded in the run directory."""
    source = open_source(config.model.from_pretrained)
    parameters = load_parameters(source, config.model, shapes)
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
            "sha256 of config.json and of the description and first 4096 bytes of each tensor": source.fingerprint(),
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


def pretrained_parameters(config: Config, shapes: Transformer, dtype: str = "float32") -> tuple[Transformer, Source]:
    """(the parameters of model.from_pretrained with their matrices of the precision `dtype`, where they are from).

    Raises UserError if they cannot be read, or the memory of a machine with emulated devices is too small.
    """
    if config.model.from_pretrained is None:
        raise UserError("model.from_pretrained=null names no Hugging Face directory")
    source = open_source(config.model.from_pretrained)
    held = held_in(shapes, compute_dtype(Precision(dtype)))
    require_host_memory(held, purpose=USE)
    return load_parameters(source, config.model, held), source
