"""Several processes that train as one: where each speaks, and how the end of one becomes the end of all.

They meet at the coordinator, a service of JAX in process 0, which keeps a few words that all can read and write, and a
thread of each does so every second.  A process that fails writes why before it leaves, one that is told to stop writes
that, and all write that they are alive, so that process 0 notices one that was killed.  Without process 0 there is no
service: JAX itself then aborts the others, as it would where these threads cannot run.

Nobody waits for a process that has failed: this one leaves by os._exit, past JAX's barrier at the interpreter's exit.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

import jax
from jax._src.distributed import global_state  # its client has no public name; Orbax takes it from there, too

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.runtime.distributed import Coordinator, initialize_distributed
from shmap_tp.runtime.exit_codes import LOST, STOPPED_EARLY, Stopped, last_words, leave, terminal
from shmap_tp.runtime.files import make_directory

WORDS, ALIVE = "shmap_tp/words/", "shmap_tp/alive/"
"""What keys at the coordinator begin with: what all read, and what only process 0 does."""


def distributed_session(
    config: Config, place: Coordinator | None, told: threading.Event
) -> AbstractContextManager["Peers | None"]:
    """Meet the other processes and part from them at the end; None where this is the only one.

    From then on only process 0 speaks where it was started.  `told` is set once this process is told to stop.
    """
    several = config.mesh.processes > 1
    try:
        if several and place:
            _speak(config, place.process)
        initialize_distributed(config, place)
        if several and not place:
            _speak(config, jax.process_index())
    except (UserError, Stopped) as error:
        if several:
            leave(*(STOPPED_EARLY if isinstance(error, Stopped) else (2, str(error))))
        raise
    return Peers(told, config.run.lost_timeout_seconds) if several else nullcontext()


class Peers:
    """The other processes.  Use as a context around all that is done together: whatever ends it here ends it there."""

    def __init__(self, told: threading.Event, lost_timeout_seconds: int):
        self._client = global_state.client
        self._process, self._count = jax.process_index(), jax.process_count()
        self._told, self._lost_seconds = told, lost_timeout_seconds
        self._asked, self._stop_at = 0, None
        self._lock, self._leaving = threading.Lock(), threading.Lock()
        # Of process 0: what each other that is not lost last wrote to be alive, and when that was seen.
        self._heard = {process: ("", time.monotonic()) for process in range(1, self._count)}
        self._parted = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name="peers")

    def __enter__(self) -> "Peers":
        self._reader.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            jax.distributed.shutdown()  # waits for the others; until then they may still fail, and be read
            self._parted.set()
            self._reader.join()
        elif isinstance(error, Stopped):
            self.end(*STOPPED_EARLY)
        elif isinstance(error, UserError):
            self.end(2, str(error))
        else:
            what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):  # Orbax tells a ValueError
                print(f"{what}\nwas another process lost? known within {self._lost_seconds} s", file=sys.stderr)
                time.sleep(self._lost_seconds + 15)
            if not self._leaving.locked():  # by the reader, which knows more
                traceback.print_exception(error)
            self.end(1, what)

    def stop_now(self) -> bool:
        """Whether one was told to stop.  All get the same answer, each the n-th time that it asks, for the same n."""
        with self._lock:
            self._asked += 1
            return self._stop_at is not None and self._asked >= self._stop_at

    def end(self, code: int, said: str) -> NoReturn:
        """Leave with `code`, saying why; every other process leaves with it as soon as it has read the same."""
        with suppress(jax.errors.JaxRuntimeError):  # another's end was first, and is what the others say
            self._client.key_value_set(f"{WORDS}end", json.dumps([self._process, code, said]))
        self._leave(code, said)

    def _leave(self, code: int, said: str) -> NoReturn:
        """Leave; process 0, whose service the words are at, a second after all have read them, lest JAX miss it
        first.  It does not wait for the dead."""
        self._leaving.acquire()  # for good: whichever thread is second says no more
        last_words(code, said)
        deadline = time.monotonic() + 5
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{WORDS}read/{self._process}", "", allow_overwrite=True)
            for other in self._heard if self._process == 0 else ():
                left = max(1, int(1000 * (deadline - time.monotonic())))
                self._client.blocking_key_value_get(f"{WORDS}read/{other}", left)
        if self._process == 0:
            time.sleep(1)
        os._exit(code)

    def _read(self) -> None:
        """Until all part: leave where one has ended, and where one is told to stop agree on when."""
        try:
            while not self._parted.wait(1):
                self._client.key_value_set(f"{ALIVE}{self._process}", str(time.monotonic()), allow_overwrite=True)
                if self._process == 0:
                    self._look_for_the_dead()
                words = dict(self._client.key_value_dir_get(WORDS))
                if end := words.get(f"{WORDS}end"):
                    process, code, said = json.loads(end)
                    if process != self._process:
                        self._leave(code, f"process {process} ended: {said}")
                if self._told.is_set() and f"{WORDS}stop" not in words:
                    self._client.key_value_set(f"{WORDS}stop", "", allow_overwrite=True)
                if f"{WORDS}stop" in words and self._stop_at is None:
                    self._agree()
        except jax.errors.JaxRuntimeError as error:  # all have parted, or else JAX is about to say what happened
            if not self._parted.wait(self._lost_seconds):
                leave(LOST, f"the other processes cannot be reached: {str(error).splitlines()[0]}")

    def _look_for_the_dead(self) -> None:
        """End where another process has been silent for too long."""
        now, alive = time.monotonic(), dict(self._client.key_value_dir_get(ALIVE))
        for process, (before, since) in list(self._heard.items()):
            if (word := alive.get(f"{ALIVE}{process}", "")) != before:
                self._heard[process] = word, now
            elif now - since > self._lost_seconds:
                del self._heard[process]
                self.end(
                    LOST,
                    f"process {process} is lost, silent for {self._lost_seconds} s (run.lost_timeout_seconds): it was killed, "
                    f"or its host was;\nits log may say more; start all again with checkpoint.resume=if_present",
                )

    def _agree(self) -> None:
        """Stop at the next time of asking that no process has come to; none asks meanwhile."""
        with self._lock:
            self._client.key_value_set(f"{WORDS}asked/{self._process}", str(self._asked))
            milliseconds = 1000 * self._lost_seconds
            each = (f"{WORDS}asked/{process}" for process in range(self._count))
            self._stop_at = 1 + max(int(self._client.blocking_key_value_get(key, milliseconds)) for key in each)


def _speak(config: Config, process: int) -> None:
    """Process 0 speaks where it was started; every other's stdout and stderr go to its log, to which it appends."""
    faulthandler.enable()
    make_directory("run.dir", config.run.dir)
    logs = Path(config.run.dir) / "logs"
    make_directory("run.dir", str(logs))
    if process == 0:
        print(f"process 0 of {config.mesh.processes}; the others write to {logs}/process-I.log", flush=True)
        return
    file = logs / f"process-{process}.log"
    print(f"process {process} of {config.mesh.processes} on {socket.gethostname()} writes to {file}", file=sys.stderr)
    sys.stderr.flush()
    terminal.append(os.dup(2))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"process {process} of {config.mesh.processes} on {socket.gethostname()}, pid {os.getpid()}, {now}")
