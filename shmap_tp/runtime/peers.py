"""Several processes that train together: a shared stop, failure of all when one fails, and where each one prints.

Process 0 hosts JAX's coordination service, a key-value store that all processes can read and write.  A thread of each
process accesses it every second.  It writes a heartbeat, by which process 0 notices a process that was killed; it
publishes a stop request or the reason of an exit; and it exits when another process has published one.  If process 0
itself is killed, the store is gone and JAX aborts the other processes.

After a failure no process waits for another: it leaves by os._exit, without JAX's barrier at interpreter exit.
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

from shmap_tp.config.schema import Config
from shmap_tp.errors import LostProcessError, ShmapTpError
from shmap_tp.runtime import exit_codes
from shmap_tp.runtime.agreement import global_state
from shmap_tp.runtime.distributed import Coordinator, initialize_distributed
from shmap_tp.runtime.files import make_directory

SHARED = "shmap_tp/shared/"
"""Prefix of the keys that all processes read."""
HEARTBEAT = "shmap_tp/heartbeat/"
"""Prefix of the keys that only process 0 reads."""


def distributed_session(
    config: Config, coordinator: Coordinator | None, stop_event: threading.Event
) -> AbstractContextManager["Peers | None"]:
    """Join the other processes, and leave them at the end of the context; its value is None for a single process.

    From here on only process 0 prints to its stdout and stderr; the others print to log files.  `stop_event` is set
    when this process is asked to stop.
    """
    if config.mesh.processes == 1:
        initialize_distributed(config, coordinator)
        return nullcontext()
    try:
        if coordinator:
            _redirect_output(config, coordinator.process_id)
        initialize_distributed(config, coordinator)
        if not coordinator:
            _redirect_output(config, jax.process_index())
    except exit_codes.StoppedEarly:
        exit_codes.exit_now(*exit_codes.STOPPED_EARLY)
    except ShmapTpError as error:
        exit_codes.exit_with_error(error)
    return Peers(stop_event, config.run.lost_timeout_seconds)


class Peers:
    """The other processes of the run: a context in which an error or exit of one process ends all of them."""

    def __init__(self, stop_event: threading.Event, lost_timeout_seconds: int):
        self._client = global_state.client
        self._process, self._count = jax.process_index(), jax.process_count()
        self._stop_event, self._lost_seconds = stop_event, lost_timeout_seconds
        self._polls = 0
        """How often should_stop was called."""
        self._stop_at_poll: int | None = None
        """The call of should_stop from which on it returns True, agreed among all processes."""
        self._poll_lock, self._exit_lock = threading.Lock(), threading.Lock()
        self._heartbeats = {process: ("", time.monotonic()) for process in range(1, self._count)}
        """In process 0, for each other process that is not lost: its last heartbeat, and when that was first seen."""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peers")

    def __enter__(self) -> "Peers":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            jax.distributed.shutdown()  # waits for the others, which may still fail; the thread would notice
            self._left.set()
            self._thread.join()
        elif isinstance(error, exit_codes.StoppedEarly):
            self.exit_all(*exit_codes.STOPPED_EARLY)
        elif isinstance(error, ShmapTpError):
            self.exit_all(error.exit_code, str(error))
        else:
            self._exit_all_after(error)

    def should_stop(self) -> bool:
        """Whether to stop now.  The n-th call returns the same in every process, for each n."""
        with self._poll_lock:
            self._polls += 1
            return self._stop_at_poll is not None and self._polls >= self._stop_at_poll

    def exit_all(self, code: int, message: str) -> NoReturn:
        """Exit with `code` and `message`; the other processes exit with the same as soon as they have read it."""
        with suppress(jax.errors.JaxRuntimeError):  # another process published its exit first, and that one counts
            self._client.key_value_set(f"{SHARED}exit", json.dumps([self._process, code, message]))
        self._exit(code, message)

    def _exit_all_after(self, error: BaseException) -> NoReturn:
        """Exit with code 1 and the traceback of `error`, unless it is a consequence of a lost process: then wait until
        the heartbeat time-out has passed, so that the thread can report which process was lost."""
        summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):  # Orbax raises a ValueError
            message = f"{summary}\nif this is because another process was lost, that is known in {self._lost_seconds} s"
            print(message, file=sys.stderr)
            time.sleep(self._lost_seconds + 15)
        if not self._exit_lock.locked():  # the thread is not exiting already, with a better explanation
            traceback.print_exception(error)
        self.exit_all(1, summary)

    def _exit(self, code: int, message: str) -> NoReturn:
        """End this process.  Process 0, which hosts the store, first waits until the others have read why (at most 5 s,
        since some may be dead) and a second more, so that JAX does not abort them before they exit by themselves."""
        self._exit_lock.acquire()  # never released: a second thread that comes here prints nothing
        exit_codes.print_final_message(code, message)
        deadline = time.monotonic() + 5
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{SHARED}read/{self._process}", "", allow_overwrite=True)
            for other in self._heartbeats if self._process == 0 else ():
                milliseconds = max(1, int(1000 * (deadline - time.monotonic())))
                self._client.blocking_key_value_get(f"{SHARED}read/{other}", milliseconds)
        if self._process == 0:
            time.sleep(1)
        exit_codes.end_process(code)

    def _run(self) -> None:
        """The thread: access the store every second until this process leaves."""
        try:
            while not self._left.wait(1):
                self._exchange()
        except jax.errors.JaxRuntimeError as error:  # all have left, or the store is gone and JAX will abort
            if not self._left.wait(self._lost_seconds):
                reason = str(error).splitlines()[0]
                exit_codes.exit_with_error(LostProcessError(f"the other processes cannot be reached: {reason}"))

    def _exchange(self) -> None:
        """Write a heartbeat, exit if another process has exited, and agree on a stop if any process is to stop."""
        self._client.key_value_set(f"{HEARTBEAT}{self._process}", str(time.monotonic()), allow_overwrite=True)
        if self._process == 0:
            self._check_heartbeats()
        shared = dict(self._client.key_value_dir_get(SHARED))
        if published := shared.get(f"{SHARED}exit"):
            process, code, message = json.loads(published)
            if process != self._process:
                self._exit(code, f"process {process} exited: {message}")
        if self._stop_event.is_set() and f"{SHARED}stop" not in shared:
            self._client.key_value_set(f"{SHARED}stop", "", allow_overwrite=True)
        if f"{SHARED}stop" in shared and self._stop_at_poll is None:
            self._agree_on_stop()

    def _check_heartbeats(self) -> None:
        """In process 0: exit if another process has written no new heartbeat within the time-out."""
        now, heartbeats = time.monotonic(), dict(self._client.key_value_dir_get(HEARTBEAT))
        for process, (last, since) in list(self._heartbeats.items()):
            if (current := heartbeats.get(f"{HEARTBEAT}{process}", "")) != last:
                self._heartbeats[process] = current, now
            elif now - since > self._lost_seconds:
                del self._heartbeats[process]
                error = LostProcessError(
                    f"process {process} is lost: no heartbeat for {self._lost_seconds} s (run.lost_timeout_seconds): "
                    f"it or its host was killed;\nsee its log, and start all again with checkpoint.resume=if_present"
                )
                self.exit_all(error.exit_code, str(error))

    def _agree_on_stop(self) -> None:
        """Agree to stop at the first call of should_stop that no process has made yet.  The lock keeps this process
        from making one meanwhile."""
        with self._poll_lock:
            self._client.key_value_set(f"{SHARED}polls/{self._process}", str(self._polls))
            milliseconds = 1000 * self._lost_seconds
            keys = (f"{SHARED}polls/{process}" for process in range(self._count))
            self._stop_at_poll = 1 + max(int(self._client.blocking_key_value_get(key, milliseconds)) for key in keys)


def _redirect_output(config: Config, process: int) -> None:
    """Process 0 keeps its stdout and stderr; those of every other process are appended to its log file."""
    faulthandler.enable()
    make_directory("run.dir", config.run.dir)
    logs = Path(config.run.dir) / "logs"
    make_directory("run.dir", str(logs))
    if process == 0:
        print(f"process 0 of {config.mesh.processes}; the others write to {logs}/process-I.log", flush=True)
        return
    file = logs / f"process-{process}.log"
    name = f"process {process} of {config.mesh.processes} on {socket.gethostname()}"
    print(f"{name} writes to {file}", file=sys.stderr)
    sys.stderr.flush()
    exit_codes.launch_stderr.append(os.dup(2))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)
    print(f"{name}, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}")
