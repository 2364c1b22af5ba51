"""Schedules of the learning rate, and Muon: the same updates on every mesh and with every sharding."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from shmap_tp.config.schema import OptimizerConfig
from shmap_tp.model.sharded_model import shard_model
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.parallel.whole_matrices import UpdateSharding
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.optimizer import Optimizer, describe_schedule, learning_rate_schedule, make_optimizer
from shmap_tp.training.step import CONFIGURED, Components
from tests.helpers.assertions import assert_close, assert_same_bits, by_path
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config
from tests.helpers.model_fixtures import config
from tests.helpers.step_fixtures import RELATIVE, Curve, Program, step_config

LINEAR, APART = "then a linear decay", "(optimizer.decay_steps=300 is apart from train.steps)"
CUT_SHORT = f"{LINEAR} that would end at step 300 (optimizer.decay_steps), after train.steps"
WHOLE = f"{LINEAR} down to 0.0003 at step 300"
UNREACHED = "then constant; the decay after step 270 (optimizer.decay_steps=300) begins after train.steps"
COSINE, END = "then a cosine", "decay_steps=300"


def test_every_schedule_says_where_it_and_the_run_end_apart():
    for settings, steps, rest in [
        (f"schedule=cosine {END}", 300, f", {COSINE} down to 0.0003 at step 300"),
        (f"schedule=cosine {END}", 20000, f", {COSINE} down to 0.0003 at step 300, constant until step 20,000 {APART}"),
        (
            f"schedule=cosine {END}",
            40,
            f", {COSINE} that would end at step 300 (optimizer.decay_steps), after train.steps",
        ),
        (f"schedule=linear {END}", 299, f", {CUT_SHORT}"),
        (f"schedule=linear {END}", 300, f", {WHOLE}"),
        (f"schedule=linear {END}", 301, f", {WHOLE}, constant until step 301 {APART}"),
        (f"schedule=wsd {END}", 270, f", {UNREACHED}"),
        (f"schedule=wsd {END}", 271, f", constant until step 270, {CUT_SHORT}"),
        (f"schedule=wsd {END}", 300, f", constant until step 270, {WHOLE}"),
        (f"schedule=wsd {END}", 301, f", constant until step 270, {WHOLE}, constant until step 301 {APART}"),
        ("schedule=constant decay_steps=1", 31, ", then constant"),
        ("schedule=cosine decay_steps=30", 30, ""),
        ("schedule=cosine decay_steps=29", 29, " (optimizer.warmup_steps), after the last step 29"),
    ]:
        given = f"train.steps={steps}", *(f"optimizer.{setting}" for setting in settings.split())
        section = config(*given).optimizer
        assert describe_schedule(section, steps) == f"up to 0.003 at step 30{rest}", (settings, steps)


@pytest.mark.parametrize(("warmup", "decay"), [(4, 10), (1, 3), (0, 3), (0, 1)], ids=str)
def test_the_warm_up_begins_at_its_first_fraction_and_ends_at_the_peak(warmup, decay):
    """Steps are counted from 1: a first step of rate 0 would train nothing."""
    found, first = rates(range(1, 101), f"warmup_steps={warmup}", f"decay_steps={decay}"), max(warmup, 1)
    np.testing.assert_allclose(found[:first], np.arange(1, first + 1) / first, rtol=1e-6)
    assert found[first] < 1 and [found[max(decay - 1, first)], found[99]] == [0.5, 0.5]


def rates(steps: range, *settings: str) -> list[float]:
    """The rates of `steps`, counted from 1, with a warm-up of 4, a peak of 1 and a final rate of 1/2."""
    fixed = ["warmup_steps=4", "learning_rate=1", "final_learning_rate=0.5"]
    schedule = learning_rate_schedule(config(*(f"optimizer.{one}" for one in (*fixed, *settings))).optimizer)
    return np.asarray(jax.vmap(schedule)(np.array(steps) - 1)).tolist()


COSINE_BY_HAND = [1, 0.75 + np.sqrt(3) / 8, 0.875, 0.75, 0.625, 0.75 - np.sqrt(3) / 8, 0.5, 0.5]
"""(1 + cos(pi k / 6)) / 2 between the rates, k steps after the warm-up."""


def test_the_rates_of_each_schedule_from_the_first_step_until_after_the_decay():
    for schedule, expected in [
        ("cosine", COSINE_BY_HAND),
        ("linear", [1, *(1 - k / 12 for k in range(1, 6)), 0.5, 0.5]),
        ("constant", [1] * 8),
        ("wsd", [1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5]),  # 0.4 of 10 steps: the last 4
    ]:
        found = rates(range(1, 12), f"schedule={schedule}", "decay_steps=10", "decay_fraction=0.4")
        np.testing.assert_allclose(found, [0.25, 0.5, 0.75, *expected], rtol=1e-6, err_msg=schedule)


def test_a_cosine_has_the_bits_that_it_had_before_there_were_other_schedules():
    before = jax.vmap(optax.warmup_cosine_decay_schedule(1 / 4, 1.0, 3, 99, 0.5))(np.arange(119))
    assert rates(range(1, 120), "decay_steps=100") == before.tolist()


def test_a_wsd_schedule_without_a_stable_part_is_the_linear_one_and_its_stable_part_that_of_every_longer_one():
    for warmup in (4, 0):
        given = [f"warmup_steps={warmup}", "decay_steps=10"]
        wsd = rates(range(1, 12), *given, "schedule=wsd", f"decay_fraction={(10 - warmup) / 10}")
        assert wsd == rates(range(1, 12), *given, "schedule=linear"), warmup
    stable = [rates(range(1, 8), "schedule=wsd", f"decay_steps={n}", "decay_fraction=0.3") for n in (10, 11, 1000)]
    assert stable[0] == stable[1] == stable[2]


@cache
def program(settings: str, components: Components = CONFIGURED) -> Program:
    given = "optimizer.name=muon", "model.context=8", "train.microbatches=1", *settings.split()
    return Program(step_config((1, 1), *given), components)


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Jordan et al. 2024, five steps, in float64, of a matrix that need not be wide: the iteration commutes with
    transposition."""
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def plain_muon(name: str, gradients: list[np.ndarray], w: np.ndarray, c: OptimizerConfig) -> np.ndarray:
    """The updates of constant parameters w after these gradients, by hand."""
    gradients = [g.astype(np.float64) for g in gradients]
    held = ml_dtypes.bfloat16 if c.momentum_dtype == "bfloat16" else np.float64
    of_embedding = name.startswith(("embedding", "head", "positions"))
    is_matrix = name.endswith("weight") and not of_embedding
    of_heads = w.ndim == 4 and w.shape[-1] == HEAD_DIM  # [L D N K], where experts are [L E D F]
    if not is_matrix or c.name == "adamw":
        m, v = np.zeros(w.shape), np.zeros(w.shape)
        for g in gradients:
            m, v = c.beta1 * m.astype(held) + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g**2
        step = len(gradients)
        update = m / (1 - c.beta1**step) / (np.sqrt(v / (1 - c.beta2**step)) + c.epsilon)
    else:
        m = np.zeros(w.shape)
        for g in gradients:
            m = c.momentum * m.astype(held) + g
        m = gradients[-1] + c.momentum * m
        matrices = m.reshape(-1, w.shape[1], w.shape[2] * w.shape[3]) if of_heads else m.reshape(-1, *w.shape[-2:])
        update = np.stack([0.2 * max(x.shape) ** 0.5 * newton_schulz(x) for x in matrices]).reshape(w.shape)
    if is_matrix and c.hyperball:

        def norms(x: np.ndarray) -> np.ndarray:
            last = 2 if w.ndim == 4 and not of_heads else w.ndim - 1
            return np.sqrt(np.sum(x**2, axis=tuple(range(w.ndim - last, w.ndim)), keepdims=True))

        w = w.astype(np.float64)
        moved = w - c.learning_rate * norms(w) / norms(update) * update
        return norms(w) / norms(moved) * moved - w
    vector = 1 if is_matrix else c.vector_rate
    rate = {"embedding.weight": c.embedding_rate, "positions.weight": c.embedding_rate, "head.weight": c.head_rate}
    decay = c.weight_decay if name.endswith("weight") else 0
    return -c.learning_rate * rate.get(name, vector) * (update + decay * w)


HEAD_DIM = 4
FSDP = "mesh.zero=fsdp"
IN_BFLOAT16 = "optimizer.momentum_dtype=bfloat16 optimizer.beta1=0.5"
"""With 0.5 what is rounded after the first gradient is exact in float32 and float64."""
BALL = "optimizer.hyperball=true optimizer.embedding_rate=0.5 optimizer.head_rate=2 optimizer.vector_rate=3"
PLACED = [
    "mesh.dp=2 mesh.mp=4 mesh.zero=none",
    "mesh.dp=8 mesh.zero=zero1 model.layers=3",
    f"mesh.mp=8 {FSDP} mesh.tensor_parallel=sequence model.context=8 model.kv_heads=2 model.mlp=swiglu",
    f"mesh.dp=2 mesh.cp=2 mesh.mp=2 {FSDP} mesh.tensor_parallel=collective_matmul model.context=8",
    f"mesh.dp=4 mesh.mp=2 {FSDP} mesh.fsdp_gradients=ring mesh.slices=2 model.layers=3 {IN_BFLOAT16}",
    f"mesh.dp=4 mesh.mp=2 {FSDP} model.block=sequential model.mlp=swiglu model.experts=6 model.experts_per_token=2",
    "mesh.dp=2 mesh.mp=4 mesh.zero=zero1 model.adapter.rank=2",
    f"mesh.dp=2 mesh.mp=4 mesh.zero=zero1 optimizer.name=adamw {IN_BFLOAT16}",
    f"mesh.dp=2 mesh.mp=4 {FSDP} {BALL} model.positions=learned",
    f"mesh.dp=4 mesh.mp=2 mesh.zero=zero1 {BALL} optimizer.name=adamw model.block=sequential model.mlp=swiglu "
    "model.experts=6 model.experts_per_token=2",
]


@pytest.mark.parametrize("settings", PLACED)
def test_updates_of_muon_are_those_of_plain_numpy_on_every_mesh(settings):
    """And no collective is within Newton-Schulz."""
    given = "optimizer.name=muon", "optimizer.warmup_steps=0", "optimizer.epsilon=1e-3", *settings.split()
    conf = step_config((1, 1), *given)
    on = make_mesh(conf.mesh, jax.devices()[: conf.mesh.devices])
    model, muon = shard_model(conf, on, jnp.float32), make_optimizer(conf.optimizer)
    trained, specs = model.split(model.shapes)[0], model.split(model.placed.updated)[0]
    rng = np.random.default_rng(0)
    params, *gradients = (
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), trained) for _ in range(3)
    )

    def second_update(params: Any, *gradients: Any) -> Any:
        state = muon.init(params)
        for g in gradients:
            updates, state = muon.update(g, state, params, UpdateSharding(specs, on.axis_names, jnp.float32))
        return updates

    run = jax.jit(jax.shard_map(second_update, mesh=on, in_specs=(specs,) * 3, out_specs=specs))
    run = run.lower(params, *gradients).compile()
    placed = jax.device_put((params, *gradients), run.input_shardings[0])
    found, w, first, second = map(by_path, (run(*placed), params, *gradients))
    constant = replace(conf.optimizer, learning_rate=float(muon.schedule(1)))
    expected = {name: plain_muon(name, [first[name], second[name]], w[name], constant) for name in found}
    assert_close(found, expected, RELATIVE)
    lines = [line for line in run.as_text().splitlines() if "newton_schulz" in line]
    assert any(" dot(" in line or "matmul" in line for line in lines) == (conf.optimizer.name == "muon")
    collectives = ("all-", "reduce-scatter", "collective-permute")
    assert not [line for line in lines if any(name in line.split("metadata")[0] for name in collectives)]


CUT = f"mesh.dp=2 mesh.cp=2 mesh.mp=2 {FSDP} mesh.tensor_parallel=sequence"


@cache
def trained(settings: str) -> Curve:
    return program(settings).train(3, program("").initial)


def test_a_run_on_the_hyperball_has_the_parameters_of_one_device_and_matrices_keep_their_norms():
    of_one = trained(BALL)
    assert_close(trained(f"{CUT} {BALL}").params, of_one.params, RELATIVE)
    initial = by_path(program("").initial.params)
    for name, w in of_one.params.items():
        pairs = zip(w, initial[name], strict=True)
        kept = [np.isclose(np.linalg.norm(a), np.linalg.norm(b), rtol=1e-5) for a, b in pairs]
        assert all(kept) == (name.startswith("blocks.") and name.endswith("weight")), name


def test_a_run_with_muon_has_the_parameters_of_one_device_and_its_checkpoint_moves_to_another_mesh(tmp_path):
    assert_close(trained(CUT).params, trained("").params, RELATIVE)
    with Checkpoints(checkpoint_config(tmp_path), print) as checkpoints:
        checkpoints.save(3, trained(CUT).state, FACTS)
        checkpoints.wait()
        moved = checkpoints.restore(3, program("mesh.dp=8 mesh.zero=zero1").made.shapes)
    assert_same_bits(moved, trained(CUT).state)


def test_muon_has_momenta_of_matrices_sharded_as_adam_s_and_moments_of_the_rest():
    muon, shapes = program(CUT).made.shapes, program(f"{CUT} optimizer.name=adamw").made.shapes
    momentum, adam = muon.optimizer[0].inner_state.trace, muon.optimizer[1].inner_state
    matrices = {f"blocks.{name}.weight" for name in (
        "attention.query", "attention.key", "attention.value", "attention.out", "mlp.up", "mlp.down"
    )}  # fmt: skip
    assert set(shardings(momentum)) == matrices
    assert set(shardings(adam.mu)) == set(shardings(adam.nu)) == set(shardings(muon.params)) - matrices
    assert shardings(momentum) | shardings(adam.mu) == shardings(shapes.optimizer[0].mu)


def shardings(shapes: Any) -> dict[str, Any]:
    return {name: leaf.sharding for name, leaf in leaves_by_path(shapes, ".").items()}


def test_the_learning_rate_that_a_step_reports_is_that_of_its_optimizer():
    optimizer = Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1))
    one = program("", Components(make_optimizer=lambda config: optimizer))
    metrics = one.train(1, one.initial).metrics
    assert metrics["learning_rate"] == np.float32(0.1)  # optimizer.learning_rate is 1e-2
