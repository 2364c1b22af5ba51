"""Are the copies of an array that several devices hold still the same bits?

A faulty device or link, or a sum that one device was left out of, makes them drift apart, and nothing else tells: each
device goes on with its own copy, the loss is still a number, a checkpoint holds one of them.

Each device makes a fingerprint of each of its arrays, 4 bytes, and every process sees those of all devices.  Two arrays
that differ in one element never have the same fingerprint; others do once in 2^32.

    x, whole or cut as its PartitionSpec says  --fingerprint, on each device-->  table[devices leaves]  --all-gather-->

Cost    one reading of the state; over the wire 4 bytes for each array of each device; the devices wait for the host.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from shmap_tp.errors import UserError
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import DP, MP


class ReplicaCheck:
    """The check of a state that is laid out as `shapes` says; compiled when it is first made."""

    def __init__(self, shapes: Any):
        """`shapes`: ShapeDtypeStructs, each with its NamedSharding, all over one mesh."""
        paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(shapes)[0], strict=True)
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
        self._specs = [leaf.sharding.spec for leaf in leaves]
        self._mesh = leaves[0].sharding.mesh
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
        self._fingerprints = jax.jit(
            jax.shard_map(_of_this_device, mesh=self._mesh, in_specs=(specs,), out_specs=P((DP, MP)))
        )
        # A program of its own: together, the compiler might take copies that should be the same for the same.
        self._show_all = jax.jit(lambda table: table, out_shardings=NamedSharding(self._mesh, P()))

    def differences(self, state: Any) -> list[str]:
        """What is not the same on all its devices, a line each: the array, and which devices disagree with how many."""
        table = np.asarray(self._show_all(self._fingerprints(state)).addressable_data(0))
        found = []
        for name, spec, prints in zip(self._names, self._specs, table.T, strict=True):
            for copies in self._copies(spec):
                held = prints[copies]
                (usual, count), *rest = Counter(held.tolist()).most_common()
                if rest:
                    odd = [self._device(place) for place in copies[held != usual].tolist()]
                    found.append(f"{name} on {', '.join(odd)} is not what its {count} other copies are")
        return found

    def check(self, state: Any, step: int) -> None:
        """Raises InputError, the same on every process, where copies differ after `step`."""
        if found := self.differences(state):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise UserError(
                f"after step {step} {found[0]}{more}: a device or a link is faulty, or a sum left one out;\n"
                f"go on from the newest checkpoint, without that device: checkpoint.resume=must"
            )

    def _copies(self, spec: P) -> np.ndarray:
        """Rows of the table that must be the same, by group: [groups copies]."""
        cut = {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
        sizes = dict(self._mesh.shape)
        places = np.arange(self._mesh.size).reshape(sizes[DP], sizes[MP])
        order = [i for i, axis in enumerate((DP, MP)) if axis in cut]
        whole = [i for i, axis in enumerate((DP, MP)) if axis not in cut]
        groups = math.prod(places.shape[i] for i in order)
        return places.transpose(*order, *whole).reshape(groups, -1)

    def _device(self, place: int) -> str:
        device = self._mesh.devices.flat[place]
        return f"device {device.id} (process {device.process_index})"


def _of_this_device(state: Any) -> UInt32[Array, "1 leaves"]:
    """The fingerprints of what this device holds.  Nothing travels."""
    return jnp.stack([mark_varying(mark_varying(fingerprint(leaf), DP), MP) for leaf in jax.tree.leaves(state)])[None]


def fingerprint(x: Array) -> UInt32[Array, ""]:
    """The sum, modulo 2^32, of every 32 bits of `x`, each mixed with its place: the finaliser of MurmurHash3, which no
    two words share.  The order of summation does not matter, so it is the same wherever the same bits lie."""
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    mixed = words ^ (place * np.uint32(0x9E3779B1))
    for shift, factor in [(16, 0x85EBCA6B), (13, 0xC2B2AE35)]:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> np.uint32(16)), dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, "..."]:
    """The bits of `x` as 32-bit words: one for each element of 32 bits or fewer, two for one of 64."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
