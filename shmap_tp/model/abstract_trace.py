"""The forward and backward pass of a model as a traced program, for counting: no device, array or compiler is needed.

B batch, T time (queries), S time (keys), H query heads, N key/value heads, G = H / N, K head dim.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.activation_names import ATTENTION_OUTPUT
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.flash_attention import DeferredResiduals
from shmap_tp.model.transformer import Execution, Transformer
from shmap_tp.parallel.fsdp import Replicated
from shmap_tp.parallel.mesh import DP, MP, abstract_mesh
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.tensor_parallel import TensorParallel

SCORES, VALUES = "attention_scores", "attention_values"
"""Named scopes of the two products of `TracedAttention`."""


@dataclass(frozen=True)
class TracedAttention(Chunked):
    """Stands for every way to compute attention: softmax(q k') v of the whole sequence, as two products.

    It computes all pairs of queries and keys, without a mask, which changes no shape.
    """

    recomputes_scores: bool = False
    """Whether its backward pass recomputes the scores from q and k, as that of a kernel does."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTNK: Float[Array, "B T N K"],
        v_BTNK: Float[Array, "B T N J"],
        slopes_H: Float[Array, " H"] | None,
    ) -> tuple[Float[Array, "B T H J"], DeferredResiduals]:
        attend = jax.checkpoint(_attend) if self.recomputes_scores else _attend
        return checkpoint_name(attend(q_BTHK, k_BTNK, v_BTNK), ATTENTION_OUTPUT), ()


def _attend(
    q_BTHK: Float[Array, "B T H K"], k_BSNK: Float[Array, "B S N K"], v_BSNK: Float[Array, "B S N J"]
) -> Float[Array, "B T H J"]:
    (batch, time, heads, head_dim), groups = q_BTHK.shape, k_BSNK.shape[2]
    q_BTNGK = q_BTHK.reshape(batch, time, groups, heads // groups, head_dim)
    with jax.named_scope(SCORES):
        scores_BNGTS = jnp.einsum("btngk,bsnk->bngts", q_BTNGK, k_BSNK)
    weights_BNGTS = jax.nn.softmax(scores_BNGTS, axis=-1)
    with jax.named_scope(VALUES):
        mixed_BTNGJ = jnp.einsum("bngts,bsnj->btngj", weights_BNGTS, v_BSNK)
    return mixed_BTNGJ.reshape(batch, time, heads, v_BSNK.shape[-1])


def trace_gradients(
    shapes: Transformer, tp: TensorParallel, tokens: tuple[int, int], *, mp: int = 1, dtype: DTypeLike = jnp.float32
) -> Any:
    """The jaxpr of one device of mp: from tokens[B T] to the output of the final norm, and its backward pass.

    `shapes` are the parameters as `parameter_shapes` gives them, `tokens` is (B, T).  Every rematerialisation policy
    does what it does in training.  Not part of it: the output projection and the loss, and everything over dp.
    """
    execution = Execution(tp, dtype, jax.tree.map(lambda _: Replicated(), shapes))

    def gradients(params: Transformer, ids_BT: Int[Array, "B T"]) -> Any:
        positions = jnp.arange(ids_BT.shape[1])  # given: the rotation is then computed without a matmul
        h_BTD, pull = jax.vjp(lambda params: params(ids_BT, execution, positions), tp.mark_varying(params))
        return jax.tree.map(jnp.ravel, pull(h_BTD)[0])

    mesh = abstract_mesh(1, mp)
    specs = partition_specs(shapes, dict(mesh.shape))
    local = jax.tree.map(lambda _: P((DP, MP)), shapes)  # what each device computes, whether it varies or not
    program = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, P()), out_specs=local)
    return jax.make_jaxpr(program)(shapes, jax.ShapeDtypeStruct(tokens, jnp.int32)).jaxpr
