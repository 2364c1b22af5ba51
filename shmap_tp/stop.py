"""Being told to stop: SIGTERM and Ctrl-C set a flag that the training loop looks at between steps."""

import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Use as a context around everything that may be stopped; `asked` then says whether it was.

    The first signal only sets the flag, so that the step under way is finished and saved.  A second Ctrl-C raises
    KeyboardInterrupt, for a user who does not want to wait.
    Where there are several processes, JAX's preemption service has them agree on one step to stop after; SIGTERM goes
    to it.
    """

    def __init__(self) -> None:
        self._flag = False
        self._former: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if not jax.distributed.is_initialized():
            self._former = {s: signal.signal(s, self._set) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def asked(self, step: int) -> bool:
        """Whether to stop now; all processes get the same answer for the same `step`."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._flag

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self._flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._flag = True
