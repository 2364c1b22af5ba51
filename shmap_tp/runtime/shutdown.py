"""Being told to stop: by SIGTERM or Ctrl-C, at any moment of a run.

Before the first step there is nothing to save, and the run ends at once.  From then on the training loop looks between
steps and between validation batches; the step under way is finished and saved.
"""

import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax

from shmap_tp.runtime.console import say
from shmap_tp.runtime.exit_codes import STOPPED_EARLY, Stopped, leave
from shmap_tp.runtime.peers import Peers

SIGNALS = (signal.SIGTERM, signal.SIGINT)


GRACE = 5
"""Seconds that Python has to unwind, where the run ends at once.  A compiler does not listen; it is not waited for."""


class StopRequest:
    """Use as a context around everything that may be stopped; `asked` then says whether it was.

    A second SIGTERM changes nothing; a second Ctrl-C raises KeyboardInterrupt, for a user who does not want to wait.
    Where there are several processes (`peers`), telling one tells all, and they agree on one moment to stop.
    """

    def __init__(self) -> None:
        self.told = threading.Event()
        self.peers: Peers | None = None
        self._training = False
        self._left = threading.Event()

    def __enter__(self) -> "StopRequest":
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._former_mouth = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="stop")
        self._listener.start()
        self._former = {number: signal.signal(number, self._heed) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, *error: object) -> bool:
        """Swallows Stopped: the lines after the context return STOPPED."""
        if kind is Stopped and jax.distributed.is_initialized():  # heeded just before `peers` was there to end them all
            leave(*STOPPED_EARLY)
        self._left.set()
        signal.set_wakeup_fd(self._former_mouth)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._mouth.close()
        self._listener.join()
        self._ear.close()
        return kind is Stopped

    def training(self) -> None:
        """From here on there is something to save."""
        self._training = True

    def asked(self) -> bool:
        """Whether to stop now.  The same answer for all processes, which all ask at the same moments of the run."""
        return self.peers.stop_now() if self.peers else self.told.is_set()

    def _heed(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it is back in Python."""
        again = self.told.is_set()
        self.told.set()
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not (again or self._training or self._left.is_set()):
            raise Stopped

    def _listen(self) -> None:
        """In a thread, where the signal's number arrives at once whatever the main thread is at."""
        while heard := self._ear.recv(1):
            if heard[0] in SIGNALS and not self._training and not self._left.wait(GRACE) and not self._training:
                (self.peers.end if self.peers else leave)(*STOPPED_EARLY)


SERVER = "metadata.google.internal"


QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}
"""What the keys hold while all is well."""


@contextmanager
def watch_preemption(told: threading.Event, pause: float = 5.0) -> Iterator[None]:
    """Set `told` as soon as the machine is to be taken away.  A thread asks every `pause` seconds; it asks nobody where
    there is no TPU, unless GCE_METADATA_HOST names a server (Google's own libraries read it, too)."""
    server = os.environ.get("GCE_METADATA_HOST") or (SERVER if jax.devices()[0].platform == "tpu" else None)
    if server is None:
        yield
        return
    left = threading.Event()
    thread = threading.Thread(target=_watch, args=(server, told, left, pause), daemon=True, name="notice")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def _watch(server: str, told: threading.Event, left: threading.Event, pause: float) -> None:
    """A server that does not answer is asked again: it may be busy, and SIGTERM remains."""
    answered = True
    while not told.is_set():
        try:
            for key, quiet in QUIET.items():
                if (now := _ask(server, key)) != quiet:
                    print(f"this machine is about to be taken away ({key} is {now}): stopping", flush=True)
                    told.set()
                    return
            answered = True
        except (urllib.error.URLError, TimeoutError, OSError) as error:
            if answered:
                say(f"{server} does not say whether this machine is to be taken away ({error}); asking on")
            answered = False
        if left.wait(pause):
            return


def _ask(server: str, key: str) -> str:
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=2) as answer:
        return answer.read().decode().strip()
