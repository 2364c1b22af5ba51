"""Short runs on the small model of `model_fixtures`: configurations, batches, programs, and a distance of curves."""

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shmap_tp.config.schema import Config
from shmap_tp.parallel.mesh import axis_sizes, make_mesh
from shmap_tp.plan.ledger import Entry, communication_in_jaxpr
from shmap_tp.training.step import CONFIGURED, Components, State, build_step_functions
from tests.helpers import communication_rules
from tests.helpers.assertions import assert_replicas_agree, by_path
from tests.helpers.communication_rules import tally
from tests.helpers.model_fixtures import config

STEPS = 50
RELATIVE = 1e-5
"""By how much losses and parameters in float32 may differ between meshes."""


def step_config(shape: tuple[int, int], *overrides: str) -> Config:
    """Two microbatches, clipping that takes effect in the first steps, warm-up and decay within 50 steps."""
    return config(
        f"mesh.dp={shape[0]}", f"mesh.mp={shape[1]}", "train.batch=16", "train.microbatches=2", "train.z_loss=1e-4",
        "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=5", "optimizer.decay_steps=50", *overrides,
    )  # fmt: skip


def learnable_batch(step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Token ids [A, B, T + 1]: with probability 0.8, each is three times the one before, which 50 steps can learn."""
    rng = np.random.default_rng(step)
    ids = np.zeros(shape, np.int32)
    ids[..., 0] = rng.integers(0, 50, shape[:-1])
    for t in range(1, shape[-1]):
        ids[..., t] = np.where(rng.random(shape[:-1]) < 0.2, rng.integers(0, 50, shape[:-1]), 3 * ids[..., t - 1] % 50)
    return ids


def largest_difference(losses: np.ndarray, expected: np.ndarray) -> float:
    """max|losses - expected| / expected."""
    return float(np.max(np.abs(losses - expected) / expected))


class Curve(NamedTuple):
    """Some steps: the metrics of each, and the last state."""

    metrics: dict[str, np.ndarray]
    state: State

    @property
    def losses(self) -> np.ndarray:
        return self.metrics["loss"]

    @property
    def params(self) -> dict[str, np.ndarray]:
        return by_path(self.state.params)


class Program:
    """The step of a configuration on the first of the eight devices, traced, lowered and compiled once for all claims
    about it; with `documents` its rows have segments."""

    def __init__(
        self, conf: Config, components: Components = CONFIGURED, *, dtype: Any = jnp.float32, documents: bool = False
    ):
        devices = jax.devices()[: int(np.prod([*axis_sizes(conf.mesh).values()]))]
        self.conf, self.components, self.documents = conf, components, documents
        self.made = build_step_functions(conf, make_mesh(conf.mesh, devices), dtype, components)

    @cached_property
    def traced(self) -> Any:
        return self.made.step.trace(self.made.shapes, *[self.made.tokens] * (1 + self.documents))

    @cached_property
    def lowered(self) -> Any:
        return self.traced.lower()

    @cached_property
    def compiled(self) -> Any:
        return self.lowered.compile()

    @cached_property
    def initial(self) -> State:
        return jax.device_get(self.made.init())

    def placed(self, state: State) -> State:
        """`state`, which has been made on another mesh, where this program has its own."""
        shapes, structure = jax.tree.flatten(self.made.shapes)
        shardings = [shape.sharding for shape in shapes]
        return jax.tree.unflatten(structure, jax.device_put(jax.tree.leaves(state), shardings))

    def batch(self, step: int) -> Any:
        """(tokens, and where rows have documents segments) of a step: the same rows for any microbatches."""
        shape = (self.conf.train.batch, self.conf.model.context + 1)
        arrays = [learnable_batch(step, shape)]
        if self.documents:
            arrays.append(np.cumsum(np.random.default_rng(step).random(shape) < 0.2, axis=-1, dtype=np.int32))
        return jax.device_put([x.reshape(self.made.tokens.shape) for x in arrays], self.made.tokens.sharding)

    def train(self, steps: int, initial: State | None = None) -> Curve:
        """`steps` from the initial state, or from one of another mesh; the replicas of the last state are compared."""
        state, seen = self.placed(self.initial if initial is None else initial), []
        for step in range(steps):
            state, metrics = self.compiled(state, *self.batch(step))
            seen.append(jax.device_get(metrics))  # waits: emulated devices deadlock with many steps in flight
        assert_replicas_agree(state)
        return Curve({name: np.array([one[name] for one in seen]) for name in seen[0]}, state)

    @property
    def communication(self) -> list[Entry]:
        return communication_in_jaxpr(self.traced.jaxpr.jaxpr)

    def communicates_parameters_as_written_by_hand(self) -> bool:
        """Whether each is gathered, and its gradient reduced, as its placement says (`communication_rules.py`)."""
        by_hand = communication_rules.parameters(self.conf, "float32", self.components)
        return not tally(by_hand) - tally(self.communication)
