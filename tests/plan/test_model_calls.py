"""What the planner derives from a model's modules: for the blocks of the project what is written down by hand, for
those of a user what their step does."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shmap_tp.config.schema import AttentionKernel
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.partitioning import param
from shmap_tp.parallel.tensor_parallel import AllReduce, SequenceParallel
from shmap_tp.plan.communication.analytic import (
    activations,
    analytic_communication,
    analytic_evaluation_communication,
)
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction, tally
from shmap_tp.plan.report import config_fields
from shmap_tp.training.step import Components, build_step_functions
from tests.helpers.communication_checks import by_direction, check_activations, program_config, step_communication
from tests.helpers.components import ADAPTER, COMPONENTS, AdapterBlock, ReGluMlp
from tests.helpers.model_fixtures import config, mesh_of

BY_HAND = [
    "parallel", "parallel, remat full", "sequential, remat attention", "2 kv heads", "fsdp", "fsdp; sequence",
    "1 kv head, sequential, remat full; sequence", "sequential, remat full; collective_matmul",
]  # fmt: skip


@pytest.mark.parametrize("program", BY_HAND)
def test_the_calls_of_a_model_are_those_written_down_by_hand(program):
    check_activations(program, "bfloat16")


def test_the_parts_of_a_model_are_named():
    sequential = activations(program_config("sequential", (2, 4)), jnp.bfloat16)
    assert {entry.what for entry in sequential} == {
        "embedding reduce", "attention enter", "attention reduce", "MLP enter", "MLP reduce", "head enter",
    }  # fmt: skip
    parallel = activations(program_config("2 kv heads; collective_matmul", (2, 4)), jnp.bfloat16)
    assert {"block column-parallel", "block row-parallel"} < {entry.what for entry in parallel}
    assert "attention, in a layer" in {e.what for e in activations(program_config("2 kv heads", (2, 4)), jnp.bfloat16)}


# Components


class WithoutAdapter(AdapterBlock):
    """AdapterBlock without its third sublayer."""

    def __init__(self, config, attend, *, key, mlp=None):
        super().__init__(config, attend, key=key, mlp=mlp)
        self.adapter_in = self.adapter_out = None

    def __call__(self, x_BTD, context):
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        y_BTD, extras = self.attention(before_attention(x_BTD), context)
        x_BTD = x_BTD + after_attention(y_BTD)
        return x_BTD + after_mlp(self.mlp(before_mlp(x_BTD), context.tp)), extras


def conf_of(settings: str, shape: tuple[int, int]):
    sizes = f"mesh.dp={shape[0]} mesh.mp={shape[1]} model.layers=3 train.batch=16 train.microbatches=2 model.context=8"
    return config(*sizes.split(), *settings.split())


@pytest.mark.parametrize(
    ("components", "settings", "shape"),
    [
        ("mlp", "", (2, 4)),
        ("mlp", "mesh.tensor_parallel=sequence model.remat=attention_and_up mesh.zero=fsdp", (4, 2)),
        ("block", "model.remat=full", (2, 4)),
        ("block", "model.kv_heads=2 model.remat=mlp mesh.zero=zero1", (2, 4)),
        ("block and mlp", "mesh.tensor_parallel=sequence model.remat=full mesh.zero=fsdp", (2, 4)),
        ("block and mlp", "mesh.tensor_parallel=collective_matmul model.remat=attention", (1, 8)),
        ("block", "model.remat=all_matmuls model.offload=[up] mesh.zero=fsdp mesh.fsdp_gradients=ring", (2, 4)),
    ],
)
def test_a_step_with_components_communicates_as_the_planner_says(components, settings, shape):
    conf, given = conf_of(settings, shape), COMPONENTS[components]
    expected = by_direction(analytic_communication(conf, "bfloat16", given))
    assert by_direction(step_communication(conf, "bfloat16", given)) == expected
    assert expected != by_direction(analytic_communication(conf, "bfloat16")), "the component makes no difference"


def test_an_evaluation_with_components_communicates_as_the_planner_says():
    conf, given = conf_of("mesh.zero=fsdp", (2, 4)), COMPONENTS["block and mlp"]
    made = build_step_functions(conf, mesh_of(conf), jnp.bfloat16, given)
    found = communication_in_jaxpr(jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens).jaxpr)
    assert by_direction(found) == by_direction(analytic_evaluation_communication(conf, "bfloat16", given))


class ScaledHiddenMlp(ReGluMlp):
    """Its hidden units are scaled by one parameter, which is replicated over mp and applied to shards."""

    scale: jax.Array = param()

    def __init__(self, width, hidden, *, std, std_out, key):
        super().__init__(width, hidden, std=std, std_out=std_out, key=key)
        self.scale = jnp.ones(())

    def __call__(self, x_BTD, tp):
        hidden = self.activate(*tp.column_parallel(x_BTD, *self.inputs))
        return tp.row_parallel((jax.tree.map(lambda y: y * self.scale.astype(y.dtype), hidden), self.down))


@pytest.mark.parametrize("mode", ["all_reduce", "sequence"])
def test_the_gradient_of_a_replicated_parameter_that_scales_shards_is_planned(mode):
    conf = conf_of(f"model.block=sequential mesh.tensor_parallel={mode}", (2, 4))
    given = Components(mlp=ScaledHiddenMlp)
    planned = analytic_communication(conf, "float32", given)
    assert tally(step_communication(conf, "float32", given)) == tally(planned)
    scalars = [entry for entry in planned if entry.axis == MP and entry.bytes == 4 and "norm" not in entry.what]
    assert sum(entry.count for entry in scalars) == (2 * 3 if mode == "all_reduce" else 0)


class NormalisedOverDp(ReGluMlp):
    """Its output is divided by the mean square of x over all dp ranks: a collective over another axis than mp."""

    def __call__(self, x_BTD, tp):
        mean = lax.pmean(jnp.mean(jnp.square(x_BTD.astype(jnp.float32))), DP)
        return super().__call__(x_BTD, tp) / lax.stop_gradient(mean).astype(x_BTD.dtype)


def test_what_a_layer_communicates_over_another_axis_is_planned():
    conf, given = conf_of("model.block=sequential model.remat=full", (2, 4)), Components(mlp=NormalisedOverDp)
    planned = analytic_communication(conf, "float32", given)
    assert by_direction(step_communication(conf, "float32", given)) == by_direction(planned)
    over_dp = [entry for entry in planned if entry.what == "MLP, in a layer" and entry.axis == DP]
    assert {entry.direction: entry.count for entry in over_dp} == {Direction.forward: 6, Direction.recompute: 6}


@dataclass(frozen=True)
class TwoReductions(AllReduce):
    """A mode of a user: it reduces each half of the width by itself."""

    def reduce(self, y_BTD):
        return jnp.concatenate([lax.psum(half, MP) for half in jnp.split(y_BTD, 2, axis=-1)], axis=-1)


def test_a_mode_of_ones_own_is_planned_as_it_is_traced():
    conf, given = conf_of("model.block=sequential", (2, 4)), Components(tensor_parallel=TwoReductions())
    planned = analytic_communication(conf, "float32", given)
    assert (
        tally(step_communication(conf, "float32", given))
        == tally(planned)
        != tally(analytic_communication(conf, "float32"))
    )


def test_a_given_mode_communicates_as_the_one_that_the_configuration_names():
    conf, given = conf_of("", (2, 4)), Components(tensor_parallel=SequenceParallel())
    named = conf_of("mesh.tensor_parallel=sequence", (2, 4))
    assert analytic_communication(conf, "float32", given) == analytic_communication(named, "float32")


@pytest.mark.parametrize("missing", ["gate", "adapter_in"])
def test_a_matrix_that_is_not_counted_would_be_found(missing):
    """A mutation of the reference: one matrix of each layer left out, the figures differ by exactly that matrix."""
    conf, given = conf_of("", (2, 4)), COMPONENTS["block and mlp"]
    without = Components(block=WithoutAdapter, mlp=ReGluMlp) if missing == "adapter_in" else Components(AdapterBlock)
    weights = {"gate": 24 * 40, "adapter_in": 2 * 24 * ADAPTER}[missing] * conf.model.layers
    fields = [config_fields(conf, AttentionKernel.chunked, 8, None, one) for one in (given, without)]
    assert fields[0]["params"] - fields[1]["params"] == weights
    tokens = conf.train.batch * conf.model.context
    assert fields[0]["model_flops_per_device"] - fields[1]["model_flops_per_device"] == 6 * weights * tokens / 8
    ledgers = [analytic_communication(conf, "float32", one) for one in (given, without)]
    dp = [sum(entry.total for entry in ledger if entry.axis == DP) for ledger in ledgers]
    assert dp[0] - dp[1] == 4 * weights / 4, "its gradient, float32, sharded over mp"
