"""Layers equal their dense references: output, input gradient, and the gradient of every parameter.  What an option of
a pretrained architecture must not do: communicate, decay, or change other weights.

`tests/model/test_model.py` compares whole models; `tests/test_option_mutations.py` breaks each option on purpose.
"""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import Rotation, make_rotation
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import Fsdp, Replicated, place_parameters
from shmap_tp.parallel.mesh import MP
from shmap_tp.parallel.partitioning import decayed, leaves_by_path
from shmap_tp.plan.ledger import Direction, Operation
from tests.helpers import layer_cases as cases
from tests.helpers import reference
from tests.helpers.assertions import by_path
from tests.helpers.communication_checks import traced_communication
from tests.helpers.communication_rules import ArrayTraffic, tally
from tests.helpers.layer_cases import MODES, D, K
from tests.helpers.model_cases import parameter_shapes
from tests.helpers.model_fixtures import config
from tests.helpers.sharded_harness import Case, compare

WITH_OPTIONS = [
    *(f"{cases.BIASES}; {mode}" for mode in MODES),
    *(f"{name}; {mode}" for name in (cases.TWO_NORMS, cases.JOINT_NORMS) for mode in ("all_reduce", "sequence")),
    *(f"{cases.HEAD_NORMS}; {mode}" for mode in ("all_reduce", "collective_matmul")),
    *(f"{name}; all_reduce" for name in (cases.KV_HEADS, cases.UNIT_OFFSET)),
]
"""Models have these options in the other modes (tests/helpers/model_cases.py)."""
ON_OTHER_MESHES = [
    *((name, (1, 8)) for name in ("embedding", "head, sequence", "attention_alibi")),
    ("parallel_block_2_of_8, collective_matmul", (1, 8)), ("sequential_block, collective_matmul", (4, 2)),
    *((name, (4, 2)) for name in ("key_value_2_of_8", "parallel_block_2_of_8")),
    *((f"{name}; all_reduce", (4, 2)) for name in (cases.KV_HEADS, cases.HEAD_NORMS)),
]  # fmt: skip
"""On (1, 8) one device holds only padding of the vocabulary; on (4, 2) two key/value heads are not fewer than mp."""


@pytest.mark.parametrize(
    ("layer", "shape", "precision"),
    [
        *((name, (2, 4), "float64") for name in [*cases.LAYERS, *WITH_OPTIONS]),
        *((*it, "float32") for it in ON_OTHER_MESHES),
    ],
    ids=str,
)
def test_layer_equals_its_dense_reference(layer, shape, precision):
    """Within 1e-12 in float64, which proves the mathematics, and 1e-6 in float32, which proves that no operation has a
    lower precision."""
    compare((cases.LAYERS | cases.OPTION_BLOCKS)[layer], shape, precision)


def own_communication(case: Case) -> Counter[Any]:
    """The communication of a block on (2, 4), forward and backward, without the reductions of parameters' gradients
    after it."""
    _, both, gradient_reductions = traced_communication(case, (2, 4))
    return tally(both) - tally(gradient_reductions)


def added(options: str, more: str, mode: str) -> Counter[Any]:
    """What `more` options of a block communicate, which take nothing away."""
    tp = MODES[mode]
    plain, found = (own_communication(cases.block(each, tp)) for each in (options, f"{options} {more}"))
    assert not plain - found
    return found - plain


def scales(size: int, count: int) -> Counter[Any]:
    """All-reduces of the gradients of that many scales over mp."""
    return tally(count * [ArrayTraffic(size, "float32", 1).over(MP, "norm", Operation.all_reduce, Direction.backward)])


@pytest.mark.parametrize("mode", MODES)
def test_biases_and_a_second_norm_communicate_nothing_over_the_residual_stream(mode):
    """With all-reduces the gradients of two norms are summed over mp, because each device has that of its columns; a
    bias needs nothing."""
    assert not added("", "norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true", mode)
    all_biases = f"{cases.ALL_BIASES} block=parallel_two_norms"
    assert added("", all_biases, mode) == scales(D, 4 * (mode == "all_reduce"))


def test_norms_of_heads_sum_the_gradients_of_their_scales_over_mp():
    assert added("", "qk_norm=true", "all_reduce") == scales(K, 2)


def test_a_joint_norm_of_heads_sums_one_mean_a_token_over_mp():
    """Forward and backward, for q and for k; with two key/value heads on four devices also the gradient of a scale."""
    found = added("block=sequential kv_heads=2", "qk_norm=true qk_norm_across_heads=true", "all_reduce")
    assert sum(found.values()) == 5


MORE = f"{cases.ALL_BIASES} head_bias=true kv_heads=2 mlp=geglu qk_norm=true"
ALL_BIASES = [f"model.{option}" for option in MORE.split()]


def initial(*settings: str) -> dict[str, np.ndarray]:
    return by_path(Transformer(config(*settings).model, Chunked(7), key=jax.random.key(0)))


def test_weight_decay_and_fsdp_apply_to_matrices_but_not_to_biases_and_norms():
    """A bias of key/value heads has two dims, and stacked ones have a dim of layers."""
    conf = config(*ALL_BIASES, "mesh.zero=fsdp", "mesh.dp=2", "mesh.mp=2")
    shapes = parameter_shapes(conf)
    placements = place_parameters(conf.mesh, shapes).placements
    found, placed = leaves_by_path(decayed(shapes), "."), leaves_by_path(placements, ".")
    assert sum(name.endswith("bias") for name in found) == 10
    for name, is_decayed in found.items():
        assert is_decayed == name.endswith("weight"), name
        assert isinstance(placed[name], Fsdp if is_decayed else Replicated), name


def test_biases_start_at_zero_and_norms_at_a_factor_of_one_and_no_option_changes_a_weight():
    """The random numbers of a weight do not depend on whether there are biases or norms beside it."""
    plain, extended = initial("model.kv_heads=2", "model.mlp=swiglu"), initial(*ALL_BIASES)
    for name, array in extended.items():
        assert not (name.endswith("bias") and array.any()), name
        assert not name.endswith("scale") or (array == 1).all(), name
    assert not RMSNorm(8, unit_offset=True).scale.any()
    for name, array in plain.items():
        np.testing.assert_array_equal(array, extended[name], err_msg=name)


def test_epsilon_of_a_norm_is_the_usual_one_unless_it_is_given():
    assert (LayerNorm(4).epsilon, RMSNorm(4).epsilon) == (1e-5, 1e-6)
    for norm, epsilon in (("layernorm", 1e-5), ("rmsnorm", 1e-6), ("rmsnorm_unit_offset", 1e-6)):
        assert parameter_shapes(config(f"model.norm={norm}")).norm.epsilon == epsilon
        assert parameter_shapes(config(f"model.norm={norm}", "model.norm_epsilon=1e-3")).norm.epsilon == 1e-3


def test_scaled_rates_of_llama_3_1_follow_their_wavelengths():
    """29 of 64 pairs have wavelengths below 8192 / 4 positions, and 29 above 8192."""
    model = load(
        str(CONF / "base.yaml"),
        ["model=llama3_8b", "model.rotary_base=5e5", "model.rotary_scaling=llama3", "mesh.mp=1", "mesh.dp=1"],
    ).model
    scaled, rates = make_rotation(model).rates(128), Rotation(5e5).rates(128)
    np.testing.assert_allclose(scaled, [reference.llama3_frequency(rate, model) for rate in rates], rtol=1e-12)
    np.testing.assert_array_equal(scaled[:29], rates[:29])
    np.testing.assert_allclose(scaled[35:], rates[35:] / 8, rtol=1e-12)
    assert (scaled[29:35] < rates[29:35]).all() and (scaled[29:35] > rates[29:35] / 8).all()


def test_pairs_of_a_rotation_are_disjoint_and_the_first_elements():
    for name, rotation in cases.ROTATIONS.items():
        first, second = rotation.pairs(8)
        assert sorted([*first, *second]) == list(range(rotation.size(8))), name
