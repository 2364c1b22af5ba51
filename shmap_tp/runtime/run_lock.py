"""One writer per directory: the run directory and the directory of checkpoints, local or in a bucket.

Each start writes a file `writer-N.lock` with its host, its process and a random token (a fencing token), N one more
than that of the start before, and each save reads it again.  The owner before it may be

    a process that runs on this machine   known by its id and start time: the new start is refused
    one that has ended on this machine    the new start takes over at once
    one on another machine                the new start takes over at once, too: the newest one wins

An owner that finds a later start ends with an error and saves nothing more: its machine was cut off or suspended.  File
systems and buckets create a file that must not exist for exactly one of several processes (O_EXCL; on Google Cloud
Storage a precondition), so exactly one start gets a number.  No clocks are compared, and no lock of the operating
system is used: buckets have none, and network file systems do not always share theirs between hosts.
"""

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from fsspec.core import url_to_fs

from shmap_tp.errors import UserError
from shmap_tp.runtime.agreement import on_process_0
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.exit_codes import before_exit
from shmap_tp.runtime.files import make_directory, writable

ENDING_SECONDS = 3.0
"""How long a start waits for an owner on this machine to end: a process that was just killed needs a moment."""
POLL_SECONDS = 0.5
_ON_PROCESS_0 = partial(on_process_0, "lock")
LOCK = re.compile(r"writer-([0-9]+)\.lock")


@dataclass(frozen=True)
class Owner:
    """The process that has started to write to a directory."""

    host: str
    machine: str
    """Identifies this start of the machine's kernel and the container; empty where Linux does not provide that."""
    pid: int
    start: int | None
    """When the process started, in clock ticks since the machine started: tells it from one that reuses its id."""
    since: str
    """When that was, in UTC."""
    token: str
    """A random string."""

    @classmethod
    def this_process(cls) -> "Owner":
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _start_of_process(pid), since, uuid.uuid4().hex)

    def is_running(self) -> bool | None:
        """Whether the process exists; None if it cannot be known, because it is on another machine."""
        if not self.machine or self.machine != _machine():
            return None
        return self.start is not None and _start_of_process(self.pid) == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class DirectoryLock:
    """The right to write to one directory, `directory` being the value of the configuration key `key`."""

    def __init__(self, key: str, directory: str):
        self.key, self.directory = key, directory
        self._files, self.path = url_to_fs(directory if "://" in directory else os.path.realpath(directory))
        self._owner = Owner.this_process()
        self._number: int | None = None
        """N of this process's file, until it is released."""

    def free_number(self) -> int:
        """N of a new file.  Raises UserError if a process of this machine writes to the directory, and does not end in
        ENDING_SECONDS."""
        deadline = time.monotonic() + ENDING_SECONDS
        while newest := max(self._numbers(), default=0):
            owner = self._read(newest)
            if owner is not None and not owner.is_running():
                break
            if time.monotonic() > deadline:
                if owner is None:  # another file, or one whose process was killed while it wrote
                    break
                raise UserError(
                    f"{self.key}={self.directory} is in use: {owner} writes there;\n"
                    f"wait for it or stop it (SIGTERM lets it save), or choose another {self.key}"
                )
            time.sleep(POLL_SECONDS)
        return newest + 1

    def acquire(self) -> None:
        """Become the owner.  Raises UserError as `free_number` does."""
        while self._number is None:
            number = self.free_number()
            with suppress(FileExistsError), self._files.open(self._file(number), "xb") as file:
                file.write(json.dumps(asdict(self._owner)).encode())
            if self._read(number) == self._owner and number == max(self._numbers()):
                self._number = number
            elif self._read(number) == self._owner:  # a later start was faster
                self._remove(number)
        for old in self._numbers():
            if old < self._number:
                before = self._read(old)
                if before is not None and before.is_running() is None:
                    ends = "which ends at its next save if it still runs"
                    print_on_process_0(f"{self.key}={self.directory} is taken over from {before}, {ends}")
                self._remove(old)

    def require(self) -> None:
        """Raise UserError if a later start is the owner; nothing if this process never was."""
        if self._number is None:
            return
        with writable(self.key, self.directory):
            newest = max(self._numbers(), default=0)
            owner = self._read(newest)
        if owner != self._owner:
            raise UserError(
                f"{self.key}={self.directory} was taken over by {owner or 'another process'}: the newest start "
                f"writes there;\nthis one ends without saving; resume from its checkpoints once the other has ended"
            )

    def release(self) -> None:
        """Remove the file if it is this process's."""
        if self._number is not None and self._read(self._number) == self._owner:
            self._remove(self._number)
        self._number = None

    def _read(self, number: int) -> Owner | None:
        """The owner in file `number`; None if there is no such file or it is being written."""
        try:
            return Owner(**json.loads(self._files.cat_file(self._file(number))))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _numbers(self) -> list[int]:
        self._files.invalidate_cache(self.path)
        try:
            names = [name.rpartition("/")[2] for name in self._files.ls(self.path, detail=False)]
        except FileNotFoundError:  # in a bucket, a directory without a file does not exist
            names = []
        return [int(match[1]) for match in map(LOCK.fullmatch, names) if match]

    def _remove(self, number: int) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._file(number))

    def _file(self, number: int) -> str:
        return f"{self.path}/writer-{number}.lock"


def is_in_use(directory: str) -> bool:
    """Whether a process that has not ended, as far as is known, writes to `directory`.  Nothing is changed there."""
    lock = DirectoryLock("directory", directory)
    owner = lock._read(max(lock._numbers(), default=0))
    return owner is not None and owner.is_running() is not False


@contextmanager
def lock_directories(
    directories: dict[str, str], call_on_process_0: Callable[[Callable[[], None]], None] = _ON_PROCESS_0
) -> Iterator[Callable[[], None]]:
    """Context in which this run writes to `directories`, by configuration key, which are created.

    Its value raises UserError, in process 0, if a later start has taken one of them over; it is called before each
    save.  The context must be entered by all processes; process 0 acquires the locks in `call_on_process_0` while the
    others wait.  Raises UserError in all of them if another run of this machine writes there, or if a directory cannot
    be written.
    """
    locks: dict[str, DirectoryLock] = {}

    def acquire() -> None:
        for key, directory in directories.items():
            make_directory(key, directory)
            lock = DirectoryLock(key, directory)
            locks.setdefault(lock.path, lock)
        for step in (DirectoryLock.free_number, DirectoryLock.acquire):  # none is taken over if one cannot be
            for lock in locks.values():
                with writable(lock.key, lock.directory):
                    step(lock)

    def require() -> None:
        for lock in locks.values():
            lock.require()

    def release() -> None:
        for lock in locks.values():
            lock.release()

    before_exit.append(release)
    try:
        call_on_process_0(acquire)
        yield require
    finally:
        release()
        before_exit.remove(release)


@cache
def _machine() -> str:
    """What identifies this start of this machine and the container in which this process runs; empty if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or hidden in a sandbox
        return ""


def _start_of_process(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine started; None if it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
