"""What `chat`, `generate` and `evaluate` share: the arguments that name a model and say how tokens are sampled, and the
model, on one process or several."""

import argparse
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmap_tp.config.choices import HeldIn
from shmap_tp.errors import ShmapTpError, UserError
from shmap_tp.runtime.command_line import importing
from shmap_tp.runtime.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from shmap_tp.api import Model
    from shmap_tp.inference.generator import Options

MESH_KEYS = "mesh.dp", "mesh.mp"
NOT_SHARED = {"process_id", "out"}
"""Arguments in which the processes may differ."""


PROCESSES = """
Several processes: the same command on every host of a TPU, GKE or Slurm job, with --processes N; elsewhere also
--coordinator HOST:PORT and a different --process-id on each.  Process 0 prints and writes.
"""


def model_parser(command: str, description: str, epilog: str, *, several: bool) -> argparse.ArgumentParser:
    """A parser of `python -m shmap_tp.COMMAND` with the arguments that name the model, its tokenizer and the mesh.

    If the command can run on `several` processes, also with those that join them, as in training.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m shmap_tp.{command}",
        description=description,
        epilog=epilog + PROCESSES if several else epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, model = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="a run, its checkpoints, or one checkpoint")
    model.add_argument("--pretrained", metavar="DIR", help="a Hugging Face directory, or a name on the hub")
    add("--adapter", metavar="DIR", help="with --pretrained: a directory of PEFT, an adapter of it")
    add("--components", metavar="FILE.py:NAME", help="with --checkpoint: those of its run")
    add("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    add(
        "--dtype",
        choices=[each.value for each in HeldIn],
        default=HeldIn.auto,
        help="of weights and matrix products (auto: as the run; --pretrained: float32 on CPUs, bfloat16 elsewhere; "
        "int8: weights alone, for half their memory)",
    )
    add("--tokenizer", metavar="FILE", help="tokenizer.json or bytes (default: that of the model)")
    add("mesh", nargs="*", metavar="mesh.dp=N mesh.mp=N", help="the mesh (1, 1)")
    parser.set_defaults(mesh_keys=MESH_KEYS, processes=1, process_id=None, coordinator=None)
    if several:
        add("--processes", type=int, metavar="N", help="number of processes, one per host (1)")
        add("--process-id", type=int, metavar="I", help="number of this process, 0 to N-1")
        add("--coordinator", metavar="HOST:PORT", help="host of process 0, and a free port there")
    return parser


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """The flags of `sampling_options`."""
    add, tokens = parser.add_argument, f"tokens of each answer ({max_new_tokens})"
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=tokens)
    add("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the k likeliest tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest, of this sum")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="of seen tokens; 1 is none")
    add("--seed", type=int, default=0, metavar="N", help="of sampling (0)")
    add("--special-tokens-in-text", action="store_true", help="names of special tokens are these tokens")


def sampling_options(arguments: argparse.Namespace, **others: int) -> "Options":
    """How answers are sampled; `others` are fields without a flag of `add_sampling_arguments`.  Raises UserError."""
    with importing():
        from shmap_tp.inference.generator import Options
    flags = "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed"
    options = Options(**{name: getattr(arguments, name) for name in flags}, **others)
    without_effect = {"samples": options.samples > 1, "top_k": options.top_k > 0, "top_p": options.top_p < 1}
    for name in [name for name, is_given in without_effect.items() if is_given and options.temperature == 0]:
        raise UserError(
            f"--{name.replace('_', '-')} {getattr(options, name)} has no effect with --temperature 0, which takes the "
            f"likeliest token; give another temperature, such as 0.8, or leave it out"
        )
    return options


@contextmanager
def joined(arguments: argparse.Namespace, **inputs: Any) -> Iterator[None]:
    """A context in which the processes of arguments.processes work together.

    `inputs` are what the command has read from files; all processes must be started with the same arguments, and have
    read the same.  Only process 0 prints to stdout.  An error, an interrupt or the loss of one process ends all.
    Raises UserError if the arguments of several processes do not suit each other, or a device lacks memory.
    """
    from shmap_tp.config.validate import validate_process_arguments

    validate_process_arguments(arguments.coordinator, arguments.process_id, arguments.processes)
    if arguments.processes == 1:
        with _explained_memory_errors():
            yield
        return
    mesh = mesh_sizes(arguments.mesh, arguments.mesh_keys)
    devices = math.prod(mesh.values())
    if devices % arguments.processes:
        what = f"mesh.dp x mesh.mp = {devices} devices; name the mesh of all devices"
        raise UserError(f"--processes {arguments.processes} does not divide {what}")

    with importing():
        import jax

        from shmap_tp.api import load_config
        from shmap_tp.runtime.agreement import require_agreement
        from shmap_tp.runtime.distributed import Coordinator, initialize_distributed
        from shmap_tp.runtime.exit_codes import exit_with_error
    from shmap_tp.runtime.peers import Peers

    config = load_config()
    config = replace(config, mesh=replace(config.mesh, **mesh, processes=arguments.processes))
    shared = {name: value for name, value in vars(arguments).items() if name not in NOT_SHARED} | inputs
    try:
        coordinator = Coordinator(arguments.coordinator, arguments.process_id) if arguments.coordinator else None
        initialize_distributed(config, coordinator)
        require_agreement("command", shared, config.run.join_timeout_seconds)
    except ShmapTpError as error:
        exit_with_error(error)
    with (
        open(os.devnull, "w") as nothing,
        redirect_stdout(nothing if jax.process_index() else sys.stdout),
        Peers(threading.Event(), config.run.lost_timeout_seconds) as peers,
    ):
        try:
            with _explained_memory_errors():
                yield
        except KeyboardInterrupt:
            peers.exit_all(INTERRUPTED, "interrupted")


@contextmanager
def _explained_memory_errors() -> Iterator[None]:
    """Context in which a device without enough memory is a UserError."""
    with importing():
        from shmap_tp.training import environment
    with environment.explained_memory_errors(environment.USE):
        yield


def is_first_process() -> bool:
    """Whether this process is the only one, or process 0: it prints and writes for all."""
    from shmap_tp.runtime.distributed import joined_processes

    if joined_processes() == 1:
        return True
    import jax

    return jax.process_index() == 0


def open_model(arguments: argparse.Namespace) -> "Model":
    """The model in arguments.checkpoint (of arguments.step) or arguments.pretrained, on the mesh of arguments.mesh,
    which covers the devices of arguments.processes.

    Raises UserError if there is none, or it does not suit the mesh.
    """
    mesh = mesh_sizes(arguments.mesh, arguments.mesh_keys)
    for name, is_of_pretrained, rule in [
        ("step", False, "names a checkpoint of a run; leave it out with --pretrained"),
        ("components", False, "is for a checkpoint of a run that had them; leave it out with --pretrained"),
        ("adapter", True, "is for --pretrained; the checkpoint of a run with adapters has its own"),
    ]:
        if getattr(arguments, name) is not None and (arguments.pretrained is not None) != is_of_pretrained:
            raise UserError(f"--{name} {rule}")

    with importing():
        from shmap_tp.api import Model, from_pretrained
        from shmap_tp.training.components_file import load_components
        from shmap_tp.training.step import CONFIGURED

    if arguments.pretrained is not None:
        given = {"adapter": arguments.adapter, "dtype": arguments.dtype, "processes": arguments.processes}
        return from_pretrained(arguments.pretrained, **given, **mesh)
    components = CONFIGURED if arguments.components is None else load_components(arguments.components)
    given = {"step": arguments.step, "dtype": arguments.dtype, "processes": arguments.processes}
    return Model.restore(arguments.checkpoint, **given, **mesh, components=components)


def mesh_sizes(arguments: Sequence[str], keys: Sequence[str] = MESH_KEYS) -> dict[str, int]:
    """{"dp": N, "mp": N} of mesh.dp=N and mesh.mp=N, and so of other `keys`; 1 where one is not given.  Raises
    UserError."""
    found = dict.fromkeys(keys, 1)
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_number = value.isascii() and value.isdecimal() and len(value) < 10
        if key not in found or not is_number or int(value) < 1:
            known = " or ".join(f"{key}=N" for key in keys)
            rule = f"{argument!r} is not {known}; everything else is as in the checkpoint"
            if key == "mesh.cp" and key not in found:
                rule = (
                    f"{argument}: only training and evaluation split rows along time; for a prompt that does not fit\n"
                    f"one device use a larger mesh.mp, over which the heads of the cache are sharded"
                )
            raise UserError(rule)
        found[key] = int(value)
    return {key.removeprefix("mesh."): value for key, value in found.items()}
