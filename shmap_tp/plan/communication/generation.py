"""The communication of generation, derived from the configuration and the modules before its programs are traced.

B/dp sequences of a device, T positions that are read together (a prompt, or one new token), D model width, N tokens of
a call.  The residual stream is replicated over mp, whatever the mode of training, so for the blocks of model/blocks.py
this comes to:

    embedding          all-reduce of x[B/dp T D] over mp                                               N times
    parallel block     all-reduce of y[B/dp T D] over mp                                               N L times
    sequential block   the same twice                                                                  N L times
    next token         all-gather over mp of [B/dp], float32, and of [B/dp], int32                     N times
    new tokens         all-gather over dp of [B/dp N], int32                                           once
    zero: fsdp         a matrix is all-gathered over dp, in the dtype of the activations               N times a layer
"""

from dataclasses import replace

from jax import numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.schema import Config, TensorParallelMode
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import AllReduce
from shmap_tp.plan.communication.analytic import RULES
from shmap_tp.plan.communication.ledger import ArrayTraffic, Direction, Entry, Operation
from shmap_tp.plan.communication.model_calls import model_calls
from shmap_tp.plan.communication.parameters import fsdp_uses, parameters, shapes_in_use


def prefill_communication(config: Config, batch: int, prompt: int, dtype: DTypeLike) -> list[Entry]:
    """What reading `batch` prompts of `prompt` tokens communicates, and choosing a token for each, without noise.

    `batch` is that of all devices of one slice; the model computes in `dtype`.  Entries over a mesh axis of size 1 are
    included.
    """
    return _communication(config, batch // config.mesh.dp, prompt, 1, dtype)


def decode_communication(config: Config, batch: int, tokens: int, dtype: DTypeLike) -> list[Entry]:
    """What one call that decodes `tokens` tokens of each of `batch` sequences communicates; as above."""
    return _communication(config, batch // config.mesh.dp, 1, tokens, dtype)


def _communication(config: Config, batch: int, positions: int, steps: int, dtype: DTypeLike) -> list[Entry]:
    """`batch` sequences of a device; `steps` times `positions` positions of each."""
    model = replace(config.model, offload=[])
    used = shapes_in_use(model, config.mesh, dtype)
    calls, own = model_calls(used, AllReduce(), (batch, positions), config.mesh.mp, dtype)
    found = list(own)
    for traced in calls:
        x = ArrayTraffic(traced.call.values, traced.call.dtype, traced.count)
        mode = TensorParallelMode.all_reduce
        found += RULES[traced.call.method](mode, config.mesh.mp, traced.what, x, traced.direction)
    once = replace(config, train=replace(config.train, microbatches=1))
    found += fsdp_uses(once, parameters(model, config.mesh), jnp.dtype(dtype).name)
    repeated = [replace(e, count=e.count * steps) for e in found if e.direction == Direction.forward]
    wide = jnp.promote_types(dtype, jnp.float32).name
    chosen = [ArrayTraffic(batch, of, steps) for of in (wide, "int32")]
    return [
        *repeated,
        *(x.over(MP, "next token", Operation.all_gather, Direction.forward) for x in chosen),
        ArrayTraffic(batch * steps, "int32", 1).over(DP, "new tokens", Operation.all_gather, Direction.once),
    ]
