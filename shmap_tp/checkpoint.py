"""Checkpoints by Orbax: saved in the background, complete or not there, restored onto whatever mesh there is now.

A checkpoint is a directory `<step>/` that Orbax wrote and renamed into place, and in it `sha256.json`, the hash of
every file, written last.  Only a checkpoint whose files match their hashes is ever read: Orbax itself loads a flipped
bit without a word.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from shmap_tp.config import CheckpointConfig, InputError
from shmap_tp.step import State

MANIFEST = "sha256.json"


class Checkpoints:
    """The checkpoints of one run.  Use as a context: leaving it waits until what is being saved is committed."""

    def __init__(self, config: CheckpointConfig, say: Callable[[str], None]):
        """`say` is told, in one line each, which checkpoints are passed over and why."""
        policies = ocp.training.preservation_policies
        keep = [policies.LatestN(config.keep)]
        keep += [policies.EveryNSteps(config.keep_every)] if config.keep_every else []
        self._dir = epath.Path(config.dir)
        self._say = say
        self._sealing: list[Future] = []
        self._background = ThreadPoolExecutor(1, "seal")
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint.dir={config.dir} cannot be written: {error.strerror or error}") from error
        self._orbax = ocp.training.Checkpointer(
            self._dir.resolve(),
            preservation_policy=policies.AnyPreservationPolicy(keep),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._orbax.close()

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint, newest first, whether or not it is intact."""
        return sorted((checkpoint.step for checkpoint in self._orbax.checkpoints), reverse=True)

    def save(self, step: int, state: State, facts: dict[str, Any]) -> None:
        """Begin to save; returns as soon as `state` may be donated.  `facts` is JSON, kept with the arrays.

        Raises what a save before this one failed with.
        """
        self.wait()
        written = self._orbax.save_checkpointables_async(step, {"state": state}, custom_metadata=facts, force=True)
        self._sealing = [self._background.submit(self._seal, step, written)]

    def wait(self) -> None:
        """Until the checkpoint being saved is complete.  Raises what its save failed with."""
        pending, self._sealing = self._sealing, []
        for future in pending:
            future.result()

    def newest_intact(self) -> int | None:
        """The newest checkpoint whose files all match their hashes, agreed on by all processes; None without any."""
        found = -1
        if jax.process_index() == 0:
            for step in self.steps():
                fault = self._fault(step)
                if fault is None:
                    found = step
                    break
                self._say(f"checkpoint {self._dir / str(step)} is passed over: {fault}")
        if jax.process_count() > 1:
            found = int(multihost_utils.broadcast_one_to_all(found))
        return None if found < 0 else found

    def facts(self, step: int) -> dict[str, Any]:
        """What was given to `save` beside the state."""
        return self._orbax.metadata(step).custom_metadata

    def restore(self, step: int, shapes: State) -> State:
        """The bits that were saved, laid out as `shapes` says.  Raises InputError where they cannot be read."""
        try:
            return self._orbax.load_checkpointables(step, {"state": shapes})["state"]
        except Exception as error:
            cause = str(error.__cause__ or error).strip().splitlines()[0][:200]
            raise InputError(f"checkpoint {self._dir / str(step)} cannot be restored: {cause}") from error

    def _seal(self, step: int, written: Any) -> None:
        written.result()
        if jax.process_index() == 0:
            directory = self._dir / str(step)
            (directory / f"{MANIFEST}.tmp").write_text(json.dumps(_hashes(directory), indent=1))
            (directory / f"{MANIFEST}.tmp").rename(directory / MANIFEST)

    def _fault(self, step: int) -> str | None:
        """Why this checkpoint must not be read, or None."""
        directory = self._dir / str(step)
        try:
            expected = json.loads((directory / MANIFEST).read_text())
            actual = _hashes(directory)
        except FileNotFoundError:
            return f"{MANIFEST} is missing, so its save was not finished"
        except (ValueError, OSError) as error:
            return f"it cannot be read ({error})"
        for name in sorted(expected.keys() | actual.keys()):
            if name not in actual:
                return f"file {name} is missing"
            if expected.get(name) != actual[name]:
                return f"file {name} is not what was saved (sha256 differs)"
        return None


def _hashes(directory: epath.Path) -> dict[str, str]:
    """sha256 of every file under `directory`, the manifest itself left out, by path relative to it."""

    def files(at: epath.Path, prefix: str) -> list[tuple[str, epath.Path]]:
        found = []
        for child in sorted(at.iterdir()):
            name = prefix + child.name
            found += files(child, f"{name}/") if child.is_dir() else [(name, child)]
        return found

    return {name: _sha256(file) for name, file in files(directory, "") if name not in (MANIFEST, f"{MANIFEST}.tmp")}


def _sha256(file: epath.Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
