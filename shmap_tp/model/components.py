"""Replacements for parts of a model that the configuration names, and the shapes of its parameters."""

from dataclasses import dataclass

import equinox as eqx
import jax

from shmap_tp.config.schema import ModelConfig
from shmap_tp.layers.attention import AnyAttention, Chunked
from shmap_tp.model.blocks import MakeMlp
from shmap_tp.model.transformer import MakeBlock, Transformer


@dataclass(frozen=True)
class ModelComponents:
    """Replacements for parts of a model; None: what the configuration names."""

    block: MakeBlock | None = None
    mlp: MakeMlp | None = None


CONFIGURED_MODEL = ModelComponents()
"""Everything as the configuration names it."""


def parameter_shapes(
    model: ModelConfig, components: ModelComponents = CONFIGURED_MODEL, attend: AnyAttention | None = None
) -> Transformer:
    """The model with a ShapeDtypeStruct, of the whole array, in the place of every parameter.  No array is made, and no
    device is used."""
    attend = attend or Chunked(model.attention_chunk)

    def make() -> Transformer:
        return Transformer(model, attend, key=jax.random.key(0), block=components.block, mlp=components.mlp)

    return eqx.filter_eval_shape(make)
