"""Weights that multiply in a way of their own: what gathering gives, and the values and scales of int8, the same on
every mesh."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shmap_tp.config.compose import load
from shmap_tp.layers.linear import Linear
from shmap_tp.model.sharded_model import ModelComponents, ShardedModel, held_in, shard_model
from shmap_tp.parallel.fsdp import gather
from shmap_tp.parallel.mesh import MP, make_mesh
from shmap_tp.parallel.partitioning import param
from shmap_tp.parallel.weights import Int8, Ring, is_int8, quantize, quantized_shape, quantized_specs
from tests.helpers.assertions import assert_same_bits
from tests.helpers.model_fixtures import config, mesh_of
from tests.helpers.run_fixtures import FIRST


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


def weights(*shape: int) -> np.ndarray:
    """Rows and columns of different sizes; one column of the last dim is 0."""
    generator = np.random.default_rng(0)
    w = generator.normal(size=shape) * np.exp(generator.normal(size=shape[-1]))
    w[..., 2] = 0
    return w.astype(np.float32)


def test_each_output_feature_uses_all_of_int8_and_is_rounded_to_the_nearest():
    w = weights(6, 40, 5)  # layers, inputs, outputs
    found = quantize(jnp.asarray(w), (-2,))
    scale = np.abs(w).max(1) / 127
    np.testing.assert_allclose(found.scale, np.where(scale > 0, scale, 1 / 127), rtol=1e-6)
    assert found.values.dtype == jnp.int8 and found.shape == w.shape
    assert (np.abs(found.values).max(1) == np.where(scale > 0, 127, 0)).all()
    error = np.abs(found.astype(jnp.float32) - w)
    assert (error <= 0.501 * found.scale[:, None]).all() and (error[..., 2] == 0).all()
    assert found.astype(jnp.bfloat16).dtype == jnp.bfloat16


def test_shards_of_the_inputs_have_the_scale_of_all_of_them():
    mesh = make_mesh(load(FIRST, ["model=test", "mesh.dp=2", "mesh.mp=4"]).mesh)
    w = weights(3, 8, 6)
    shape = quantized_shape(
        jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, jax.P(None, MP, None))), (-2,)
    )
    assert shape.values.sharding.spec == jax.P(None, MP, None) and shape.scale.sharding.spec == jax.P(None, None)
    shardings = jax.tree.map(lambda part: part.sharding, shape)
    sharded = jax.jit(lambda w: quantize(w, (-2,)), out_shardings=shardings)(w)
    assert_same_bits(sharded, quantize(jnp.asarray(w), (-2,)))
    by_output = quantized_specs([jax.P(MP, None)], [quantize(jnp.asarray(w[0]), (-1,))])[0]
    assert (by_output.values, by_output.scale) == (jax.P(MP, None), jax.P(MP))
