"""The training command: `python main.py`, `shmap-tp train` and `python -m shmap_tp.train` are the same."""

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from shmap_tp.config.yaml_files import as_installed
from shmap_tp.runtime.command_line import outlive_readers
from shmap_tp.runtime.console import print_error
from shmap_tp.runtime.exit_codes import INTERRUPTED, stop_at_signals

EPILOG = """\
examples
  {command} --cfg conf/config.yaml                                  train a small model on this machine
  {command} --cfg conf/config.yaml train.steps=900 --resume         continue from its newest checkpoint
  {command} --cfg conf/config.yaml mesh.dp=8 mesh.mp=1 --resume     the same on another mesh shape
  {command} --cfg conf/recipes/gpt2_124m_1gpu.yaml                  train GPT-2 124M on a GPU, by a recipe
  {command} --cfg conf/config.yaml mesh.dp=8 mesh.mp=1 --check      check the configuration, and train nothing
  {command} --cfg conf/recipes/6_9b_v3-32.yaml --check --type v3-32   check a run for a TPU slice before it is rented

configuration
  Without --cfg the packaged configuration is used:
    {default}
  FILE is a path from the working directory; it can use the models and data sources of the packaged configuration.

recipes
  Complete configurations of larger models, for --cfg, in recipes/ beside that file:
{recipes}

key=value
  mesh.dp, mesh.mp      data-parallel and tensor-parallel size; their product is the number of devices, which are
                        emulated on a machine that has only a CPU; mesh.dp=auto uses all devices
  mesh.cp               for long rows, over how many devices each is split along time; a factor of the product, too
  model=NAME            a model of conf/model/:
{models}
  data=NAME             a data source of conf/data/: {data}
  train.steps, train.batch, train.microbatches, optimizer.learning_rate, run.name, ...
                        all keys are in conf/base.yaml and explained in shmap_tp/config/schema.py

exit codes
  0   finished, or with --check: the configuration is valid
  2   an error that is explained in one or two lines: bad input, a full disk, faulty hardware, a diverged run
  75  stopped by SIGTERM, Ctrl-C, SIGHUP or a preemption notice, and saved: start again with --resume
  130 ended by a second Ctrl-C, without saving
  69  another process did not start in time or was lost (134 if that was process 0): start all processes again

several processes, one per host
  TPU slice, GKE, Slurm    run the same command on every host, with --processes N
  elsewhere                add the same --coordinator HOST:PORT on all hosts, and a different --process-id on each
"""


def main(argv: Sequence[str] | None = None, command: str = "python main.py") -> int:
    """Train as the command line `argv` says (default: sys.argv); returns the exit code.  `command` is its name."""
    arguments = _parser(command).parse_intermixed_args(argv)
    from shmap_tp.config.compose import CONF, load, quoted
    from shmap_tp.config.validate import validate_process_arguments
    from shmap_tp.errors import ShmapTpError, UserError
    from shmap_tp.pretrained.configuration import derive_model

    overrides = list(arguments.overrides)
    if arguments.resume:
        overrides.append("checkpoint.resume=must")
    if arguments.processes is not None:
        overrides.append(f"mesh.processes={arguments.processes}")
    if arguments.components is not None:
        overrides.append(f"run.components={quoted(arguments.components)}")
    try:
        config = load(CONF / "config.yaml" if arguments.cfg is None else arguments.cfg, overrides, derive_model)
        if arguments.type is not None and not arguments.check:
            raise UserError(f"--type {arguments.type} is for --check; a run uses the devices that are there")
        validate_process_arguments(arguments.coordinator, arguments.process_id, config.mesh.processes)
        from shmap_tp.training.components_file import components_of

        components = components_of(config)
        if arguments.check:
            from shmap_tp.check import check
            from shmap_tp.pretrained.configuration import describe_target

            export = describe_target(config.model) if config.run.components is None else "as --components allow"
            print(check(config, export, components, arguments.type))
            return 0
        from shmap_tp.inference.text import make_training_sampler
        from shmap_tp.pretrained.start import with_pretrained
        from shmap_tp.runtime.distributed import Coordinator
        from shmap_tp.training import loop

        coordinator = Coordinator(arguments.coordinator, arguments.process_id) if arguments.coordinator else None
        return loop.train(config, coordinator, with_pretrained(config, components), make_training_sampler)
    except ShmapTpError as error:
        print_error(error)
        return error.exit_code


def run(argv: Sequence[str] | None = None, command: str = "python main.py") -> NoReturn:
    """Call `main` as the program of this process, and exit with its code."""
    outlive_readers()
    stop_at_signals()  # `train` replaces these handlers
    try:
        code = main(argv, command)
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("interrupted without saving: --resume continues from the newest checkpoint, if any", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):  # all is saved; the interpreter may still wait for threads
        signal.signal(number, lambda *_: os._exit(code))
    if code and "jax" in sys.modules and not sys.modules["jax"].distributed.is_initialized():
        # All files are closed, but what still runs or compiles could crash the interpreter at its exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _parser(command: str) -> argparse.ArgumentParser:
    from shmap_tp.config.compose import CONF

    models, data, recipes = (
        ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml"))) for group in ("model", "data", "recipes")
    )
    models = textwrap.fill(models, 120, initial_indent=24 * " ", subsequent_indent=24 * " ")
    recipes = textwrap.fill(recipes, 120, initial_indent=4 * " ", subsequent_indent=4 * " ")
    parser = argparse.ArgumentParser(
        prog=command,
        usage="%(prog)s [--cfg FILE] [--resume] [--check [--type TYPE]] [--components FILE.py:NAME] "
        "[--processes N [--coordinator HOST:PORT --process-id I]] [key=value ...]",
        description="Tensor-parallel transformer training over a (dp, mp) mesh, with every collective written by hand.",
        epilog=as_installed(EPILOG).format(
            command=command, default=CONF / "config.yaml", models=models, data=data, recipes=recipes
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cfg", metavar="FILE", help=as_installed("configuration file, for example conf/config.yaml"))
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--check", action="store_true", help="check the configuration, print a summary, and end")
    parser.add_argument("--type", help="with --check: on new TPU slices, such as v3-32 or 2xv5litepod-256")
    parser.add_argument("--components", metavar="FILE.py:NAME", help="blocks, optimizer, ... of your own: a Components")
    parser.add_argument("--processes", type=int, metavar="N", help="number of processes; sets mesh.processes")
    parser.add_argument("--process-id", type=int, metavar="I", help="number of this process, 0 to N-1")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="host of process 0, and a free port there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides a value of FILE")
    return parser


if __name__ == "__main__":
    run(command="python -m shmap_tp.train")
