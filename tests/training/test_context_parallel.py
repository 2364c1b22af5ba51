"""Training on rows that are split along time, `mesh.cp`: the same values as on one device, whatever else is sharded.

T time.  Rows have documents of lengths that nothing divides.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto, validate
from shmap_tp.errors import UserError
from shmap_tp.layers import attention
from shmap_tp.layers.context import Extras
from shmap_tp.layers.flash_attention import Cudnn
from shmap_tp.layers.norm import RMSNorm
from shmap_tp.model import tokens as tokens_module
from shmap_tp.model.blocks import SequentialBlock
from shmap_tp.parallel import context_parallel
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan.communication.analytic import analytic_communication
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction, Operation, tally
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import CONFIGURED, Components, StepFunctions, build_step_functions
from tests.helpers.assertions import assert_close, by_path
from tests.helpers.step_fixtures import STEPS, largest_difference, learnable_batch, step_config

RELATIVE = 1e-5
"""As the loss curves of different meshes in test_step."""
COMMON = ("model.context=32", "optimizer.epsilon=1e-4")
"""With an epsilon above the smallest gradients: the first step of Adam divides each by its own size, and so its
rounding error, too."""
WINDOWED = "model.positions=rotary", "model.window=5", "model.layer_pattern=[local,global]"
"""On at most four ranks a chunk has four positions or more, and so a local layer needs only that before each."""
ALL_REDUCE, SEQUENCE, COLLECTIVE_MATMUL = (
    f"mesh.tensor_parallel={mode}" for mode in ("all_reduce", "sequence", "collective_matmul")
)


def functions_of(conf: Config, components: Components = CONFIGURED) -> StepFunctions:
    return build_step_functions(conf, make_mesh(conf.mesh, jax.devices()[: conf.mesh.devices]), jnp.float32, components)


def batch(made: StepFunctions, step: int) -> Any:
    """(tokens, segments) of a step."""
    begins = np.random.default_rng(step).random(made.tokens.shape) < 0.2
    arrays = learnable_batch(step, made.tokens.shape), np.cumsum(begins, axis=-1, dtype=np.int32)
    return jax.device_put(arrays, made.tokens.sharding)


def train(made: StepFunctions, steps: int = 3) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(the losses of some steps, the parameters after them)."""
    state, losses = made.init(), []
    for step in range(steps):
        state, metrics = made.step(state, *batch(made, step))
        losses.append(float(metrics["loss"]))
    return np.array(losses), by_path(state.params)


@cache
def on_one_device(steps: int, *settings: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return train(functions_of(step_config((1, 1), *COMMON, *settings)), steps)


def cut(shape: tuple[int, int, int], *settings: str) -> Config:
    """The configuration on a (dp, cp, mp) mesh."""
    dp, cp, mp = shape
    return step_config((dp, mp), f"mesh.cp={cp}", *COMMON, *settings)


@pytest.mark.parametrize(("positions", "shape", "settings"), [
    ("alibi", (2, 2, 2), (ALL_REDUCE, "mesh.zero=zero1", "model.attention_chunk=3")),
    ("learned", (2, 2, 2), (SEQUENCE, "mesh.zero=zero1", "mesh.slices=2", "model.remat=attention")),
    ("rotary", (1, 4, 2), (SEQUENCE, "mesh.zero=fsdp", "model.attention_chunk=2", "model.remat=full")),
    ("rotary", (1, 8, 1), (ALL_REDUCE, "mesh.zero=fsdp")),
    ("rotary", (1, 2, 4), (COLLECTIVE_MATMUL,)),
])  # fmt: skip
def test_cut_rows_train_as_whole_ones(positions, shape, settings):
    expected = on_one_device(3, f"model.positions={positions}")
    losses, params = train(functions_of(cut(shape, f"model.positions={positions}", *settings)))
    assert largest_difference(losses, expected[0]) <= RELATIVE
    assert_close(params, expected[1], RELATIVE)


def test_a_window_and_experts_on_cut_rows_train_as_on_whole_ones():
    settings = (
        "model.block=sequential", "model.mlp=swiglu", "model.mlp_bias=false", *WINDOWED,
        "model.experts=4", "model.experts_per_token=2", "model.router_balance_loss=0.01",
    )  # fmt: skip
    expected = on_one_device(3, *settings)
    losses, params = train(functions_of(cut((2, 2, 2), SEQUENCE, "mesh.zero=fsdp", *settings)))
    assert largest_difference(losses, expected[0]) <= RELATIVE
    assert_close(params, expected[1], RELATIVE)


@pytest.mark.parametrize(("window", "shape"), [(5, (1, 4, 2)), (6, (1, 4, 2)), (3, (1, 8, 1)), (9, (2, 2, 1))])
def test_layers_whose_window_ends_in_the_chunk_before_and_beyond_it_train_as_on_whole_rows(window, shape):
    settings = "model.positions=rotary", f"model.window={window}"
    expected = on_one_device(3, *settings)
    losses, params = train(functions_of(cut(shape, *settings)))
    assert largest_difference(losses, expected[0]) <= RELATIVE
    assert_close(params, expected[1], RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ALL_REDUCE, SEQUENCE, COLLECTIVE_MATMUL])
@pytest.mark.parametrize("shape", [(4, 2, 1), (2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("zero", ["none", "fsdp"])
@pytest.mark.parametrize("layers", [("model.positions=rotary",), WINDOWED], ids=["global", "local and global"])
def test_fifty_steps_have_the_losses_of_one_device(shape, mode, zero, layers):
    expected, _ = on_one_device(STEPS, *layers)
    losses, _ = train(functions_of(cut(shape, *layers, mode, f"mesh.zero={zero}")), STEPS)
    assert largest_difference(losses, expected) <= RELATIVE


@pytest.mark.parametrize(("shape", "settings"), [
    ((2, 2, 2), (SEQUENCE, "mesh.zero=fsdp", "mesh.slices=2", "model.remat=attention")),
    ((1, 4, 2), (ALL_REDUCE, "mesh.zero=zero1", "model.remat=full")),
    ((1, 2, 4), (COLLECTIVE_MATMUL,)),
    ((2, 4, 1), (SEQUENCE, *WINDOWED, "model.remat=full")),
])  # fmt: skip
def test_the_ledger_is_the_traced_step(shape, settings):
    conf = cut(shape, *settings)
    made = functions_of(conf)
    traced = communication_in_jaxpr(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)
    assert tally(analytic_communication(conf, jnp.float32)) == tally(traced)


def test_a_window_moves_the_chunk_before_in_place_of_whole_rows():
    """Of each of k and v two ppermutes of B T/2cp N K, in place of an all-gather of B T/cp N K, which reaches a device
    cp - 1 times."""
    moved, passes = {}, (Direction.forward, Direction.recompute, Direction.backward)
    for window in (5, 6):
        conf = cut((1, 4, 1), "model.positions=rotary", f"model.window={window}", "model.remat=full")
        entries = [each for each in analytic_communication(conf, jnp.float32) if each.what == "attention, in a layer"]
        moved[window] = {(each.operation, each.direction): each.bytes * each.count for each in entries}
    shard = moved[6][Operation.all_gather, Direction.forward]
    assert moved[5] == {(Operation.ppermute, direction): shard for direction in passes}
    gathers = {(Operation.all_gather, direction): shard for direction in (Direction.forward, Direction.recompute)}
    assert moved[6] == gathers | {(Operation.reduce_scatter, Direction.backward): 4 * shard}


@pytest.mark.parametrize("settings", [(SEQUENCE, "mesh.zero=fsdp", *WINDOWED), (ALL_REDUCE, "model.positions=learned")])
def test_a_step_on_whole_rows_is_the_program_of_a_code_without_context_parallelism(monkeypatch, settings):
    """Its StableHLO is the same if the functions of `context_parallel` return what they are given."""
    conf = cut((2, 1, 2), *settings)

    def lowered() -> str:
        made = functions_of(conf)
        assert made.tokens.sharding.mesh.axis_names == ("dp", "mp")
        return made.step.lower(made.shapes, made.tokens).as_text()

    expected = lowered()
    for module in (attention, tokens_module):
        for name in {"own_chunks", "row_order", "whole_rows"} & set(vars(module)):
            monkeypatch.setattr(module, name, lambda tree, *_: tree)
    monkeypatch.setattr(attention, "sees_one_chunk_back", lambda *_: False)
    assert lowered() == expected


def test_the_memory_of_a_device_is_that_of_its_part_of_a_row():
    """But for the keys and values of whole rows in the one layer at work, of few heads."""
    common = (
        "model.positions=rotary",
        "model.kv_heads=1",
        "model.attention_chunk=4",
        "model.layers=64",
        "model.remat=full",
    )

    def temporaries(time: int, cp: int) -> int:
        made = functions_of(cut((1, cp, 1), f"model.context={time}", *common, "mesh.zero=fsdp", "train.loss_chunk=64"))
        return made.step.lower(made.shapes, made.tokens).compile().memory_analysis().temp_size_in_bytes

    one = temporaries(256, 1)
    assert temporaries(1024, 4) < 1.25 * one and temporaries(1024, 1) > 3 * one


def stale_positions(monkeypatch):
    """Every rank has the positions of the first."""
    monkeypatch.setattr(tokens_module, "positions_of", lambda ids, axes, segments: jnp.broadcast_to(0, ids.shape))


def shifted_after_cutting(monkeypatch):
    """A rank takes the target of its last position from its own first one."""
    made = tokens_module.next_token_batch

    def shifted(*arguments):
        batch = made(*arguments)
        rolled = jnp.roll(rank_parts(batch.inputs), -1, axis=-1).reshape(batch.inputs.shape)
        return batch._replace(targets=jnp.where(batch.targets < 0, batch.targets, rolled))

    monkeypatch.setattr("shmap_tp.training.step.next_token_batch", shifted)


def rank_parts(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], 2, -1)


def chunks_of_one_end(monkeypatch):
    """Attention takes the chunks of a rank to be consecutive ones."""

    def numbers():
        over = context_parallel.axes_of(context_parallel.Role.time)
        return [2 * jax.lax.axis_index(over), 2 * jax.lax.axis_index(over) + 1]

    monkeypatch.setattr(attention, "chunk_numbers", numbers)


def keys_of_own_chunks(monkeypatch):
    """A rank sees its own keys in place of those of all ranks."""
    monkeypatch.setattr(attention, "whole_rows", lambda tree: jax.tree.map(lambda x: jnp.tile(x, (1, 2, 1, 1)), tree))


def wrong_neighbours(monkeypatch):
    """The chunk before one comes from the rank on the other side."""
    permute = jax.lax.ppermute

    def turned(x, over, pairs):
        return permute(x, over, [(target, source) for source, target in pairs])

    monkeypatch.setattr(jax.lax, "ppermute", turned)


def no_chunk_of_its_own(monkeypatch):
    """The last rank has nothing before its second chunk."""
    without = vars(jnp) | {"where": lambda _, own, received: received}
    monkeypatch.setattr(context_parallel, "jnp", SimpleNamespace(**without))


@pytest.mark.parametrize("mutate", [wrong_neighbours, no_chunk_of_its_own])
def test_mutations_of_a_window_on_cut_rows_give_other_losses(monkeypatch, mutate):
    settings = "model.positions=alibi", "model.window=5"
    expected, _ = on_one_device(3, *settings)
    mutate(monkeypatch)
    losses, _ = train(functions_of(cut((1, 4, 1), *settings)))
    assert largest_difference(losses, expected) > 10 * RELATIVE


@pytest.mark.parametrize("mutate", [stale_positions, shifted_after_cutting, chunks_of_one_end, keys_of_own_chunks])
def test_mutations_of_context_parallelism_give_other_losses(monkeypatch, mutate):
    expected, _ = on_one_device(3, "model.positions=rotary")
    mutate(monkeypatch)
    losses, _ = train(functions_of(cut((1, 2, 1), "model.positions=rotary")))
    assert largest_difference(losses, expected) > 10 * RELATIVE


def test_a_gradient_that_is_not_summed_over_cp_is_a_type_error(monkeypatch):
    monkeypatch.setattr("shmap_tp.training.step.token_axes", lambda: ("dp",))
    made = functions_of(cut((2, 2, 2)))
    with pytest.raises(Exception, match=r"varying"):
        jax.make_jaxpr(made.step)(made.shapes, made.tokens)


@pytest.mark.parametrize("with_segments", [False, True])
def test_the_logits_of_cut_rows_are_those_of_whole_ones(with_segments):
    found = {}
    for shape in ((1, 1, 1), (2, 2, 2)):
        conf = cut(shape, "model.positions=learned")
        mesh = make_mesh(conf.mesh, jax.devices()[: conf.mesh.devices])
        functions = build_model_functions(conf, mesh, jnp.float32)
        ids = jnp.asarray(learnable_batch(0, (2, 32)))
        segments = (jnp.cumsum(ids % 7 == 0, axis=1),) if with_segments else ()
        found[shape] = functions.logits(functions.initialize(), ids, *segments)
    assert_close(*found.values(), 1e-6)


class PositionWise(eqx.Module):
    """x + norm(x)^2: a block in which no token sees another, and which ignores its context."""

    norm: RMSNorm

    def __init__(self, config, attend, *, key, mlp=None):
        self.norm = RMSNorm(config.width)

    def __call__(self, x_BTD, context):
        return x_BTD + jnp.square(self.norm(x_BTD)), Extras()


def test_a_block_that_ignores_its_context_trains_on_cut_rows_too():
    components = Components(block=PositionWise)
    _, expected = train(functions_of(step_config((1, 1), *COMMON, "model.positions=learned"), components))
    made = functions_of(cut((2, 2, 2), "model.positions=learned", "mesh.zero=fsdp"), components)
    assert made.tokens.sharding.spec == jax.P(None, "dp", None)
    assert_close(train(made)[1], expected, RELATIVE)


def test_cudnn_is_refused_on_cut_rows():
    """It would leave out the keys of other ranks."""
    block = lambda config, _, **rest: SequentialBlock(config, Cudnn(False, None), **rest)  # noqa: E731
    made = functions_of(cut((2, 2, 2), "model.positions=rotary"), Components(block=block))
    with pytest.raises(UserError, match=r"cudnn computes whole rows, which mesh.cp splits"):
        jax.make_jaxpr(made.step)(made.shapes, made.tokens)


@pytest.mark.parametrize(("settings", "message"), [
    (("mesh.cp=3",), r"mesh.cp=3: model.context=32 .* use mesh.cp in \{1, 2, 4, 8, 16\}, or model.context=36"),
    (("mesh.cp=16", "mesh.mp=4", SEQUENCE), r"16 parts that 2 and mesh.mp divide; use mesh.cp in \{1, 2, 4, 8\}, or"),
    (("mesh.cp=2", "mesh.zero=fsdp", "mesh.fsdp_gradients=ring"), "cannot be combined with mesh.cp=2"),
    (("mesh.cp=2", "model.remat=attention", "model.offload=[query_key_value]"), "would be written to the host"),
    (("mesh.cp=2", "model.adapter.rank=2", "train.dpo_beta=0.1", "train.z_loss=0"), "cuts the answers of a pair apart"),
])  # fmt: skip
def test_what_cp_does_not_suit_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        validate(step_config((1, 1), *COMMON, *settings))


def test_dp_auto_is_what_cp_and_mp_leave():
    conf = resolve_auto(step_config((1, 2), *COMMON, "mesh.cp=2", "mesh.dp=auto"), 8)
    assert (conf.mesh.dp, conf.mesh.devices) == (2, 8)
    with pytest.raises(UserError, match=r"mesh.cp=4 does not divide the 6 available devices"):
        resolve_auto(step_config((1, 1), *COMMON, "mesh.cp=4", "mesh.dp=auto"), 6)
