"""`to_whole_layers` and `from_whole_layers` against JAX's own sharding: whole matrices of some layers on a device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.config.schema import FsdpGradients, Zero
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import DP, DP_RING, DP_SLICE, MP, make_mesh
from shmap_tp.parallel.partitioning import ParameterKind, axes_in, param, stacked
from shmap_tp.parallel.whole_layers import from_whole_layers, to_whole_layers, whole_layer_specs
from tests.helpers.model_fixtures import mesh_config

MESHES = {
    "dp 2, mp 4": mesh_config(2, 4),
    "dp 2 x 2 slices, mp 2": mesh_config(4, 2, slices=2),
    "rings of 2, 2 slices": mesh_config(4, 2, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=2),
}
SPECS = [
    P(),
    P(None, DP),
    P(None, None, MP),
    P(None, DP, MP),
    P(None, (MP, DP)),
    P(None, (DP, MP)),
    P(None, (MP, DP, DP_SLICE)),
    P(None, MP, (DP, DP_SLICE)),
]


class Stack(eqx.Module):
    weight: jax.Array = param(None, None)


class Model(eqx.Module):
    blocks: Stack = stacked()


@pytest.mark.parametrize("layers", [8, 4, 2, 3], ids="{} layers".format)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_each_device_gets_the_layers_that_the_spec_says_and_gives_back_its_shard(name, spec, layers):
    on = make_mesh(MESHES[name])
    if not set(axes_in(spec)) <= set(on.axis_names):
        pytest.skip("no such axis")
    x = np.arange(layers * 16 * 8, dtype=np.float32).reshape(layers, 16, 8)
    model, specs = Model(Stack(x)), Model(Stack(spec))
    whole = whole_layer_specs(model, specs, {ParameterKind.matrix}, dict(on.shape)).blocks.weight
    assert axes_in(P(*whole[1:])) == ()

    def local(x):
        there = to_whole_layers(x, spec, whole)
        assert varying_axes(there) == set(axes_in(whole))
        back = from_whole_layers(there, spec, whole)
        assert varying_axes(back) == set(axes_in(spec))
        return there, back

    run = jax.jit(jax.shard_map(local, mesh=on, in_specs=spec, out_specs=(whole, spec)))
    there, back = run(jax.device_put(x, jax.NamedSharding(on, spec)))
    np.testing.assert_array_equal(there, x)
    np.testing.assert_array_equal(back, x)


def test_layers_are_divided_by_as_many_axes_as_divide_their_number():
    sizes = {DP: 2, DP_RING: 2, MP: 3}
    for layers, over in ((12, (DP, DP_RING, MP)), (4, (DP, DP_RING)), (6, (DP, MP)), (3, (MP,)), (5, None)):
        model = Model(Stack(jnp.zeros((layers, 16, 6))))
        found = whole_layer_specs(model, Model(Stack(P())), {ParameterKind.matrix}, sizes).blocks.weight
        assert found == P(over, None, None), layers
    assert whole_layer_specs(model, Model(Stack(P())), {ParameterKind.vector}, sizes).blocks.weight == P()
