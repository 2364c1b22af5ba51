"""Parameters and tokens over axes of the table of roles: what a step reduces, shards and cuts follows from it alone.

The layers here are of the test's own.  Their model is trained on several meshes, and compared with one device.
"""

from dataclasses import asdict, dataclass, replace
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shmap_tp.config.schema import Config, MeshConfig
from shmap_tp.model.blocks import SequentialBlock
from shmap_tp.model.sharded_model import Frozen
from shmap_tp.parallel import mesh as mesh_module
from shmap_tp.parallel.mesh import AXES, DP, Role
from shmap_tp.parallel.partitioning import param
from shmap_tp.training.step import Components
from tests.helpers.assertions import assert_close, assert_same_bits, by_path, distances
from tests.helpers.step_fixtures import RELATIVE, Curve, Program, step_config


class OverDp(eqx.Module):
    """y = gelu(x @ up') @ down, its hidden units sharded over a token axis, to which all tokens of the axis come."""

    up: jax.Array = param(DP, None, outputs=(0,))
    down: jax.Array = param(DP, None)
    axis = DP

    def __init__(self, width, hidden, *, std, std_out, key):
        self.up = std * jax.random.normal(key, (hidden, width))
        self.down = std_out * jax.random.normal(key, (hidden, width))

    def __call__(self, x_BTD, tp):
        x_BTD = x_BTD if self.axis not in mesh_module.token_axes() else lax.all_gather(x_BTD, self.axis, tiled=True)
        y_BTD = jax.nn.gelu(x_BTD @ self.up.T) @ self.down
        return lax.psum_scatter(y_BTD, self.axis, tiled=True) if self.axis in mesh_module.token_axes() else y_BTD


class OverExperts(OverDp):
    up: jax.Array = param("xp", None, outputs=(0,))
    down: jax.Array = param("xp", None)
    axis = "xp"


class Penalised(SequentialBlock):
    """A SequentialBlock with an auxiliary loss: the mean square of its output, summed over tokens."""

    def __call__(self, x_BTD, context):
        x_BTD, extras = SequentialBlock.__call__(self, x_BTD, context)
        penalty = 0.1 * jnp.sum(jnp.mean(jnp.square(x_BTD), axis=-1))
        return x_BTD, type(extras)(penalty, extras.cache, extras.residuals)


FROZEN = Frozen(lambda name: "attention/" in name or name == "embedding/weight", jnp.bfloat16)
MODEL = Components(mlp=OverDp, block=Penalised, frozen=FROZEN)
COMMON = "model.block=sequential", "model.context=8", "optimizer.epsilon=1e-4"
"""With an epsilon above the smallest gradients: the first step of Adam divides each by its own size, and so its
rounding error, too."""


@cache
def whole(components: Components = MODEL) -> Program:
    return Program(step_config((1, 1), *COMMON, "train.microbatches=1"), components)


@cache
def on_one_device(components: Components = MODEL) -> Curve:
    return whole(components).train(3)


def assert_trains_as_on_one_device(one: Program) -> None:
    before, found, expected = whole().initial, one.train(3, whole().initial).params, on_one_device().params
    assert_same_bits(one.initial, before)
    before = by_path(before.params)
    frozen = {name for name in before if "attention." in name or name == "embedding.weight"}
    moments = set(by_path(one.made.shapes.optimizer[0].mu))
    assert len(frozen) == 5 and moments == set(before) - frozen, "what is frozen has no moments, all else has"
    for name, array in found.items():
        assert np.array_equal(array, before[name]) == (name in frozen), name
        assert array.dtype == (jnp.bfloat16 if name in frozen else np.float32), name
    assert_close({name: found[name] for name in moments}, {name: expected[name] for name in moments}, RELATIVE)


@pytest.mark.parametrize(("shape", "settings"), [
    ((2, 4), "mesh.tensor_parallel=all_reduce"),
    ((4, 2), "mesh.tensor_parallel=sequence mesh.zero=zero1 mesh.slices=2 train.microbatches=1"),
    ((2, 2), "mesh.tensor_parallel=collective_matmul mesh.zero=fsdp"),
])  # fmt: skip
def test_parameters_over_dp_frozen_ones_and_an_auxiliary_loss_train_as_on_one_device(shape, settings):
    """The gradient of what declares dp is complete over dp, summed and sharded over the other token axes alone; what
    is frozen keeps its bits; and the auxiliary loss of blocks counts alike for any microbatches."""
    assert_trains_as_on_one_device(Program(step_config(shape, *COMMON, *settings.split()), MODEL))


def test_frozen_parameters_in_rings_keep_their_bits():
    components = Components(frozen=FROZEN)
    settings = "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "train.microbatches=1"
    one = Program(step_config((4, 1), *settings), components)
    before, after = by_path(one.initial.params), one.train(1).params
    frozen = {name for name in before if "attention." in name or name == "embedding.weight"}
    assert {name for name in before if np.array_equal(before[name], after[name])} == frozen


def test_an_auxiliary_loss_changes_the_training_and_not_the_evaluation():
    plain = replace(MODEL, block=None)
    assert max(distances(on_one_device().params, on_one_device(plain).params).values()) > 1e-3
    batch = whole().batch(0)
    with_loss, without = (
        float(whole(each).made.evaluate(whole(each).placed(whole().initial).params, *batch)[0])
        for each in (MODEL, plain)
    )
    assert with_loss == without


@pytest.fixture
def added_axis(monkeypatch):
    """Adds an axis of tokens to the table, before mp."""
    on_one_device()  # whose mesh does not have it
    rows = {**AXES, "xp": frozenset({Role.tokens})}
    rows["mp"] = rows.pop("mp")
    for module in ("mesh", "partitioning"):
        monkeypatch.setattr(f"shmap_tp.parallel.{module}.AXES", rows)


@dataclass
class MeshOfMoreAxes(MeshConfig):
    xp: int = 1


def over_experts(zero: str) -> Program:
    conf: Config = step_config((2, 2), *COMMON, f"mesh.zero={zero}", "train.microbatches=1")
    conf = replace(conf, mesh=MeshOfMoreAxes(**{**asdict(conf.mesh), "xp": 2}))
    return Program(conf, replace(MODEL, mlp=OverExperts))


@pytest.mark.parametrize("zero", ["none", "zero1", "fsdp"])
def test_an_added_axis_has_the_same_rules_and_a_layer_sharded_over_it_trains(added_axis, zero):
    one = over_experts(zero)
    assert one.made.tokens.sharding.spec[1] == ("dp", "xp")
    assert one.communicates_parameters_as_written_by_hand()
    assert {"xp", "dp xp", "mp"} <= {entry.axis for entry in one.communication}
    if zero == "fsdp":
        assert_trains_as_on_one_device(one)
