"""The options of pretrained architectures in layers: parity with the dense reference, and what an option must not be.

`tests/model/test_families.py` compares whole models; `tests/test_option_mutations.py` breaks each option on purpose.
"""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.rotation import Rotation, make_rotation
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import Fsdp, Replicated, place_parameters
from shmap_tp.parallel.key_paths import leaves_by_path
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import decayed
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Operation, tally
from tests.helpers import reference
from tests.helpers.assertions import by_path
from tests.helpers.communication_checks import traced_communication
from tests.helpers.layer_cases import D, K
from tests.helpers.model_cases import parameter_shapes
from tests.helpers.model_fixtures import config
from tests.helpers.option_cases import MODES, OPTION_BLOCKS, ROTATIONS, block
from tests.helpers.sharded_harness import ALL_REDUCE, Case, compare

TWO_NORMS = "two norms, biases, exact gelu, partial rotary"
ALL_BIASES = [
    *("model.norm_bias=true", "model.qkv_bias=true", "model.attention_output_bias=true", "model.mlp_bias=true"),
    *("model.head_bias=true", "model.kv_heads=2", "model.mlp=geglu", "model.qk_norm=true"),
]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (2, 4)) for name in OPTION_BLOCKS] + [(name, (4, 2)) for name in OPTION_BLOCKS if "all_reduce" in name],
    ids=str,
)
def test_block_with_options_equals_its_dense_reference(name, shape):
    """On (2, 4) two key/value heads are fewer than the devices of mp."""
    compare(OPTION_BLOCKS[name], shape, "float64")


def own_communication(case: Case) -> Counter[Any]:
    """Of a block on (2, 4), forward and backward; without the reductions of parameters' gradients after it."""
    _, both, gradient_reductions = traced_communication(case, (2, 4))
    return tally(both) - tally(gradient_reductions)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["parallel, biases, partial rotary in neighbouring pairs", TWO_NORMS])
def test_biases_and_a_second_norm_communicate_nothing_over_the_residual_stream(name, mode):
    """With all-reduces the gradients of two norms are summed over mp, because each device has that of its columns; a
    bias needs nothing."""
    plain, found = (own_communication(block) for block in (block("", MODES[mode]), OPTION_BLOCKS[f"{name}; {mode}"]))
    norms = []
    if (name, mode) == (TWO_NORMS, "all_reduce"):
        norms = 4 * [ArrayTraffic(D, "float32", 1).over(MP, "norm", Operation.all_reduce, Direction.backward)]
    assert found - plain == tally(norms) and not plain - found


def test_norms_of_heads_sum_the_gradients_of_their_scales_over_mp():
    found = own_communication(block("qk_norm=true", ALL_REDUCE)) - own_communication(block("", ALL_REDUCE))
    scale = ArrayTraffic(K, "float32", 1).over(MP, "norm", Operation.all_reduce, Direction.backward)
    assert found == tally(2 * [scale])


def test_a_joint_norm_of_heads_sums_one_mean_a_token_over_mp():
    """Forward and backward, for q and for k; with two key/value heads on four devices also the gradient of a scale."""
    options = "block=sequential kv_heads=2"
    found = own_communication(block(f"{options} qk_norm=true qk_norm_across_heads=true", ALL_REDUCE))
    plain = own_communication(block(options, ALL_REDUCE))
    assert not plain - found
    assert sum((found - plain).values()) == 5


def test_weight_decay_and_fsdp_apply_to_matrices_but_not_to_biases_and_norms():
    """A bias of key/value heads has two dims, and stacked ones have a dim of layers."""
    conf = config(*ALL_BIASES, "mesh.zero=fsdp", "mesh.dp=2", "mesh.mp=2")
    shapes = parameter_shapes(conf)
    placements = place_parameters(conf.mesh, shapes).placements
    found, placed = leaves_by_path(decayed(shapes), "."), leaves_by_path(placements, ".")
    biases = [name for name in found if name.endswith("bias")]
    assert len(biases) == 10
    for name, is_decayed in found.items():
        assert is_decayed == name.endswith("weight"), name
        assert isinstance(placed[name], Fsdp if is_decayed else Replicated), name


def test_biases_start_at_zero_and_norms_at_a_factor_of_one():
    model = config(*ALL_BIASES).model
    params = by_path(Transformer(model, Chunked(7), key=jax.random.key(0)))
    for name, array in params.items():
        if name.endswith("bias"):
            assert not array.any(), name
        if name.endswith("scale"):
            assert (array == 1).all(), name
    assert not RMSNorm(8, unit_offset=True).scale.any()


def test_options_change_no_initial_weight():
    """The random numbers of a weight do not depend on whether there are biases or norms beside it."""
    plain, extended = (
        by_path(Transformer(config(*settings).model, Chunked(7), key=jax.random.key(0)))
        for settings in (["model.kv_heads=2", "model.mlp=swiglu"], ALL_BIASES)
    )
    for name, array in plain.items():
        np.testing.assert_array_equal(array, extended[name], err_msg=name)


def test_epsilon_of_a_norm_is_the_usual_one_unless_it_is_given():
    assert (LayerNorm(4).epsilon, RMSNorm(4).epsilon) == (1e-5, 1e-6)
    for norm, epsilon in (("layernorm", 1e-5), ("rmsnorm", 1e-6), ("rmsnorm_unit_offset", 1e-6)):
        assert parameter_shapes(config(f"model.norm={norm}")).norm.epsilon == epsilon
        assert parameter_shapes(config(f"model.norm={norm}", "model.norm_epsilon=1e-3")).norm.epsilon == 1e-3


def test_scaled_rates_of_llama_3_1_follow_their_wavelengths():
    """Of 64 pairs 29 have wavelengths below 8192 / 4 positions, and 29 above 8192."""
    model = load(
        str(CONF / "config.yaml"),
        ["model=llama3_8b", "model.rotary_base=5e5", "model.rotary_scaling=llama3", "mesh.mp=1", "mesh.dp=1"],
    ).model
    scaled, rates = make_rotation(model).rates(128), Rotation(5e5).rates(128)
    np.testing.assert_allclose(scaled, [reference.llama3_frequency(rate, model) for rate in rates], rtol=1e-12)
    np.testing.assert_array_equal(scaled[:29], rates[:29])
    np.testing.assert_allclose(scaled[35:], rates[35:] / 8, rtol=1e-12)
    assert (scaled[29:35] < rates[29:35]).all() and (scaled[29:35] > rates[29:35] / 8).all()


@pytest.mark.parametrize("name", ROTATIONS)
def test_pairs_of_a_rotation_are_disjoint_and_the_first_elements(name):
    first, second = ROTATIONS[name].pairs(8)
    assert sorted([*first, *second]) == list(range(ROTATIONS[name].size(8)))
