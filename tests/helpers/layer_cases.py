"""Every layer as a `Case`: how it is called on one device, and its dense reference.

B batch, T time, D model width, F hidden width, H query heads, N key/value heads, K head dim, V vocabulary rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.attention import Attention, Chunked, KeyValueHeads
from shmap_tp.layers.context import Context
from shmap_tp.layers.embedding import OutputProjection, VocabParallelEmbedding, VocabParallelHead, score
from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.layers.mlp import GatedMlp, GeluMlp
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import Alibi, Learned, Rotary
from shmap_tp.layers.rotation import Rotation
from shmap_tp.model.blocks import ParallelBlock, SequentialBlock
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import TensorParallel
from tests.helpers import reference
from tests.helpers.model_fixtures import config
from tests.helpers.sharded_harness import (
    ALL_REDUCE,
    BATCH_SHARDED,
    COLLECTIVE_MATMUL,
    FEATURES_SHARDED,
    SEQUENCE,
    TIME_SHARDED,
    Case,
)

B, T, D, F, H, K = 8, 7, 24, 40, 8, 4
VOCABULARY, V = 50, 64
HEADS_SHARDED = P(DP, None, MP, None)  # [B/dp T H/mp K]
RESIDUAL_STREAM = {ALL_REDUCE: ((B, T, D), BATCH_SHARDED)} | dict.fromkeys(
    (SEQUENCE, COLLECTIVE_MATMUL), ((B, T + 1, D), TIME_SHARDED)
)
"""(shape, PartitionSpec) of the residual stream by tensor-parallel mode; every mp divides 8 positions."""
ENCODINGS = {"alibi": Alibi(H), "rotary": Rotary(Rotation(10_000.0))}


def attention(kv_heads: int, positions: str, chunk: int, heads: int = H, tp: TensorParallel = ALL_REDUCE) -> Case:
    encoding = Alibi(heads) if positions == "alibi" else ENCODINGS[positions]
    return Case(
        partial(Attention, D, (heads, kv_heads), K, Chunked(chunk), std=1.0, std_out=1.0),
        lambda layer, x: layer(x, Context(tp, encoding))[0],
        partial(reference.attention, positions=positions),
        (RESIDUAL_STREAM[tp],),
        RESIDUAL_STREAM[tp][1],
        tp,
    )


def mlp(make, dense, tp: TensorParallel = ALL_REDUCE) -> Case:
    return Case(
        partial(make, D, F, std=1.0, std_out=1.0),
        lambda layer, x: layer(x, tp),
        dense,
        (RESIDUAL_STREAM[tp],),
        RESIDUAL_STREAM[tp][1],
        tp,
    )


def key_value_heads(kv_heads: int) -> Case:
    """KeyValueHeads, its heads repeated so that there is one for each query head of the device."""

    def call(layer, x):
        k_BTNK = layer(ALL_REDUCE.enter(x))
        return jnp.repeat(k_BTNK, H // lax.axis_size(MP) // k_BTNK.shape[2], axis=2)

    def dense(p, x):
        return jnp.repeat(jnp.einsum("btd,dnk->btnk", x, p["weight"]), H // kv_heads, axis=2)

    inputs = (((B, T, D), BATCH_SHARDED),)
    return Case(partial(KeyValueHeads, D, kv_heads, K, std=1.0), call, dense, inputs, HEADS_SHARDED)


def block(make, *settings: str, tp: TensorParallel = ALL_REDUCE) -> Case:
    model = config(*[f"model.{setting}" for setting in settings]).model
    return Case(
        partial(make, model, Chunked(model.attention_chunk)),
        lambda layer, x: layer(x, Context(tp, ENCODINGS[model.positions]))[0],
        partial(reference.block, config=model),
        (RESIDUAL_STREAM[tp],),
        RESIDUAL_STREAM[tp][1],
        tp,
    )


def embedding(tp: TensorParallel) -> Case:
    shape, spec = RESIDUAL_STREAM[tp]
    ids = np.random.default_rng(3).integers(0, VOCABULARY, shape[:2]).astype(np.int32)
    return Case(
        partial(VocabParallelEmbedding, VOCABULARY, V, D, std=1.0),
        lambda layer, ids, like: tp.reduce(layer(ids, like.dtype)) * like,
        lambda p, ids, like: reference.embedding(p, ids) * like,
        ((ids, P(DP, None)), (shape, spec)),
        spec,
        tp,
    )


def head(tp: TensorParallel) -> Case:
    return Case(
        partial(VocabParallelHead, VOCABULARY, V, D, std=1.0),
        lambda layer, x: jax.vmap(score, (0, None))(tp.enter(x), OutputProjection(layer.weight)),
        lambda p, x: x @ p["weight"].T,
        (RESIDUAL_STREAM[tp],),
        FEATURES_SHARDED,
        tp,
    )


def learned_positions(tp: TensorParallel) -> Case:
    shape, spec = RESIDUAL_STREAM[tp]
    return Case(
        partial(Learned, shape[1] + 2, D, std=1.0),
        lambda layer, x: layer.add_to_input(x, tp),
        lambda p, x: x + p["weight"][None, : shape[1]],
        ((shape, spec),),
        spec,
        tp,
    )


def norm(make, dense) -> Case:
    return Case(lambda key: make(D), lambda layer, x: layer(x), dense, (((B, T, D), BATCH_SHARDED),), BATCH_SHARDED)


GROUPED_QUERY_BLOCK = ("kv_heads=2", "norm=rmsnorm", "mlp=swiglu", "positions=rotary")
LAYERS = {
    "column": Case(
        partial(ColumnParallelLinear, D, F, std=1.0),
        lambda layer, x: layer(ALL_REDUCE.enter(x)),
        lambda p, x: x @ p["weight"].T,
        (((B, T, D), BATCH_SHARDED),),
        FEATURES_SHARDED,
    ),
    "row": Case(
        partial(RowParallelLinear, F, D, std=1.0),
        lambda layer, x: ALL_REDUCE.reduce(layer(x)),
        lambda p, x: x @ p["weight"],
        (((B, T, F), FEATURES_SHARDED),),
        BATCH_SHARDED,
    ),
    "gelu": mlp(GeluMlp, reference.gelu_mlp),
    "gelu, collective_matmul": mlp(GeluMlp, reference.gelu_mlp, COLLECTIVE_MATMUL),
    "swiglu": mlp(GatedMlp, reference.swiglu_mlp),
    "layernorm": norm(LayerNorm, reference.layernorm),
    "rmsnorm": norm(RMSNorm, reference.rmsnorm),
    "embedding": embedding(ALL_REDUCE),
    "embedding, sequence": embedding(SEQUENCE),
    "head": head(ALL_REDUCE),
    "head, sequence": head(SEQUENCE),
    "learned": learned_positions(ALL_REDUCE),
    "learned, sequence": learned_positions(SEQUENCE),
    "rotary": Case(
        lambda key: ENCODINGS["rotary"],
        lambda layer, x: layer.rotate(x),
        lambda p, x: reference.rotate(x),
        (((B, T, H, 6), HEADS_SHARDED),),
        HEADS_SHARDED,
    ),
    "key_value_2_of_8": key_value_heads(2),
    "attention_alibi": attention(8, "alibi", T),
    "attention_alibi_24_heads": attention(24, "alibi", T, heads=24),
    "attention_rotary_1_of_8_in_chunks_of_3": attention(1, "rotary", 3),
    "attention_rotary_1_of_8_in_chunks_of_3, collective_matmul": attention(1, "rotary", 3, tp=COLLECTIVE_MATMUL),
    "parallel_block_2_of_8": block(ParallelBlock, *GROUPED_QUERY_BLOCK),
    "sequential_block": block(SequentialBlock, "block=sequential"),
    "parallel_block_2_of_8, sequence": block(ParallelBlock, *GROUPED_QUERY_BLOCK, tp=SEQUENCE),
    "sequential_block, sequence": block(SequentialBlock, "block=sequential", tp=SEQUENCE),
    "parallel_block_2_of_8, collective_matmul": block(ParallelBlock, *GROUPED_QUERY_BLOCK, tp=COLLECTIVE_MATMUL),
    "sequential_block, collective_matmul": block(SequentialBlock, "block=sequential", tp=COLLECTIVE_MATMUL),
}
"""By name; the part after a comma is the tensor-parallel mode, without it all_reduce.  `2_of_8`: two key/value heads
for eight query heads."""
