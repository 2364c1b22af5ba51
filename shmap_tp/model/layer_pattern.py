"""Layers that differ: what `model.layer_pattern` says of each, and a scan over layers that repeats the pattern.

L layers, P layers of a period.

    pattern [local, local, global], 7 layers:   (local, local, global), (local, local, global), local

Parameters are stacked over layers as without a pattern.  An iteration of the scan computes the layers of one period one
after the other, so each layer's attention is chosen when the program is traced, and the program is as long as a period,
whatever the number of layers.  The layers beyond the last whole period follow the scan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shmap_tp.config.schema import LayerKind, ModelConfig
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import Context
from shmap_tp.layers.positions import NoPositions, Rotary
from shmap_tp.layers.rotation import make_rotation

Body = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, a layer) -> (carry, output), as lax.scan takes it."""


@dataclass(frozen=True)
class LayerOptions:
    """In what a layer may differ from the others."""

    pattern: Pattern
    """What its attention computes, without arrays."""
    encoding: Rotary | NoPositions | None = None
    """None: that of the model."""

    def within(self, context: Context) -> Context:
        """The context of this layer."""
        return replace(context, pattern=self.pattern, encoding=self.encoding or context.encoding)


def layer_options(config: ModelConfig) -> tuple[LayerOptions, ...]:
    """The options of each layer of a period: layer i has element i % P."""
    rotary = None
    if config.rotary_local_base is not None:
        rotary = Rotary(replace(make_rotation(config), base=config.rotary_local_base, scaling=None))
    scale = None if config.attention_scale_dim is None else config.attention_scale_dim**-0.5
    everywhere = Pattern(softcap=config.attention_softcap, scale=scale)
    of_kind = {
        LayerKind["local"]: LayerOptions(replace(everywhere, window=config.window), rotary),
        LayerKind["global"]: LayerOptions(everywhere),
        LayerKind["nope"]: LayerOptions(everywhere, NoPositions()),
    }
    return tuple(of_kind[kind] for kind in config.layer_pattern or [LayerKind.local])


def scan_layers(
    bodies: Sequence[Body], carry: Any, layers: Any, *, outside: Sequence[Body] | None = None
) -> tuple[Any, Any]:
    """lax.scan over the first dim of every array of `layers`; layer i is computed by bodies[i % P], or in no loop by
    outside[i % P] (None: also by bodies).  A loop of one iteration is none: XLA unrolls it.

    As many outputs as layers, stacked.
    """
    period, outside = len(bodies), outside or bodies
    whole, rest = divmod(len(jax.tree.leaves(layers)[0]), period)
    bodies = bodies if whole > 1 else outside
    if period == 1:
        return lax.scan(bodies[0], carry, layers)

    def unrolled(bodies: Sequence[Body], carry: Any, layers: Any) -> tuple[Any, Any]:
        outputs = []
        for i, body in enumerate(bodies):
            carry, output = body(carry, jax.tree.map(lambda x, i=i: x[i], layers))
            outputs.append(output)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    # slice_in_dim has strides: the gradient of x[a:b], which has none, JAX cannot add to a Ref (`loss_and_gradients`).
    def periods(x: jax.Array) -> jax.Array:
        return lax.slice_in_dim(x, 0, whole * period).reshape(whole, period, *x.shape[1:])

    carry, outputs = lax.scan(partial(unrolled, bodies), carry, jax.tree.map(periods, layers))
    outputs = jax.tree.map(lambda x: x.reshape(whole * period, *x.shape[2:]), outputs)
    if not rest:
        return carry, outputs
    beyond = jax.tree.map(lambda x: lax.slice_in_dim(x, whole * period, whole * period + rest), layers)
    carry, last = unrolled(outside[:rest], carry, beyond)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs, last)
