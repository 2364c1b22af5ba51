"""An optimizer whose update of an element depends on a full matrix gives the same parameters on every mesh and with
every sharding of parameters and optimizer state."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.api import load_config
from shmap_tp.config.schema import OptimizerConfig
from shmap_tp.parallel.mesh import DP, make_mesh
from shmap_tp.parallel.partitioning import Declaration, ParameterKind, declarations
from shmap_tp.training.optimizer import Optimizer, describe_schedule, learning_rate_schedule
from shmap_tp.training.step import Components, State, StepFunctions, build_step_functions
from tests.helpers.assertions import assert_close, by_path, distances
from tests.helpers.step_fixtures import learnable_batch, step_config

STEPS = 3
RELATIVE = 1e-5
"""As the loss curves of different meshes in test_step."""
ZEROS = ["none", "zero1", "fsdp"]


@pytest.mark.parametrize(
    "steps, rest",
    [
        (300, "down to 0.0003 at step 300"),
        (20000, "at step 300, constant until step 20,000 (optimizer.decay_steps=300 is apart from train.steps)"),
        (40, "would end at step 300 (optimizer.decay_steps), after train.steps"),
    ],
)
def test_a_schedule_is_described_up_to_the_last_step(steps, rest):
    section = load_config("optimizer.learning_rate=3e-3").optimizer
    described = describe_schedule(section, steps)
    assert described.startswith("up to 0.003 at step 30, then a cosine ") and described.endswith(rest)


LINEAR, APART = "then a linear decay", "(optimizer.decay_steps=300 is apart from train.steps)"
CUT = f"{LINEAR} that would end at step 300 (optimizer.decay_steps), after train.steps"
WHOLE = f"{LINEAR} down to 0.0003 at step 300"
UNREACHED = "then constant; the decay after step 270 (optimizer.decay_steps=300) begins after train.steps"


@pytest.mark.parametrize(
    "settings, steps, rest",
    [
        ("schedule=linear", 299, CUT),
        ("schedule=linear", 300, WHOLE),
        ("schedule=linear", 301, f"{WHOLE}, constant until step 301 {APART}"),
        ("schedule=wsd", 270, UNREACHED),
        ("schedule=wsd", 271, f"constant until step 270, {CUT}"),
        ("schedule=wsd", 300, f"constant until step 270, {WHOLE}"),
        ("schedule=wsd", 301, f"constant until step 270, {WHOLE}, constant until step 301 {APART}"),
        ("schedule=constant decay_steps=1", 30, "then constant"),
        ("schedule=constant", 29, "then constant (optimizer.warmup_steps is above train.steps)"),
    ],
)
def test_every_schedule_says_where_it_and_the_run_end_apart(settings, steps, rest):
    section = load_config(*(f"optimizer.{setting}" for setting in settings.split())).optimizer
    assert describe_schedule(section, steps) == f"up to 0.003 at step 30, {rest}"


@pytest.mark.parametrize("warmup, decay", [(4, 10), (1, 3), (0, 3), (0, 1)], ids=str)
def test_the_warm_up_begins_at_its_first_fraction_and_ends_at_the_peak(warmup, decay):
    """Of step n, counted from 1: a first step of rate 0 would train nothing."""
    given = [f"optimizer.warmup_steps={warmup}", f"optimizer.decay_steps={decay}", "optimizer.learning_rate=1"]
    schedule = learning_rate_schedule(load_config(*given, "optimizer.final_learning_rate=0.5").optimizer)
    first = max(warmup, 1)
    np.testing.assert_allclose([schedule(n) for n in range(first)], np.arange(1, first + 1) / first, rtol=1e-6)
    assert schedule(first) < 1 and [schedule(max(decay - 1, first)), schedule(99)] == [0.5, 0.5]


def rates(steps: range, *settings: str) -> list[float]:
    """Of `steps`, counted from 1, with a warm-up of 4, a peak of 1 and a final rate of 1/2."""
    fixed = ["warmup_steps=4", "learning_rate=1", "final_learning_rate=0.5"]
    schedule = learning_rate_schedule(load_config(*(f"optimizer.{one}" for one in (*fixed, *settings))).optimizer)
    return [float(schedule(step - 1)) for step in steps]


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("cosine", [1, 0.75 + np.sqrt(3) / 8, 0.875, 0.75, 0.625, 0.75 - np.sqrt(3) / 8, 0.5, 0.5]),
        ("linear", [1, *(1 - k / 12 for k in range(1, 6)), 0.5, 0.5]),
        ("constant", [1] * 8),
        ("wsd", [1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5]),  # 0.4 of 10 steps: the last 4
    ],
)
def test_the_rates_of_each_schedule_from_the_first_step_until_after_the_decay(schedule, expected):
    """Cosine by hand: (1 + cos(pi k / 6)) / 2 between the rates, k steps after the warm-up."""
    found = rates(range(1, 12), f"schedule={schedule}", "decay_steps=10", "decay_fraction=0.4")
    np.testing.assert_allclose(found, [0.25, 0.5, 0.75, *expected], rtol=1e-6)


def test_a_cosine_has_the_bits_that_it_had_before_there_were_other_schedules():
    before = optax.warmup_cosine_decay_schedule(1 / 4, 1.0, 3, 99, 0.5)
    assert rates(range(1, 120), "decay_steps=100") == [float(before(count)) for count in range(119)]


@pytest.mark.parametrize("warmup", [4, 0])
def test_a_wsd_schedule_without_a_stable_part_is_the_linear_one(warmup):
    given = [f"warmup_steps={warmup}", "decay_steps=10"]
    wsd = rates(range(1, 12), *given, "schedule=wsd", f"decay_fraction={(10 - warmup) / 10}")
    assert wsd == rates(range(1, 12), *given, "schedule=linear")


@pytest.mark.parametrize("longer", [11, 1000])
def test_the_stable_part_of_a_wsd_schedule_is_that_of_every_longer_one(longer):
    short = rates(range(1, 8), "schedule=wsd", "decay_steps=10", "decay_fraction=0.3")
    assert short == rates(range(1, 8), "schedule=wsd", f"decay_steps={longer}", "decay_fraction=0.3")


ALL_KINDS = frozenset(ParameterKind)


def normalised_descent(whole: frozenset[ParameterKind]) -> Optimizer:
    """Momentum of each layer, divided by its Frobenius norm: a minimal optimizer that needs whole arrays."""

    def normalised(update: jax.Array, declared: Declaration) -> jax.Array:
        dims = tuple(range(declared.stacked, update.ndim))
        return update / (jnp.sqrt(jnp.sum(jnp.square(update), axis=dims, keepdims=True)) + 1e-6)

    def normalise(updates: Any, params: Any) -> Any:
        return jax.tree.map(normalised, updates, declarations(updates))

    chain = optax.chain(
        optax.trace(0.9), optax.stateless(normalise), optax.add_decayed_weights(0.01), optax.scale(-0.1)
    )
    return Optimizer(chain, optax.constant_schedule(0.1), whole)


def muon(config: OptimizerConfig) -> Optimizer:
    """As in docs/extending.md."""
    schedule = learning_rate_schedule(config)

    def dims(params: Any) -> Any:
        def of(declared: Declaration) -> Any:
            is_matrix = declared.kind == ParameterKind.matrix
            return optax.contrib.MuonDimensionNumbers(declared.inputs, declared.outputs) if is_matrix else None

        return jax.tree.map(of, declarations(params))

    return Optimizer(
        optax.contrib.muon(schedule, muon_weight_dimension_numbers=dims), schedule, frozenset({ParameterKind.matrix})
    )


def functions_of(make: Any, shape: tuple[int, int], *settings: str) -> StepFunctions:
    conf = step_config(shape, *settings)
    on = make_mesh(conf.mesh, jax.devices()[: shape[0] * shape[1]])
    return build_step_functions(conf, on, jnp.float32, Components(make_optimizer=make))


def train(made: StepFunctions) -> State:
    """After 3 steps in float32."""
    state = made.init()
    for i in range(STEPS):
        tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
        state, _ = made.step(state, tokens)
    return state


@cache
def parameters_after_training(name: str, shape: tuple[int, int], *settings: str) -> dict[str, np.ndarray]:
    return by_path(train(functions_of(OPTIMIZERS[name], shape, *settings)).params)


OPTIMIZERS = {
    "normalised": lambda config: normalised_descent(ALL_KINDS),
    "normalised by shard": lambda config: normalised_descent(frozenset()),
    "muon": muon,
}
PLACED = [
    *[((2, 4), (f"mesh.zero={zero}",)) for zero in ZEROS],
    ((8, 1), ("mesh.zero=fsdp",)),
    ((1, 8), ("mesh.zero=none", "mesh.tensor_parallel=sequence", "model.context=8")),
    ((4, 2), ("mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.slices=2", "model.layers=3")),
]


@pytest.mark.parametrize("name", ["normalised", "muon"])
@pytest.mark.parametrize(("shape", "settings"), PLACED, ids=str)
def test_an_optimizer_on_whole_matrices_gives_the_parameters_of_one_device(name, shape, settings):
    of_model = [setting for setting in settings if setting.startswith("model")]
    expected = parameters_after_training(name, (1, 1), *of_model)
    assert_close(parameters_after_training(name, shape, *settings), expected, RELATIVE)


@pytest.mark.parametrize(("shape", "zero"), [((2, 4), "none"), ((8, 1), "zero1"), ((8, 1), "fsdp")])
def test_an_optimizer_on_whole_matrices_that_is_given_shards_gives_other_parameters(shape, zero):
    """It then divides by the norm of one device's shard."""
    found = parameters_after_training("normalised by shard", shape, f"mesh.zero={zero}")
    assert max(distances(found, parameters_after_training("normalised", (1, 1))).values()) > 1e-2


def test_muon_updates_the_matrices_of_blocks_and_adam_the_rest():
    momenta = functions_of(muon, (2, 4)).shapes.optimizer.inner_states
    of_muon, of_adam = (set(by_path(momenta[name].inner_state[0].mu)) for name in ("muon", "adam"))
    assert of_muon == {f"blocks.{name}.weight" for name in (
        "attention.query", "attention.key", "attention.value", "attention.out", "mlp.up", "mlp.down"
    )}  # fmt: skip
    assert of_adam == {"embedding.weight", "head.weight", "norm.scale", "blocks.norm.scale"}


def test_the_state_of_muon_is_sharded_along_layers():
    """And not replicated: two layers, divided by dp; the other axis of the mesh does not divide one layer."""
    made = functions_of(muon, (2, 4), "mesh.zero=fsdp")
    momentum = made.shapes.optimizer.inner_states["muon"].inner_state[0].mu.blocks.mlp.up.weight
    assert momentum.sharding.spec == P((DP,), None, None)
    shard = momentum.sharding.shard_shape(momentum.shape)
    assert shard == (momentum.shape[0] // 2, *momentum.shape[1:])


def test_the_learning_rate_that_a_step_reports_is_that_of_its_optimizer():
    made = functions_of(lambda config: normalised_descent(ALL_KINDS), (2, 1))
    tokens = jax.device_put(learnable_batch(0, made.tokens.shape), made.tokens.sharding)
    _, metrics = made.step(made.init(), tokens)
    assert float(metrics["learning_rate"]) == np.float32(0.1)  # optimizer.learning_rate is 1e-2
