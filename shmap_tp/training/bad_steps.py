"""Steps that must not be taken: their loss or gradient is not finite, or their loss is a spike.

Such a step is skipped: weights and optimizer state stay the bits that they are, so that the schedule, too, waits; the
batch is used up, so that the order of the data stays a function of the step; and it is counted.

The judgement is made in the compiled step, of the loss and the gradients' global norm, which by their types are the
same on every device: nothing more travels, and no device can take a step that another skips.  A value that is not
finite, on whichever device it arises, reaches both through the sums that make them.  (What differs between copies of
one replicated gradient differs against its type, by a fault of the machine: that is not for a norm to see.)
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
    """What is remembered of the steps so far, as part of a run's state: scalars, the same on every device."""

    mean: Float[Array, ""]
    """Running mean of the loss, of the steps that were taken."""
    variance: Float[Array, ""]
    """Running variance of it."""
    taken: Int[Array, ""]
    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]
    """How many steps up to the last one were skipped; 0 where that one was taken."""

    def limit(self, config: GuardConfig) -> Float[Array, ""]:
        """The largest loss that is no spike; infinite where none is, or too few were seen to say."""
        if config.loss_spike_sigmas is None:
            return jnp.full((), jnp.inf, self.mean.dtype)
        return jnp.where(
            self.taken < config.window, jnp.inf, self.mean + config.loss_spike_sigmas * jnp.sqrt(self.variance)
        )

    def judge(
        self, loss: Float[Array, ""], norm: Float[Array, ""], config: GuardConfig
    ) -> tuple[Bool[Array, ""], "Guard"]:
        """(whether to take a step of this loss and this norm of its gradients, what is remembered then)."""
        loss = loss.astype(self.mean.dtype)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (loss <= self.limit(config))
        # Exact mean and variance of up to `window` losses, then those that forget (Finch 2009, section 9).
        share = 1 / jnp.minimum(self.taken + 1, config.window).astype(loss.dtype)
        apart = loss - self.mean
        remembered = (self.mean + share * apart, (1 - share) * (self.variance + share * apart**2), self.taken + 1)
        mean, variance, taken = select_tree(good, remembered, (self.mean, self.variance, self.taken))
        bad = 1 - good.astype(jnp.int32)
        return good, BadStepState(mean, variance, taken, self.skipped + bad, bad * (self.in_a_row + 1))

    def counts(self) -> dict[str, Int[Array, ""]]:
        """For a step's metrics: how many steps were skipped so far, and how many of them up to this one."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row}


def initial_bad_step_state() -> BadStepState:
    """Before the first step."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return BadStepState(mean=zero, variance=zero, taken=none, skipped=none, in_a_row=none)


def select_tree(good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` or, to the bit, `old`: one tree or the other.  XLA selects where it computes `new`, in the same pass."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


class BadStepMonitor:
    """The host's eye on the guard, which hears of a step when its metrics are read: once the next is under way.

    That next step may be taken or skipped; its state is as good as any to be saved, since the guard is in it.
    """

    in_a_row: int = 0
    """How many steps up to the last one read were skipped."""
    verdict: str | None = None
    """Why the run must stop now; None while it need not."""

    def __init__(self, config: GuardConfig, windows: Callable[[int], np.ndarray], file: str):
        """`windows(step)` are the numbers of those windows of `file` that a step reads, the first step being 0."""
        self._config, self._windows, self._file = config, windows, file

    def of(self, line: dict[str, Any]) -> dict[str, Any]:
        """What there is to add to the metrics of a step: of one that was skipped, why, and which windows it read."""
        step, self.in_a_row = line["step"], line["skipped_in_a_row"]
        if not self.in_a_row:
            return {}
        windows = self._windows(step - 1).tolist()
        loss, norm = line["loss"], line["grad_norm"]
        why = f"its loss is {loss:.4g}, the norm of its gradient {norm:.4g}"
        if math.isfinite(loss) and math.isfinite(norm):
            why = f"its loss is {loss:.4g}, above {line['loss_limit']:.4g} (guard.loss_spike_sigmas={self._config.loss_spike_sigmas:g})"
        read = f"{', '.join(map(str, windows[:4]))}{', ...' if len(windows) > 4 else ''} of {self._file}"
        # A run that goes on after it was stopped has as many again.
        if self._config.max_consecutive and self.in_a_row % self._config.max_consecutive == 0:
            self.verdict = (
                f"steps {step - self.in_a_row + 1} to {step} were skipped, {self.in_a_row} in a row (guard.max_consecutive="
                f"{self._config.max_consecutive}); the last read windows {read}, and {why}"
            )
        return {"why_skipped": why, "windows": windows}
