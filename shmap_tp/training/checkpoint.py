"""Checkpoints by Orbax: saved in the background, complete or not there, restored onto whatever mesh there is now.

A checkpoint is a directory `<step>/` that Orbax wrote and renamed into place, and in it `sha256.json`, the hash of
every file, written last.  Only a checkpoint whose files match their hashes is ever read: Orbax itself loads a flipped
bit without a word.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from shmap_tp.config.schema import CheckpointConfig
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import writing
from shmap_tp.training.bad_steps import initial_bad_step_state
from shmap_tp.training.step import State

MANIFEST = "sha256.json"

logging.getLogger("absl").addFilter(lambda record: "_SignalingThread.run() raised" not in record.getMessage())
"""Orbax logs the traceback of each of its threads that fails; what failed is raised here all the same."""


class Checkpoints:
    """The checkpoints of one run.  Use as a context: leaving it waits until what is being saved is complete.

    Orbax's own manager of many checkpoints is not used: it reads all that are there when it opens, and one damaged file
    stops it; and it deletes an old checkpoint before the hashes of the new one are written.
    """

    def __init__(self, config: CheckpointConfig, say: Callable[[str], None]):
        """`say` is told, in one line each, which checkpoints are passed over and why."""
        self._dir = _directory(config.dir)
        self._keep, self._keep_every = config.keep, config.keep_every
        self._say = say
        self._saving: Future | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
        except ImportError as error:
            raise UserError(f"checkpoint.dir={config.dir} needs gcsfs: pip install -e '.[gcs]'") from error
        except Exception as error:  # a bucket refuses in ways of its own
            raise UserError(
                f"checkpoint.dir={config.dir} cannot be written: {getattr(error, 'strerror', None) or error}; "
                f"choose another"
            ) from error
        if jax.process_index() == 0:
            for left in self._dir.glob("*.orbax-checkpoint-tmp*"):  # by a save that a kill cut short
                left.rmtree()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first, whether or not it is intact."""
        return sorted((int(child.name) for child in self._dir.iterdir() if child.name.isdecimal()), reverse=True)

    def save(self, step: int, state: State, facts: dict[str, Any]) -> None:
        """Begin to save; returns as soon as `state` may be donated.  `facts` is JSON, kept with the arrays.

        Raises what a save before this one failed with: StorageError where the disk is full.
        """
        self.wait()
        with self._writing(step):
            written = ocp.save_checkpointables_async(self._dir / str(step), {"state": state}, custom_metadata=facts)
        self._saving = self._background.submit(self._complete, step, written)

    def wait(self) -> None:
        """Until the checkpoint being saved is complete.  Raises what its save failed with."""
        saving, self._saving = self._saving, None
        if saving:
            saving.result()

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
        found = agreed(found)
        return None if found < 0 else found

    def first_save_unfinished(self) -> bool:
        """Whether all there is is one checkpoint without hashes: what a run leaves that is killed in its first save."""
        steps = self.steps()
        return len(steps) == 1 and not (self._dir / str(steps[0]) / MANIFEST).exists()

    def discard_after(self, step: int) -> None:
        """Delete what is newer than `step`: it is damaged, and the run will save those steps again."""
        for newer in self.steps() if jax.process_index() == 0 else []:
            if newer > step:
                self._say(f"checkpoint {self._dir / str(newer)} is deleted; the run comes by that step again")
                self._delete(newer)

    def facts(self, step: int) -> dict[str, Any]:
        """What was given to `save` beside the state."""
        return ocp.checkpointables_metadata(self._dir / str(step)).custom_metadata

    def restore(self, step: int, shapes: State) -> State:
        """The bits that were saved, laid out as `shapes` says; a guard that begins anew where it was saved without one.

        Raises InputError where they are of other names, shapes or dtypes (Orbax would cast a dtype without a word), or
        cannot be read.
        """
        directory = self._dir / str(step)
        saved = _leaves(ocp.checkpointables_metadata(directory).metadata["state"])
        asked = {field: getattr(shapes, field) for field in vars(shapes)}
        if not any(name.startswith("guard/") for name in saved):
            del asked["guard"]
        wanted = _leaves(asked)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise UserError(
                    f"checkpoint {directory} holds {name} as {saved.get(name)}, needed is {wanted.get(name)};\n"
                    f"go on with the version of shmap_tp that saved it, or start another run with run.dir=..."
                )
        begins = jax.jit(
            initial_bad_step_state, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes.guard)
        )()
        try:
            return State(**{"guard": begins} | ocp.load_checkpointables(directory, {"state": asked})["state"])
        except Exception as error:
            cause = str(error.__cause__ or error).strip().splitlines()[0][:200]
            raise UserError(f"checkpoint {directory} cannot be restored: {cause}") from error

    def _complete(self, step: int, written: Any) -> None:
        """Once Orbax has `written` the files: hash them, and only then delete the checkpoints that are not kept."""
        with self._writing(step):
            written.result()
            if jax.process_index() == 0:
                directory = self._dir / str(step)
                (directory / f"{MANIFEST}.tmp").write_text(json.dumps(_hashes(directory), indent=1))
                (directory / f"{MANIFEST}.tmp").rename(directory / MANIFEST)
                for old in self.steps()[self._keep :]:
                    if not self._keep_every or old % self._keep_every:
                        self._delete(old)

    def _writing(self, step: int) -> AbstractContextManager[None]:
        return writing(f"checkpoint {self._dir / str(step)}")

    def _delete(self, step: int) -> None:
        (self._dir / str(step) / MANIFEST).unlink(missing_ok=True)  # first: what is half deleted is not complete
        (self._dir / str(step)).rmtree()

    def _fault(self, step: int) -> str | None:
        """Why this checkpoint must not be read, or None."""
        return next(iter(examine(self._dir / str(step))), None)


def examine(directory: epath.Path) -> list[str]:
    """Why the checkpoint in `directory` must not be read, a line for each file that is damaged, missing or added."""
    try:
        expected = json.loads((directory / MANIFEST).read_text())
        actual = _hashes(directory)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, so its save was not finished"]
    except ValueError as error:
        return [f"{MANIFEST} is not what was saved ({error})"]
    except OSError as error:
        return [f"it cannot be read ({error})"]
    if not isinstance(expected, dict):
        return [f"{MANIFEST} is not what was saved (it names no files)"]
    faults = []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            faults.append(f"file {name} is missing")
        elif name not in expected:
            faults.append(f"file {name} was not saved with it: it is not in {MANIFEST}")
        elif expected[name] != actual[name]:
            faults.append(f"file {name} is not what was saved: its sha256 is not the one in {MANIFEST}")
    return faults


def agreed(value: int) -> int:
    """Process 0's value, on every process."""
    return int(multihost_utils.broadcast_one_to_all(value)) if jax.process_count() > 1 else value


def _directory(name: str) -> epath.Path:
    """Absolute, as Orbax wants it; a bucket (gs://) is so already, and resolving it would make a directory of it."""
    return epath.Path(name) if "://" in name else epath.Path(name).resolve()


def _leaves(state: Any) -> dict[str, str]:
    """dtype and shape of every leaf, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


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
