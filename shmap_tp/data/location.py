"""Where the token files of a run are: in data.dir, or for a bucket in a copy on this host.

A host copies train.bin, validation.bin, meta.json and tokenizer.json once; its processes share the copy, and each then
reads the rows of its own devices.  A random permutation of the sequences visits every block of the file, so reading it
in parts would transfer as much, and training would depend on the network.
"""

import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shmap_tp.config.schema import DataConfig
from shmap_tp.data.files import file_size, shown
from shmap_tp.data.metadata import META, SPLITS, TOKENIZER
from shmap_tp.errors import UserError
from shmap_tp.runtime.console import say

STDLIB = "stdlib"
_FILES = (META, TOKENIZER, *(f"{split}.bin" for split in SPLITS))
_COPIED = "copied.json"  # which versions of the files were copied


def prepared_directory(data: DataConfig) -> Path:
    """The directory that has the token files of data.dir.

    Communication  none between processes; the files of a bucket are read, once per host and version.
    Raises UserError if there are none, with the command that prepares them, or if they cannot be read.
    """
    if "://" in data.dir:
        return _copy_of_bucket(data)
    if file_size(Path(data.dir) / "train.bin") is None:
        raise UserError(_how_to_prepare(data))
    return Path(data.dir)


def _how_to_prepare(data: DataConfig) -> str:
    """What the user does about a data.dir without data."""
    directory = shown(data.dir).rstrip("/")
    arguments = {None: "--text FILES", STDLIB: f"--source {STDLIB}"}.get(data.source, data.source)
    other = "; --help lists other sources" if data.source is None else ""
    command, missing = f"python -m shmap_tp.prepare {arguments}", f"{directory}/train.bin does not exist; prepare it"
    if "://" not in directory:
        return f"{missing} with `{command} --out {shlex.quote(directory)}`{other}"
    local = shlex.quote(f"data/{data.name}")
    copy = f"gcloud storage cp {local}/* {directory}/" if directory.startswith("gs://") else "copy it there"
    return f"{missing} and copy it there{other}:\n{command} --out {local} && {copy}"


def _copy_of_bucket(data: DataConfig) -> Path:
    """The copy of data.dir under data.cache, made now if there is none of these versions of the files."""
    cache = Path(data.cache) / hashlib.sha256(data.dir.encode()).hexdigest()[:16]
    with _messages(data):
        import fsspec

        system, root = fsspec.core.url_to_fs(data.dir)
        library = type(system).__module__.partition(".")[0]
        logging.getLogger(library).addHandler(logging.NullHandler())  # else it prints a traceback, and then raises
        found = {path.rsplit("/", 1)[-1]: path for path in system.ls(root, detail=False)} if system.exists(root) else {}
        versions = {name: str(system.ukey(found[name])) for name in _FILES if name in found}
    if "train.bin" not in versions:
        raise UserError(_how_to_prepare(data))
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cache.with_suffix(".lock")):
            if _copied(cache) != versions:
                say(f"copying {data.dir} to {cache} ...")
                _copy(data, system, {name: found[name] for name in versions}, cache)
                (cache / _COPIED).write_text(json.dumps(versions))
    except OSError as error:
        raise UserError(
            f"data.cache={shown(data.cache)} cannot hold a copy of {data.dir}: {error.strerror or error}; "
            f"free some space, or choose another data.cache"
        ) from error
    return cache


def _copy(data: DataConfig, system: Any, files: dict[str, str], cache: Path) -> None:
    """Copy `files` to `cache`, in place of what it holds.  Without `copied.json` a copy is not complete."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    for name, path in files.items():
        with (cache / name).open("xb") as target:
            target.writelines(_chunks(data, system, path))


def _chunks(data: DataConfig, system: Any, path: str) -> Iterator[bytes]:
    with _messages(data), system.open(path, "rb") as source:
        while chunk := source.read(1 << 24):
            yield chunk


def _copied(cache: Path) -> dict[str, str]:
    """The versions of the files in `cache`; empty unless the copy is complete."""
    try:
        return json.loads((cache / _COPIED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for a lock that the other processes of this host take, too; it is released even if this one is killed."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _messages(data: DataConfig) -> Iterator[None]:
    """Whatever the bucket's library raises becomes a UserError: each library has exceptions of its own."""
    try:
        yield
    except ImportError as error:
        extra = "gcsfs: pip install -e '.[gcs]'" if data.dir.startswith("gs://") else str(error).splitlines()[0]
        raise UserError(f"data.dir={data.dir} needs {extra}") from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"data.dir={shown(data.dir)} cannot be read: {shown(reason)}") from error
