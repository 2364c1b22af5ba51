"""Which sequence of which source each sample of a run is: a function of (seed, sample) that is computed in constant
memory, whatever the number of sequences, and from any sample on.

Sample i = step * batch + row.  Within a phase the sources take turns in a pattern that repeats with the common
denominator of their shares.  Each source counts its own samples over the whole run, and reads in each of its epochs
each of its sequences once, in an order of its own: a keyed permutation that is computed, not stored.

n sequences in a source, s = floor(sqrt(n)) + 1.  A position is a pair (left, right) of numbers below s.  A Feistel
network permutes the s^2 pairs; what it takes outside of 0 .. n - 1 goes through it again until it is inside (cycle
walking).  That is a permutation of 0 .. n - 1, and any position of it takes the same time and no memory, whatever n.

Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 3 and 4, https://eprint.iacr.org/2001/012
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from jaxtyping import Int, UInt64

_BLOCK = 4096  # samples that are computed at a time, and kept for the batches after
ORDER = "feistel-1"
"""Name of this order in checkpoints.  A change of what `shuffled` returns needs another name."""
_ROUNDS = 6
_INCREMENT = 0x9E3779B97F4A7C15  # that of SplitMix64


def source_key(seed: int, sha256: str) -> int:
    """The key of the source whose file has this sha256, in a run of `seed` >= 0: 64 bits."""
    content = int.from_bytes(hashlib.sha256(sha256.encode()).digest()[:8])
    return int(_mix(np.array([content], np.uint64) + _mix(np.array([seed], np.uint64)))[0])


def shuffled(
    samples: Int[np.ndarray, " rows"], counts: Int[np.ndarray, " rows"], keys: UInt64[np.ndarray, " rows"]
) -> Int[np.ndarray, " rows"]:
    """The sequence that each sample is.

    Row r is sample number samples[r] of a source of counts[r] = n sequences and of the `source_key` keys[r].  Sample k
    is at position k % n of epoch k // n.  Each epoch has each sequence once, in an order of its own.
    """
    epochs, positions = np.divmod(samples, counts)
    keys = _mix(keys + _mix(epochs.astype(np.uint64)))
    sides = np.sqrt(counts).astype(np.uint64) + np.uint64(1)
    found = _feistel(positions.astype(np.uint64), sides, keys)
    while (outside := np.flatnonzero(found >= counts.astype(np.uint64))).size:
        found[outside] = _feistel(found[outside], sides[outside], keys[outside])
    return found.astype(np.int64)


def _feistel(
    values: UInt64[np.ndarray, " rows"], sides: UInt64[np.ndarray, " rows"], keys: UInt64[np.ndarray, " rows"]
) -> UInt64[np.ndarray, " rows"]:
    """A permutation, by each key, of the numbers below sides^2."""
    left, right = np.divmod(values, sides)
    for number in range(_ROUNDS):
        mixed = _mix(keys + np.uint64(number * _INCREMENT % 2**64) + right) >> np.uint64(1)  # so that the sum fits
        left, right = right, (left + mixed) % sides
    return left * sides + right


def _mix(x: UInt64[np.ndarray, " rows"]) -> UInt64[np.ndarray, " rows"]:
    """The output function of SplitMix64, a bijection in which each bit of x changes half of the bits.

    Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", with the constants of Stafford.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def turns(shares: Sequence[Fraction]) -> Int[np.ndarray, " period"]:
    """The source whose turn it is at each position of a period, as its index in `shares`, which add up to 1.

    After any m positions, source s of k had m * shares[s] turns within 1 - 1/(2 k - 2), which is below 1; so in any
    stretch of positions within 2, and in a whole period exactly.

    Tijdeman 1980, "The chairman assignment problem", https://doi.org/10.1016/0012-365X(80)90269-1: of the sources that
    can have another turn within that bound, the one that must have it first.
    """
    period = math.lcm(*(share.denominator for share in shares))
    weights = np.array([int(share * period) for share in shares])
    slack = 2 * len(shares) - 2
    if not slack:
        return np.zeros(1, np.int64)
    found, due = np.empty(period, np.int64), np.zeros(len(shares), np.int64)
    for position in range(period):
        due += weights  # period times how far each source is behind its share
        until = np.where(slack * due >= period, (period * (slack - 1) - slack * due) / weights, np.inf)
        found[position] = chosen = int(until.argmin())
        due[chosen] -= period
    return found


@dataclass(frozen=True)
class _Part:
    """The samples of a phase."""

    first: int
    """Its first sample."""
    before: Int[np.ndarray, " sources"]
    """Samples of each source before it."""
    turns: Int[np.ndarray, " period"]
    """Source of each position of its period."""
    earlier: Int[np.ndarray, " period"]
    """Number of earlier positions of the period that have the same source."""
    per_period: Int[np.ndarray, " sources"]

    def count(self, samples: int) -> Int[np.ndarray, " sources"]:
        """Samples of each source up to `samples` samples after the first."""
        periods, rest = divmod(samples, len(self.turns))
        partial = np.bincount(self.turns[:rest], minlength=len(self.before))
        return self.before + periods * self.per_period + partial


class DataOrder:
    """(source, sequence) of each sample of a run."""

    def __init__(self, sizes: Sequence[int], keys: Sequence[int], shares: dict[int, Sequence[Fraction]]):
        """`sizes` are the numbers of sequences of the sources, `keys` their `source_key`.  shares[i] are the shares of
        all sources from sample i on; the first i is 0."""
        self._sizes, self._keys = np.array(sizes, np.int64), np.array(keys, np.uint64)
        self._parts: list[_Part] = []
        for first, each in sorted(shares.items()):
            taking_part = np.flatnonzero([bool(share) for share in each])
            pattern = taking_part[turns([each[source] for source in taking_part])]
            per_period = np.bincount(pattern, minlength=len(sizes))
            earlier = np.empty_like(pattern)
            for source in taking_part:
                earlier[pattern == source] = np.arange(per_period[source])
            self._parts.append(_Part(first, self.counts(first), pattern, earlier, per_period))
        self._block = lru_cache(maxsize=2)(self._compute_block)

    def counts(self, samples: int) -> Int[np.ndarray, " sources"]:
        """How many of the first `samples` samples of the run are of each source."""
        part = next((part for part in reversed(self._parts) if part.first <= samples), None)
        return np.zeros_like(self._sizes) if part is None else part.count(samples - part.first)

    def __call__(self, first: int, last: int) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """(source, sequence) of samples first .. last - 1, the source as an index."""
        blocks = [self._block(number) for number in range(first // _BLOCK, -(-last // _BLOCK))]
        start, stop = first % _BLOCK, first % _BLOCK + last - first
        if len(blocks) == 1:
            return blocks[0][0][start:stop], blocks[0][1][start:stop]
        both = np.concatenate(blocks, axis=1)[:, start:stop]
        return both[0], both[1]

    def _compute_block(self, number: int) -> Int[np.ndarray, "2 rows"]:
        samples = np.arange(number * _BLOCK, (number + 1) * _BLOCK)
        found = np.empty((2, _BLOCK), np.int64)
        ends = [part.first for part in self._parts[1:]] + [samples[-1] + 1]
        for part, end in zip(self._parts, ends, strict=True):
            inside = slice(*np.clip([part.first - samples[0], end - samples[0]], 0, _BLOCK))
            periods, position = np.divmod(samples[inside] - part.first, len(part.turns))
            source = part.turns[position]
            sample = part.before[source] + periods * part.per_period[source] + part.earlier[position]
            found[:, inside] = source, shuffled(sample, self._sizes[source], self._keys[source])
        found.setflags(write=False)
        return found
