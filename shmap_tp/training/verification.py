"""Is this machine, and what was saved on it, to be trusted?

    python -m shmap_tp.verify resume --cfg conf/config.yaml --onto 8,1 [--steps 3] [key=value ...]
        train, stop, go on from the checkpoint on this mesh and on another, and compare with having gone straight on
    python -m shmap_tp.verify replicas --cfg conf/config.yaml [--steps 3] [key=value ...]
        restore the newest checkpoint, or begin, train, and compare all copies of every array after each step
    python -m shmap_tp.verify checkpoint DIRECTORY
        every checkpoint in it: which files are damaged, missing or not its own

`resume` and `replicas` train with the model, data and devices that the configuration names; in several processes start
them on every host.  Nothing of the run is changed: what `resume` saves lies beside the checkpoints while it works.

exit codes: 0 all is well, 1 something is not, 2 bad input
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.data.batches import Batches
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.runtime.console import say
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.loop import dtype_of
from shmap_tp.training.replica_check import ReplicaCheck
from shmap_tp.training.step import State, StepFunctions, build_step_functions


class Trainer:
    """The steps of a configuration on one mesh."""

    def __init__(self, config: Config):
        self.mesh = config.mesh
        self.programs: StepFunctions = build_step_functions(
            config, make_mesh(config.mesh), dtype_of(config.train.precision)
        )
        self._batches = Batches(config, self.programs.tokens)

    def go(self, state: State, first: int, last: int) -> tuple[State, list[float]]:
        """Train from step `first` to `last`: (state, loss of each step)."""
        losses = []
        for step in range(first, last):
            state, metrics = self.programs.step(state, self._batches.training(step))
            losses.append(float(metrics["loss"]))
        return state, losses


def resume(config: Config, onto: tuple[int, int], steps: int) -> bool:
    """Whether what is restored is bit for bit what was saved on both meshes, and the run on the same mesh, too."""
    other = replace(config, mesh=replace(config.mesh, dp=onto[0], mp=onto[1], tile=None))
    validate(other)
    here, there = Trainer(config), Trainer(other)
    with set_aside(config) as checkpoints:
        state, _ = here.go(here.programs.init(), 0, steps)
        saved = whole(state)
        checkpoints.save(steps, state, {})
        checkpoints.wait()
        straight, expected = here.go(state, steps, 2 * steps)
        straight, good = whole(straight), True
        for trainer in (here, there):
            restored = checkpoints.restore(steps, trainer.programs.shapes)
            same = bits_differ(whole(restored), saved)
            end, losses = trainer.go(restored, steps, 2 * steps)
            mesh = f"dp={trainer.mesh.dp}, mp={trainer.mesh.mp}"
            say(f"on {mesh}: restored {'bit for bit what was saved' if not same else 'NOT what was saved: ' + same[0]}")
            far = compare(whole(end), straight, mesh, steps)
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            say(f"  losses      {apart:.1e} apart at most, relative to those of the run that was not stopped")
            good = good and not same and (trainer is there or not far)
    say("what a run on another mesh adds up in another order may differ by rounding; on the same mesh nothing may")
    return good


def compare(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], mesh: str, steps: int) -> list[str]:
    """Tell how far each array is from its expected value after `steps` more; the names of those that are not bitwise
    equal, the farthest first."""
    sizes = {name: np.max(np.abs(array.astype(np.float64)), initial=0.0) for name, array in expected.items()}
    sizes["guard/variance"] = sizes["guard/mean"] ** 2  # of losses nearly equal: by itself as good as nothing
    far = {name: distance(actual[name], expected[name], sizes[name]) for name in bits_differ(actual, expected)}
    worst = sorted(far, key=lambda name: -np.nan_to_num(far[name], nan=np.inf))
    say(
        f"  {steps} steps on {len(actual) - len(far)} of {len(actual)} arrays are bit for bit those of the straight run"
    )
    for name in worst[:8]:
        size = "the squared mean" if name == "guard/variance" else "its largest value"
        say(f"    {far[name]:8.1e} of {size}  {name}")
    if len(worst) > 8:
        say(f"    less       in {len(worst) - 8} more")
    return worst


def distance(actual: np.ndarray, expected: np.ndarray, size: float) -> float:
    """max|actual - expected| / size."""
    apart = np.max(np.abs(actual.astype(np.float64) - expected.astype(np.float64)), initial=0.0)
    return float(apart / size) if size else float(apart)


def bits_differ(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    return [name for name in expected if actual[name].tobytes() != expected[name].tobytes()]


def whole(state: State) -> dict[str, np.ndarray]:
    """Every array on this host, by its path: as much host memory as the state has bytes."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(
            multihost_utils.process_allgather(leaf, tiled=True) if jax.process_count() > 1 else leaf
        )
        for path, leaf in leaves
    }


@contextmanager
def set_aside(config: Config) -> Iterator[Checkpoints]:
    """Checkpoints beside those of the run: none before, and gone afterwards."""
    name = config.checkpoint.dir.rstrip("/") + "-doctor"
    with Checkpoints(replace(config.checkpoint, dir=name), say) as checkpoints:
        if checkpoints.steps():
            raise UserError(f"{name} is there already, of a doctor that was killed: remove it, then call again")
        try:
            yield checkpoints
        finally:
            checkpoints.wait()
            if jax.process_index() == 0:
                epath.Path(name).rmtree()


def replicas(config: Config, steps: int) -> bool:
    """Whether all copies of every array agree at the start and after each of `steps` steps."""
    trainer = Trainer(config)
    watch = ReplicaCheck(trainer.programs.shapes)
    with Checkpoints(config.checkpoint, say) as checkpoints:
        newest = checkpoints.newest_intact() if checkpoints.steps() else None
        state = trainer.programs.init() if newest is None else checkpoints.restore(newest, trainer.programs.shapes)
    first, good = newest or 0, True
    for step in range(first, first + steps + 1):
        found = watch.differences(state)
        say(f"step {step}: " + ("all copies of every array are the same bits" if not found else "COPIES DIFFER"))
        for line in found:
            say(f"  {line}")
        good = good and not found
        if step < first + steps:
            state, _ = trainer.go(state, step, step + 1)
    return good
