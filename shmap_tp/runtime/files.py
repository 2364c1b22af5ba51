"""Writing files: errors of the file system become errors with a message for the user."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from shmap_tp.errors import ShmapTpError, StorageError, UserError

BUCKETS = ("gs://", "s3://", "az://")
"""Kinds of URLs that name a directory in a bucket."""


def make_directory(key: str, directory: str) -> None:
    """Create `directory`, local or in a bucket, the value of configuration key `key`.

    Raises UserError if it cannot be written.
    """
    with writable(key, directory):
        if "://" in directory:
            if not directory.startswith(BUCKETS):
                raise UserError(f"{key}={directory} is no storage that is known; use a local directory or gs://...")
            epath.Path(directory).mkdir(parents=True, exist_ok=True)
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")


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
        number = re.search(r"os_error_code='(\d+)'", str(error))
        reason = os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)[:200]
        raise StorageError(
            f"{what} could not be written: {reason}; all complete checkpoints are intact;\n"
            f"free some space, then continue with checkpoint.resume=if_present (without a checkpoint it starts anew)"
        ) from error
