"""Checks that the replicas of an array on several devices are bitwise equal.

A faulty device or link, or a missing reduction, makes replicas drift apart.  Nothing else detects it: each device goes
on with its own replica, the loss stays finite, and a checkpoint stores only one of the replicas.

Each device computes a 4-byte fingerprint of each of its arrays, and every process receives those of all devices.  Two
arrays that differ in one element never have the same fingerprint; other differences are missed once in 2^32.

    state, sharded as declared  --fingerprint, per device-->  table[devices leaves]  --all-gather-->  replicated table

Cost    one pass over the state; communication of 4 bytes per array and device; the devices wait for the host.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from shmap_tp.errors import HardwareError
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.key_paths import leaves_by_path


class ReplicaCheck:
    """Compares the replicas of a state with fixed shapes and shardings; compiled at the first check."""

    def __init__(self, shapes: Any):
        """`shapes`: a tree of ShapeDtypeStructs, each with a NamedSharding, all over one mesh."""
        self._names, leaves = zip(*leaves_by_path(shapes).items(), strict=True)
        self._specs = [leaf.sharding.spec for leaf in leaves]
        self._mesh = leaves[0].sharding.mesh
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
        self._fingerprints = jax.jit(
            jax.shard_map(_local_fingerprints, mesh=self._mesh, in_specs=(specs,), out_specs=P(self._mesh.axis_names))
        )
        # A separate program: within one, the compiler could treat replicas as equal because their types say so.
        self._all_gather = jax.jit(lambda table: table, out_shardings=NamedSharding(self._mesh, P()))

    def differences(self, state: Any) -> list[str]:
        """One line for each array whose replicas differ: its name, and which devices disagree with the majority."""
        table = np.asarray(self._all_gather(self._fingerprints(state)).addressable_data(0))
        found = []
        for name, spec, fingerprints in zip(self._names, self._specs, table.T, strict=True):
            for rows in self._replica_groups(spec):
                values = fingerprints[rows]
                (majority, count), *others = Counter(values.tolist()).most_common()
                if others:
                    deviating = [self._device_name(row) for row in rows[values != majority].tolist()]
                    found.append(f"{name} on {', '.join(deviating)} differs from its {count} other replicas")
        return found

    def check(self, state: Any, step: int) -> None:
        """Raise `HardwareError`, the same on every process, if replicas differ after `step`."""
        if found := self.differences(state):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise HardwareError(
                f"after step {step} {found[0]}{more}: a device or a link is faulty, or a reduction is missing;\n"
                f"resume from the newest checkpoint without that device: checkpoint.resume=must"
            )

    def _replica_groups(self, spec: P) -> np.ndarray:
        """Rows of the table that must be equal for an array partitioned by `spec`: [groups replicas]."""
        sharded = {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
        rows = np.arange(self._mesh.size).reshape(self._mesh.devices.shape)
        over_groups = [i for i, axis in enumerate(self._mesh.axis_names) if axis in sharded]
        over_replicas = [i for i, axis in enumerate(self._mesh.axis_names) if axis not in sharded]
        groups = math.prod(rows.shape[i] for i in over_groups)
        return rows.transpose(*over_groups, *over_replicas).reshape(groups, -1)

    def _device_name(self, row: int) -> str:
        device = self._mesh.devices.flat[row]
        return f"device {device.id} (process {device.process_index})"


def _local_fingerprints(state: Any) -> UInt32[Array, "1 leaves"]:
    """The fingerprints of this device's shards.  No communication."""
    fingerprints = [fingerprint(leaf) for leaf in jax.tree.leaves(state)]
    fingerprints = mark_varying(fingerprints, get_abstract_mesh().axis_names)
    return jnp.stack(fingerprints)[None]


def fingerprint(x: Array) -> UInt32[Array, ""]:
    """The sum modulo 2^32 of every 32-bit word of `x` mixed with its position.

    The mixing is the finaliser of MurmurHash3, a bijection.  The order of summation does not matter, so equal bits have
    equal fingerprints on every device.
    """
    words = _words(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        position = position * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    mixed = words ^ (position * np.uint32(0x9E3779B1))
    for shift, factor in [(16, 0x85EBCA6B), (13, 0xC2B2AE35)]:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> np.uint32(16)), dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, "..."]:
    """The bits of `x` as 32-bit words: one for each element of up to 32 bits, two for each element of 64 bits."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
