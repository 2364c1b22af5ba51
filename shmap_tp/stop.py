"""Being told to stop: by SIGTERM or Ctrl-C, at any moment of a run.

Before the first step there is nothing to save, and the run ends at once.  From then on the training loop looks between
steps and between validation batches; the step under way is finished and saved.
"""

import signal
import socket
import threading
from types import FrameType

import jax

from shmap_tp.exits import STOPPED_EARLY, Stopped, leave
from shmap_tp.processes import Peers

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
