"""A weight of int8: its values and scales, the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shmap_tp.config.compose import load
from shmap_tp.parallel.int8 import quantize, quantized_shape, quantized_specs
from shmap_tp.parallel.mesh import MP, make_mesh
from tests.helpers.assertions import assert_same_bits
from tests.helpers.run_fixtures import FIRST


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
