"""Is this machine, and what was saved on it, to be trusted?

    python -m shmap_tp.doctor resume --cfg conf/config.yaml --onto 8,1 [--steps 3] [key=value ...]
        train, stop, go on from the checkpoint on this mesh and on another, and compare with having gone straight on
    python -m shmap_tp.doctor replicas --cfg conf/config.yaml [--steps 3] [key=value ...]
        restore the newest checkpoint, or begin, train, and compare all copies of every array after each step
    python -m shmap_tp.doctor checkpoint DIRECTORY
        every checkpoint in it: which files are damaged, missing or not its own

`resume` and `replicas` train with the model, data and devices that the configuration names; in several processes start
them on every host.  Nothing of the run is changed: what `resume` saves lies beside the checkpoints while it works.

exit codes: 0 all is well, 1 something is not, 2 bad input
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from shmap_tp.checkpoint import Checkpoints, examine
from shmap_tp.config import Config, InputError
from shmap_tp.data import Batches
from shmap_tp.meeting import meet
from shmap_tp.mesh import make_mesh
from shmap_tp.replicas import Replicas
from shmap_tp.settings import check, load, settled
from shmap_tp.step import Programs, State, build_programs
from shmap_tp.train import dtype_of, make_ready, say


class Trainer:
    """The steps of a configuration on one mesh."""

    def __init__(self, config: Config):
        self.mesh = config.mesh
        self.programs: Programs = build_programs(config, make_mesh(config.mesh), dtype_of(config.train.precision))
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
    check(other)
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
            raise InputError(f"{name} is there already, of a doctor that was killed: remove it, then call again")
        try:
            yield checkpoints
        finally:
            checkpoints.wait()
            if jax.process_index() == 0:
                epath.Path(name).rmtree()


def replicas(config: Config, steps: int) -> bool:
    """Whether all copies of every array agree at the start and after each of `steps` steps."""
    trainer = Trainer(config)
    watch = Replicas(trainer.programs.shapes)
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


def checkpoints_in(directory: str) -> bool:
    """Whether every checkpoint in `directory` is intact.  Reads only: it may be that of a run under way."""
    there = epath.Path(directory)
    steps = sorted(int(child.name) for child in there.iterdir() if child.name.isdecimal()) if there.is_dir() else []
    if not steps:
        raise InputError(
            f"{directory} holds no checkpoint; name the checkpoint.dir of a run, which has one for each step"
        )
    good = True
    for step in reversed(steps):
        faults = examine(there / str(step))
        say(f"{step}: " + ("intact" if not faults else "NOT to be used"))
        for fault in faults:
            say(f"  {fault}")
        good = good and not faults
    return good


def main(arguments: argparse.Namespace) -> bool:
    if arguments.what == "checkpoint":
        return checkpoints_in(arguments.directory)
    config = load(arguments.cfg, arguments.overrides)
    meet(config)
    config = settled(config, len(jax.devices()))
    make_ready(config)
    if arguments.what == "replicas":
        return replicas(config, arguments.steps)
    return resume(config, arguments.onto, arguments.steps)


def mesh_of(given: str) -> tuple[int, int]:
    try:
        dp, mp = map(int, given.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given!r} is no mesh; write it as in 8,1") from error
    return dp, mp


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m shmap_tp.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = made.add_subparsers(dest="what", required=True)
    for what in ("resume", "replicas"):
        kind = kinds.add_parser(what)
        kind.add_argument("--cfg", metavar="FILE", required=True, help="configuration, such as conf/config.yaml")
        kind.add_argument("--steps", type=int, default=3, help="to train before and after (default 3)")
        kind.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of FILE")
        if what == "resume":
            kind.add_argument("--onto", type=mesh_of, required=True, metavar="DP,MP", help="the other mesh, as in 8,1")
    kinds.add_parser("checkpoint").add_argument("directory", help="checkpoint.dir of a run")
    return made


def door(act: Callable[[], bool]) -> int:
    try:
        return 0 if act() else 1
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    parsed = parser().parse_args()
    sys.exit(door(lambda: main(parsed)))
