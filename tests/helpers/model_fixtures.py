"""Five meshes, a configuration whose model compiles in a second, and random parameters."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from omegaconf import DictConfig, OmegaConf

import shmap_tp
from shmap_tp.config import compose
from shmap_tp.config.choices import FsdpGradients, TensorParallelMode, Zero
from shmap_tp.config.schema import Config, MeshConfig
from shmap_tp.config.validate import validate
from shmap_tp.parallel.mesh import make_mesh

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=str)

MODEL = (
    "width=24 layers=2 heads=8 kv_heads=8 head_dim=4 ffn=40 vocabulary=50 vocabulary_multiple=32 context=7 "
    "attention_chunk=7 init_std=0.1"
)
"""50 ids in 64 rows: at mp=8 one device holds only padding, and another holds some padding."""


def config(*overrides: str) -> Config:
    """conf/base.yaml with the small model and `overrides`, each with its full key, such as `model.layers=3`.

    Hydra composes the files once for each choice of them, in some tenths of a second; the keys are set in the result.
    So a key that another one follows (run.name: run.dir, checkpoint.dir) and messages about bad input need `load`.
    """
    files = [override for override in overrides if "." not in override.partition("=")[0]]
    keys = OmegaConf.from_dotlist([override for override in overrides if override not in files])
    result = OmegaConf.to_object(OmegaConf.merge(_composed(*files), keys))
    validate(result)
    return result


@cache
def _composed(*files: str) -> DictConfig:
    model = [f"model.{setting}" for setting in MODEL.split()]
    overrides = ["model=test", *model, "train.batch=8", *files]
    return OmegaConf.structured(compose.load(str(compose.CONF / "base.yaml"), overrides))


def mesh_config(dp: int, mp: int, **others: Any) -> MeshConfig:
    """A MeshConfig with every feature off except `others`."""
    defaults = {
        "tensor_parallel": TensorParallelMode.all_reduce,
        "tile": None,
        "zero": Zero.none,
        "fsdp_gradients": FsdpGradients.reduce_scatter,
    }
    return MeshConfig(dp, mp, **defaults | {"slices": 1, "processes": 1, "cp": 1, "ep": 1} | others)


def mesh(shape: tuple[int, int], **others: Any) -> Mesh:
    """A (dp, mp) mesh over the first dp x mp of the eight devices; `others` as for `mesh_config`."""
    dp, mp = shape
    return make_mesh(mesh_config(dp, mp, **others), jax.devices()[: dp * mp])


def mesh_of(config: Config) -> Mesh:
    """The mesh of a configuration over the first of the eight devices."""
    return make_mesh(config.mesh, jax.devices()[: config.mesh.dp * config.mesh.mp])


def random_like(shapes: Any, dtype: str, *, spread: float = 0.25) -> Any:
    """`shapes`, an eqx.Module of arrays or shapes, with random arrays: scales around 1, everything else around 0."""
    rng = np.random.default_rng(0)

    def fill(path: tuple, leaf: Any) -> np.ndarray:
        is_scale = path[-1].name == "scale"
        return rng.normal(1.0 if is_scale else 0.0, 0.5 if is_scale else spread, leaf.shape).astype(dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def shapes_of(make: Any) -> Any:
    """The result of `make(key=...)`, with shapes in place of its arrays."""
    return eqx.filter_eval_shape(make, key=jax.random.key(0))


def small(dp: int, mp: int, *more: str) -> Config:
    """50 ids in 64 rows, a context of 8, and loss terms that a wrong gradient would miss."""
    model = [f"model.{setting}" for setting in MODEL.split()]
    given = ["model=test", *model, "model.context=8", "train.z_loss=0.01", "train.batch=8", "train.microbatches=1"]
    return shmap_tp.load_config(*given, f"mesh.dp={dp}", f"mesh.mp={mp}", *more)


def sequences(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (rows, length))
