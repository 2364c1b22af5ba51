"""The model of a command that reads one: `generate` and `evaluate`."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmap_tp.errors import UserError

if TYPE_CHECKING:
    from shmap_tp.api import Model

MESH_KEYS = "mesh.dp", "mesh.mp"


def open_model(arguments: argparse.Namespace) -> "Model":
    """The model in arguments.checkpoint (of arguments.step) or arguments.pretrained, on the mesh of arguments.mesh.

    Raises UserError if there is none, or it does not suit the mesh.
    """
    mesh = mesh_sizes(arguments.mesh)
    if arguments.pretrained and arguments.step is not None:
        raise UserError("--step names a checkpoint of a run; leave it out with --pretrained")

    from shmap_tp.api import Model, from_pretrained

    if arguments.pretrained:
        return from_pretrained(arguments.pretrained, **mesh)
    return Model.restore(arguments.checkpoint, step=arguments.step, **mesh)


def mesh_sizes(arguments: Sequence[str]) -> dict[str, int]:
    """{"dp": N, "mp": N} of mesh.dp=N and mesh.mp=N; 1 where one is not given.  Raises UserError."""
    found = dict.fromkeys(MESH_KEYS, 1)
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_number = value.isascii() and value.isdecimal() and len(value) < 10
        if key not in found or not is_number or int(value) < 1:
            raise UserError(f"{argument!r} is not mesh.dp=N or mesh.mp=N; everything else is as in the checkpoint")
        found[key] = int(value)
    return {key.removeprefix("mesh."): value for key, value in found.items()}
