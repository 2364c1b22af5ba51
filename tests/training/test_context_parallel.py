"""Training on rows that are split along time, `mesh.cp`: the same values as on one device, whatever else is sharded.

T time.  Rows have documents of lengths that nothing divides.  With experts: test_experts.py.
"""

from functools import cache
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto, validate
from shmap_tp.errors import UserError
from shmap_tp.layers import attention
from shmap_tp.layers import context as tokens_module
from shmap_tp.layers.context import Extras
from shmap_tp.layers.flash_attention import Cudnn
from shmap_tp.layers.norm import RMSNorm
from shmap_tp.model.blocks import SequentialBlock
from shmap_tp.parallel import context_parallel
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan.ledger import Direction, Operation
from shmap_tp.plan.predict import step_communication
from shmap_tp.training import step
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import CONFIGURED, Components
from tests.helpers import step_fixtures as fixtures
from tests.helpers.assertions import assert_close
from tests.helpers.model_fixtures import random_like

COMMON = ("model.context=32", "optimizer.epsilon=1e-4")
"""With an epsilon above the smallest gradients: the first step of Adam divides each by its own size, and so its
rounding error, too."""
GLOBAL = "model.positions=alibi", "train.microbatches=1"
WINDOWED = "model.positions=rotary", "model.window=5", "model.layer_pattern=[local,global]"
"""On at most four ranks a chunk has four positions or more, and so a local layer needs only that before each."""
MODES = [f"mesh.tensor_parallel={mode}" for mode in ("all_reduce", "sequence", "collective_matmul")]
ALL_REDUCE, SEQUENCE, COLLECTIVE_MATMUL = MODES


def cut(shape: tuple[int, int, int], *settings: str) -> Config:
    """The configuration on a (dp, cp, mp) mesh."""
    dp, cp, mp = shape
    return fixtures.step_config((dp, mp), f"mesh.cp={cp}", *COMMON, *settings)


def program(shape: tuple[int, int, int], *settings: str, components: Components = CONFIGURED) -> fixtures.Program:
    return fixtures.Program(cut(shape, *settings), components, documents=True)


whole_rows = cache(lambda *settings: program((1, 1, 1), *settings))


@cache
def on_one_device(steps: int, *settings: str) -> fixtures.Curve:
    return whole_rows(*settings).train(steps)


@pytest.mark.parametrize(("model", "shape", "settings"), [
    (GLOBAL, (2, 2, 2), (ALL_REDUCE, "mesh.zero=zero1", "mesh.slices=2", "model.attention_chunk=3")),
    (GLOBAL, (1, 2, 4), (COLLECTIVE_MATMUL, "model.remat=attention")),
    (WINDOWED, (1, 4, 2), (SEQUENCE, "mesh.zero=fsdp", "model.attention_chunk=2", "model.remat=full")),
])  # fmt: skip
def test_cut_rows_train_as_whole_ones_and_communicate_as_the_ledger_says(model, shape, settings):
    expected, one = on_one_device(3, *model), program(shape, *model, *settings)
    found = one.train(3, whole_rows(*model).initial)
    assert fixtures.largest_difference(found.losses, expected.losses) <= fixtures.RELATIVE
    assert_close(found.params, expected.params, fixtures.RELATIVE)
    assert one.communicates_parameters_as_written_by_hand()


LEARNED = ("model.positions=learned",)
FIFTY = [
    ((4, 2, 1), ALL_REDUCE, "fsdp", LEARNED),
    ((4, 2, 1), COLLECTIVE_MATMUL, "none", WINDOWED),
    ((4, 2, 1), SEQUENCE, "none", LEARNED),
    ((2, 4, 1), ALL_REDUCE, "none", LEARNED),
    ((2, 4, 1), COLLECTIVE_MATMUL, "fsdp", LEARNED),
    ((2, 4, 1), SEQUENCE, "none", WINDOWED),
    ((1, 8, 1), ALL_REDUCE, "fsdp", LEARNED),
    ((1, 8, 1), COLLECTIVE_MATMUL, "none", WINDOWED),
    ((1, 8, 1), SEQUENCE, "none", WINDOWED),
    ((2, 2, 2), ALL_REDUCE, "none", LEARNED),
    ((2, 2, 2), COLLECTIVE_MATMUL, "none", WINDOWED),
    ((2, 2, 2), SEQUENCE, "fsdp", WINDOWED),
    ((1, 4, 2), ALL_REDUCE, "fsdp", WINDOWED),
    ((1, 4, 2), COLLECTIVE_MATMUL, "none", WINDOWED),
    ((1, 4, 2), SEQUENCE, "fsdp", LEARNED),
    ((1, 2, 4), ALL_REDUCE, "fsdp", WINDOWED),
    ((1, 2, 4), COLLECTIVE_MATMUL, "none", LEARNED),
    ((1, 2, 4), SEQUENCE, "none", LEARNED),
]
"""Every pair of values occurs."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "mode", "zero", "model"), FIFTY, ids=str)
def test_fifty_steps_have_the_losses_of_one_device(shape, mode, zero, model):
    found = program(shape, *model, mode, f"mesh.zero={zero}").train(fixtures.STEPS, whole_rows(*model).initial)
    assert fixtures.largest_difference(found.losses, on_one_device(fixtures.STEPS, *model).losses) <= fixtures.RELATIVE


def test_a_window_moves_the_chunk_before_in_place_of_whole_rows():
    """Each of k and v has two ppermutes of B T/2cp N K, in place of an all-gather of B T/cp N K, which reaches a device
    cp - 1 times."""
    moved, passes = {}, (Direction.forward, Direction.recompute, Direction.backward)
    for window in (5, 6):
        conf = cut((1, 4, 1), "model.positions=rotary", f"model.window={window}", "model.remat=full")
        entries = [each for each in step_communication(conf, jnp.float32) if each.what == "attention"]
        moved[window] = {(each.operation, each.direction): each.total for each in entries}
    shard = moved[6][Operation.all_gather, Direction.forward]
    assert moved[5] == {(Operation.ppermute, direction): shard for direction in passes}
    gathers = {(Operation.all_gather, direction): shard for direction in (Direction.forward, Direction.recompute)}
    assert moved[6] == gathers | {(Operation.reduce_scatter, Direction.backward): 4 * shard}


def test_a_step_on_whole_rows_is_the_program_of_a_code_without_context_parallelism(monkeypatch):
    """Its StableHLO is the same if the functions of `context_parallel` return what they are given."""
    settings = SEQUENCE, "mesh.zero=fsdp", *WINDOWED, "model.positions=learned", "train.microbatches=1"

    def lowered() -> str:
        one = fixtures.Program(cut((2, 1, 2), *settings))
        assert one.made.tokens.sharding.mesh.axis_names == ("dp", "mp")
        return one.lowered.as_text()

    expected = lowered()
    for module in (attention, tokens_module):
        for name in {"own_chunks", "row_order", "whole_rows"} & set(vars(module)):
            monkeypatch.setattr(module, name, lambda tree, *_: tree)
    monkeypatch.setattr(attention, "sees_one_chunk_back", lambda *_: False)
    assert lowered() == expected


def test_the_memory_of_a_device_is_that_of_its_part_of_a_row():
    """But for the keys and values of whole rows in the one layer at work, of few heads."""
    common = (
        "model.positions=rotary", "model.kv_heads=1", "model.attention_chunk=4", "model.layers=64",
        "train.microbatches=1",
        "model.remat=full", "mesh.zero=fsdp", "train.loss_chunk=64",
    )  # fmt: skip

    def temporaries(time: int, cp: int) -> int:
        one = fixtures.Program(cut((1, cp, 1), f"model.context={time}", *common))
        return one.compiled.memory_analysis().temp_size_in_bytes

    one, inputs_of_layers = temporaries(256, 1), 64 * (16 * 256 * 24 * 4)
    assert one > inputs_of_layers and temporaries(1024, 4) < 1.25 * one


def rank() -> jax.Array:
    return jax.lax.axis_index(context_parallel.axes_of(context_parallel.Role.time))


def shifted_after_cutting(*arguments, made=tokens_module.next_token_batch, **named):
    batch = made(*arguments, **named)
    parts = batch.inputs.reshape(*batch.inputs.shape[:-1], 2, -1)
    rolled = jnp.roll(parts, -1, axis=-1).reshape(batch.inputs.shape)
    return batch._replace(targets=jnp.where(batch.targets < 0, batch.targets, rolled))


def to_the_other_side(x, over, pairs, permute=jax.lax.ppermute):
    return permute(x, over, [(target, source) for source, target in pairs])


ALIBI = (1, 4, 1), "model.positions=alibi", "model.window=5", "train.microbatches=1"
ROTARY = (1, 2, 1), "model.positions=rotary", "train.microbatches=1"
ONLY_RECEIVED = SimpleNamespace(**vars(jnp) | {"where": lambda _, own, received: received})
MUTATIONS = {
    "every rank has the positions of the first": (
        ROTARY, tokens_module, "positions_of", lambda ids, axes, segments: jnp.broadcast_to(0, ids.shape),
    ),
    "a rank takes the target of its last position from its own first one": (
        ROTARY, step, "next_token_batch", shifted_after_cutting,
    ),
    "attention takes the chunks of a rank to be consecutive ones": (
        ROTARY, attention, "chunk_numbers", lambda: [2 * rank(), 2 * rank() + 1],
    ),
    "a rank sees its own keys in place of those of all ranks": (
        ROTARY, attention, "whole_rows", lambda tree: jax.tree.map(lambda x: jnp.tile(x, (1, 2, 1, 1)), tree),
    ),
    "the chunk before one comes from the rank on the other side": (ALIBI, jax.lax, "ppermute", to_the_other_side),
    "the last rank has nothing before its second chunk": (ALIBI, context_parallel, "jnp", ONLY_RECEIVED),
}  # fmt: skip


def evaluated(shape: tuple[int, int, int], *settings: str) -> float:
    """The loss of random parameters."""
    one = program(shape, *settings)
    params = random_like(one.made.shapes.params, "float32")
    placed = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), params, one.made.shapes.params)
    return float(one.made.evaluate(placed, *one.batch(0))[0])


of_whole_rows = cache(lambda *settings: evaluated((1, 1, 1), *settings))


@pytest.mark.parametrize("model", [ALIBI, ROTARY], ids=["alibi", "rotary"])
def test_the_loss_of_cut_rows_is_that_of_whole_ones(model):
    assert evaluated(*model) == pytest.approx(of_whole_rows(*model[1:]), rel=fixtures.RELATIVE)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_of_context_parallelism_give_another_loss(monkeypatch, mutation):
    model, module, name, other = MUTATIONS[mutation]
    expected = of_whole_rows(*model[1:])
    monkeypatch.setattr(module, name, other)
    assert abs(evaluated(*model) / expected - 1) > 10 * fixtures.RELATIVE


def test_a_gradient_that_is_not_summed_over_cp_is_a_type_error(monkeypatch):
    monkeypatch.setattr("shmap_tp.training.step.token_axes", lambda: ("dp",))
    with pytest.raises(Exception, match=r"varying"):
        program((2, 2, 2)).traced  # noqa: B018


def test_the_logits_of_cut_rows_are_those_of_whole_ones():
    found = {}
    for shape in ((1, 1, 1), (2, 2, 2)):
        conf = cut(shape, "model.positions=learned")
        functions = build_model_functions(conf, make_mesh(conf.mesh, jax.devices()[: conf.mesh.devices]), jnp.float32)
        ids, params = jnp.asarray(fixtures.learnable_batch(0, (2, 32))), random_like(functions.shapes, "float32")
        placed = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), params, functions.shapes)
        segments = jnp.cumsum(ids % 7 == 0, axis=1)
        found[shape] = [functions.logits(placed, ids, *more) for more in ((), (segments,))]
    assert_close(*found.values(), 1e-6)


class PositionWise(eqx.Module):
    """x + norm(x)^2: a block in which no token sees another, and which ignores its context."""

    norm: RMSNorm

    def __init__(self, config, attend, *, key, mlp=None):
        self.norm = RMSNorm(config.width)

    def __call__(self, x_BTD, context):
        return x_BTD + jnp.square(self.norm(x_BTD)), Extras()


def test_a_block_that_ignores_its_context_trains_on_cut_rows_too():
    components, settings = Components(block=PositionWise), ("model.positions=learned", "train.microbatches=1")
    whole, one = (
        program(shape, *settings, *more, components=components)
        for shape, more in [((1, 1, 1), ()), ((2, 2, 2), ("mesh.zero=fsdp",))]
    )
    assert one.made.tokens.sharding.spec == jax.P(None, "dp", None)
    assert_close(one.train(3, whole.initial).params, whole.train(3).params, fixtures.RELATIVE)


def test_cudnn_is_refused_on_cut_rows():
    """It would leave out the keys of other ranks."""
    block = lambda config, _, **rest: SequentialBlock(config, Cudnn(False, None), **rest)  # noqa: E731
    with pytest.raises(UserError, match=r"cudnn computes whole rows, which mesh.cp splits"):
        program((2, 2, 2), "model.positions=rotary", components=Components(block=block)).traced  # noqa: B018


@pytest.mark.parametrize(("settings", "message"), [
    (("mesh.cp=3",), r"mesh.cp=3: model.context=32 .* use mesh.cp in \{1, 2, 4, 8, 16\}, or model.context=36"),
    (("mesh.cp=2", "model.context=33"), r"cannot be cut in 2 parts that 2 divide; use model.context=36$"),
    (("mesh.cp=16", "mesh.mp=4", SEQUENCE), r"16 parts that 2 and mesh.mp divide; use mesh.cp in \{1, 2, 4, 8\}, or"),
    (("mesh.cp=2", "mesh.zero=fsdp", "mesh.fsdp_gradients=ring"), "needs mesh.cp=1, but mesh.cp=2"),
    (("mesh.cp=2", "model.remat=attention", "model.offload=[query_key_value]"), "which gathers whole rows of them"),
    (("mesh.cp=2", "model.adapter.rank=2", "train.dpo_beta=0.1", "train.z_loss=0"), "cuts the answers of a pair apart"),
])  # fmt: skip
def test_what_cp_does_not_suit_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        validate(fixtures.step_config((1, 1), *COMMON, *settings))


def test_dp_auto_is_what_cp_and_mp_leave():
    conf = resolve_auto(fixtures.step_config((1, 2), *COMMON, "mesh.cp=2", "mesh.dp=auto"), 8)
    assert (conf.mesh.dp, conf.mesh.devices) == (2, 8)
    with pytest.raises(UserError, match=r"mesh.cp=4 does not divide the 6 available devices"):
        resolve_auto(fixtures.step_config((1, 1), *COMMON, "mesh.cp=4", "mesh.dp=auto"), 6)
