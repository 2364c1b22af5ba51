"""Every layer on every mesh is its dense reference: output, input gradient, and the gradient of every parameter.

B batch, T time, D model width, F hidden width, H query heads, N key/value heads, K head dim, V vocabulary rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shmap_tp.layers.attention import Attention, Chunked, KeyValueHeads
from shmap_tp.layers.embedding import VocabParallelEmbedding, VocabParallelHead, score
from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.layers.mlp import GeluMlp, SwigluMlp
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import Alibi, Learned, Rotary
from shmap_tp.model.blocks import ParallelBlock, SequentialBlock
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import TensorParallel
from tests.helpers import reference
from tests.helpers.model_fixtures import config, every_mesh, every_precision
from tests.helpers.sharded_harness import ALL_REDUCE, COLUMNS, RING, ROWS, SEQUENCE, TIMES, Case, compare

B, T, D, F, H, K = 8, 7, 24, 40, 8, 4
VOCABULARY, V = 50, 64
HEADS = P(DP, None, MP, None)  # [B/dp T H/mp K]
STREAM = {ALL_REDUCE: (((B, T, D), ROWS),)} | dict.fromkeys((SEQUENCE, RING), (((B, T + 1, D), TIMES),))
"""(shape, layout) of the residual stream by wire; 8 positions may be cut along any mp."""
POSITIONS = {"alibi": Alibi(H), "rotary": Rotary(10_000.0)}


def attention(kv_heads: int, positions: str, chunk: int, heads: int = H, wire: TensorParallel = ALL_REDUCE) -> Case:
    def call(layer, x):
        (qkv,) = wire.into(x, attention=layer.columns)
        mixed, _ = layer(*qkv, Alibi(heads) if positions == "alibi" else Rotary(10_000.0), wire)
        return wire.out_of(attention=(mixed, layer.out))

    return Case(
        partial(Attention, D, (heads, kv_heads), K, Chunked(chunk), std=1.0, std_out=1.0),
        call,
        partial(reference.attention, positions=positions),
        STREAM[wire],
        STREAM[wire][0][1],
        wire,
    )


def mlp(make, dense, wire: TensorParallel = ALL_REDUCE) -> Case:
    def call(layer, x):
        (hidden,) = wire.into(x, mlp=layer.columns)
        return wire.out_of(mlp=(layer(*hidden), layer.down))

    return Case(partial(make, D, F, std=1.0, std_out=1.0), call, dense, STREAM[wire], STREAM[wire][0][1], wire)


def shared_heads(kv_heads: int) -> Case:
    """KeyValueHeads as the query heads of each device see them: one key head for each."""

    def seen(layer, x):
        k_BTNK = layer(ALL_REDUCE.enter(x))
        return jnp.repeat(k_BTNK, H // lax.axis_size(MP) // k_BTNK.shape[2], axis=2)

    def dense(p, x):
        return jnp.repeat(jnp.einsum("btd,dnk->btnk", x, p["weight"]), H // kv_heads, axis=2)

    return Case(partial(KeyValueHeads, D, kv_heads, K, std=1.0), seen, dense, (((B, T, D), ROWS),), HEADS)


def block(make, *settings: str, wire: TensorParallel = ALL_REDUCE) -> Case:
    model, ((shape, layout),) = config(*[f"model.{setting}" for setting in settings]).model, STREAM[wire]
    return Case(
        partial(make, model, Chunked(model.attention_chunk)),
        lambda layer, x: layer(x, POSITIONS[model.positions], wire),
        partial(reference.block, config=model),
        ((shape, layout),),
        layout,
        wire,
    )


def embedding(wire: TensorParallel) -> Case:
    ((shape, layout),) = STREAM[wire]
    ids = np.random.default_rng(3).integers(0, VOCABULARY, shape[:2]).astype(np.int32)
    return Case(
        partial(VocabParallelEmbedding, VOCABULARY, V, D, std=1.0),
        lambda layer, ids, like: wire.leave(layer(ids, like.dtype)) * like,
        lambda p, ids, like: reference.embedding(p, ids) * like,
        ((ids, P(DP, None)), (shape, layout)),
        layout,
        wire,
    )


def head(wire: TensorParallel) -> Case:
    return Case(
        partial(VocabParallelHead, VOCABULARY, V, D, std=1.0),
        lambda layer, x: jax.vmap(score, (0, None))(wire.enter(x), layer.weight),
        lambda p, x: x @ p["weight"].T,
        STREAM[wire],
        COLUMNS,
        wire,
    )


def learned(wire: TensorParallel) -> Case:
    ((shape, layout),) = STREAM[wire]
    return Case(
        partial(Learned, shape[1] + 2, D, std=1.0),
        lambda layer, x: layer.at_input(x, wire),
        lambda p, x: x + p["weight"][None, : shape[1]],
        ((shape, layout),),
        layout,
        wire,
    )


LAYERS = {
    "column": Case(
        partial(ColumnParallelLinear, D, F, std=1.0),
        lambda layer, x: layer(ALL_REDUCE.enter(x)),
        lambda p, x: x @ p["weight"].T,
        (((B, T, D), ROWS),),
        COLUMNS,
    ),
    "row": Case(
        partial(RowParallelLinear, F, D, std=1.0),
        lambda layer, x: ALL_REDUCE.leave(layer(x)),
        lambda p, x: x @ p["weight"],
        (((B, T, F), COLUMNS),),
        ROWS,
    ),
    "gelu": mlp(GeluMlp, reference.gelu_mlp),
    "gelu, collective_matmul": mlp(GeluMlp, reference.gelu_mlp, RING),
    "swiglu": mlp(SwigluMlp, reference.swiglu_mlp),
    "layernorm": Case(
        lambda key: LayerNorm(D), lambda layer, x: layer(x), reference.layernorm, (((B, T, D), ROWS),), ROWS
    ),
    "rmsnorm": Case(lambda key: RMSNorm(D), lambda layer, x: layer(x), reference.rmsnorm, (((B, T, D), ROWS),), ROWS),
    "embedding": embedding(ALL_REDUCE),
    "embedding, sequence": embedding(SEQUENCE),
    "head": head(ALL_REDUCE),
    "head, sequence": head(SEQUENCE),
    "learned": learned(ALL_REDUCE),
    "learned, sequence": learned(SEQUENCE),
    "rotary": Case(
        lambda key: Rotary(10_000.0),
        lambda layer, x: layer.on_heads(x),
        lambda p, x: reference.rotate(x),
        (((B, T, H, 6), HEADS),),
        HEADS,
    ),
    "key_value_2_of_8": shared_heads(2),
    "attention_alibi": attention(8, "alibi", T),
    "attention_alibi_24_heads": attention(24, "alibi", T, heads=24),
    "attention_rotary_1_of_8_in_chunks_of_3": attention(1, "rotary", 3),
    "attention_rotary_1_of_8_in_chunks_of_3, collective_matmul": attention(1, "rotary", 3, wire=RING),
    "parallel_block_2_of_8": block(ParallelBlock, "kv_heads=2", "norm=rmsnorm", "mlp=swiglu", "positions=rotary"),
    "sequential_block": block(SequentialBlock, "block=sequential"),
    "parallel_block_2_of_8, sequence": block(
        ParallelBlock, "kv_heads=2", "norm=rmsnorm", "mlp=swiglu", "positions=rotary", wire=SEQUENCE
    ),
    "sequential_block, sequence": block(SequentialBlock, "block=sequential", wire=SEQUENCE),
    "parallel_block_2_of_8, collective_matmul": block(
        ParallelBlock, "kv_heads=2", "norm=rmsnorm", "mlp=swiglu", "positions=rotary", wire=RING
    ),
    "sequential_block, collective_matmul": block(SequentialBlock, "block=sequential", wire=RING),
}


@every_precision
@every_mesh
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_its_dense_reference(layer, shape, precision):
    compare(LAYERS[layer], shape, precision)
