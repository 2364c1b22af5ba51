"""The training command: `python main.py`, `shmap-tp train` and `python -m shmap_tp.train` are the same."""

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from shmap_tp.runtime.exit_codes import STOPPED

EPILOG = """\
examples
  {command} --cfg conf/config.yaml                                  the first run: a small model, on this machine
  {command} --cfg conf/config.yaml train.steps=600 --resume         continue from its newest checkpoint
  {command} --cfg conf/config.yaml mesh.dp=8 mesh.mp=1 --resume     the same, on another mesh shape
  {command} --cfg conf/config.yaml model=6_9b data=minipile mesh.dp=4 mesh.mp=8 run.name=big

configuration
  Without --cfg the packaged configuration is used, which is conf/config.yaml of the repository:
    {default}
  A FILE is never searched for elsewhere; its groups (model=..., data=...) are also taken from the packaged ones.

key=value
  mesh.dp, mesh.mp      data- and model-parallel size; their product is the number of devices (a CPU emulates them);
                        mesh.dp=auto uses all devices
  model=NAME            a model shape:
{models}
  data=NAME             a data set: {data}
  train.steps, train.batch, train.microbatches, optimizer.learning_rate, run.name, ...
                        every key of conf/config.yaml; shmap_tp/config/schema.py documents each

exit codes
  0   done
  2   the input cannot be used, the disk is full, or too many steps in a row were skipped; two lines say why
  75  stopped by SIGTERM or Ctrl-C, and saved: start again with --resume
  69  other processes did not start in time, or one was lost (134 if that was process 0): start all again

several processes, one per host
  on a TPU slice, GKE or Slurm    the same command on every host, with --processes N
  elsewhere                       also --coordinator HOST:PORT, the same on every host, and --process-id I
"""


def main(argv: Sequence[str] | None = None, command: str = "python main.py") -> int:
    """Train as the command line `argv` says (default: sys.argv); returns the exit code.  `command` is its name."""
    arguments = _parser(command).parse_intermixed_args(argv)
    from shmap_tp.config.compose import CONF, load
    from shmap_tp.config.validate import check_place
    from shmap_tp.errors import UserError

    overrides = list(arguments.overrides)
    if arguments.resume:
        overrides.append("checkpoint.resume=must")
    if arguments.processes is not None:
        overrides.append(f"mesh.processes={arguments.processes}")
    try:
        config = load(arguments.cfg or str(CONF / "config.yaml"), overrides)
        check_place(arguments.coordinator, arguments.process_id, config.mesh.processes)
        from shmap_tp.runtime.distributed import Coordinator
        from shmap_tp.training import loop

        given = arguments.coordinator is not None
        return loop.train(config, Coordinator(arguments.coordinator, arguments.process_id) if given else None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(argv: Sequence[str] | None = None, command: str = "python main.py") -> NoReturn:
    """Call `main` as the program of this process, and exit with its code."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(STOPPED))  # until training handles it, which saves
    code = main(argv, command)
    if code == STOPPED and not sys.modules["jax"].distributed.is_initialized():
        # Everything is written and closed.  Work that still runs on the devices could crash the interpreter's exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _parser(command: str) -> argparse.ArgumentParser:
    from shmap_tp.config.compose import CONF

    models, data = (
        ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml"))) for group in ("model", "data")
    )
    models = textwrap.fill(models, 120, initial_indent=24 * " ", subsequent_indent=24 * " ")
    parser = argparse.ArgumentParser(
        prog=command,
        usage="%(prog)s [--cfg FILE] [--resume] [--processes N [--coordinator HOST:PORT --process-id I]] "
        "[key=value ...]",
        description="Tensor-parallel transformer training over a (dp, mp) mesh, with every collective written by hand.",
        epilog=EPILOG.format(command=command, default=CONF / "config.yaml", models=models, data=data),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cfg", metavar="FILE", help="a configuration file; without it the packaged one")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--processes", type=int, metavar="N", help="how many processes train; sets mesh.processes")
    parser.add_argument("--process-id", type=int, metavar="I", help="the index of this process, 0 to N-1")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="the host of process 0 and a free port there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of FILE")
    return parser


if __name__ == "__main__":
    run(command="python -m shmap_tp.train")
