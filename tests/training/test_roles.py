"""Parameters and tokens over axes of the table of roles: what a step reduces, shards and cuts follows from it alone.

The layers here are of the test's own.  Each is trained on several meshes, and compared with one device.
"""

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shmap_tp.config.schema import Config, MeshConfig
from shmap_tp.layers.context import Extras
from shmap_tp.model.blocks import SequentialBlock
from shmap_tp.model.components import Frozen
from shmap_tp.parallel import mesh as mesh_module
from shmap_tp.parallel.mesh import AXES, DP, Role, axis_sizes, make_mesh
from shmap_tp.parallel.partitioning import param
from shmap_tp.plan.communication.analytic import analytic_communication
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import tally
from shmap_tp.training.step import Components, StepFunctions, build_step_functions
from tests.helpers.assertions import assert_close, by_path, distances
from tests.helpers.step_fixtures import learnable_batch, step_config

ZEROS = ["none", "zero1", "fsdp"]
RELATIVE = 1e-5
"""As the loss curves of different meshes in test_step."""


class ShardedOver(eqx.Module):
    """y = gelu(x @ up') @ down, its hidden units sharded over a token axis, to which all tokens of the axis come."""

    up: jax.Array
    down: jax.Array
    axis: str = eqx.field(static=True)

    def __call__(self, x_BTD, tp):
        x_BTD = x_BTD if self.axis not in mesh_module.token_axes() else lax.all_gather(x_BTD, self.axis, tiled=True)
        y_BTD = jax.nn.gelu(x_BTD @ self.up.T) @ self.down
        return lax.psum_scatter(y_BTD, self.axis, tiled=True) if self.axis in mesh_module.token_axes() else y_BTD


class OverDp(ShardedOver):
    up: jax.Array = param(DP, None, outputs=(0,))
    down: jax.Array = param(DP, None)

    def __init__(self, width, hidden, *, std, std_out, key):
        self.up = std * jax.random.normal(key, (hidden, width))
        self.down = std_out * jax.random.normal(key, (hidden, width))
        self.axis = DP


class OverExperts(ShardedOver):
    up: jax.Array = param("xp", None, outputs=(0,))
    down: jax.Array = param("xp", None)

    def __init__(self, width, hidden, *, std, std_out, key):
        self.up = std * jax.random.normal(key, (hidden, width))
        self.down = std_out * jax.random.normal(key, (hidden, width))
        self.axis = "xp"


def train(made: StepFunctions, steps: int = 3) -> dict[str, np.ndarray]:
    """The parameters after some steps in float32."""
    state = made.init()
    for i in range(steps):
        tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
        state, _ = made.step(state, tokens)
    return by_path(state.params)


def functions_of(conf: Config, components: Components) -> StepFunctions:
    devices = jax.devices()[: int(np.prod(list(axis_sizes(conf.mesh).values())))]
    return build_step_functions(conf, make_mesh(conf.mesh, devices), jnp.float32, components)


@cache
def on_one_device(components: Components, *settings: str) -> dict[str, np.ndarray]:
    return train(functions_of(step_config((1, 1), *settings), components))


OVER_DP = Components(mlp=OverDp)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("sizes", [((2, 4), ()), ((4, 2), ("mesh.slices=2",))], ids=["(2, 4)", "(4, 2), two slices"])
def test_a_parameter_that_declares_dp_has_the_gradient_of_its_own_shard(sizes, zero):
    """It is complete over dp, and summed and sharded over the other token axes alone."""
    shape, settings = sizes
    conf = step_config(shape, "model.block=sequential", f"mesh.zero={zero}", *settings)
    assert_close(train(functions_of(conf, OVER_DP)), on_one_device(OVER_DP, "model.block=sequential"), RELATIVE)


@pytest.fixture
def added_axis(monkeypatch):
    """Adds an axis to the table, before mp."""

    def add(name: str, *roles: Role) -> None:
        rows = {**AXES, name: frozenset(roles)}
        rows["mp"] = rows.pop("mp")
        monkeypatch.setattr(mesh_module, "AXES", rows)
        monkeypatch.setattr("shmap_tp.parallel.partitioning.AXES", rows)

    return add


@dataclass
class MeshOfMoreAxes(MeshConfig):
    xp: int = 1


def with_axis(conf: Config, **sizes: int) -> Config:
    return replace(conf, mesh=MeshOfMoreAxes(**{**asdict(conf.mesh), **sizes}))


EXPERTS = Components(mlp=OverExperts)


@pytest.mark.parametrize("zero", ZEROS)
def test_an_axis_of_tokens_that_is_added_to_the_table_trains_a_layer_sharded_over_it(added_axis, zero):
    expected = on_one_device(Components(mlp=OverDp), "model.block=sequential")
    added_axis("xp", Role.tokens)
    conf = with_axis(step_config((2, 2), "model.block=sequential", f"mesh.zero={zero}"), xp=2)
    made = functions_of(conf, EXPERTS)
    assert made.tokens.sharding.spec[1] == ("dp", "xp")
    assert_close(train(made), expected, RELATIVE)


@pytest.mark.parametrize("zero", ZEROS)
def test_the_ledger_of_an_added_axis_is_that_of_the_traced_step(added_axis, zero):
    added_axis("xp", Role.tokens)
    conf = with_axis(step_config((2, 2), "model.block=sequential", f"mesh.zero={zero}"), xp=2)
    made = functions_of(conf, EXPERTS)
    traced = communication_in_jaxpr(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)
    planned = analytic_communication(conf, jnp.float32, EXPERTS)
    assert tally(planned) == tally(traced)
    assert {"xp", "dp xp", "mp"} <= {entry.axis for entry in planned}


MODES = ["mesh.tensor_parallel=all_reduce", "mesh.tensor_parallel=sequence", "mesh.tensor_parallel=collective_matmul"]


class Penalised(SequentialBlock):
    """A SequentialBlock with an auxiliary loss: the mean square of its output, summed over tokens."""

    def __call__(self, x_BTD, context):
        x_BTD, extras = SequentialBlock.__call__(self, x_BTD, context)
        return x_BTD, replace_extras(extras, 0.1 * jnp.sum(jnp.mean(jnp.square(x_BTD), axis=-1)))


def replace_extras(extras: Extras, loss: Any) -> Extras:
    return Extras(loss, extras.cache, extras.residuals)


PENALISED = Components(block=Penalised)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_auxiliary_loss_of_blocks_counts_alike_on_every_mesh_and_for_any_microbatches(mode, microbatches):
    """With an epsilon above the smallest gradients: the first step of Adam divides each by its own size, and so its
    rounding error, too."""
    settings = ["model.block=sequential", "model.context=8", "optimizer.epsilon=1e-4"]
    conf = step_config((2, 4), *settings, mode, f"train.microbatches={microbatches}")
    expected = on_one_device(PENALISED, *settings)
    assert_close(train(functions_of(conf, PENALISED)), expected, RELATIVE)
    assert max(distances(expected, on_one_device(Components(), *settings)).values()) > 1e-3


def test_an_auxiliary_loss_is_no_part_of_the_evaluation_loss():
    conf = step_config((2, 1), "model.block=sequential")
    made, plain = functions_of(conf, PENALISED), functions_of(conf, Components())
    tokens = jax.device_put(learnable_batch(0, made.tokens.shape), made.tokens.sharding)
    assert float(made.evaluate(made.init().params, tokens)[0]) == float(plain.evaluate(plain.init().params, tokens)[0])


FROZEN = Components(frozen=Frozen(lambda name: "attention/" in name or name == "embedding/weight", jnp.bfloat16))


@pytest.mark.parametrize("settings", [
    ("mesh.zero=none",), ("mesh.zero=zero1",), ("mesh.zero=fsdp", "mesh.fsdp_gradients=ring"),
    ("mesh.zero=fsdp", "mesh.tensor_parallel=collective_matmul", "model.context=8"),
])  # fmt: skip
def test_frozen_parameters_keep_their_bits_and_have_no_moments(settings):
    context = [setting for setting in settings if setting.startswith("model.")]
    made = functions_of(step_config((4, 2), *settings), FROZEN)
    before = by_path(made.init().params)
    after = train(made)
    frozen = {name for name in before if "attention." in name or name == "embedding.weight"}
    assert len(frozen) == 5
    for name, array in after.items():
        assert np.array_equal(array, before[name]) == (name in frozen), name
        assert array.dtype == (jnp.bfloat16 if name in frozen else np.float32), name
    moments = by_path(made.shapes.optimizer[0].mu)
    assert set(moments) == set(before) - frozen
    assert_close({name: after[name] for name in moments}, {
        name: array for name, array in on_one_device(FROZEN, *context).items() if name in moments
    }, RELATIVE)  # fmt: skip
