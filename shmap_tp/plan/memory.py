"""The memory of a device during a training step, by kind."""

import math
from typing import Any

import jax

from shmap_tp.plan.aot_compile import Compiled
from shmap_tp.plan.communication.ledger import format_bytes
from shmap_tp.training.step import State, StepFunctions


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's shard of every ShapeDtypeStruct of a tree, without the padding of layouts."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_bytes(shapes: State) -> int:
    """The least that a step needs: parameters, optimizer state, and gradients of the size of the parameters."""
    return 2 * shard_bytes(shapes.params) + shard_bytes(shapes.optimizer)


def memory_by_kind(programs: StepFunctions, compiled: Compiled) -> dict[str, float]:
    """Bytes per device by kind; the last kind is the remainder of the peak.

    parameters, optimizer state   exact, from shapes and shardings
    gradients                     one float32 accumulator per parameter
    activations, temporaries      the remainder: saved activations, bfloat16 copies of weights, temporaries, padding
    """
    params = shard_bytes(programs.shapes.params)
    kinds = {
        "parameters": params,
        "optimizer state": shard_bytes(programs.shapes.optimizer),
        "gradients": params,
    }
    return kinds | {"activations, temporaries": max(0, compiled.peak_bytes - sum(kinds.values()))}


def format_memory(kinds: dict[str, float], compiled: Compiled) -> str:
    """An aligned table: bytes, and percent of the device's memory."""
    rows = [*kinds.items(), ("total (peak)", compiled.peak_bytes), ("available", compiled.limit_bytes)]
    lines = [f"  {name:<26}{format_bytes(int(size)):>10} {size / compiled.limit_bytes:>6.1%}" for name, size in rows]
    if compiled.host_bytes:
        lines.append(f"  {'offloaded to host memory':<26}{format_bytes(compiled.host_bytes):>10}")
    return "\n".join(lines)
