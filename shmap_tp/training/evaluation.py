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

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.size if self.size else None

    def values(self) -> dict[str, float]:
        """What metrics.jsonl has of it."""
        bits = self.bits_per_byte
        return {"loss": self.loss} | ({} if bits is None else {"bits_per_byte": bits})


def mixed(found: Mapping[str, Evaluation], weights: Mapping[str, float]) -> Evaluation:
    """The evaluation of targets of which each source has the share weights[source]; the weights add up to 1."""
    if len(found) == 1:
        return next(iter(found.values()))
    parts = [(weights[name] / each.targets, each) for name, each in found.items()]
    sizes = [share * each.size for share, each in parts if each.size is not None]
    size = sum(sizes) if len(sizes) == len(parts) else None
    return Evaluation(sum(share * each.nats for share, each in parts), 1.0, size)


def describe(found: Evaluation, sources: Mapping[str, Evaluation]) -> str:
    """The loss of an evaluation, and those of its `sources`, in words."""
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
    each = ", ".join(f"{name} {of.loss:.4f}" for name, of in sources.items())
    return f"{found.loss:.4f}{bits}" + (f" ({each})" if each else "")
