"""An array from blocks that the processes have on their disks, on whatever mesh: what a process needs and does not have
is sent to it by one that has it, over the mesh.

    for each shift s of 1 ... processes - 1, if anything is to be sent so far:
    bytes for process i + s  --ppermute over the processes by s, in chunks-->  bytes from process i - s

Memory of a process: its shards of the array, what it sends of it and what it receives, each at most as much.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.parallel.mesh import ring_permutation

CHUNK_BYTES = 16 * 2**20
"""The most that a device sends and receives at once."""
LEAST_BYTES = 2**16
"""The least, so that few programs are compiled; between the two it is a power of two."""

Ranges = tuple[tuple[int, int], ...]
"""A part of an array: (first, end) of each dim."""
Holders = Mapping[str, Mapping[Ranges, list[int]]]
"""The processes that have a block, by the array's path."""
Piece = tuple[Ranges, Ranges, Ranges]
"""(a shard, a block, what they have in common)."""


def assembled(
    leaf: jax.ShapeDtypeStruct, holders: Mapping[Ranges, list[int]], read: Callable[[Ranges], np.ndarray]
) -> tuple[jax.Array, int]:
    """(the array with the shape, dtype and sharding of `leaf`, the bytes that processes have sent to each other).

    `holders` are the processes that have each block, equal on all of them; `read` a block that this process has.
    """
    me, processes, dtype, sent = jax.process_index(), jax.process_count(), np.dtype(leaf.dtype), 0
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    pieces = pieces_of(leaf.shape, indices, holders)
    shards: dict[Ranges, np.ndarray] = {}

    def values(target: int) -> Iterable[np.ndarray]:
        return (read(block)[_within(part, block)] for _, block, part in pieces[me, target])

    def fill(source: int, found: Iterable[np.ndarray]) -> None:
        for (shard, _, part), value in zip(pieces[source, me], found, strict=True):
            if shard not in shards:
                shards[shard] = np.empty(sizes_of(shard), dtype)
            shards[shard][_within(part, shard)] = value

    fill(me, values(me))
    for shift in range(1, processes):
        lengths = [_bytes(pieces[p, (p + shift) % processes], dtype) for p in range(processes)]
        if not any(lengths):
            continue
        sent += sum(lengths)
        data = b"".join(value.tobytes() for value in values((me + shift) % processes))
        received, source = shifted(data, max(lengths), shift), (me - shift) % processes
        sizes = [sizes_of(part) for *_, part in pieces[source, me]]
        ends = np.cumsum([0, *(dtype.itemsize * math.prod(size) for size in sizes)])
        parts = zip(ends, ends[1:], sizes, strict=False)
        fill(source, (received[a:b].view(dtype).reshape(size) for a, b, size in parts))
    whole = jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: shards[ranges_of(index, leaf.shape)])
    return whole, sent


def pieces_of(
    shape: tuple[int, ...], indices: Mapping[Any, tuple[slice, ...]], holders: Mapping[Ranges, list[int]]
) -> Mapping[tuple[int, int], list[Piece]]:
    """The pieces by (process that has them, process that needs them); `indices` has what each device needs.

    A process takes what it has itself; the others that have a block share the work.
    """
    needed: dict[int, set[Ranges]] = defaultdict(set)
    for device, index in indices.items():
        needed[device.process_index].add(ranges_of(index, shape))
    pieces = defaultdict(list)
    for process, shards in sorted(needed.items()):
        for shard in sorted(shards):
            for block in [shard] if shard in holders else holders:
                part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(shard, block, strict=True))
                if all(a < b for a, b in part):
                    have = holders[block]
                    source = process if process in have else have[process % len(have)]
                    pieces[source, process].append((shard, block, part))
    return pieces


def shifted(data: bytes, longest: int, by: int) -> np.ndarray:
    """The bytes of the process `by` before this one, while `data` goes to the process `by` after it; none has more than
    `longest`.  All processes call this; each divides its bytes over its devices."""
    devices = len(jax.local_devices())
    share = max(LEAST_BYTES, 1 << (-(-longest // devices) - 1).bit_length())
    row = devices * min(CHUNK_BYTES, share)
    received = np.empty(-(-longest // row) * row, np.uint8)
    shift, sharding = _shift(by)
    for begin in range(0, longest, row):
        words = np.frombuffer(data[begin : begin + row].ljust(row, b"\0"), np.uint32).reshape(1, devices, -1)
        found = shift(jax.make_array_from_process_local_data(sharding, words)).addressable_shards
        found = sorted(found, key=lambda shard: shard.index[1].start or 0)
        received[begin : begin + row] = np.concatenate([np.ravel(shard.data) for shard in found]).view(np.uint8)
    return received


@lru_cache
def _shift(by: int) -> tuple[Callable[[jax.Array], jax.Array], NamedSharding]:
    """(a program that passes words to the process `by` after this one, their sharding)."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("process", "device"))
    spec, permutation = P("process", "device"), ring_permutation(jax.process_count(), by)
    shift = jax.shard_map(
        lambda words: lax.ppermute(words, "process", permutation), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return jax.jit(shift), NamedSharding(mesh, spec)


def ranges_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Ranges:
    """A shard's index as ranges."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def sizes_of(ranges: Ranges) -> tuple[int, ...]:
    """The shape of a part of an array."""
    return tuple(end - first for first, end in ranges)


def _bytes(pieces: list[Piece], dtype: np.dtype) -> int:
    return dtype.itemsize * sum(math.prod(sizes_of(part)) for *_, part in pieces)


def _within(part: Ranges, block: Ranges) -> tuple[slice, ...]:
    """Where `part` is in `block`."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(part, block, strict=True))
