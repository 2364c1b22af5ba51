"""Several processes that train as one: how they meet, where each speaks, and how the end of one becomes the end of all.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jax
from jax._src.distributed import global_state  # its client has no public name; Orbax takes it from there, too

from shmap_tp.config import Config, InputError
from shmap_tp.disk import make_directory
from shmap_tp.mesh import emulate

LOST = 69
"""Exit code where other processes were not there in time, or one was lost (EX_UNAVAILABLE of sysexits.h)."""

STOPPED = 75
"""Exit code of a run that was told to stop and has saved: start it again with --resume (EX_TEMPFAIL of sysexits.h)."""
STOPPED_EARLY = STOPPED, "told to stop before a step was trained; there is nothing to save"

WORDS, ALIVE = "shmap_tp/words/", "shmap_tp/alive/"
"""What keys at the coordinator begin with: what all read, and what only process 0 does."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the others, where no TPU, GKE or Slurm environment says so."""

    coordinator: str
    """HOST:PORT of process 0, as all reach it."""
    process: int


class Stopped(BaseException):
    """Told to stop while there was nothing to save.  No Exception, so that nobody takes it for a failure of theirs."""


def joined(config: Config, place: Place | None, told: threading.Event) -> AbstractContextManager["Peers | None"]:
    """Meet the other processes and part from them at the end; None where this is the only one.

    From then on only process 0 speaks where it was started.  `told` is set once this process is told to stop.
    """
    several = config.mesh.processes > 1
    try:
        if several and place:
            _speak(config, place.process)
        meet(config, place)
        if several and not place:
            _speak(config, jax.process_index())
    except (InputError, Stopped) as error:
        if several:
            leave(*(STOPPED_EARLY if isinstance(error, Stopped) else (2, str(error))))
        raise
    return Peers(told, config.run.lost_seconds) if several else nullcontext()


def meet(config: Config, place: Place | None = None) -> None:
    """Meet the other processes, where there are any, and emulate this one's share of the mesh's devices on its CPU.

    Must come before JAX's first use of a backend.  Raises InputError where this process cannot take part; leaves with
    LOST where the others are not there within run.join_seconds.
    """
    processes = config.mesh.processes
    emulate(max(1, config.mesh.dp * config.mesh.mp // processes))
    if processes == 1:
        return
    _initialize(config, place)
    if jax.process_count() != processes:
        raise InputError(f"mesh.processes={processes}, but {jax.process_count()} were started; make the two the same")


class Peers:
    """The other processes.  Use as a context around all that is done together: whatever ends it here ends it there."""

    def __init__(self, told: threading.Event, lost_seconds: int):
        self._client = global_state.client
        self._process, self._count = jax.process_index(), jax.process_count()
        self._told, self._lost_seconds = told, lost_seconds
        self._asked, self._stop_at = 0, None
        self._lock = threading.Lock()
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
        elif isinstance(error, InputError):
            self.end(2, str(error))
        else:
            what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            if isinstance(error, jax.errors.JaxRuntimeError):
                print(f"{what}\nwas another process lost? known within {self._lost_seconds} s", file=sys.stderr)
                time.sleep(self._lost_seconds + 5)
            traceback.print_exception(error)
            self.end(1, what)

    def stop_now(self) -> bool:
        """Whether one was told to stop.  All get the same answer, each the n-th time that it asks, for the same n."""
        with self._lock:
            self._asked += 1
            return self._stop_at is not None and self._asked >= self._stop_at

    def end(self, code: int, said: str) -> NoReturn:
        """Leave with `code`, saying why; every other process leaves with it as soon as it has read the same."""
        try:
            self._client.key_value_set(f"{WORDS}end", json.dumps([self._process, code, said]))
            if self._process == 0:  # the words go with it: wait until all have read them, but not for the dead
                deadline = time.monotonic() + 5
                for other in range(1, self._count):
                    left = max(1, int(1000 * (deadline - time.monotonic())))
                    self._client.blocking_key_value_get(f"{WORDS}read/{other}", left)
        except jax.errors.JaxRuntimeError:
            pass  # another's end was first, or was too quick to say so
        leave(code, said)

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
                        self._client.key_value_set(f"{WORDS}read/{self._process}", "")
                        leave(code, f"process {process} ended: {said}")
                if self._told.is_set() and f"{WORDS}stop" not in words:
                    self._client.key_value_set(f"{WORDS}stop", "", allow_overwrite=True)
                if f"{WORDS}stop" in words and self._stop_at is None:
                    self._agree()
        except jax.errors.JaxRuntimeError as error:  # all have parted, or else JAX is about to say what happened
            if not self._parted.wait(self._lost_seconds):
                leave(LOST, f"process 0 cannot be reached: {str(error).splitlines()[0]}")

    def _look_for_the_dead(self) -> None:
        """End where another process has been silent for too long."""
        now, alive = time.monotonic(), dict(self._client.key_value_dir_get(ALIVE))
        for process, (before, since) in self._heard.items():
            if (word := alive.get(f"{ALIVE}{process}", "")) != before:
                self._heard[process] = word, now
            elif now - since > self._lost_seconds:
                self.end(
                    LOST,
                    f"process {process} is lost, silent for {self._lost_seconds} s (run.lost_seconds): it was killed, "
                    f"or its host was;\nits log may say more; start all again with checkpoint.resume=if_present",
                )

    def _agree(self) -> None:
        """Stop at the next time of asking that no process has come to; none asks meanwhile."""
        with self._lock:
            self._client.key_value_set(f"{WORDS}asked/{self._process}", str(self._asked))
            milliseconds = 1000 * self._lost_seconds
            each = (f"{WORDS}asked/{process}" for process in range(self._count))
            self._stop_at = 1 + max(int(self._client.blocking_key_value_get(key, milliseconds)) for key in each)


_terminal: list[int] = []
"""The file descriptor of the stderr that this process was started with, where it now writes to a log."""


def leave(code: int, said: str) -> NoReturn:
    """End this process now, from any thread, whatever the others are at."""
    line = f"{said}\n" if code == STOPPED else f"error: {said}\n"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in [2, *_terminal]:
        os.write(descriptor, line.encode())
    os._exit(code)


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
    _terminal.append(os.dup(2))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"process {process} of {config.mesh.processes} on {socket.gethostname()}, pid {os.getpid()}, {now}")


def _initialize(config: Config, place: Place | None) -> None:
    """jax.distributed.initialize with a limit: where that passes, JAX would abort the process without a word on why."""
    processes, seconds = config.mesh.processes, config.run.join_seconds
    given = {}
    if place:
        given = {"coordinator_address": place.coordinator, "num_processes": processes, "process_id": place.process}
        given |= {"cluster_detection_method": "deactivate"}
    late = threading.Timer(seconds, lambda: leave(LOST, _why_late(processes, seconds)))
    late.daemon = True
    late.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from StopRequest
    try:
        jax.distributed.initialize(
            **given, initialization_timeout=seconds + 60, heartbeat_timeout_seconds=config.run.lost_seconds + 15
        )
    except (ValueError, RuntimeError) as error:
        where, said = global_state.coordinator_address, str(error).splitlines()[0]
        if "RPC server" in said:
            raise InputError(
                f"process 0 cannot listen at port {where.rpartition(':')[2]} of {where}: another program does, perhaps "
                f"an earlier run;\nend that one, or choose another port on every process"
            ) from error
        raise InputError(
            f"mesh.processes={processes}, but the others were not found: {said}\nstart the same command on every host "
            f"of a TPU, GKE or Slurm job, give --coordinator and --process-id, or set mesh.processes=1"
        ) from error
    finally:
        late.cancel()


def _why_late(processes: int, seconds: int) -> str:
    """What most likely keeps the processes apart, as far as it can be seen from here."""
    where, me = global_state.coordinator_address, global_state.process_id
    who = f"process {me} of {processes}, after {seconds} s (run.join_seconds)"
    if where is None:
        return f"{who}: the environment of this TPU, GKE or Slurm job does not say where process 0 is"
    host, _, port = where.rpartition(":")
    there = "start it there with the same --coordinator" if me else "name an address of this host"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except socket.gaierror:
        return f"{who}: no host is known by the name of {host}, where process 0 should be; mend the name or use its IP"
    except ConnectionRefusedError:
        return f"{who}: nothing listens at {host} port {port}, where process 0 should be; {there}"
    except OSError as error:
        return (
            f"{who}: {host} port {port}, where process 0 should be, does not answer ({error});\n"
            f"open the port between the hosts (a firewall?), or {there}"
        )
    return (
        f"{who}: process 0 listens at {host} port {port}, but not all {processes} processes came;\n"
        f"start each with a --process-id of its own, 0 to {processes - 1}, and open the port to all of their hosts"
    )
