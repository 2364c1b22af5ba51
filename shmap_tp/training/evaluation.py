"""The validation loss of each source of a run, and of their mixture."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """Sums over the targets that count, or the preference pairs, of some validation batches."""

    nats: float
    """Cross entropy, or the loss of the pairs."""
    targets: float
    size: int | float | None
    """UTF-8 bytes of their text; None where the tokenizer is not known, and of pairs."""
    experts_dropped: float | None = None
    """The share of the pairs of a token and an expert that were not computed; None without experts."""

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.size if self.size else None

    def values(self) -> dict[str, float]:
        """What metrics.jsonl has of it."""
        more = {"bits_per_byte": self.bits_per_byte, "experts_dropped": self.experts_dropped}
        return {"loss": self.loss} | {name: value for name, value in more.items() if value is not None}


def mixed(found: Mapping[str, Evaluation], weights: Mapping[str, float]) -> Evaluation:
    """The evaluation of a mixture, in which each source has the share weights[source] of the targets."""
    if len(found) == 1:
        return next(iter(found.values()))
    parts = [(weights[name] / each.targets, each) for name, each in found.items()]
    sizes = [share * each.size for share, each in parts if each.size is not None]
    size = sum(sizes) if len(sizes) == len(parts) else None
    dropped = [weights[name] * each.experts_dropped for name, each in found.items() if each.experts_dropped is not None]
    return Evaluation(sum(share * each.nats for share, each in parts), 1.0, size, sum(dropped) if dropped else None)


def describe(found: Evaluation, sources: Mapping[str, Evaluation]) -> str:
    """The loss of an evaluation, and the losses of its `sources`, in words."""
    more = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
    more += f", dropped {found.experts_dropped:.1%}" if found.experts_dropped else ""
    each = ", ".join(f"{name} {of.loss:.4f}" for name, of in sources.items())
    return f"{found.loss:.4f}{more}" + (f" ({each})" if each else "")
