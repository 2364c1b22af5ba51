"""The set-up of a run on a machine before its functions are built: directories, data, compilation cache, dtype."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config, Precision
from shmap_tp.data.prepare import prepare_missing
from shmap_tp.runtime.files import make_directory


def prepare_environment(config: Config) -> None:
    """Create the run directory, prepare the data if data.source names a local source, and set up the compilation cache.

    Raises `UserError` if a directory cannot be written.
    """
    make_directory("run.dir", config.run.dir)
    prepare_missing(config.data)
    if config.run.compilation_cache:
        make_directory("run.compilation_cache", config.run.compilation_cache)
        jax.config.update("jax_compilation_cache_dir", str(Path(config.run.compilation_cache).resolve()))


def compute_dtype(precision: Precision) -> DTypeLike:
    """The dtype of activations and matmuls: `auto` is float32 on CPU and bfloat16 elsewhere."""
    if precision == Precision.auto:
        precision = Precision.float32 if jax.devices()[0].platform == "cpu" else Precision.bfloat16
    return jnp.dtype(str(precision))
