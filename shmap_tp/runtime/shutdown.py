"""Stopping a run: SIGTERM, Ctrl-C, a closed terminal (SIGHUP) and the preemption notices of Google Cloud.

All of them set one `threading.Event`.  Before the first training step there is nothing to save, and the run exits at
once.  From then on the training loop polls `StopRequest.requested` before each step and each validation batch; the step
in progress is finished and saved.  Both cases exit with code STOPPED.
"""

import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import jax

from shmap_tp.runtime.console import print_on_process_0, write_line
from shmap_tp.runtime.exit_codes import STOPPED_EARLY, StoppedEarly, exit_now
from shmap_tp.runtime.peers import Peers

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_SECONDS = 5
"""Time that Python has to unwind before training.  A compilation cannot be interrupted, so the process then exits."""

STOPPING = b"\nstopping: the step under way is finished and saved (a second Ctrl-C ends without saving)\n"

METADATA_SERVER = "metadata.google.internal"
NORMAL_VALUES = {"preempted": "FALSE", "maintenance-event": "NONE"}
"""Metadata keys that announce a preemption, with the values that they have otherwise."""


class StopRequest:
    """Context that handles SIGTERM, SIGINT and SIGHUP; `requested` tells whether to stop.

    SIGHUP stays ignored where it was, as `nohup` arranges.  A second SIGTERM or SIGHUP has no effect; a second Ctrl-C
    raises KeyboardInterrupt, for users who do not want to wait.  With several processes (`peers` is set) a signal to
    one of them stops all, at a step on which they agree.
    """

    def __init__(self) -> None:
        self.stop_event = threading.Event()
        """Set once this process was asked to stop, by a signal or by `watch_preemption`."""
        self.peers: Peers | None = None
        self._is_training = False
        self._left = threading.Event()

    def __enter__(self) -> "StopRequest":
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="stop")
        self._listener.start()
        handled = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
        self._former_handlers = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, kind: type | None, *error: object) -> bool:
        """Suppress StoppedEarly; the caller returns STOPPED after the context."""
        if kind is StoppedEarly and jax.distributed.is_initialized():  # before `peers` was set, which would exit all
            exit_now(*STOPPED_EARLY)
        self._left.set()
        signal.set_wakeup_fd(self._former_wakeup)
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._sender.close()
        self._listener.join()
        self._receiver.close()
        return kind is StoppedEarly

    def begin_training(self) -> None:
        """From here on a stop waits until the training loop has saved."""
        self._is_training = True

    def requested(self) -> bool:
        """Whether to stop now.  All processes get the same answer if they call this at the same points of the run."""
        return self.peers.should_stop() if self.peers else self.stop_event.is_set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler, which Python calls in the main thread once that executes Python code again."""
        again = self.stop_event.is_set()
        self.stop_event.set()
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._is_training and not again:
            with suppress(OSError):  # nobody may read it any more
                os.write(2, STOPPING)  # not print: the signal may have interrupted one
        if not (again or self._is_training or self._left.is_set()):
            raise StoppedEarly

    def _listen(self) -> None:
        """The thread, which receives the number of a signal at once, whatever the main thread is executing.  It ends
        the process if the handler has not done so within GRACE_SECONDS and training has not begun."""
        while received := self._receiver.recv(1):
            is_early = received[0] in SIGNALS and not self._is_training
            if is_early and not self._left.wait(GRACE_SECONDS) and not self._is_training:
                (self.peers.exit_all if self.peers else exit_now)(*STOPPED_EARLY)


@contextmanager
def watch_preemption(stop_event: threading.Event, interval_seconds: float = 5.0) -> Iterator[None]:
    """Context in which a thread polls the metadata server of Google Cloud, and sets `stop_event` once this machine is
    about to be preempted.  It polls only on TPUs, or where GCE_METADATA_HOST names a server (as for Google's own
    libraries)."""
    server = os.environ.get("GCE_METADATA_HOST") or (METADATA_SERVER if jax.devices()[0].platform == "tpu" else None)
    if server is None:
        yield
        return
    left = threading.Event()
    arguments = (server, stop_event, left, interval_seconds)
    thread = threading.Thread(target=_poll_metadata, args=arguments, daemon=True, name="notice")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def _poll_metadata(server: str, stop_event: threading.Event, left: threading.Event, interval_seconds: float) -> None:
    """Poll until a preemption is announced or `left` is set.  A server that does not answer is polled again: it may be
    busy, and a preemption also sends SIGTERM."""
    answered = True
    while not stop_event.is_set():
        try:
            for key, normal in NORMAL_VALUES.items():
                if (value := _read_metadata(server, key)) != normal:
                    write_line(f"this machine is about to be preempted ({key} is {value}): stopping")
                    stop_event.set()
                    return
            answered = True
        except (urllib.error.URLError, TimeoutError, OSError) as error:
            if answered:
                print_on_process_0(f"{server}, which announces preemptions, does not answer ({error}); retrying")
            answered = False
        if left.wait(interval_seconds):
            return


def _read_metadata(server: str, key: str) -> str:
    url = f"http://{server}/computeMetadata/v1/instance/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=2) as answer:
        return answer.read().decode().strip()
