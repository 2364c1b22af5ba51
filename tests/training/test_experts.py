"""A model with experts, auxiliary losses and biases of routers included: one curve on every mesh and for any
microbatches, and the biases bit for bit."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.layers.context import document_segments
from shmap_tp.layers.experts import Router
from tests.helpers import step_fixtures as fixtures
from tests.helpers.assertions import assert_close, assert_same_bits, by_path
from tests.helpers.model_fixtures import config

EXPERTS = (
    "block=sequential norm=rmsnorm mlp=swiglu positions=rotary context=8 attention_chunk=8 ffn=16 experts=8 window=3"
)
LOSSES = "router_balance_loss=0.01 router_z_loss=0.001 router_bias_rate=0.003"
BIAS = "blocks.mlp.router.choice_bias"


def program(shape: tuple[int, int], settings: str = "", model: str = LOSSES) -> fixtures.Program:
    """`settings` are of the mesh, or others with their sections."""
    given = [one if "." in one.partition("=")[0] else f"mesh.{one}" for one in settings.split()]
    conf = fixtures.step_config(shape, *(f"model.{one}" for one in f"{EXPERTS} {model}".split()), *given)
    return fixtures.Program(conf, documents="data.documents=isolated" in given)


@cache
def one_device(model: str = LOSSES) -> fixtures.Program:
    return program((1, 1), "train.microbatches=1", model)


@cache
def on_one_device(model: str = LOSSES) -> fixtures.Curve:
    return one_device(model).train(fixtures.STEPS)


QUICK = [((2, 2), "ep=2 tensor_parallel=sequence zero=fsdp cp=2", 2)]
"""Experts over ep and mp, with a window on cut rows."""
EVERY = [
    ((1, 1), "ep=1 tensor_parallel=all_reduce zero=fsdp", 4),
    ((1, 1), "ep=1 tensor_parallel=collective_matmul zero=none", 1),
    ((1, 1), "ep=1 tensor_parallel=sequence zero=zero1", 2),
    ((1, 8), "ep=1 tensor_parallel=all_reduce zero=zero1", 1),
    ((1, 8), "ep=1 tensor_parallel=collective_matmul zero=fsdp", 4),
    ((1, 8), "ep=1 tensor_parallel=sequence zero=none", 2),
    ((2, 4), "ep=1 tensor_parallel=sequence zero=zero1", 1),
    ((2, 4), "ep=2 tensor_parallel=all_reduce zero=fsdp", 2),
    ((2, 4), "ep=2 tensor_parallel=collective_matmul zero=none", 4),
    ((4, 2), "ep=1 tensor_parallel=collective_matmul zero=fsdp", 2),
    ((4, 2), "ep=2 tensor_parallel=sequence zero=zero1", 4),
    ((4, 2), "ep=4 tensor_parallel=all_reduce zero=none", 1),
    ((4, 2), "ep=4 tensor_parallel=collective_matmul zero=zero1", 4),
    ((8, 1), "ep=1 tensor_parallel=all_reduce zero=fsdp", 1),
    ((8, 1), "ep=2 tensor_parallel=collective_matmul zero=fsdp", 1),
    ((8, 1), "ep=4 tensor_parallel=sequence zero=fsdp", 2),
    ((8, 1), "ep=8 tensor_parallel=all_reduce zero=zero1", 2),
    ((8, 1), "ep=8 tensor_parallel=collective_matmul zero=none", 1),
    ((8, 1), "ep=8 tensor_parallel=sequence zero=fsdp", 1),
]
"""Every pair of values that go together: meshes, ep, modes, ZeRO stages and microbatches."""
PLACES = [*QUICK, *[pytest.param(*place, marks=pytest.mark.slow) for place in EVERY]]


@pytest.mark.parametrize(("shape", "settings", "microbatches"), PLACES, ids=str)
def test_the_loss_curve_of_a_model_with_experts_is_the_same_everywhere(shape, settings, microbatches):
    """And the initial state has the same bits, and after some steps the biases of its routers, which have no moments;
    the traced step communicates as the ledger says."""
    one, expected = program(shape, f"{settings} train.microbatches={microbatches}"), on_one_device()
    assert one.communicates_parameters_as_written_by_hand()
    assert not any("router.choice_bias" in path for path in by_path(one.made.shapes.optimizer))
    initial = one_device().initial
    assert_same_bits(one.initial, initial)
    assert np.array_equal(one.train(6, initial).params[BIAS], one_device().train(6).params[BIAS])
    assert expected.losses[-1] < expected.losses[0] - 1
    assert fixtures.largest_difference(one.train(fixtures.STEPS, initial).losses, expected.losses) <= fixtures.RELATIVE


@pytest.mark.parametrize("settings", [
    "tensor_parallel=all_reduce zero=fsdp", "ep=2 slices=2 zero=zero1 tensor_parallel=collective_matmul",
    "cp=2 data.documents=isolated",
])  # fmt: skip
def test_the_traced_step_communicates_parameters_as_written_by_hand(settings):
    dp = 2 if "cp" in settings else 4
    assert program((dp, 2), f"{settings} model.remat=full").communicates_parameters_as_written_by_hand()


def test_biases_move_by_their_rate_in_every_step():
    biases = one_device().train(6).params[BIAS]
    assert len(np.unique(biases)) > 2 and np.max(np.abs(biases)) <= 0.003 * 6 * (1 + 1e-6)


def test_the_bias_moves_by_its_rate_towards_the_mean_load_and_not_for_a_skipped_step():
    model = config("model.block=sequential", "model.mlp=swiglu", "model.experts=4", "model.router_bias_rate=0.5").model
    router = jax.vmap(lambda key: Router(model, key=key))(jax.random.split(jax.random.key(0)))  # of two layers
    loads = jnp.array([[5, 3, 4, 4], [16, 0, 0, 0]])  # of 8 tokens, 2 experts each
    assert router.balanced(loads, 8, jnp.array(True)).choice_bias.tolist() == [[-0.5, 0.5, 0, 0], [-0.5, 0.5, 0.5, 0.5]]
    assert router.balanced(loads, 8, jnp.array(False)).choice_bias.tolist() == [[0.0] * 4] * 2
    between = router.balanced(jnp.array([[5, 4, 4, 5]] * 2), 9, jnp.array(True))  # a mean of 4.5
    assert between.choice_bias.tolist() == [[-0.5, 0.5, 0.5, -0.5]] * 2


def test_the_bias_balances_a_router_that_does_not_learn():
    """The load of the most chosen expert of any layer, relative to the mean, of one batch."""
    still = "optimizer.learning_rate=0 optimizer.final_learning_rate=0 model.init_std=0.3 train.microbatches=1"
    one = program((2, 1), still, "router_bias_rate=0.003")
    state, loads = one.placed(one.initial), []
    for _ in range(150):
        state, metrics = one.compiled(state, *one.batch(0))
        loads.append(float(metrics["expert_load"]))
    assert loads[0] > 1.5 and loads[-1] < 1.15


def test_evaluation_reports_what_a_capacity_drops():
    one = program((4, 1), "ep=4 train.microbatches=1", f"{LOSSES} expert_capacity=1.0")
    share = float(one.made.evaluate(one.placed(one_device().initial).params, *one.batch(0))[2])
    assert share == one.train(1, one_device().initial).metrics["experts_dropped"] > 0


END = 49


def rows_of(documents: list[list[np.ndarray]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments) [1 rows length]: the documents of each row, then ends of text as in a packed file; a row
    without any is padding."""
    rows = [np.concatenate([*row, np.full(length, END)])[:length] if row else np.full(length, -1) for row in documents]
    tokens = np.array(rows, np.int32)[None]
    return tokens, np.asarray(document_segments(jnp.asarray(tokens), END))


def first_step(
    shape: tuple[int, int], settings: str, context: int, documents: list[list[np.ndarray]]
) -> fixtures.Curve:
    """The first step on rows of `context` tokens, each with these documents; the state has the gradients as momenta."""
    given = f"{settings} train.microbatches=1 train.batch={len(documents)} model.context={context}"
    one = program(shape, f"{given} model.attention_chunk={context} data.documents=isolated", LOSSES)
    batch = jax.device_put(rows_of(documents, context + 1), one.made.tokens.sharding)
    state, metrics = jax.device_get(one.compiled(one.placed(one_device().initial), *batch))
    return fixtures.Curve(metrics, state)


@pytest.mark.parametrize(("settings", "elsewhere"), [
    ("ep=2 model.expert_capacity=1.0 tensor_parallel=sequence", ((2, 2), "")), ("", ((1, 1), "cp=2")),
], ids=["a capacity over ep", "rows split along time"])  # fmt: skip
def test_the_free_space_of_rows_takes_part_in_nothing(settings, elsewhere):
    """The same documents, one in each short row, and four in each long row beside rows of filling and of padding: the
    same gradients, loads, drops and biases."""
    shape, more = elsewhere
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(0, END, rng.integers(2, 8)), END) for _ in range(16)]
    short = first_step(shape, settings, 8, [[document] for document in documents])
    four = [documents[i : i + 4] for i in range(0, 16, 4)]
    long = first_step(shape, f"{settings} {more}", 64, [*four[:2], [], [documents[0][-1:]], *four[2:], [], []])
    assert short.metrics.keys() == long.metrics.keys()
    for name, value in short.metrics.items():
        assert long.metrics[name] == pytest.approx(value, rel=1e-6), name
    assert (short.metrics["experts_dropped"] > 0) == ("capacity" in settings)
    assert np.array_equal(short.params[BIAS], long.params[BIAS])
    found, wanted = by_path(long.state.optimizer), by_path(short.state.optimizer)
    squares = {name for name in wanted if ".nu." in name}  # whose relative difference is twice that of the gradient
    assert squares and found.keys() == wanted.keys()
    for of, relative in ((squares, 2e-6), (wanted.keys() - squares, 1e-6)):
        assert_close(*({name: each[name] for name in of} for each in (found, wanted)), relative)


def test_rows_of_padding_take_no_capacity_in_an_evaluation():
    """Each rank has two rows, and in the larger batch two of padding behind them."""

    def evaluate(batch: int, tokens: np.ndarray) -> list[float]:
        settings = f"ep=4 train.microbatches=1 train.batch={batch}"
        one = program((4, 1), settings, f"{LOSSES} expert_capacity=1.0")
        params = one.placed(one_device().initial).params
        found = one.made.evaluate(params, jax.device_put(tokens[None], one.made.tokens.sharding))
        return [float(x) for x in found]

    rows = fixtures.learnable_batch(0, (8, 9))
    padded = np.concatenate([rows.reshape(4, 2, 9), np.full((4, 2, 9), -1, np.int32)], axis=1).reshape(16, 9)
    alone = evaluate(8, rows)
    assert alone[2] > 0 and evaluate(16, padded) == pytest.approx(alone, rel=1e-6)


def test_adapters_of_attention_train_beside_frozen_experts_alike_on_every_mesh():
    adapters = "adapter.rank=2 adapter.matrices=[attention] adapter.base_dtype=float32"
    expected = on_one_device(adapters).losses
    assert expected[-1] < expected[0]
    one = program((2, 2), "tensor_parallel=sequence train.microbatches=1", adapters)
    found = one.train(fixtures.STEPS, one_device(adapters).initial).losses
    assert fixtures.largest_difference(found, expected) <= fixtures.RELATIVE
