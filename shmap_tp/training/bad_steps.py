"""Bad steps: a training step is skipped if its loss, its gradient or its update is not finite, or is too large.

A skipped step leaves the parameters and the optimizer state bitwise unchanged, so the learning-rate schedule does not
advance either.  Its batch is used up, so the data order remains a function of the step.  It is counted.

The decision is made inside the compiled step from the loss, the global norm of the gradient, and the global norms of
the parameters before and after the update.  By their types, all are equal on all devices, so all devices decide the
same.  A non-finite value on any device reaches them through the reductions that compute them.  (Replicas of one
gradient that differ between devices are a hardware fault that a norm cannot detect; see `ReplicaCheck`.)

Consecutive skipped steps form a streak.  After guard.max_consecutive of them the run is saved and stops with exit code
2.  No checkpoint from before a streak is deleted during it (`checkpoint`), a checkpoint from within a streak that is
too long is not resumed (`resume`), and a run whose last step was skipped does not end with exit code 0 (`run`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.config.schema import GuardConfig


class StepOutcome(NamedTuple):
    """The scalars by which a step is judged good or bad, equal on all devices."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    """Global norm of the gradient."""
    old_norm: Float[Array, ""]
    """Global norm of the parameters before the step."""
    new_norm: Float[Array, ""]
    """Global norm of the updated parameters; NaN if the updated optimizer state has a non-finite value."""

    def is_acceptable(self, config: GuardConfig) -> Bool[Array, ""]:
        """Whether all are finite and the norm of the parameters changes by at most the factor guard.max_norm_change.

        Parameters that were all zero may get any finite norm.
        """
        finite = jnp.isfinite(self.loss) & jnp.isfinite(self.gradient_norm) & jnp.isfinite(self.new_norm)
        if config.max_norm_change is None:
            return finite
        smaller, larger = jnp.minimum(self.old_norm, self.new_norm), jnp.maximum(self.old_norm, self.new_norm)
        return finite & ((self.old_norm == 0) | (larger <= config.max_norm_change * smaller))

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """As metrics of a step."""
        norms = {"grad_norm": self.gradient_norm, "param_norm": self.old_norm, "updated_param_norm": self.new_norm}
        return {"loss": self.loss} | norms


class BadStepState(eqx.Module):
    """Loss statistics and counters, part of a run's state: scalars, replicated over all devices."""

    mean: Float[Array, ""]
    """Running mean of the loss, over steps that were not skipped."""
    variance: Float[Array, ""]
    """Running variance of the loss, over the same steps."""
    taken: Int[Array, ""]
    """Number of steps that were not skipped."""
    skipped: Int[Array, ""]
    """Number of skipped steps."""
    in_a_row: Int[Array, ""]
    """Number of consecutive skipped steps up to and including the last step; 0 if that one was not skipped."""

    def limit(self, config: GuardConfig) -> Float[Array, ""]:
        """The largest loss that is not a spike; infinite if spikes are allowed or too few losses are known."""
        if config.loss_spike_sigmas is None:
            return jnp.full((), jnp.inf, self.mean.dtype)
        limit = self.mean + config.loss_spike_sigmas * jnp.sqrt(self.variance)
        return jnp.where(self.taken < config.window, jnp.inf, limit)

    def update(self, outcome: "StepOutcome", config: GuardConfig) -> tuple[Bool[Array, ""], "BadStepState"]:
        """(whether a step is good, the state after it)."""
        loss = outcome.loss.astype(self.mean.dtype)
        good = outcome.is_acceptable(config) & (loss <= self.limit(config))
        # Exact mean and variance up to `window` losses, exponentially weighted ones after (Finch 2009, section 9).
        weight = 1 / jnp.minimum(self.taken + 1, config.window).astype(loss.dtype)
        deviation = loss - self.mean
        new = (self.mean + weight * deviation, (1 - weight) * (self.variance + weight * deviation**2), self.taken + 1)
        mean, variance, taken = select_tree(good, new, (self.mean, self.variance, self.taken))
        bad = 1 - good.astype(jnp.int32)
        return good, BadStepState(mean, variance, taken, self.skipped + bad, bad * (self.in_a_row + 1))

    def counts(self) -> dict[str, Int[Array, ""]]:
        """The counters as metrics of a step: skipped steps so far, and consecutive ones up to this step."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row}


def initial_bad_step_state() -> BadStepState:
    """The state before the first step."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return BadStepState(mean=zero, variance=zero, taken=none, skipped=none, in_a_row=none)


def select_tree(good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The tree `new` if `good`, else `old` bit for bit.  XLA fuses the selection into the computation of `new`."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


class BadStepMonitor:
    """Host-side view of skipped steps: explains each one, and decides when to stop the run.

    It sees the metrics of a step when the meter reads them, while the next step is already in flight.  That next step
    may be good or bad; its state can be saved either way, because the bad-step state is part of it.
    """

    in_a_row: int
    """Number of consecutive skipped steps up to and including the last one seen."""
    verdict: str | None = None
    """Why the run must stop; None as long as it can continue."""

    def __init__(self, config: GuardConfig, sequences: Callable[[int], Sequence], file: str, in_a_row: int = 0):
        """`sequences(step)` are the sequences of `file` that a step reads, counted from 0.

        `in_a_row` is the number of consecutive skipped steps at the end of the run that is resumed.
        """
        self._config, self._sequences, self._file = config, sequences, file
        self.in_a_row = in_a_row

    def update(self, line: dict[str, Any]) -> dict[str, Any]:
        """Take the metrics of a step; return what to add to them: for a skipped step, why and which sequences it read.

        Sets `verdict` at every multiple of guard.max_consecutive, so that a resumed run gets as many attempts again.
        """
        step, self.in_a_row = line["step"], line["skipped_in_a_row"]
        if not self.in_a_row:
            return {}
        sequences, why = self._sequences(step - 1), self._why(line)
        limit = self._config.max_consecutive
        if limit and self.in_a_row % limit == 0:
            listed = f"{', '.join(map(str, sequences[:4]))}{', ...' if len(sequences) > 4 else ''}"
            self.verdict = (
                f"steps {step - self.in_a_row + 1} to {step} were skipped, {self.in_a_row} in a row "
                f"(guard.max_consecutive={limit}); the last read sequences {listed} of {self._file}, and {why}"
            )
        return {"why_skipped": why, "sequences": sequences}

    def last_steps_skipped(self, step: int) -> str | None:
        """Why a run whose last step is `step` did not succeed: its last steps were skipped.  None if they were not."""
        if not self.in_a_row:
            return None
        first = step - self.in_a_row + 1
        return f"the last steps of the run, {first} to {step}, were skipped"

    def _why(self, line: dict[str, Any]) -> str:
        """Why the step with these metrics was skipped."""
        loss, norm, old, new = (line[name] for name in ("loss", "grad_norm", "param_norm", "updated_param_norm"))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"its loss is {loss:.4g}, its gradient norm {norm:.4g}"
        if not math.isfinite(new):
            return "its update would make the weights or the optimizer state infinite or NaN"
        if loss > line.get("loss_limit", math.inf):
            sigmas = f"guard.loss_spike_sigmas={self._config.loss_spike_sigmas:g}"
            return f"its loss is {loss:.4g}, above {line['loss_limit']:.4g} ({sigmas})"
        factor = f"guard.max_norm_change={self._config.max_norm_change:g}"
        return f"its update would change the norm of the weights from {old:.4g} to {new:.4g}, too much ({factor})"
