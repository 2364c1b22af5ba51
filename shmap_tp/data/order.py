"""The order in which the epochs of a source visit its sequences: a keyed permutation that is computed, not stored.

n sequences in a source, s = floor(sqrt(n)) + 1.  A position is a pair (left, right) of numbers below s.  A Feistel
network permutes the s^2 pairs; what it takes outside of 0 .. n - 1 goes through it again until it is inside (cycle
walking).  That is a permutation of 0 .. n - 1, and any position of it takes the same time and no memory, whatever n.

Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 3 and 4, https://eprint.iacr.org/2001/012
"""

import hashlib

import numpy as np
from jaxtyping import Int, UInt64

from shmap_tp.errors import UserError

ORDER = "feistel-1"
"""Name of this order in checkpoints.  A change of what `shuffled` returns needs another name."""
_ROUNDS = 6
_INCREMENT = 0x9E3779B97F4A7C15  # that of SplitMix64


def source_key(seed: int, sha256: str) -> int:
    """The key of the source whose file has this sha256, in a run of `seed`: 64 bits.  Raises UserError if seed < 0."""
    if seed < 0:
        raise UserError(f"run.seed={seed} is negative; the data order needs run.seed >= 0, such as run.seed={-seed}")
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
