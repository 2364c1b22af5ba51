"""What the planner derives from a model's modules: for the blocks of the project what is written down by hand, for
those of a user what their step does."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
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
from shmap_tp.plan.communication.ledger import Direction, Entry, tally
from shmap_tp.plan.report import config_fields
from shmap_tp.training.step import Components, build_step_functions
from tests.helpers.communication_checks import by_direction, check_activations, program_config, step_communication
from tests.helpers.components import ADAPTER, COMPONENTS, AdapterBlock, ReGluMlp
from tests.helpers.model_fixtures import mesh_of

BY_HAND = [
    "parallel", "parallel, remat full", "sequential, remat attention", "2 kv heads", "fsdp", "fsdp; sequence",
    "1 kv head, sequential, remat full; sequence", "sequential, remat full; collective_matmul",
]  # fmt: skip


@pytest.mark.parametrize("program", BY_HAND)
def test_the_calls_of_a_model_are_those_written_down_by_hand(program):
    check_activations(program, "bfloat16")


def test_the_parts_of_a_model_are_named():
    sequential = activations(program_config("block=sequential kv_heads=2", (2, 4)), jnp.bfloat16)
    assert {entry.what for entry in sequential} == {
        "embedding reduce", "attention enter", "attention reduce", "attention, in a layer", "MLP enter", "MLP reduce",
        "head enter",
    }  # fmt: skip
    parallel = activations(program_config("parallel; collective_matmul", (4, 2)), jnp.bfloat16)
    assert {"block column-parallel", "block row-parallel"} < {entry.what for entry in parallel}


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


def conf_of(settings: str, shape: tuple[int, int] = (2, 4)):
    return program_config(f"context=8 {settings}", shape)


def check_planned(conf, given: Components, precision: str = "float32") -> list[Entry]:
    planned = analytic_communication(conf, precision, given)
    assert by_direction(step_communication(conf, precision, given)) == by_direction(planned)
    return planned


@pytest.mark.parametrize(
    ("components", "settings", "shape"),
    [
        ("mlp", "mesh.tensor_parallel=sequence remat=attention_and_up mesh.zero=fsdp", (4, 2)),
        ("block", "kv_heads=2 remat=mlp mesh.zero=zero1", (2, 4)),
        ("block and mlp", "mesh.tensor_parallel=collective_matmul remat=attention", (1, 2)),
        ("block", "remat=all_matmuls offload=[up] mesh.zero=fsdp mesh.fsdp_gradients=ring", (2, 4)),
    ],
)
def test_a_step_with_components_communicates_as_the_planner_says(components, settings, shape):
    conf, given = conf_of(settings, shape), COMPONENTS[components]
    check_planned(conf, given, "bfloat16")


def test_an_evaluation_with_components_communicates_as_the_planner_says():
    conf, given = conf_of("mesh.zero=fsdp"), COMPONENTS["block and mlp"]
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
    conf = conf_of(f"block=sequential mesh.tensor_parallel={mode}")
    planned = check_planned(conf, Components(mlp=ScaledHiddenMlp))
    scalars = [entry for entry in planned if entry.axis == MP and entry.bytes == 4 and "norm" not in entry.what]
    assert sum(entry.count for entry in scalars) == (2 * 3 if mode == "all_reduce" else 0)


class NormalisedOverDp(ReGluMlp):
    """Its output is divided by the mean square of x over all dp ranks: a collective over another axis than mp."""

    def __call__(self, x_BTD, tp):
        mean = lax.pmean(jnp.mean(jnp.square(x_BTD.astype(jnp.float32))), DP)
        return super().__call__(x_BTD, tp) / lax.stop_gradient(mean).astype(x_BTD.dtype)


def test_what_a_layer_communicates_over_another_axis_is_planned():
    planned = check_planned(conf_of("block=sequential remat=full"), Components(mlp=NormalisedOverDp))
    over_dp = [entry for entry in planned if entry.what == "MLP, in a layer" and entry.axis == DP]
    assert {entry.direction: entry.count for entry in over_dp} == {Direction.forward: 6, Direction.recompute: 6}


@dataclass(frozen=True)
class TwoReductions(AllReduce):
    """A mode of a user: it reduces each half of the width by itself."""

    def reduce(self, y_BTD):
        return jnp.concatenate([lax.psum(half, MP) for half in jnp.split(y_BTD, 2, axis=-1)], axis=-1)


def test_a_mode_of_ones_own_is_planned_as_it_is_traced_and_a_given_one_as_the_one_that_is_named():
    conf = conf_of("block=sequential")
    own = check_planned(conf, Components(tensor_parallel=TwoReductions()))
    assert tally(own) != tally(analytic_communication(conf, "float32"))
    given = analytic_communication(conf, "float32", Components(tensor_parallel=SequenceParallel()))
    named = conf_of("block=sequential mesh.tensor_parallel=sequence")
    assert given == analytic_communication(named, "float32")


def test_a_matrix_that_is_not_counted_would_be_found():
    """A mutation of the reference: one matrix of each layer left out, the figures differ by exactly that matrix."""
    conf, given = conf_of(""), COMPONENTS["block and mlp"]
    layers, tokens = conf.model.layers, conf.train.batch * conf.model.context

    def figures(components: Components) -> tuple[int, float, int]:
        """(parameters, FLOPs of a device, bytes over dp)."""
        fields = config_fields(conf, AttentionKernel.chunked, 8, None, components)
        ledger = analytic_communication(conf, "float32", components)
        over_dp = sum(entry.total for entry in ledger if entry.axis == DP)
        return fields["params"], fields["model_flops_per_device"], over_dp

    whole = np.array(figures(given))
    for without, weights in (
        (Components(AdapterBlock), 24 * 40 * layers),
        (Components(block=WithoutAdapter, mlp=ReGluMlp), 2 * 24 * ADAPTER * layers),
    ):
        flops, gradient = 6 * weights * tokens / 8, 4 * weights / 4  # float32, sharded over mp
        assert [*(whole - figures(without))] == [weights, flops, gradient]
