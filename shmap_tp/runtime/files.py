"""Reading and writing files: errors of the file system become errors with a message for the user."""

import errno
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import IO, Any, BinaryIO, TextIO, TypeVar

from etils import epath

from shmap_tp.errors import ShmapTpError, StorageError, UserError, first_line, shown
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.workers import in_background

BUCKETS = ("gs://", "s3://", "az://")
"""Kinds of URLs that name a directory in a bucket."""
FULL = (errno.ENOSPC, errno.EDQUOT)
BUCKET_SECONDS = 30
"""How long the first use of a bucket may take; with its credentials it takes a few."""
T = TypeVar("T")


def make_directory(key: str, directory: str) -> None:
    """Create `directory`, local or in a bucket, the value of configuration key `key`.

    Raises UserError if it cannot be written.
    """
    with writable(key, directory):
        if "://" in directory:
            if not directory.startswith(BUCKETS):
                raise UserError(f"{key}={directory} is no storage that is known; use a local directory or gs://...")
            first_contact(lambda: epath.Path(directory).mkdir(parents=True, exist_ok=True))
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")


def first_contact(call: Callable[[], T]) -> T:
    """What `call`, the first use of a bucket, returns.  Raises its errors, and TimeoutError after BUCKET_SECONDS.

    Libraries of buckets try again for minutes where there is no network, and log each failure with a traceback.
    """
    for library in ("gcsfs", "s3fs", "adlfs"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        return in_background(call).result(BUCKET_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {BUCKET_SECONDS} s (is there a network?)") from error


@contextmanager
def writable(key: str, directory: str) -> Iterator[None]:
    """Context that writes to `directory`, the value of configuration key `key`.  An error becomes a UserError."""
    try:
        yield
    except ShmapTpError:
        raise
    except ImportError as error:
        raise UserError(f"{key}={directory} needs gcsfs: pip install -e '.[gcs]'") from error
    except Exception as error:  # buckets raise errors of many types
        reason = getattr(error, "strerror", None) or str(error)[:200]
        raise UserError(f"{key}={directory} cannot be written: {reason}; choose another") from error


@contextmanager
def writing_output(what: str) -> Iterator[None]:
    """Context that writes `what`, an option of a command and the path that it names.  An OSError becomes a
    UserError."""
    try:
        yield
    except OSError as error:
        way_out = "create its directory" if error.errno == errno.ENOENT else "correct that"
        raise UserError(f"{what} cannot be written: {error.strerror or error}; {way_out}, or choose another") from error


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Context in which `what` is written.  Raises StorageError if the disk or bucket refuses, for example when full.

    TensorStore, which writes Orbax's files, reports this as a ValueError with the system's error number in its text.
    """
    try:
        yield
    except ShmapTpError:
        raise
    except (OSError, ValueError) as error:
        if "Gloo" in str(error):  # another process was lost during a collective write; storage is not at fault
            raise
        found = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        reason = os.strerror(number) if number else str(error)[:200].rstrip(".")
        raise StorageError(
            f"{what} could not be written: {reason}; {_way_out(number, reason)}, then continue with "
            f"checkpoint.resume=if_present (without a checkpoint it starts anew)"
        ) from error


def _way_out(number: int | None, reason: str) -> str:
    """What to do about an error of the system, of this errno."""
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "its directory was removed or replaced while the run was under way;\nend what did that"
    if number in (errno.EEXIST, errno.ENOTEMPTY) or "already exists" in reason:
        return "this run did not write what is there;\nmove it elsewhere"
    return f"all complete checkpoints are intact;\n{'free some space' if number in FULL else 'correct that'}"


def write_atomically(file: Any, text: str) -> None:
    """Write `text` to `file`, a pathlib or epath Path, which has either its old or its new content whenever the process
    ends.  Raises OSError."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


@contextmanager
def replacing(file: Path, mode: str = "w", *, keep: bool = False) -> Iterator[IO[Any]]:
    """A stream, open for "w" or "wb", whose content is that of `file` once the context ends; after an error `file` is
    as it was, or is not there.

    Until then the content is in FILE.partial, which an error or an interrupt removes; with `keep` only if it is empty.
    Raises OSError if the file cannot be written, and UserError if it is not a regular file.
    """
    if file_size(file) is not None and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    target = Path(os.path.realpath(file))  # a symlink stays
    partial = target.with_name(f"{target.name}.partial")
    file_size(partial)
    try:
        with partial.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
        partial.replace(target)
    finally:
        with suppress(OSError):
            if not keep or not partial.stat().st_size:
                partial.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context in which this process alone holds the lock file `path`, for which others wait; it is released even if
    this process is killed.  Raises OSError where the file system has no locks."""
    is_held = False
    while not is_held:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                write_line(f"waiting for the process that has locked {path} ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # the process that had the lock has removed the file
                is_held = os.path.samestat(os.fstat(lock), path.stat())
            if is_held:
                yield
        finally:
            if is_held:
                path.unlink(missing_ok=True)
            os.close(lock)


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Context in which `path` is read.  Raises UserError if the file system refuses."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        is_long = error.errno == errno.ENAMETOOLONG
        way_out = "choose a shorter one" if is_long else "correct its permissions or its place, or name another"
        raise UserError(f"{shown(path)} cannot be read: {reason}; {way_out}") from error


def file_size(path: Path) -> int | None:
    """Size of a regular file in bytes, None if it does not exist.

    Raises UserError if it cannot be reached, or is of another kind: reading a FIFO would wait for ever.
    """
    with reading(path):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a NUL in the path
            raise UserError(f"{str(path)!r} contains a NUL, which no file name has; correct the name") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise UserError(f"{shown(path)} is {kind}, but a file is needed; name another")
    return status.st_size


def parse_json(text: bytes | str, place: object) -> Any:
    """The value of JSON text that was read at `place`.  Raises UserError if it is not JSON or too deeply nested."""
    try:
        return json.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # also of bytes that are not UTF-8
        reason = first_line(error)
    raise UserError(f"{place}: not JSON: {reason}; correct it, or write it again") from None


def read_file(file: str | Path, name: object = None) -> bytes:
    """The content of a regular file, which messages call `name`.  Raises UserError if it cannot be read, or is of
    another kind."""
    file_size(Path(file))
    with reading(name or file):
        return Path(file).read_bytes()


def read_json_file(file: Path) -> Any:
    """The content of a JSON file.  Raises UserError if it cannot be read or is not JSON."""
    return parse_json(read_file(file), file)


# Files with a JSON object per line, metrics.jsonl, time.jsonl and samples.jsonl, to which each start of a run appends.
# A line that is not one of the file's own (cut short by a kill, NULs after a power failure, damaged, another program's)
# is never an error, and stays where it is.  Memory: one block, or one line.

BLOCK = 1 << 20

Accept = Callable[[Any], bool]
"""Whether a JSON object is one of the file's own lines."""
NUMBER = int | float


def having(**kinds: type | UnionType) -> Accept:
    """Accepts objects with these keys, whose values have these types."""
    return lambda line: all(name in line and isinstance(line[name], kind) for name, kind in kinds.items())


def read_lines(file: Path, accept: Accept) -> Iterator[dict[str, Any]]:
    """The file's own lines, in order; none if there is no file.  Raises UserError if it cannot be read."""
    if file_size(file) is not None:
        with reading(file), file.open("rb") as stream:
            yield from _own(stream, accept)


def read_lines_backwards(file: Path, accept: Accept) -> Iterator[dict[str, Any]]:
    """The file's own lines, the last one first; the others as in `read_lines`."""
    if file_size(file) is not None:
        with reading(file), file.open("rb") as stream:
            yield from _own(_lines_backwards(stream), accept)


def appending(file: Path) -> TextIO:
    """The file, open for lines at its end; one that a kill has cut short is ended.  Raises OSError."""
    with file.open("a+b") as stream:
        if stream.tell() and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n":
            stream.write(b"\n")
    return file.open("a", buffering=1)


def _own(lines: Iterable[bytes], accept: Accept) -> Iterator[dict[str, Any]]:
    """The values of complete lines that are the file's own."""
    for line in lines:
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and accept(value):
            yield value


def _lines_backwards(stream: BinaryIO) -> Iterator[bytes]:
    """Every line that is not empty, the last one first."""
    position, rest = stream.seek(0, os.SEEK_END), b""
    while position:
        size = min(BLOCK, position)
        position -= size
        stream.seek(position)
        rest, *lines = (stream.read(size) + rest).splitlines(keepends=True)
        yield from reversed(lines)
    if rest:
        yield rest
