"""Replacements for parts of a model that the configuration names, and the shapes of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from shmap_tp.config.schema import ModelConfig, Precision
from shmap_tp.layers.attention import AnyAttention, Chunked
from shmap_tp.model.blocks import MakeMlp
from shmap_tp.model.transformer import MakeBlock, Transformer
from shmap_tp.parallel.int8 import quantized_shape
from shmap_tp.parallel.key_paths import is_factor, path_name
from shmap_tp.parallel.partitioning import ParameterKind, declaration
from shmap_tp.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained: they have no gradient and no optimizer state."""

    where: Callable[[str], bool]
    """The name of a parameter's path, such as blocks/attention/query/weight -> whether it is frozen."""
    dtype: DTypeLike
    """What frozen matrices and embeddings are held in; vectors (norms, biases) keep their own dtype.  With adapters it
    is that of model.adapter.base_dtype."""


MODEL_PARTS = "block", "mlp"
"""The replacements without which the same parameters are another model."""
PARTS = (*MODEL_PARTS, "frozen", "make_optimizer")
"""The replacements without which a run goes on as another run."""


@dataclass(frozen=True)
class ModelComponents:
    """Replacements for parts of a model; None: what the configuration names."""

    block: MakeBlock | None = None
    mlp: MakeMlp | None = None
    tensor_parallel: TensorParallel | None = None
    frozen: Frozen | None = None
    """Without it every parameter that declares a gradient is trained, or with adapters these alone."""

    @property
    def replaced(self) -> list[str]:
        """Which of `PARTS` are replaced."""
        return [part for part in PARTS if getattr(self, part, None) is not None]

    def make(self, model: ModelConfig, attend: AnyAttention, key: PRNGKeyArray) -> Transformer:
        """The model with its initial parameters."""
        return Transformer(model, attend, key=key, block=self.block, mlp=self.mlp)

    def trained(self, model: ModelConfig, params: Transformer) -> Any:
        """A tree like the parameters (arrays or shapes): whether each is trained."""
        where = (lambda _: False) if self.frozen is None else self.frozen.where

        def is_trained(path: tuple, _: Any) -> bool:
            may_be = declaration(params, path).trained and not where(path_name(path))
            return may_be and (not model.adapter.rank or is_factor(path))

        return jax.tree_util.tree_map_with_path(is_trained, params)

    def held(self, model: ModelConfig, params: Transformer, dtype: DTypeLike) -> Transformer:
        """The parameters, frozen ones in the dtype that they are held in; `dtype` is that of the activations."""
        if model.adapter.rank:
            frozen = dtype if model.adapter.base_dtype == Precision.auto else model.adapter.base_dtype.value
        else:
            frozen = None if self.frozen is None else self.frozen.dtype

        def hold(path: tuple, w: Array, is_trained: bool) -> Array:
            if is_trained or declaration(params, path).kind == ParameterKind.vector:
                return w
            return w.astype(frozen)

        return jax.tree_util.tree_map_with_path(hold, params, self.trained(model, params))


CONFIGURED_MODEL = ModelComponents()
"""Everything as the configuration names it."""


def parameter_shapes(
    model: ModelConfig,
    components: ModelComponents = CONFIGURED_MODEL,
    attend: AnyAttention | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Transformer:
    """The model with a ShapeDtypeStruct, of the whole array, in the place of every parameter; `dtype` is that of
    the activations.  No array is made, and no device is used."""
    attend = attend or Chunked(model.attention_chunk)
    make = partial(components.make, model, attend)
    return eqx.filter_eval_shape(lambda: components.held(model, make(jax.random.key(0)), dtype))


def held_in(shapes: Transformer, dtype: DTypeLike, *, int8: bool = False) -> Transformer:
    """`shapes`, which have shardings, of a model that is used and not trained: its matrices are of `dtype`.  Vectors,
    which norms compute with, stay as they are.

    A model that computes in `dtype` gives the same bits: every use of a matrix casts it to that first.  With `int8`
    those matrices of the blocks are `Int8` that mp shards and that a linear layer or experts multiply with; embedding,
    head, routers and factors of adapters are not.
    """

    def held(path: tuple, leaf: jax.ShapeDtypeStruct) -> Any:
        declared = declaration(shapes, path)
        if declared.kind == ParameterKind.vector:
            return leaf
        whole = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        can_be_int8 = declared.by_linear or declared.kind == ParameterKind.experts
        can_be_int8 = can_be_int8 and declared.stacked and any(declared.axes) and not is_factor(path)
        return quantized_shape(whole, declared.inputs) if int8 and can_be_int8 else whole

    return jax.tree_util.tree_map_with_path(held, shapes)
