"""Weights of int8, with a scale for each output feature: half the bytes of bfloat16, for a model that is used and not
trained.

    w[D F]  ~  values[D F] x scale[F]        scale = max over D of |w| / 127, values = w / scale, rounded

Values are exact in the dtype of the activations, so a linear layer multiplies with them in that, and the scale is
applied to its result: XLA for TPUs makes the conversion part of the matmul, which reads int8
(docs/performance-notes.md).  A weight of experts becomes an array where it is used, one that FSDP shards before it is
gathered.  Symmetric and by the largest value, as the weights of Dettmers et al. 2022, "LLM.int8()", section 2.1,
https://arxiv.org/abs/2208.07339
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

LARGEST = 127


class Quantized(eqx.Module):
    """A weight of int8, in the place of the array; or its shapes, or its PartitionSpecs."""

    values: Int8[Array, "..."]
    scale: Float[Array, "..."]
    """float32; without the dims of the inputs."""
    inputs: tuple[int, ...] = eqx.field(static=True)
    """The dims of the input features, counted from the last."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def astype(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The weight, rounded once to `dtype`."""
        return (self.values * jnp.expand_dims(self.scale, self.inputs)).astype(dtype)


Weight = Float[Array, "..."] | Quantized


class ScaledLinear(eqx.Module):
    """A linear layer with a weight of int8; called like the layer.  `fsdp.gather` puts it in the layer's place.

    Communication  none.
    """

    layer: Any
    """With the values as its weight, and without an adapter."""
    scale: Float[Array, "..."]
    adapter: Any
    """An `Adapter`, or None."""

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        y = self.layer(x)
        y = (y * self.layer.of_features(self.scale, y)).astype(y.dtype)
        return y if self.adapter is None else y + self.adapter(x)

    def add_bias(self, y: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        return self.layer.add_bias(y)


def is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def dequantized(w: Weight, dtype: DTypeLike) -> Float[Array, "..."]:
    """A weight of int8 as an array of `dtype`, any other as it is."""
    return w.astype(dtype) if is_quantized(w) else w


def quantize(w: Float[Array, "..."], inputs: tuple[int, ...]) -> Quantized:
    """The weight in int8.  An output feature whose weights are all 0 stays so.

    Communication  under jit, where the inputs are sharded, one all-reduce of the largest values.
    """
    largest = jnp.max(jnp.abs(w), axis=inputs).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest, 1) / LARGEST
    return Quantized(jnp.round(w / jnp.expand_dims(scale, inputs)).astype(jnp.int8), scale, inputs)


def quantized_shape(w: jax.ShapeDtypeStruct, inputs: tuple[int, ...]) -> Quantized:
    """ShapeDtypeStructs of a weight in int8, sharded as `w` is."""
    shapes = jax.eval_shape(partial(quantize, inputs=inputs), w)
    shardings = jax.tree.map(partial(NamedSharding, w.sharding.mesh), quantized_specs(w.sharding.spec, shapes))
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)


def quantized_specs(specs: Any, params: Any) -> Any:
    """The PartitionSpecs of parameters, each of a whole weight, for `params`, of which some may be of int8."""

    def spec_of(spec: P, w: Any) -> Any:
        if not is_quantized(w):
            return spec
        of_scale = [axes for dim, axes in enumerate(spec, -len(spec)) if dim not in w.inputs]
        return eqx.tree_at(lambda w: (w.values, w.scale), w, (spec, P(*of_scale)))

    return jax.tree.map(spec_of, specs, params)


def ready_to_multiply(module: Any, dtype: DTypeLike) -> Any:
    """`module`, a part of the model, with every linear layer of int8 as a `ScaledLinear` that multiplies in `dtype`,
    and every other weight of int8 as an array of it."""

    def ready(node: Any) -> Any:
        w = getattr(node, "weight", None)
        if not is_quantized(w):
            return dequantized(node, dtype)
        if not hasattr(node, "of_features"):
            return eqx.tree_at(lambda node: node.weight, node, w.astype(dtype), is_leaf=is_quantized)
        parts = w.values.astype(dtype), None
        layer = eqx.tree_at(
            lambda node: (node.weight, node.adapter), node, parts, is_leaf=lambda x: x is None or x is w
        )
        return ScaledLinear(layer, w.scale, node.adapter)

    return jax.tree.map(ready, module, is_leaf=lambda node: is_quantized(getattr(node, "weight", node)))
