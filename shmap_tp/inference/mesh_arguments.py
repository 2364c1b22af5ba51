"""The mesh of a command that reads a checkpoint: everything else is as it was saved."""

from collections.abc import Sequence

from shmap_tp.errors import UserError


def mesh_sizes(arguments: Sequence[str]) -> dict[str, int]:
    """{"dp": N, "mp": N} of mesh.dp=N and mesh.mp=N; 1 where one is not given.  Raises UserError."""
    found = {"dp": 1, "mp": 1}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if (
            key not in ("mesh.dp", "mesh.mp")
            or not (value.isascii() and value.isdecimal())
            or not 0 < int(value) < 2**31
        ):
            raise UserError(f"{argument!r} is not mesh.dp=N or mesh.mp=N; everything else is as in the checkpoint")
        found[key.removeprefix("mesh.")] = int(value)
    return found
