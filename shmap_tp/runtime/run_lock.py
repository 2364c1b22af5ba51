"""One writer per directory: a lock on the run directory and on the directory of checkpoints, local or in a bucket.

The lock is a file `writer-N.lock` in the directory.  It names the process that owns it, which rewrites it every
RENEW_SECONDS with a higher count.  Whether the owner is still there is decided as follows:

    owner on this machine     by its process id and start time, so that a killed run can be resumed at once
    owner elsewhere           by its count: if that stays the same for LOST_SECONDS, the owner is lost

The lock of a lost owner is taken over by creating `writer-(N+1).lock`.  File systems and buckets create a file that
must not exist for exactly one of several processes (O_EXCL; on Google Cloud Storage a precondition), so exactly one
process becomes the owner.  No lock of the operating system is used: buckets have none, and network file systems do not
always share theirs between hosts.  An owner that was suspended for so long that another has taken over ends its run.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from fsspec.core import url_to_fs

from shmap_tp.errors import ShmapTpError, UserError
from shmap_tp.runtime.agreement import on_process_0
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.exit_codes import before_exit, exit_now
from shmap_tp.runtime.files import make_directory, writable
from shmap_tp.runtime.peers import Peers

RENEW_SECONDS = 10.0
LOST_SECONDS = 60.0
"""An owner on another machine that has not renewed its lock for this long is lost."""
ENDING_SECONDS = 3.0
"""How long a start waits for an owner on this machine to end: a process that was just killed needs a moment."""
POLL_SECONDS = 0.5
_ON_PROCESS_0 = partial(on_process_0, "lock")
LOCK = re.compile(r"writer-([0-9]+)\.lock")


@dataclass(frozen=True)
class Owner:
    """The process that owns a lock."""

    host: str
    machine: str
    """Identifies this start of the machine's kernel and the container; empty where Linux does not provide that."""
    pid: int
    start: int | None
    """When the process started, in clock ticks since the machine started: tells it from one that reuses its id."""
    since: str
    """Time at which it acquired the lock, in UTC."""
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
    """The lock on one directory, `directory` being the value of the configuration key `key`."""

    def __init__(self, key: str, directory: str):
        self._what, self._key = f"{key}={directory}", key
        self._files, self.path = url_to_fs(directory if "://" in directory else os.path.realpath(directory))
        self._owner = Owner.this_process()
        self._number: int | None = None
        """N of the lock file, while this process owns it."""
        self._count, self._renewed = 0, time.monotonic()
        self._seen: tuple[Owner | None, int, float] | None = None
        """Another owner with its count, and when that was first seen."""
        self._mutex = threading.Lock()

    def try_to_acquire(self) -> bool:
        """Whether this process owns the lock now; if not, try again.  Raises UserError if it is another's.

        Must be called every second or so, to notice whether another owner renews its lock.
        """
        number = self._newest()
        if number is not None and not self._owner_is_lost(number):
            return False
        mine = (number or 0) + 1
        try:
            with self._files.open(self._file(mine), "xb") as file:
                file.write(self._content())
        except FileExistsError:
            if self._read(mine)[0] != self._owner:  # it is this process's if a request to a bucket was repeated
                return False
        if self._newest() != mine:  # another process took over a lost owner's lock before, and this one was late
            self._remove(mine)
            return False
        self._number, self._renewed = mine, time.monotonic()
        for old in self._numbers():
            if old < mine:
                self._remove(old)
        return True

    def renew(self) -> None:
        """Show that this process is running.  Raises UserError if another process has taken over."""
        with self._mutex:
            if self._number is None:
                return
            late = time.monotonic() - self._renewed > LOST_SECONDS
            newest = self._newest()
            owner, _ = self._read(self._number)
            if newest not in (None, self._number) or (owner and owner != self._owner) or (late and owner is None):
                self._number = None
                raise UserError(
                    f"{self._what} was taken over by {self._read(newest)[0] if newest else 'another process'}: this "
                    f"process had not renewed its lock for more than {LOST_SECONDS:.0f} s;\n"
                    f"it ends without saving; resume from the newest checkpoint once the other has ended"
                )
            self._count += 1
            self._files.pipe_file(self._file(self._number), self._content())
            self._renewed = time.monotonic()

    def release(self) -> None:
        """Remove the lock file if this process owns it."""
        with self._mutex:
            if self._number is not None and self._read(self._number)[0] == self._owner:
                self._remove(self._number)
            self._number = None

    def _owner_is_lost(self, number: int) -> bool:
        """Whether lock file `number` is of an owner that has ended.  Raises UserError if that is still running."""
        now, (owner, count) = time.monotonic(), self._read(number)
        running = owner.is_running() if owner else None
        if running is False:
            return True
        if self._seen is None or owner not in (None, self._seen[0]):
            self._seen = owner, count, now
            if running is None:
                who = f"is locked by {owner}, which may have ended" if owner else "has a lock without an owner"
                print_on_process_0(
                    f"{self._what} {who}: waiting up to {LOST_SECONDS:.0f} s for a sign of it, then taking over ..."
                )
        elif owner and (count != self._seen[1] or (running and now - self._seen[2] > ENDING_SECONDS)):
            raise UserError(
                f"{self._what} is in use: {owner} writes there;\n"
                f"wait for it or stop it (SIGTERM lets it save), or choose another {self._key}"
            )
        return running is None and now - self._seen[2] > LOST_SECONDS

    def _read(self, number: int) -> tuple[Owner | None, int]:
        """(owner, count) in lock file `number`; (None, 0) if there is no such file or it is being rewritten."""
        try:
            content = json.loads(self._files.cat_file(self._file(number)))
            return Owner(**content["owner"]), int(content["count"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, 0

    def _content(self) -> bytes:
        return json.dumps({"owner": asdict(self._owner), "count": self._count}).encode()

    def _numbers(self) -> list[int]:
        self._files.invalidate_cache(self.path)
        try:
            names = [name.rpartition("/")[2] for name in self._files.ls(self.path, detail=False)]
        except FileNotFoundError:  # in a bucket, a directory without a file does not exist
            names = []
        return [int(match[1]) for match in map(LOCK.fullmatch, names) if match]

    def _newest(self) -> int | None:
        return max(self._numbers(), default=None)

    def _remove(self, number: int) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._file(number))

    def _file(self, number: int) -> str:
        return f"{self.path}/writer-{number}.lock"


def is_in_use(directory: str) -> bool:
    """Whether a process that has not ended, as far as is known, writes to `directory`.  Nothing is changed there."""
    lock = DirectoryLock("directory", directory)
    number = lock._newest()
    owner = None if number is None else lock._read(number)[0]
    return owner is not None and owner.is_running() is not False


@contextmanager
def lock_directories(
    directories: dict[str, str],
    peers: Peers | None,
    call_on_process_0: Callable[[Callable[[], None]], None] = _ON_PROCESS_0,
) -> Iterator[None]:
    """Context in which this run alone writes to `directories`, by configuration key; they are created.

    Must be entered by all processes; process 0 acquires the locks in `call_on_process_0` while the others wait.
    Raises UserError in all of them if another run writes there, or if a directory cannot be written.
    """
    locks: list[DirectoryLock] = []
    left = threading.Event()
    renewing = threading.Thread(target=_renew_until, args=(left, locks, peers), daemon=True, name="lock")

    def release() -> None:
        left.set()
        for lock in locks:
            lock.release()

    before_exit.append(release)
    try:
        call_on_process_0(lambda: _acquire(directories, locks))
        renewing.start()
        yield
    finally:
        release()
        before_exit.remove(release)


def _acquire(directories: dict[str, str], locks: list[DirectoryLock]) -> None:
    """Create the directories and acquire the lock on each, all at the same time; add the locks to `locks`."""
    pending = {}
    for key, directory in directories.items():
        make_directory(key, directory)
        lock = DirectoryLock(key, directory)
        pending.setdefault(lock.path, (lock, key, directory))
    locks += [lock for lock, _, _ in pending.values()]
    while pending:
        for path, (lock, key, directory) in list(pending.items()):
            with writable(key, directory):
                if lock.try_to_acquire():
                    del pending[path]
        if pending:
            time.sleep(POLL_SECONDS)


def _renew_until(left: threading.Event, locks: list[DirectoryLock], peers: Peers | None) -> None:
    """The thread that renews `locks` until `left` is set, and ends the run if another process has taken one over."""
    while not left.wait(RENEW_SECONDS):
        for lock in locks:
            try:
                lock.renew()
            except ShmapTpError as error:
                (peers.exit_all if peers else exit_now)(error.exit_code, str(error))
            except Exception as error:  # buckets raise errors of many types; another renewal follows
                print_on_process_0(f"the lock {lock.path} could not be renewed ({error}); trying again")


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
