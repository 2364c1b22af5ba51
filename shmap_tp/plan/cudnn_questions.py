"""The one place of the planner that uses private names of JAX: what tracing cuDNN's attention asks of this machine.

`jax.nn.dot_product_attention(implementation="cudnn")` asks the GPU of this machine for its compute capability, and the
installed cuDNN for its version, while it is traced, in `jax._src.cudnn.fused_attention_stablehlo`.  A planner has
neither.  No argument or option of JAX answers instead: the questions come before lowering, so that
`trace(...).lower(lowering_platforms=("cuda",))` changes nothing, and a described topology is no local device.  To write
the call with `jax.ffi.ffi_call` would repeat JAX's description of cuDNN's graph, and plan another program than the
trainer runs.
"""

from typing import Any
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo

from shmap_tp.plan.gpu import CUDNN, Gpu


def answered_for(gpu: Gpu) -> Any:
    """A context in which tracing cuDNN's attention is given the compute capability of `gpu`, and the version CUDNN."""
    return mock.patch.multiple(
        fused_attention_stablehlo,
        check_compute_capability=lambda wanted: gpu.capability >= tuple(map(int, wanted.split("."))),
        is_cuda_compute_capability_equal=lambda wanted: gpu.capability == tuple(map(int, wanted.split("."))),
        check_cudnn_version=lambda: CUDNN[0] * 10000 + CUDNN[1] * 100 + CUDNN[2],
    )
