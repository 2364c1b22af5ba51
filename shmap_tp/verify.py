"""Verify that this machine trains reproducibly, and that its checkpoints are intact.

    python -m shmap_tp.verify resume --cfg conf/base.yaml --onto 8,1 [--steps 3] [key=value ...]
        train, save, resume on the same mesh and on another, and compare both with the uninterrupted run
    python -m shmap_tp.verify replicas --cfg conf/base.yaml [--steps 3] [key=value ...]
        restore the newest checkpoint, or start a new run; train, and compare all replicas of every array at each step
    python -m shmap_tp.verify checkpoint DIRECTORY
        list the damaged, missing and added files of every checkpoint in it
    python -m shmap_tp.verify data DIRECTORY
        read the token files of a data.dir, and compare their hashes with those of meta.json; a start trusts a file that
        an earlier one has read, as long as its size and modification time stay

`resume` and `replicas` train with the model, data and devices of the configuration; with several processes, start them
on every host.  Nothing of the run is changed: `resume` saves to a temporary directory beside the checkpoints.

exit codes: 0 all is well, 1 a difference or a damaged file was found, 2 bad input, 130 interrupted by Ctrl-C
"""

import argparse
import sys

from shmap_tp.config.yaml_files import as_installed
from shmap_tp.runtime.command_line import end_without_readers, importing, run_command


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.verify`."""
    top = argparse.ArgumentParser(
        prog="python -m shmap_tp.verify",
        description=as_installed(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name in ("resume", "replicas"):
        command = commands.add_parser(name)
        command.add_argument("--cfg", metavar="FILE", required=True, help=as_installed("such as conf/base.yaml"))
        steps = f"steps to train{' before and after the resume' if name == 'resume' else ''} (default 3)"
        command.add_argument("--steps", type=_steps, default=3, metavar="N", help=steps)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of FILE")
        if name == "resume":
            command.add_argument("--onto", type=_mesh, required=True, metavar="DP,[CP,]MP", help="the other mesh")
    commands.add_parser("checkpoint").add_argument("directory", help="a run, or its checkpoint.dir")
    commands.add_parser("data").add_argument("directory", help="prepared data, on a disk or in a bucket")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    return run_command(lambda: 0 if _verify(arguments) else 1)


def _verify(arguments: argparse.Namespace) -> bool:
    with importing():
        import jax

        from shmap_tp.config.compose import load
        from shmap_tp.config.validate import resolve_auto
        from shmap_tp.pretrained.configuration import derive_model
        from shmap_tp.runtime.distributed import initialize_distributed
        from shmap_tp.training.environment import prepare_environment
        from shmap_tp.verification import verify_checkpoints, verify_data, verify_replicas, verify_resume

    if arguments.command == "checkpoint":
        return verify_checkpoints(arguments.directory)
    if arguments.command == "data":
        return verify_data(arguments.directory)
    config = load(arguments.cfg, arguments.overrides, derive_model)
    initialize_distributed(config)
    config = resolve_auto(config, len(jax.devices()))
    prepare_environment(config)
    if arguments.command == "replicas":
        return verify_replicas(config, arguments.steps)
    return verify_resume(config, arguments.onto, arguments.steps)


def _steps(text: str) -> int:
    """The number of steps of --steps: without a step there is nothing to compare."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps; give 1 or more")
    return int(text)


def _mesh(text: str) -> tuple[int, ...]:
    """(dp, mp) of "8,1", or (dp, cp, mp) of "2,2,2"."""
    sizes = text.split(",")
    if len(sizes) not in (2, 3) or not all(size.isascii() and size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write it as in 8,1, or with cp as in 2,2,2")
    return tuple(map(int, sizes))


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
