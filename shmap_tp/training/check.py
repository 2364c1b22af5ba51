"""The summary of a configuration that `--check` prints, from the configuration alone.

Nothing is written, no device is used and no token is read.  What depends on them is checked when a run starts.
"""

import os
from pathlib import Path

from shmap_tp.config.mesh_sizes import product_in_words
from shmap_tp.config.schema import AUTO, Config, DataConfig
from shmap_tp.config.sources import describe_shares, each_source, phases
from shmap_tp.config.values import SCHEMES, value_of
from shmap_tp.data.batches import check_alike, check_pairs, check_rows, data_warning, isolating_id
from shmap_tp.data.location import STDLIB, prepare_command
from shmap_tp.data.metadata import SPLITS, Meta, read_meta
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from shmap_tp.model.components import ModelComponents
from shmap_tp.model.flops import parameters
from shmap_tp.parallel.mesh import axis_sizes
from shmap_tp.training.optimizer import describe_schedule


def check(config: Config, export: str, components: ModelComponents) -> str:
    """The summary, in lines, of a `config` that `compose.load` has returned; `export` says as what its model can be
    exported.

    Raises UserError if its mesh cannot be formed on any devices, or a directory cannot be written.
    """
    try:
        _check_directories(config)
        sources = {name: _data(data, config) for name, data in each_source(config.data).items()}
        check_alike({name: meta for name, (*_, meta) in sources.items() if meta})
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; choose another directory") from error
    later = "Devices, memory, tokens and checkpoints are checked when a run starts."
    found = {name: (what, warning) for name, (what, warning, _) in sources.items()}
    return f"{summary(config, found, export, components)}\nThe configuration is valid.  {later}"


def summary(
    config: Config, sources: dict[str, tuple[str, str | None]], export: str, components: ModelComponents
) -> str:
    """What a `config` would train, in lines; `sources` are (what is in it, why it may be the wrong one) by name, and
    `export` says as what the model can be exported."""
    model, train, run = config.model, config.train, config.run
    tokens = train.batch * model.context
    lines = {
        "model": f"{model.name}: {parameters(model, components=components):,} parameters, {model.layers} layers of "
        f"width {model.width}",
        "mesh": _mesh(config),
        "batch": f"{train.batch} sequences x {model.context} tokens = {tokens:,} tokens per step, "
        f"in {train.microbatches} microbatches",
        "steps": f"{train.steps:,}, together {train.steps * tokens:,} tokens",
        **({} if train.dpo_beta is None else {"objective": f"preferences (DPO), beta {train.dpo_beta}"}),
        "learning rate": describe_schedule(config.optimizer, train.steps),
        **_data_lines(config, sources),
        "export": export,
        "run.dir": run.dir,
        "checkpoint.dir": f"{config.checkpoint.dir}, checkpoint.resume={config.checkpoint.resume}",
    }
    warnings = [warning for _, warning in sources.values() if warning]
    return "\n".join([*(f"{name:<15} {text}" for name, text in lines.items()), *warnings])


def _data_lines(config: Config, sources: dict[str, tuple[str, str | None]]) -> dict[str, str]:
    """What is in data.dir, or in each of data.sources, with its shares."""
    if not config.data.sources:
        return {"data": f"{config.data.dir}: {sources[''][0]}"}
    parts, steps = phases(config.data), config.train.steps
    return {
        f"source {name}": f"{data.dir}: {describe_shares(name, parts, steps)}; {sources[name][0]}"
        for name, data in each_source(config.data).items()
    }


def _check_directories(config: Config) -> None:
    """Raise UserError if what exists of a directory that a run creates is a file, or must not be written."""
    for key in SCHEMES:
        path = value_of(config, key)
        if path is None or "://" in path or (key == "data.dir" and config.data.source != STDLIB):
            continue
        there = next(part for part in (Path(path).absolute(), *Path(path).absolute().parents) if part.exists())
        if not there.is_dir():
            raise UserError(f"{key}={path} cannot be written: {there} is a file; choose another")
        if not os.access(there, os.W_OK):
            raise UserError(f"{key}={path} cannot be written: no permission for {there}; choose another")


def _mesh(config: Config) -> str:
    mesh = config.mesh
    modes = f"tensor_parallel={mesh.tensor_parallel}, zero={mesh.zero}, processes={mesh.processes}"
    if config.model.experts:
        modes += f", ep={mesh.ep}"
    if mesh.dp == AUTO:
        rest = "all devices / mp" if mesh.cp == 1 else "all devices / cp / mp"
        return f"{product_in_words(mesh).replace(AUTO, f'{AUTO} ({rest})')}; {modes}"
    axis_sizes(mesh)
    return f"{product_in_words(mesh)} = {mesh.devices} devices; {modes}"


def _data(data: DataConfig, config: Config) -> tuple[str, str | None, Meta | None]:
    """(whether data.dir is prepared, or how it is, in words; why it may be the wrong one; meta.json where it is)."""
    model = config.model
    if "://" in data.dir:
        return "looked at when a run starts", None, None
    if all((Path(data.dir) / f"{split}.bin").is_file() for split in SPLITS):
        meta = read_meta(Path(data.dir))
        check_rows(meta, data, model)
        isolating_id(meta, data, model)
        check_pairs(meta, data, config.train)
        return "prepared", data_warning(data, model, meta), meta
    if data.source == STDLIB:
        meta = Meta(dtype="uint16", vocabulary=Bytes.vocabulary, tokenizer=Bytes.name)
        return f"not prepared; a run prepares it (data.source={STDLIB})", data_warning(data, model, meta), meta
    more = "; --help lists other sources" if data.source is None else ""
    return f"not prepared; {prepare_command(data, model.from_pretrained, data.dir)}{more}", None, None
