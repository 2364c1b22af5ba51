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

import argparse
import sys
from collections.abc import Callable

import jax
from etils import epath

from shmap_tp.config.compose import load
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import ShmapTpError, UserError
from shmap_tp.runtime.console import say
from shmap_tp.runtime.distributed import initialize_distributed
from shmap_tp.training.checkpoint import examine
from shmap_tp.training.loop import prepare_environment
from shmap_tp.training.verification import replicas, resume


def checkpoints_in(directory: str) -> bool:
    """Whether every checkpoint in `directory` is intact.  Reads only: it may be that of a run under way."""
    there = epath.Path(directory)
    steps = sorted(int(child.name) for child in there.iterdir() if child.name.isdecimal()) if there.is_dir() else []
    if not steps:
        raise UserError(
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
    initialize_distributed(config)
    config = resolve_auto(config, len(jax.devices()))
    prepare_environment(config)
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
        prog="python -m shmap_tp.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    except ShmapTpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    parsed = parser().parse_args()
    sys.exit(door(lambda: main(parsed)))
