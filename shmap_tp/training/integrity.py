"""Whether bits are as they were: the files of a checkpoint by their hashes, which all processes compute, and the
replicas of an array by their fingerprints.

A read error says nothing about a checkpoint, and is raised; only a proven difference is a fault.
"""

import hashlib
import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import lax
from jax.sharding import Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from shmap_tp.errors import HardwareError, ShmapTpError, StorageError, first_line
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.runtime.agreement import divided, on_process_0
from shmap_tp.runtime.distributed import joined_processes

MANIFEST = "sha256.json"
"""The hash of every other file of a checkpoint, by path; written last."""
HASHING_THREADS = 8
"""How many files a process hashes at the same time, each in a block of 4 MiB of memory."""


def find_faults(directory: epath.Path) -> list[str]:
    """One line for each damaged, missing or added file of the checkpoint in `directory`; [] if it is intact.

    Must be called by all processes, of which each hashes its part (`hashes`), and which all get the same.
    Raises `StorageError` if a file cannot be read: that says nothing about the checkpoint.
    """
    expected = on_process_0("manifest", lambda: _manifest(directory))
    if isinstance(expected, str):
        return [expected]
    actual, faults = hashes(directory), []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            faults.append(f"file {name} is missing")
        elif name not in expected:
            faults.append(f"file {name} was added after the save: it is not in {MANIFEST}")
        elif actual[name] is None:
            faults.append(f"{name} is not a file, or is being deleted")
        elif expected[name] != actual[name]:
            faults.append(f"file {name} is damaged: its sha256 differs from the one in {MANIFEST}")
    return faults


def _manifest(directory: epath.Path) -> dict[str, str] | str:
    """The hashes that were saved; or why there are none, in words."""
    file = directory / MANIFEST
    try:
        with _read_errors(directory):
            content = file.read_bytes() if _is_file(file.stat()) else b"null"
        found = json.loads(content)
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so its save was not finished"
    except (ValueError, RecursionError) as error:
        return f"{MANIFEST} is damaged ({error})"
    return found if isinstance(found, dict) else f"{MANIFEST} is damaged (it lists no files)"


def hashes(directory: epath.Path) -> dict[str, str | None]:
    """sha256 of every file under `directory` except the manifest, by path relative to `directory`; None for
    something that is no file, such as a FIFO, which is not read.

    Must be called by all processes: process 0 lists the files, each process hashes those of its `shares`, and all get
    the hashes of all.  Communication: names and hashes, by the key-value store of the processes.
    """

    def plan() -> list[dict[str, bool]]:
        with _read_errors(directory):
            sizes = dict(_files(directory, ""))
        return [{name: sizes[name] is not None for name in share} for share in shares(sizes, joined_processes())]

    def hash_of(name: str, is_file: bool) -> str | None:
        with suppress(FileNotFoundError):  # deleted meanwhile
            return file_hash(directory / name) if is_file else None

    def work(files: dict[str, bool]) -> dict[str, str | None]:
        with _read_errors(directory), ThreadPoolExecutor(HASHING_THREADS) as threads:
            return dict(zip(files, threads.map(hash_of, files, files.values()), strict=True))

    return {name: sha256 for part in divided("hashes", plan, work) for name, sha256 in part.items()}


def shares(sizes: dict[str, int | None], processes: int) -> list[list[str]]:
    """The files that each process hashes, whatever processes saved them: at most 1/`processes` of the bytes and one
    file, which Orbax ends after 2 GiB (in a bucket 400 MiB) and a chunk.

    A process gets the files that it wrote as long as it has less than its share; other files go to the process that has
    least.
    """
    found: list[list[str]] = [[] for _ in range(processes)]
    loads, share = [0] * processes, sum(size or 0 for size in sizes.values()) / processes
    for name, size in sorted(sizes.items(), key=lambda item: -(item[1] or 0)):
        writer = re.search(r"process_([0-9]+)", name)
        process = int(writer[1]) if writer else processes
        if process >= processes or loads[process] >= share:
            process = loads.index(min(loads))
        found[process].append(name)
        loads[process] += size or 0
    return found


def _files(at: epath.Path, prefix: str) -> Iterator[tuple[str, int | None]]:
    """(path, size) of everything below a directory but the manifest; the size is None for anything but a file."""
    for child in sorted(at.iterdir()):
        name, status = prefix + child.name, None
        with suppress(FileNotFoundError):  # a link to nothing, or deleted meanwhile
            status = child.stat()
        if status and status.is_directory:
            yield from _files(child, f"{name}/")
        elif name not in (MANIFEST, f"{MANIFEST}.tmp"):
            yield name, status.length if status and _is_file(status) else None


def _is_file(status: Any) -> bool:
    """Whether what has this status, that of epath, can be read to an end.  In a bucket there is nothing else."""
    return status.mode is None or stat.S_ISREG(status.mode)


@contextmanager
def _read_errors(directory: epath.Path) -> Iterator[None]:
    """Context that reads the checkpoint in `directory`.  Raises StorageError if it cannot be read."""
    try:
        yield
    except (ShmapTpError, FileNotFoundError):
        raise
    except Exception as error:  # buckets raise errors of many types
        raise StorageError(unreadable(directory, error)) from error


def file_hash(file: epath.Path | Path) -> str:
    """sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def unreadable(directory: epath.Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or first_line(error)
    return (
        f"checkpoint {directory} cannot be read: {reason}; nothing was changed.\n"
        f"Make it readable and start again, or name another checkpoint.dir"
    )


# The replicas of an array on several devices


class ReplicaCheck:
    """Compares the replicas of a state with fixed shapes and shardings; compiled at the first check.

    A faulty device or link, or a missing reduction, makes replicas drift apart.  Nothing else detects it: each device
    goes on with its own replica, the loss stays finite, and a checkpoint stores only one of the replicas.

    Each device computes a 4-byte fingerprint of each of its arrays, and every process receives those of all devices.
    Two arrays that differ in one element never have the same fingerprint; other differences are missed once in 2^32.

        state, as declared  --fingerprint, per device-->  table[devices leaves]  --all-gather-->  replicated table

    Cost: one pass over the state; communication of 4 bytes per array and device; the devices wait for the host.
    """

    def __init__(self, shapes: Any):
        """`shapes`: a tree of ShapeDtypeStructs, each with a NamedSharding, all over one mesh."""
        self._names, leaves = zip(*leaves_by_path(shapes).items(), strict=True)
        self._specs = [leaf.sharding.spec for leaf in leaves]
        self._mesh = leaves[0].sharding.mesh
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
        self._fingerprints = jax.jit(
            jax.shard_map(_local_fingerprints, mesh=self._mesh, in_specs=(specs,), out_specs=P(self._mesh.axis_names))
        )

    def differences(self, state: Any) -> list[str]:
        """One line for each array whose replicas differ: its name, and which devices disagree with the majority."""
        table = of_all_devices(self._fingerprints(state))
        found = []
        for name, spec, fingerprints in zip(self._names, self._specs, table.T, strict=True):
            for rows in self._replica_groups(spec):
                values = fingerprints[rows]
                (majority, count), *others = Counter(values.tolist()).most_common()
                if others:
                    deviating = [device_name(self._mesh, row) for row in rows[values != majority].tolist()]
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


def of_all_devices(table: jax.Array) -> np.ndarray:
    """A table whose rows are sharded over all devices, on every process.

    Its all-gather is a program of its own: within one, the compiler could treat replicas as equal because their types
    say so.
    """
    return np.asarray(jax.device_put(table, NamedSharding(table.sharding.mesh, P())).addressable_data(0))


def device_name(mesh: Mesh, row: int) -> str:
    """The device of a row of such a table, in words."""
    device = mesh.devices.flat[row]
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
