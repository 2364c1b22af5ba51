"""Weights of int8, with a scale for each output feature: half the bytes of bfloat16, for a model that is used and not
trained.

    w[D F]  ~  values[D F] x scale[F]        scale = max over D of |w| / 127, values = w / scale, rounded

Values are exact in the dtype of the activations, so a linear layer multiplies with them in that, and the scale is
applied to its result: XLA for TPUs makes the conversion part of the matmul, which reads int8
(docs/performance-notes.md).  A weight of experts becomes an array where it is used, one that FSDP shards before it is
gathered.  Symmetric and by the largest value, as the weights of Dettmers et al. 2022, "LLM.int8()", section 2.1,
https://arxiv.org/abs/2208.07339
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from jaxtyping import Int8 as Int8Array

from shmap_tp.errors import UserError

LARGEST = 127


class Int8(eqx.Module):
    """A weight of int8, in the place of the array; or its shapes, or its PartitionSpecs."""

    values: Int8Array[Array, "..."]
    scale: Float[Array, "..."]
    """float32; without the dims of the inputs."""
    inputs: tuple[int, ...] = eqx.field(static=True)
    """The dims of the input features, counted from the last."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def multiply(self, product: Callable[[Array, Array], Array], x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """product(x, w), in x's dtype.  Communication: none."""
        y = product(x, self.values.astype(x.dtype))
        return (y * self.scale.reshape(1, 1, *y.shape[2:])).astype(y.dtype)

    def astype(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The weight, rounded once to `dtype`."""
        return (self.values * jnp.expand_dims(self.scale, self.inputs)).astype(dtype)


def is_int8(node: Any) -> bool:
    return isinstance(node, Int8)


def quantize(w: Float[Array, "..."], inputs: tuple[int, ...]) -> Int8:
    """The weight in int8.  An output feature whose weights are all 0 stays so.

    Communication  under jit, where the inputs are sharded, one all-reduce of the largest values.
    """
    largest = jnp.max(jnp.abs(w), axis=inputs).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest, 1) / LARGEST
    return Int8(jnp.round(w / jnp.expand_dims(scale, inputs)).astype(jnp.int8), scale, inputs)


def quantized_shape(w: jax.ShapeDtypeStruct, inputs: tuple[int, ...]) -> Int8:
    """ShapeDtypeStructs of a weight in int8, sharded as `w` is."""
    shapes = jax.eval_shape(partial(quantize, inputs=inputs), w)
    shardings = jax.tree.map(partial(NamedSharding, w.sharding.mesh), quantized_specs(w.sharding.spec, shapes))
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)


def quantized_specs(specs: Any, params: Any) -> Any:
    """The PartitionSpecs of parameters, each of a whole weight, for `params`, of which some may be of int8."""

    def spec_of(spec: P, w: Any) -> Any:
        if not is_int8(w):
            return spec
        of_scale = [axes for dim, axes in enumerate(spec, -len(spec)) if dim not in w.inputs]
        return eqx.tree_at(lambda w: (w.values, w.scale), w, (spec, P(*of_scale)))

    return jax.tree.map(spec_of, specs, params)


def quantized_as(held: Any, parameters: Any) -> Any:
    """`parameters`, with those in int8 that are so in `held`.  One array after the other is converted, and freed if the
    caller does not keep it.  Communication: as `quantize`."""
    leaves, structure = jax.tree.flatten(held, is_leaf=is_int8)
    arrays = jax.tree.leaves(parameters)
    del parameters
    for number, leaf in enumerate(leaves):
        if is_int8(leaf):
            shardings = jax.tree.map(lambda part: part.sharding, leaf)
            convert = jax.jit(partial(quantize, inputs=leaf.inputs), out_shardings=shardings)
            arrays[number] = jax.block_until_ready(convert(arrays[number]))
    return jax.tree.unflatten(structure, arrays)


def require_unquantized(parameters: Any, use: str) -> None:
    """Raise UserError if any parameter is in int8; `use` says what is to be done with them, as a participle."""
    if any(map(is_int8, jax.tree.leaves(parameters, is_leaf=is_int8))):
        raise UserError(f'a model held in int8 cannot be {use}: read it with dtype="float32" or "bfloat16"')
