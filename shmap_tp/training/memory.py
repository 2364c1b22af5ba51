"""Errors of what needs more memory than there is, in place of a traceback or of the end that Linux gives a process."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from shmap_tp.errors import UserError


@dataclass(frozen=True)
class Purpose:
    """What the memory is for, and what needs less of it."""

    arrays: str
    way_out: str


TRAINING = Purpose(
    "parameters and optimizer state",
    "choose a smaller model or more devices, or shard and recompute more: mesh.zero=fsdp, model.remat=full, more "
    "train.microbatches; python -m shmap_tp.plan predicts the memory",
)
USE = Purpose(
    "parameters",
    "choose a smaller model, more devices (mp shards the weights), bfloat16 (dtype), or fewer or shorter texts",
)
"""Generation, scores and evaluation."""


def require_host_memory(shapes: Any, host_bytes: int | None = None, purpose: Purpose = TRAINING) -> None:
    """Raise UserError if the arrays of `shapes`, which have shardings, do not fit into the memory of this machine.

    Only for the CPU, whose emulated devices share that memory: Linux would end the process without a word.
    `host_bytes` is the size of that memory, by default what the system says.
    """
    if jax.devices()[0].platform != "cpu":
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if host_bytes is None else host_bytes
    needed = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)
        for leaf in jax.tree.leaves(shapes)
    )
    if needed > there:
        raise UserError(
            f"{purpose.arrays} take {needed / 1e9:,.1f} GB on the emulated devices, but this machine has "
            f"{there / 1e9:,.1f} GB;\n{purpose.way_out}"
        )


@contextmanager
def explained_memory_errors(purpose: Purpose = TRAINING) -> Iterator[None]:
    """Context in which a device without enough memory is a UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).strip().splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in first_line:
            raise
        raise UserError(f"a device has not enough memory: {first_line};\n{purpose.way_out}") from error
