"""A model, or the checkpoint of a run, as a Hugging Face directory."""

from dataclasses import replace
from pathlib import Path

import jax

from shmap_tp.config.schema import Config, Zero
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import is_stacked
from shmap_tp.pretrained.reading import paths_of
from shmap_tp.pretrained.source import Source
from shmap_tp.pretrained.start import recorded_source
from shmap_tp.pretrained.writing import MAX_SHARD_BYTES, pieces_of, save_parameters, target_of
from shmap_tp.training.checkpoint_files import find_checkpoint, read_chunks, saved_config
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.model_functions import build_model_functions


def save_model(
    out: Path,
    config: Config,
    parameters: Transformer,
    source: Source | None,
    dtype: str,
    shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `parameters` to the new directory `out`; `source` is what they were read from, if they were.

    Every process of a mesh calls it and writes what it has, to a file system that all share.
    """
    target, stacked = target_of(config.model, source), paths_of(is_stacked(parameters))
    save_parameters(out, target, config.model, stacked, pieces_of(parameters), dtype, shard_bytes=shard_bytes)


def export_checkpoint(directory: str, out: Path, step: int | None, dtype: str) -> tuple[Path, str]:
    """Write a checkpoint of a run to the new directory `out`, one chunk of its files at a time.

    Returns (the checkpoint, the architecture of what was written).
    Raises UserError if there is no such checkpoint or its model cannot be expressed, StorageError if the disk is full.
    """
    checkpoint = find_checkpoint(directory, step)
    config = saved_config(checkpoint)
    one_device = replace(config.mesh, dp=1, mp=1, tile=None, slices=1, processes=1, zero=Zero.none)
    config = replace(config, mesh=one_device)
    shapes = build_model_functions(
        config, make_mesh(config.mesh, jax.devices()[:1]), compute_dtype(config.train.precision)
    ).shapes
    target, stacked = target_of(config.model, recorded_source(checkpoint, config)), paths_of(is_stacked(shapes))
    chunks = read_chunks(checkpoint, shapes)
    save_parameters(out, target, config.model, stacked, chunks, dtype, shard_bytes=MAX_SHARD_BYTES)
    return Path(str(checkpoint)), target.family.architecture
