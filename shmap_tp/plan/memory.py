"""What fills a device's memory in a training step: what is exact, and what the compiler adds."""

import math
from typing import Any

import jax

from shmap_tp.plan.aot_compile import Compiled
from shmap_tp.plan.communication.ledger import human
from shmap_tp.training.step import State, StepFunctions


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's part of every ShapeDtypeStruct of a tree, without the padding of layouts."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_bytes(shapes: State) -> int:
    """What a step needs at least: weights, optimizer state, and as much as the weights for the gradients' totals."""
    return 2 * shard_bytes(shapes.params) + shard_bytes(shapes.optimizer)


def memory(programs: StepFunctions, compiled: Compiled) -> dict[str, float]:
    """Bytes on a device, by what they hold; the last is what remains of the peak.

    weights, optimizer    exact, from the shapes and layouts of the state
    gradients             one float32 array for every parameter: the totals that microbatches are added to
    the rest              saved activations, bfloat16 copies of weights, temporaries, padding, as the compiler counts
    """
    weights = shard_bytes(programs.shapes.params)
    parts = {
        "weights": weights,
        "optimizer": shard_bytes(programs.shapes.optimizer),
        "gradients": weights,
    }
    return parts | {"activations, temporaries": compiled.peak_bytes - sum(parts.values())}


def describe(parts: dict[str, float], compiled: Compiled) -> str:
    """As an aligned table."""
    rows = [*parts.items(), ("in all", compiled.peak_bytes), ("there is", compiled.limit_bytes)]
    lines = [f"  {name:<26}{human(int(size)):>10} {size / compiled.limit_bytes:>6.1%}" for name, size in rows]
    if compiled.host_bytes:
        lines.append(f"  {'kept by the host':<26}{human(compiled.host_bytes):>10}")
    return "\n".join(lines)
