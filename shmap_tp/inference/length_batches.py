"""Batches of requests of similar lengths, so that little of what is computed is padding."""

from collections.abc import Sequence
from typing import NamedTuple

MOST_PADDING = 0.1
"""Share of the slots of a batch that may be padding."""
STEPS_PER_OCTAVE = 16
"""Lengths between a power of two and the next that batches may have: fewer lengths are fewer programs to compile."""


class LengthBatch(NamedTuple):
    """Requests that are computed together."""

    requests: list[int]
    """Their numbers."""
    length: int
    """What each is padded to."""


def length_batches(lengths: Sequence[int], rows: int, multiple: int = 1) -> list[LengthBatch]:
    """Every request once, in batches of at most `rows`, the longest first.

    At most MOST_PADDING of the slots of a batch are padding, whatever the lengths; lengths are a multiple of
    `multiple`, which can add more.
    """
    found: list[LengthBatch] = []
    tokens = 0
    for request in sorted(range(len(lengths)), key=lambda request: -lengths[request]):
        tokens += lengths[request]
        if found and len(found[-1].requests) < rows:
            slots = (len(found[-1].requests) + 1) * found[-1].length
            if slots - tokens <= MOST_PADDING * slots:
                found[-1].requests.append(request)
                continue
        found.append(LengthBatch([request], rounded_length(lengths[request], multiple)))
        tokens = lengths[request]
    return found


def rounded_length(length: int, multiple: int = 1) -> int:
    """The next length that batches may have: at most 1/STEPS_PER_OCTAVE longer, and a multiple of `multiple`."""
    step = max(1 << max(length.bit_length() - 1, 0), STEPS_PER_OCTAVE) // STEPS_PER_OCTAVE
    rounded = -(-length // step) * step
    return -(-rounded // multiple) * multiple
