"""`to_whole` and `from_whole` against JAX's own sharding: some whole matrices on each device."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.config.choices import FsdpGradients, Zero
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import DP, DP_SLICE, MP, make_mesh
from shmap_tp.parallel.partitioning import axes_in
from shmap_tp.parallel.whole_matrices import from_whole, to_whole
from tests.helpers.model_fixtures import mesh_config

MESHES = {
    "dp 2, mp 4": mesh_config(2, 4),
    "dp 2 x 2 slices, mp 2": mesh_config(4, 2, slices=2),
    "rings of 2, 2 slices": mesh_config(4, 2, zero=Zero.fsdp, fsdp_gradients=FsdpGradients.ring, slices=2),
}


@pytest.mark.parametrize(("name", "spec"), [
    ("dp 2, mp 4", P()), ("dp 2, mp 4", P(None, DP)), ("dp 2, mp 4", P(None, None, MP)),
    ("dp 2, mp 4", P(None, DP, MP)), ("dp 2, mp 4", P(None, (MP, DP))), ("dp 2, mp 4", P(None, (DP, MP))),
    ("dp 2 x 2 slices, mp 2", P(None, (MP, DP, DP_SLICE))), ("dp 2 x 2 slices, mp 2", P(None, MP, (DP, DP_SLICE))),
    ("rings of 2, 2 slices", P(None, MP, (DP, DP_SLICE))), ("rings of 2, 2 slices", P(None, DP)),
], ids=str)  # fmt: skip
def test_each_device_gets_whole_matrices_and_gives_back_its_shard(name, spec):
    on = make_mesh(MESHES[name])
    x = np.arange(16 * 16 * 8, dtype=np.float32).reshape(16, 16, 8)
    over = on.axis_names

    def local(x):
        there = to_whole(x, spec, over)
        assert varying_axes(there) == set(over)
        back = from_whole(there, spec, over)
        assert varying_axes(back) == set(axes_in(spec))
        return there, back

    run = jax.jit(jax.shard_map(local, mesh=on, in_specs=spec, out_specs=(P(over), spec)))
    there, back = run(jax.device_put(x, jax.NamedSharding(on, spec)))
    np.testing.assert_array_equal(there[np.argsort(there[:, 0, 0])], x)  # in an order that the axes give
    np.testing.assert_array_equal(back, x)
