"""What gathering gives: the layer that was declared, and in a linear layer a weight that multiplies in its own way."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from shmap_tp.layers.linear import Linear
from shmap_tp.model.components import ModelComponents, held_in
from shmap_tp.model.sharded_model import ShardedModel, shard_model
from shmap_tp.parallel.fsdp import gather
from shmap_tp.parallel.int8 import Int8, is_int8
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import param
from shmap_tp.parallel.ring import Ring
from tests.helpers.model_fixtures import config, mesh_of


class OwnMatrices(eqx.Module):
    """An MLP that multiplies with its matrices itself."""

    up: jax.Array = param(MP, None, outputs=(0,))
    down: jax.Array = param(MP, None)

    def __init__(self, width, hidden, *, std, std_out, key):
        self.up, self.down = std * jax.random.normal(key, (2, hidden, width))

    def __call__(self, x_BTD, tp):
        return tp.reduce(jax.nn.gelu(tp.enter(x_BTD) @ self.up.T) @ self.down)


def model(*overrides: str) -> ShardedModel:
    conf = config("mesh.dp=4", "mesh.mp=2", "model.block=sequential", *overrides)
    return shard_model(conf, mesh_of(conf), jnp.bfloat16, ModelComponents(mlp=OwnMatrices))


def gathered_block(made: ShardedModel, shapes: Any) -> Any:
    """A block, as the model calls it."""
    seen = []

    def call(params: Any) -> jax.Array:
        block = jax.tree.map(lambda w: w[0], params.blocks)
        seen.append(gather(made.placed.placements.blocks, block, jnp.bfloat16))
        return jnp.zeros(())

    jax.eval_shape(made.mapped(call, (), jax.P()), shapes)
    return seen[0]


def layers(block: Any) -> Any:
    return jax.tree.structure(block, is_leaf=lambda node: isinstance(node, Ring | Int8))


def test_gathering_gives_weights_and_no_other_layer():
    made = model("mesh.zero=fsdp", "mesh.fsdp_gradients=ring")
    block = gathered_block(made, made.shapes)
    assert layers(block) == layers(made.shapes.blocks), "a layer that is called is not the one that was declared"
    assert type(block.attention.query) is Linear and isinstance(block.attention.query.weight, Ring)
    full, shard = block.attention.query.weight.full, block.attention.query.weight.shard
    assert full.shape == (4 * shard.shape[0], shard.shape[1]) and full.dtype == shard.dtype == jnp.bfloat16


def test_a_layer_that_multiplies_itself_is_given_arrays():
    """It cannot multiply with a weight whose gradient is reduced in a ring, nor with one of int8."""
    made = model("mesh.zero=fsdp", "mesh.fsdp_gradients=ring")
    up = gathered_block(made, made.shapes).mlp.up
    assert isinstance(up, jax.Array) and up.shape == (20, 24)
    made = model()
    held = held_in(made.shapes, jnp.bfloat16, int8=True)
    assert is_int8(held.blocks.attention.query.weight) and held.blocks.mlp.up.dtype == jnp.bfloat16
    block = gathered_block(made, held)
    assert is_int8(block.attention.query.weight) and isinstance(block.mlp.up, jax.Array)
