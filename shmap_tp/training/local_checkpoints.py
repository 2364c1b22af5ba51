"""Local checkpoints: each process keeps its shards of a recent step on a disk or ram disk of its own host.

    LOCAL_DIR/run-ID/STEP-START-PROCESS/N               the bytes of one of its shards, replicas included
    LOCAL_DIR/run-ID/STEP-START-PROCESS/sha256.json     which shards these are, and their hashes; written last

ID is of the run, START of one start of it: shards of two starts are never mixed, even of the same step.  A shard is
named by its range of the whole array, so a state is restored onto any mesh, if each part of each array is intact on
some host.  What a process needs and does not have is sent to it by one that has it, over the mesh (`exchange.py`).

Orbax has local checkpoints, too (orbax.checkpoint.experimental.emergency).  They are not used: they need a mesh with an
axis of replicas, one of which must be complete, restore onto the same mesh alone, and read what they find unverified.
"""

import json
import math
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shmap_tp.config.schema import CheckpointConfig
from shmap_tp.errors import StorageError, UserError, first_line
from shmap_tp.parallel.mesh import DP_SLICE
from shmap_tp.parallel.partitioning import axes_in, leaves_by_path, shard_bytes, types_by_path
from shmap_tp.runtime.agreement import divided, on_process_0
from shmap_tp.runtime.distributed import joined_processes
from shmap_tp.runtime.files import make_directory, write_atomically, writing
from shmap_tp.runtime.workers import in_background
from shmap_tp.training.checkpoint_files import absolute, difference
from shmap_tp.training.exchange import Holders, Ranges, assembled, ranges_of, sizes_of
from shmap_tp.training.integrity import HASHING_THREADS, MANIFEST, file_hash
from shmap_tp.training.step import State

KEY = "checkpoint.local_dir"
RUN_ID = "run_id"
"""File of checkpoint.dir that tells a run from another one that was in the same place."""
NAME = re.compile(r"([0-9]+)-([0-9a-f]{8})-([0-9]+)")


class Save(NamedTuple):
    """What may be restored together."""

    step: int
    start: str


class LocalCheckpoints:
    """The local checkpoints of one run.  All processes must call its methods together.

    A process has one complete save, and one that is being written: a save is deleted once all processes have written
    the next one.  Nothing here ends a run: what cannot be written or read is reported in one line.
    """

    def __init__(self, config: CheckpointConfig, shapes: State, report: Callable[[str], None]):
        """`shapes` are those of what is saved."""
        self._every, self._shapes, self._report = config.local_every, shapes, report
        run, self._start = on_process_0("run", lambda: [_run(config.dir), uuid.uuid4().hex[:8]])
        self._dir = Path(str(config.local_dir)) / run
        self._kept: Save | None = None
        self._files: dict[Save, dict[tuple[str, Ranges], Path]] = defaultdict(dict)
        self._facts: dict[Save, Any] = {}
        self._holders: Holders = {}
        self._said = ""
        self._saving: Future | None = None
        faults, others = map(_first, zip(*_everywhere("local directories", self._open), strict=True))
        self._writes = not faults
        if faults:
            report(f"no local checkpoints are written: {faults}")
        if others:
            report(f"{KEY} has {others} of another run, which stays; remove it if it is not needed")

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`: not while the save before is still written by a process."""
        if not self._writes or step % self._every:
            return False
        if is_writing := on_process_0("local save", lambda: bool(self._saving and not self._saving.done())):
            self._say(f"no local checkpoint of step {step}: the one before it is still being written")
        return not is_writing

    def save(self, step: int, state: State, facts: Any, *, is_copy: bool) -> None:
        """Write the shards of this process in the background.  The caller waits until those that another slice has are
        here and, if `state` is not a copy, which nobody donates, until all are on the host."""
        shards: dict[tuple[str, Ranges], Any] = {}
        for name, array in leaves_by_path(state).items():
            for copy in (array, *of_another_slice(array)):
                for shard in copy.addressable_shards:
                    place = name, ranges_of(shard.index, array.shape)
                    if place not in shards:
                        shards[place] = shard.data if is_copy else np.array(shard.data)
        lists, listed = {"types": types_by_path(state), "facts": facts}, [*shards.items()]
        self.wait()
        self._saving = in_background(lambda: self._write(Save(step, self._start), lists, listed))

    def wait(self) -> None:
        """Wait until all processes have written the save in progress."""
        if self._saving:
            self._saving.result()

    def newest(self) -> int | None:
        """The newest step that is intact on the hosts together; None if there is none."""
        offers, faults = zip(*_everywhere("local shards", self._read), strict=True)
        for fault in filter(None, faults):
            self._report(f"a local checkpoint is damaged: {fault}")
        for save in sorted({Save(*save) for offer in offers for save, *_ in offer}, reverse=True):
            self._holders = defaultdict(lambda: defaultdict(list))
            for process, offer in enumerate(offers):
                for _, its_types, shards in (each for each in offer if Save(*each[0]) == save):
                    types = its_types
                    for name, ranges in shards:
                        self._holders[name][_tuples(ranges)].append(process)
            if (fault := difference(types, types_by_path(self._shapes)) or self._missing()) is None:
                self._kept = save
                return save.step
            self._report(f"the local checkpoint of step {save.step} is skipped: it has {fault}")
        return None

    def facts(self) -> Any:
        """The facts that were saved with the newest step."""
        return _first(_everywhere("local facts", lambda: self._facts.get(self._kept)))

    def restore(self, shapes: State) -> State:
        """The state of the newest step, bit for bit, with the shardings of `shapes`, one array after the other.

        Raises StorageError if a file can no longer be read.
        """

        def read(name: str, dtype: Any, block: Ranges) -> np.ndarray:
            return np.fromfile(self._files[self._kept][name, block], dtype).reshape(sizes_of(block))

        try:
            arrays, sent = zip(
                *(
                    assembled(leaf, self._holders[name], partial(read, name, leaf.dtype))
                    for name, leaf in leaves_by_path(shapes).items()
                ),
                strict=True,
            )
        except OSError as error:
            raise StorageError(f"a local checkpoint cannot be read: {first_line(error)}; start again") from error
        if any(sent):
            self._report(f"{sum(sent) / 1e6:,.1f} MB of local checkpoints were sent to hosts that did not have them")
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    def _open(self) -> tuple[str, str]:
        """(why this process cannot write, a directory of another run)."""
        try:
            make_directory(KEY, str(self._dir))
            return "", _first(str(each) for each in self._dir.parent.glob("run-*") if each != self._dir)
        except UserError as error:
            return str(error), ""

    def _say(self, line: str) -> None:
        """Report why there is no save, once until there is one again."""
        if not self._said:
            self._report(line)
        self._said = line

    def _write(self, save: Save, lists: dict[str, Any], shards: list[Any]) -> None:
        """Write the shards, and once all processes have theirs, delete the save before; else what was written."""
        if fault := _first(_everywhere("local shards", lambda: self._write_shards(save, lists, shards))):
            newest = f"that of step {self._kept.step}" if self._kept else "in checkpoint.dir"
            self._say(f"no local checkpoint of step {save.step}, the newest stays {newest}: {fault}")
        else:
            self._kept, self._said = save, ""
        self._prune()

    def _write_shards(self, save: Save, lists: dict[str, Any], shards: list[Any]) -> str:
        """Why they could not be written, or nothing.  Each thread has one on the host; those written are freed."""
        self._prune()
        directory = self._dir / f"{save.step}-{save.start}-{jax.process_index()}"

        def write(number: int) -> list[Any]:
            (place, data), shards[number] = shards[number], None
            content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            (directory / str(number)).write_bytes(content)
            return [*place, sha256(content).hexdigest()]

        try:
            directory.mkdir(parents=True)
            with ThreadPoolExecutor(HASHING_THREADS) as threads:
                text = json.dumps(lists | {"shards": [*threads.map(write, range(len(shards)))]})
            write_atomically(directory / MANIFEST, f"{sha256(text.encode()).hexdigest()}\n{text}")
        except OSError as error:
            return f"{directory} could not be written: {error.strerror or error}"
        return ""

    def _prune(self) -> None:
        """Delete what is no longer needed, but not what other processes of this start write on this host."""
        for directory, save, process in self._saves():
            if save != self._kept and (save.start != self._start or process == jax.process_index()):
                with suppress(OSError):
                    (directory / MANIFEST).unlink()
                shutil.rmtree(directory, ignore_errors=True)

    def _saves(self) -> list[tuple[Path, Save, int]]:
        """What is on this host, and which process has written it."""
        found = [(each, NAME.fullmatch(each.name)) for each in sorted(self._dir.glob("*"))]
        return [(each, Save(int(match[1]), match[2]), int(match[3])) for each, match in found if match]

    def _read(self) -> tuple[list[Any], str]:
        """(each save on this host, with its types and intact shards; the first fault)."""
        offered, faults = [], []
        for directory, save, _ in self._saves():
            try:
                expected, _, text = (directory / MANIFEST).read_text().partition("\n")
                if sha256(text.encode()).hexdigest() != expected:
                    raise ValueError("differs from its hash")
                lists, good = json.loads(text), []
                files = [directory / str(number) for number in range(len(lists["shards"]))]
                with ThreadPoolExecutor(HASHING_THREADS) as threads:
                    hashes = [*threads.map(file_hash, files)]
                for file, found, (name, ranges, digest) in zip(files, hashes, lists["shards"], strict=True):
                    if found == digest:
                        good.append((name, ranges))
                        self._files[save][name, _tuples(ranges)] = file
                    else:
                        faults.append(f"{file} ({name}) differs from its hash")
                self._facts[save] = lists["facts"]
                offered.append((save, lists["types"], good))
            except (OSError, ValueError, TypeError, KeyError) as error:
                if (directory / MANIFEST).exists():  # else it was not finished
                    faults.append(f"{directory / MANIFEST}: {first_line(error)}")
        return offered, _first(faults)

    def _missing(self) -> str | None:
        """The first array that is not intact on the hosts together, in words; None if all are."""
        for name, leaf in leaves_by_path(self._shapes).items():
            if (held := sum(math.prod(sizes_of(ranges)) for ranges in self._holders.get(name, ()))) < leaf.size:
                return f"{held:,} of {leaf.size:,} elements of {name} on the hosts that are there"
        return None


def of_another_slice(array: jax.Array) -> list[jax.Array]:
    """The same array, each shard on the device in its place in the next slice; none if each slice has all of it.

    Communication: one ppermute over dp_slice of what is sharded over it.
    """
    sharding = array.sharding
    if DP_SLICE not in axes_in(sharding.spec):
        return []
    axis = sharding.mesh.axis_names.index(DP_SLICE)
    mesh = Mesh(np.roll(sharding.mesh.devices, 1, axis), sharding.mesh.axis_names)
    return [jax.block_until_ready(jax.device_put(array, NamedSharding(mesh, sharding.spec)))]


def bytes_of_copies(array: jax.Array) -> int:
    """What a device holds at most while a copy of this array is saved."""
    return shard_bytes(array) * (2 if DP_SLICE in axes_in(array.sharding.spec) else 1)


def _everywhere(name: str, call: Callable[[], Any]) -> list[Any]:
    """What `call` returns in each process, a JSON value: in all of them."""
    return divided(name, lambda: [None] * joined_processes(), lambda _: call())


def _first(values: Any) -> Any:
    """The first value that is not empty; if all are, an empty string."""
    return next(filter(None, values), "")


def _tuples(ranges: Any) -> Ranges:
    return tuple(map(tuple, ranges))


def _run(directory: str) -> str:
    """The name of the run that saves to `directory`.  A copy in another place is another run."""
    file = absolute(directory) / RUN_ID
    with writing(file):
        if not file.exists():
            write_atomically(file, uuid.uuid4().hex)
        return f"run-{sha256(f'{file} {file.read_text()}'.encode()).hexdigest()[:16]}"
