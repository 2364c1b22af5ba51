"""Bad steps: a training step whose loss or gradient norm is not finite, or whose loss is a spike, is skipped.

A skipped step leaves the parameters and the optimizer state bitwise unchanged, so the learning-rate schedule does not
advance either.  Its batch is used up, so the data order remains a function of the step.  It is counted.

The decision is made inside the compiled step from the loss and the global gradient norm.  By their types, both are
equal on all devices, so all devices decide the same and no communication is added.  A non-finite value on any device
reaches both through the reductions that compute them.  (Replicas of one gradient that differ between devices are a
hardware fault that the norm cannot detect; see `replica_check`.)
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from shmap_tp.config.schema import GuardConfig


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
        return jnp.where(
            self.taken < config.window, jnp.inf, self.mean + config.loss_spike_sigmas * jnp.sqrt(self.variance)
        )

    def update(
        self, loss: Float[Array, ""], norm: Float[Array, ""], config: GuardConfig
    ) -> tuple[Bool[Array, ""], "BadStepState"]:
        """(whether a step with this loss and gradient norm is good, the state after it)."""
        loss = loss.astype(self.mean.dtype)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (loss <= self.limit(config))
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

    in_a_row: int = 0
    """Number of consecutive skipped steps up to and including the last one seen."""
    verdict: str | None = None
    """Why the run must stop; None as long as it can continue."""

    def __init__(self, config: GuardConfig, sequence_indices: Callable[[int], np.ndarray], file: str):
        """`sequence_indices(step)` are the indices of the sequences of `file` that a step reads, counted from 0."""
        self._config, self._sequence_indices, self._file = config, sequence_indices, file

    def update(self, line: dict[str, Any]) -> dict[str, Any]:
        """Take the metrics of a step; return what to add to them: for a skipped step, why and which sequences it read.

        Sets `verdict` at every multiple of guard.max_consecutive, so that a resumed run gets as many attempts again.
        """
        step, self.in_a_row = line["step"], line["skipped_in_a_row"]
        if not self.in_a_row:
            return {}
        sequences, why = self._sequence_indices(step - 1).tolist(), self._why(line)
        limit = self._config.max_consecutive
        if limit and self.in_a_row % limit == 0:
            listed = f"{', '.join(map(str, sequences[:4]))}{', ...' if len(sequences) > 4 else ''}"
            self.verdict = (
                f"steps {step - self.in_a_row + 1} to {step} were skipped, {self.in_a_row} in a row "
                f"(guard.max_consecutive={limit}); the last read sequences {listed} of {self._file}, and {why}"
            )
        return {"why_skipped": why, "sequences": sequences}

    def _why(self, line: dict[str, Any]) -> str:
        """Why the step with these metrics was skipped."""
        loss, norm = line["loss"], line["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            sigmas = f"guard.loss_spike_sigmas={self._config.loss_spike_sigmas:g}"
            return f"its loss is {loss:.4g}, above {line['loss_limit']:.4g} ({sigmas})"
        return f"its loss is {loss:.4g}, its gradient norm {norm:.4g}"
