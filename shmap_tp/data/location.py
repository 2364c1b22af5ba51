"""The location of the token files of a run: data.dir, which may be a bucket, or a copy of it on this host.

A host copies train.bin, validation.bin, meta.json and tokenizer.json to data.cache once; its processes share the copy,
and each then reads the rows of its own devices.  With data.cache=null there is no copy, and each process reads these
rows from the bucket (`TokenFile`).
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shmap_tp.config.schema import DataConfig
from shmap_tp.data.metadata import COMPANIONS, META, SPLITS, TOKENIZER, Meta
from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import file_size, first_contact, locked

STDLIB = "stdlib"
FILES = (META, *COMPANIONS, *(f"{split}.{ending}" for split in SPLITS for ending in ("bin", "counted")))
_STDLIB_SOURCE = rf"{STDLIB}|--source {STDLIB}( --train-tokenizer (?P<vocabulary>[0-9]+))?"
"""The values of data.source that a run prepares by itself."""
_CHUNK = 1 << 24  # bytes that a copy reads at a time
_COPIED = "copied.json"  # which versions of the files were copied


def prepared_directory(data: DataConfig, pretrained: str | None = None) -> Path:
    """The directory that has the token files of data.dir, for a model of the directory `pretrained`, if it has one.

    Communication  none between processes; the files of a bucket are read, once per host and version.
    Raises UserError if there are none, with the command that prepares them, or if they cannot be read.
    """
    if "://" in data.dir:
        return _copy_of_bucket(data, pretrained)
    _require_data(file_size(Path(data.dir) / "train.bin") is not None, data, pretrained)
    return Path(data.dir)


def stdlib_meta(data: DataConfig) -> Meta | None:
    """What is known beforehand of the meta.json of the Python standard library, if data.dir is to hold it, and a run
    prepares it by itself; else None."""
    found = re.fullmatch(_STDLIB_SOURCE, data.source or "")
    if found is None or "://" in data.dir:
        return None
    if found["vocabulary"] is None:
        return Meta(dtype="uint16", vocabulary=256, tokenizer="bytes")
    return Meta(dtype="uint16", vocabulary=int(found["vocabulary"]), tokenizer=TOKENIZER)


def prepare_command(data: DataConfig, pretrained: str | None, out: str) -> str:
    """The command that prepares `data` in `out`, with the tokenizer of the directory `pretrained`, if there is one."""
    arguments = {None: "--text FILES", STDLIB: f"--source {STDLIB}"}.get(data.source, data.source)
    if pretrained is not None and "tokenizer" not in arguments:
        arguments += f" --tokenizer {shlex.quote(pretrained)}"
    return f"python -m shmap_tp.prepare {arguments} --out {shlex.quote(out)}"


def _require_data(is_there: bool, data: DataConfig, pretrained: str | None) -> None:
    """Raise UserError, which says how to prepare it, unless data.dir has data."""
    if is_there:
        return
    directory = shown(data.dir).rstrip("/")
    other = "; --help lists other sources" if data.source is None else ""
    what = f"{directory}/train.bin does not exist; prepare it"
    if "://" in directory:
        what += f" and copy it there{other}:\n{prepare_and_copy(data, pretrained, directory)}"
    else:
        what += f" with `{prepare_command(data, pretrained, directory)}`{other}"
    raise UserError(f"{directory} is a file; data.dir must name a directory" if Path(data.dir).is_file() else what)


def prepare_and_copy(data: DataConfig, pretrained: str | None, url: str) -> str:
    """The command that prepares the data and copies it to `url`; `pretrained` as in `prepare_command`."""
    local = f"data/{data.name}"
    copy = f"gcloud storage cp {shlex.quote(local)}/* {url}/" if url.startswith("gs://") else "copy it there"
    return f"{prepare_command(data, pretrained, local)} && {copy}"


class Bucket:
    """The files of data.dir, a URL.  All methods raise UserError if it cannot be read."""

    files: dict[str, str]
    """The `FILES` that are there: path by name."""

    def __init__(self, data: DataConfig, pretrained: str | None = None):
        """`pretrained` as in `prepared_directory`.  Raises UserError if it has no token files."""
        self._messages = partial(bucket_messages, "data.dir", data.dir)

        def listed() -> list[str]:
            self._system, root = open_file_system("data.dir", data.dir)
            return self._system.ls(root, detail=False) if self._system.exists(root) else []

        with self._messages():
            found = first_contact(listed)
        paths = {path.rsplit("/", 1)[-1]: path for path in found}
        self.files = {name: paths[name] for name in FILES if name in paths}
        _require_data({"train.bin", "validation.bin", META} <= self.files.keys(), data, pretrained)

    def versions(self) -> dict[str, str]:
        """What identifies the present content of each file."""
        with self._messages():
            return {name: str(self._system.ukey(path)) for name, path in self.files.items()}

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        with self._messages():
            return int(self._system.size(self.files[name]))

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content of a file."""
        with self._messages(), self._system.open(self.files[name], "rb") as source:
            while chunk := source.read(_CHUNK):
                yield chunk

    def ranges(self, name: str, starts: list[int], ends: list[int]) -> list[bytes]:
        """The bytes from each start to its end, requested at the same time."""
        with self._messages():
            return self._system.cat_ranges([self.files[name]] * len(starts), starts, ends, on_error="raise")


@contextmanager
def bucket_messages(key: str, url: str) -> Iterator[None]:
    """Context that reads `url`, a path, a URL or a name on the hub, the value of `key`.  Whatever a library raises
    becomes a UserError: each has exceptions of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError) and error.filename is None  # a bucket's says only the path
        reason = "No such file or directory" if is_missing else re.sub(r"^\[Errno \d+\] ", "", first_line(error))
        what = f"cannot be read: {shown(reason)}"
        if isinstance(error, ImportError):
            what = "needs gcsfs: pip install -e '.[gcs]'" if url.startswith("gs://") else f"needs {reason}"
            is_of_data = error.name in ("pyarrow", "datasets")
            what = f"needs `{error.name}`: pip install -e '.[data]'" if is_of_data else what
        raise UserError(f"{key}={shown(url)} {what}") from error


def open_file_system(key: str, url: str) -> tuple[Any, str]:
    """(the file system of `url`, the value of `key`; the path of `url` in it).  Raises UserError."""
    with bucket_messages(key, url):
        import fsspec

        if "://" not in url:
            return fsspec.filesystem("file"), os.path.abspath(url)
        return fsspec.core.url_to_fs(url)


def _copy_of_bucket(data: DataConfig, pretrained: str | None) -> Path:
    """The copy of data.dir under data.cache, made now if there is none of these versions of the files."""
    bucket = Bucket(data, pretrained)
    cache = Path(data.cache) / hashlib.sha256(data.dir.encode()).hexdigest()[:16]
    versions = bucket.versions()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with locked(cache.with_suffix(".lock")):
            if _copied(cache) != versions:
                print_on_process_0(f"copying {data.dir} to {cache} ...")
                shutil.rmtree(cache, ignore_errors=True)
                cache.mkdir()
                copy_files(bucket, cache, [*versions])
                (cache / _COPIED).write_text(json.dumps(versions))  # without it a copy is not complete
    except OSError as error:
        raise UserError(
            f"data.cache={shown(data.cache)} cannot hold a copy of {data.dir}: {error.strerror or error}; free some "
            f"space, choose another data.cache, or read without a copy: data.cache=null"
        ) from error
    return cache


def copy_files(bucket: Bucket, directory: Path, names: Iterable[str]) -> None:
    """Copy files of `bucket` to `directory`.  Raises OSError if they cannot be written, UserError if not read."""
    for name in names:
        with (directory / name).open("xb") as target:
            target.writelines(bucket.chunks(name))


def _copied(cache: Path) -> dict[str, str]:
    """The versions of the files in `cache`; empty unless the copy is complete."""
    try:
        return json.loads((cache / _COPIED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
