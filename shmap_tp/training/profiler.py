"""A profile of chosen training steps, for XProf or TensorBoard: what each device executes when, by scope name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax

from shmap_tp.config.schema import Config
from shmap_tp.errors import StorageError
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import writing


class Profile:
    """Profiles a range of steps.  Use as a context around the loop: leaving it writes an unfinished profile.

    A profile that cannot be written does not end the training: the error is printed, and remains in `error`.
    """

    error: StorageError | None = None
    """Why the profile could not be written."""

    def __init__(self, config: Config, done: int, pause: Callable[[], AbstractContextManager[None]]):
        """train.profile is [first, last], counted from 1, or None for no profile; there is none either, and a line that
        says so, if the first of them is among the `done` steps before this process.  No step is in flight in `pause()`.
        """
        steps = config.train.profile
        if steps and steps[0] <= done:
            print_on_process_0(
                f"no profile: train.profile={steps} begins before step {done + 1}, the first step of this process"
            )
            steps = None
        self._first, self._last = steps or (None, None)
        self._directory, self._pause = Path(config.run.dir) / "profile", pause
        self._running = False

    @contextmanager
    def annotate(self, step: int) -> Iterator[None]:
        """A context for the dispatch of `step`: starts the profile before the first profiled step and stops it after
        the last one, each time with no step in flight."""
        if step == self._first:
            with self._pause(), self._writing():
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
            with self._pause(), self._writing():
                jax.profiler.stop_trace()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context that keeps the error of writing.  XLA reports a full disk as a JaxRuntimeError."""
        try:
            with writing(f"profile {self._directory}"):
                try:
                    yield
                except jax.errors.JaxRuntimeError as error:
                    raise OSError(str(error).splitlines()[0]) from error
        except StorageError as error:
            self.error = error
            print(f"{str(error).splitlines()[0]} the training goes on", flush=True)
