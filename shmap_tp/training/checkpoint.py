"""Checkpoints by Orbax: saved in the background, complete or absent, restored onto any mesh.

A checkpoint is a directory `<step>/` that Orbax wrote and renamed into place.  Its `sha256.json`, written last, has the
hash of every file.  Only a checkpoint whose files match their hashes is read, because Orbax itself loads corrupted
files without an error.

A checkpoint whose files differ from their hashes is renamed, never deleted; where a file cannot be read, nothing is
changed and the run ends.  Deleted are only intact or older checkpoints that `checkpoint.keep` no longer keeps.

A checkpoint that is saved within a streak of skipped steps has the weights from before the streak, which may be what
makes the steps bad.  It does not count among those that `checkpoint.keep` keeps, and the next one replaces it: however
often a diverging run is stopped and resumed, all checkpoints from before the streak remain.
"""

import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from shmap_tp.config.schema import CheckpointConfig
from shmap_tp.errors import StorageError, UserError
from shmap_tp.parallel.partitioning import axes_in, shard_over, types_by_path
from shmap_tp.runtime.agreement import on_process_0
from shmap_tp.runtime.files import make_directory, write_atomically, writing
from shmap_tp.training.bad_steps import initial_bad_step_state
from shmap_tp.training.checkpoint_files import (
    SKIPPED,
    absolute,
    checkpoint_steps,
    difference,
    is_in_progress,
    load_state,
    read_facts,
    saved_state,
)
from shmap_tp.training.integrity import MANIFEST, find_faults, hashes
from shmap_tp.training.local_checkpoints import KEY, LocalCheckpoints, bytes_of_copies
from shmap_tp.training.step import State

CHUNK_BYTES = 128 * 2**20
"""The largest chunk in which an array is stored: what a reader of a part of it has in memory."""
SPLIT_BYTES = 2**20
"""Shards of which the parts that replicas write would be smaller are written whole, by one replica."""
PATIENCE_SECONDS = 10.0
"""How long the loop waits for the save in progress before it delays the next one."""


class Checkpoints:
    """The checkpoints of one run.  Use as a context: leaving it waits until the save in progress is complete.

    Orbax's CheckpointManager is not used: it reads all checkpoints when it opens and fails on one damaged file, and it
    deletes an old checkpoint before the hashes of the new one are written.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        report: Callable[[str], None],
        require_owner: Callable[[], None] = lambda: None,
        *,
        writes: bool = True,
        local: LocalCheckpoints | None = None,
    ):
        """`report` receives one line for each checkpoint that is skipped or deleted, with the reason.

        With `writes` unfinished saves are removed, and `require_owner`, of the lock on the directory
        (`runtime/run_lock.py`), is called in process 0 before anything else is changed: it raises an error once another
        run writes there.  Without `writes` nothing is changed, so a run may write there meanwhile.  `local` are the
        checkpoints on the disks of the hosts, which are newer.
        """
        self._local, self._is_local = local, False
        self._dir = absolute(config.dir)
        self._keep, self._keep_every = config.keep, config.keep_every
        self._report, self._writes, self._require_owner = report, writes, require_owner
        self.last_seconds = 0.0
        """From the beginning of the last save that is complete to its end."""
        self._peaks: dict[jax.Device, int] | None = None
        """Bytes that each device of this process has used at most, without a copy of the state."""
        self._saving: Future | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        if writes:
            make_directory("checkpoint.dir", config.dir)
        if writes and jax.process_index() == 0:
            for partial in self._dir.glob("*.orbax-checkpoint-tmp*"):  # left by a save that was killed
                if partial.name.partition(".")[0].isdecimal() and partial.is_dir() and not os.path.islink(partial):
                    partial.rmtree()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, intact or not, newest first."""
        return checkpoint_steps(self._dir)

    def save(self, step: int, state: State, facts: dict[str, Any], skipped_in_a_row: int = 0) -> None:
        """Start to save in the background; returns as soon as `state` may be donated: once a copy on the devices is
        dispatched, or where one has no room for it, once the state is on the host.

        `facts` are JSON values stored with the arrays; the last `skipped_in_a_row` steps up to this one were skipped.
        Raises the error of the previous save if that failed.
        """
        self._wait_for_save()
        if jax.process_index() == 0:
            self._require_owner()
            if step in self.steps():  # the owner before this one has finished a save meanwhile
                self._set_aside(step)
        is_shared = not skipped_in_a_row and self.is_due_locally(step)
        copied = self._copy_with_room(state, whole=is_shared)
        if is_shared:
            self._local.save(step, copied, facts, is_copy=copied is not state)
        with self._writing(step), _saving_options(is_copy=copied is not state, whole=is_shared):
            written = ocp.save_checkpointables_async(self._dir / str(step), {"state": copied}, custom_metadata=facts)
        self._saving = self._background.submit(self._complete, step, written, skipped_in_a_row)

    def is_due_locally(self, step: int) -> bool:
        """Whether to call `save_locally`, or `save`, which does it too, after `step`."""
        return self._local is not None and self._local.is_due(step)

    def save_locally(self, step: int, state: State, facts: dict[str, Any]) -> None:
        """Start to save on the disks of the hosts alone; returns as `save` does."""
        copied = self._copy_with_room(state, whole=True)
        self._local.save(step, copied, facts, is_copy=copied is not state)

    def delays(self, step: int, patience: float | None) -> bool:
        """Whether the save before that of `step` takes longer than `patience` still, the same on all processes.

        Never true of a step that `checkpoint.keep_every` keeps forever.
        """
        if self._keep_every and step % self._keep_every == 0:
            patience = None

        def is_unfinished() -> bool:
            return self._saving is not None and bool(wait([self._saving], patience).not_done)

        return on_process_0("save in progress", is_unfinished)

    def raise_failure(self) -> None:
        """Raise the error of the save in progress, if it has failed."""
        if self._saving and self._saving.done():
            self._wait_for_save()

    def wait(self) -> None:
        """Wait until the saves in progress are complete.  Raises the error of one that failed."""
        if self._local:
            self._local.wait()
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving:
            saving.result()

    def newest_intact(self) -> int | None:
        """Step of the newest checkpoint whose bits all match their hashes, the same on all processes; None if none.

        The hosts' own is taken before one of the same step in `dir`.
        """
        local = self.newest_local
        for step in on_process_0("steps", self.steps):
            if local is not None and step <= local:
                break
            if (fault := self._fault(step)) is None:
                if local is not None:
                    self._report(f"the local checkpoint of step {local} is older than {self.place(step)}/{step}")
                return step
            if self._writes or not is_in_progress(self._dir / str(step)):
                self._report(f"checkpoint {self._dir / str(step)} is skipped: {fault}")
        self._is_local = local is not None
        return local

    @functools.cached_property
    def newest_local(self) -> int | None:
        """Step of the newest checkpoint on the disks of the hosts."""
        return self._local.newest() if self._local else None

    def place(self, step: int) -> str:
        """Where the checkpoint is that `newest_intact` has found, in words."""
        return f"{KEY} of the hosts" if self._is_local and step == self.newest_local else str(self._dir)

    def first_save_unfinished(self) -> bool:
        """Whether the only checkpoint has no hashes: the state of a directory after a kill during the first save."""
        steps = self.steps()
        return len(steps) == 1 and not (self._dir / str(steps[0]) / MANIFEST).exists()

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after `step`, which are damaged or unfinished: the run will save those steps again."""
        for newer in self.steps() if jax.process_index() == 0 else []:
            if newer > step or (newer == step and not (self._dir / str(newer) / MANIFEST).exists()):
                self._set_aside(newer)

    def _set_aside(self, step: int) -> None:
        source = self._dir / str(step)
        number = next(n for n in itertools.count(1) if not (self._dir / f"{step}.damaged-{n}").exists())
        target = self._dir / f"{step}.damaged-{number}"
        with writing(target):
            source.rename(target)
        self._report(f"checkpoint {source} is renamed to {target.name}; the run will save that step again")

    def facts(self, step: int) -> Any:
        """The `facts` that were saved with the state, unless someone edited them.  Raises `StorageError`."""
        if self._is_local and step == self.newest_local:
            return self._local.facts()
        return read_facts(self._dir / str(step))

    def restore(self, step: int, shapes: State) -> State:
        """The saved state, bit for bit, with the shardings of `shapes`.

        A checkpoint saved without a bad-step state gets an initial one.
        Raises `UserError` if names, shapes or dtypes differ (Orbax would cast a dtype silently), `StorageError` if the
        files cannot be read.
        """
        if self._is_local and step == self.newest_local:
            return self._local.restore(shapes)
        directory = self._dir / str(step)
        saved = types_by_path(saved_state(directory))
        requested = {field: getattr(shapes, field) for field in vars(shapes)}
        if not any(name.startswith("guard/") for name in saved):
            del requested["guard"]
        wanted = types_by_path(requested)
        if fault := difference(saved, wanted):
            raise UserError(
                f"checkpoint {directory} has {fault};\n"
                f"resume with the version of shmap_tp that saved it, or start another run with run.dir=..."
            )
        initial = jax.jit(
            initial_bad_step_state, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes.guard)
        )()
        return State(**{"guard": initial} | load_state(directory, requested, StorageError))

    def _complete(self, step: int, written: Any, skipped_in_a_row: int) -> None:
        """Wait for Orbax, write the hashes, and only then delete the checkpoints that are not kept."""
        begin = time.monotonic()
        with self._writing(step):
            written.result()
            directory, is_main = self._dir / str(step), jax.process_index() == 0
            if is_main and skipped_in_a_row:
                (directory / SKIPPED).write_text(f"{skipped_in_a_row}\n")
            found = hashes(directory)
            if is_main:
                self._require_owner()
                write_atomically(directory / MANIFEST, json.dumps(found, indent=1))
                self._require_owner()
                self._delete_replaced()
        self.last_seconds = time.monotonic() - begin

    def _delete_replaced(self) -> None:
        """Delete the checkpoints that are not kept; those of a streak of skipped steps are not counted."""
        newest, *older = self.steps()
        counted = [step for step in (newest, *older) if not (self._dir / str(step) / SKIPPED).exists()]
        for old in older:
            if old not in counted[: self._keep] and (not self._keep_every or old % self._keep_every):
                self._delete(old)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        with writing(f"checkpoint {self._dir / str(step)}"):
            try:
                yield
            except Exception:
                self._require_owner()  # another run has removed what this one was writing
                raise

    def _copy_with_room(self, state: State, *, whole: bool) -> State:
        """A copy of `state` (`_copied`), or where the devices have no room for it, `state` itself."""
        return _copied(state, whole) if on_process_0("room for a copy", lambda: self._has_room(state)) else state

    def _has_room(self, state: State) -> bool:
        """Whether each device of this process has the memory of a copy beside the most that it has used without one.

        The most that a device reports never falls, and later has a copy in it.  On a CPU, which does not report any, a
        copy takes what copying to the host would.
        """
        needed = sum(_shard_bytes(array, _sharding_of_copy(array)) for array in jax.tree.leaves(state))
        if self._local:  # another copy, with all replicas, may be there at the same time
            needed += sum(bytes_of_copies(array) for array in jax.tree.leaves(state))
        memory = {device: found for device in jax.local_devices() if (found := device.memory_stats())}
        peaks, is_first = self._peaks or {}, self._peaks is None
        self._peaks = {}
        for device, found in memory.items():
            peak, before = found["peak_bytes_in_use"], peaks.get(device, 0)
            self._peaks[device] = before if not is_first and before < peak <= before + needed else peak
        has_room = all(needed <= found["bytes_limit"] - self._peaks[device] for device, found in memory.items())
        if is_first and not has_room:
            self._report("saves wait until the state is on the host: the devices have no memory for a copy of it")
        return has_room

    def _delete(self, step: int) -> None:
        """Delete a checkpoint: its hashes first, so that a partly deleted one counts as incomplete.  A link to a
        checkpoint elsewhere was not written by this program, and stays."""
        directory = self._dir / str(step)
        if not os.path.islink(directory):
            (directory / MANIFEST).unlink(missing_ok=True)
            directory.rmtree()

    def _fault(self, step: int) -> str | None:
        """The first fault of this checkpoint, or None if it is intact."""
        return next(iter(find_faults(self._dir / str(step))), None)


def _copied(state: State, whole: bool = False) -> State:
    """A copy of `state` on the same devices, sharded as far as its axes allow: each device has what it writes.  A
    `whole` one has the shards and replicas of `state`.

    One program, which runs between two steps; `state` may be donated as soon as it is dispatched.
    Communication: none.
    """
    arrays, structure = jax.tree.flatten(state)
    shardings = tuple(array.sharding if whole else _sharding_of_copy(array) for array in arrays)
    return jax.tree.unflatten(structure, _copy(shardings)(arrays))


@functools.lru_cache(16)
def _copy(shardings: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: [jnp.copy(array) for array in arrays], out_shardings=list(shardings))


def _sharding_of_copy(array: jax.Array) -> NamedSharding:
    """The sharding of `array`, and also over each axis of the mesh over which it is replicated, if that divides a dim
    and leaves shards of `SPLIT_BYTES`."""
    sharding = array.sharding
    mesh, spec = sharding.mesh, P(*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
    for axis in mesh.axis_names:
        if axis in axes_in(spec):
            continue
        finer = NamedSharding(mesh, shard_over(array.shape, spec, [axis], mesh.shape, first=0))
        if _shard_bytes(array, finer) >= SPLIT_BYTES:
            spec = finer.spec
    return NamedSharding(mesh, spec)


def _shard_bytes(array: jax.Array, sharding: NamedSharding) -> int:
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _saving_options(*, is_copy: bool, whole: bool) -> ocp.Context:
    """Arrays are stored in chunks.  A copy of the state is read in the background, each shard by one process; otherwise
    the caller waits until it is on the host.  Replicas, which a `whole` copy has, read a part each.

    Directories are created first: Orbax's default is a background thread; if that fails, its other threads wait for the
    directories for 300 s.
    """
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.use_replica_parallel = whole or not is_copy
    if is_copy:
        context.memory.transfer_concurrent_bytes = sys.maxsize  # None would make Orbax ignore the next line
        context.memory.is_prioritized_key_fn = lambda _: False
    return context
