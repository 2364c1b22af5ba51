"""A trace of some steps as XProf and TensorBoard show it: what ran when on each device, by the names in the source."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax

from shmap_tp.runtime.files import writing


class Profile:
    """Use as a context around the loop: a trace under way when it is left is written, too."""

    def __init__(self, steps: list[int] | None, directory: Path, pause: Callable[[], AbstractContextManager[None]]):
        """`steps` are the first and the last, counted from 1.  Within `pause()` no step is under way."""
        self._first, self._last = steps or (None, None)
        self._directory, self._pause = directory, pause
        self._running = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """What is done inside belongs to `step`.  The trace begins before its first step and ends after its last one,
        when no other is under way."""
        if step == self._first:
            with self._pause(), writing(self._directory):
                jax.profiler.start_trace(str(self._directory))
                self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._last:
            self._stop()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            with self._pause(), writing(self._directory):
                jax.profiler.stop_trace()
