"""Every layer as a `Case`: how it is called on one device, and its dense reference; blocks with the options of
pretrained architectures; and rotations.

B batch, T time, D model width, F hidden width, H query heads, N key/value heads, K head dim, V vocabulary rows.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shmap_tp.config.choices import Mlp
from shmap_tp.layers.attention import Attention, Chunked
from shmap_tp.layers.context import Context
from shmap_tp.layers.embedding import OutputProjection, VocabParallelEmbedding, VocabParallelHead, score
from shmap_tp.layers.linear import Linear
from shmap_tp.layers.mlp import MLPS
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import (
    Alibi,
    Learned,
    Llama3Scaling,
    Rotary,
    Rotation,
    YarnScaling,
    make_position_encoding,
)
from shmap_tp.model.blocks import BLOCKS
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

B, T, D, F, H, K = 8, 8, 24, 40, 8, 4
VOCABULARY, V = 50, 64
HEADS_SHARDED = P(DP, None, MP, None)  # [B/dp T H/mp K]
MODES = {"all_reduce": ALL_REDUCE, "sequence": SEQUENCE, "collective_matmul": COLLECTIVE_MATMUL}
RESIDUAL_STREAM = {
    tp: ((B, T, D), BATCH_SHARDED if name == "all_reduce" else TIME_SHARDED) for name, tp in MODES.items()
}
"""(shape, PartitionSpec) of the residual stream by tensor-parallel mode; every mp divides 8 positions."""
ENCODINGS = {"alibi": Alibi(H), "rotary": Rotary(Rotation(10_000.0))}


def on_residual_stream(make, call, dense, tp: TensorParallel = ALL_REDUCE, out=None) -> Case:
    """A layer whose input is the residual stream, as is its output unless `out` is given."""
    return Case(make, call, dense, (RESIDUAL_STREAM[tp],), out or RESIDUAL_STREAM[tp][1], tp)


def attention(kv_heads: int, positions: str, chunk: int, heads: int = H, tp: TensorParallel = ALL_REDUCE) -> Case:
    encoding = Alibi(heads) if positions == "alibi" else ENCODINGS[positions]
    return on_residual_stream(
        partial(Attention, D, (heads, kv_heads), K, Chunked(chunk), std=1.0, std_out=1.0),
        lambda layer, x: layer(x, Context(tp, encoding))[0],
        reference_attention(positions),
        tp,
    )


@cache
def reference_attention(positions: str):
    return partial(reference.attention, positions=positions)


def mlp(make, dense, tp: TensorParallel = ALL_REDUCE) -> Case:
    made = partial(make, D, F, std=1.0, std_out=1.0)
    return on_residual_stream(made, lambda layer, x: layer(x, tp), dense, tp)


def key_value_heads(kv_heads: int) -> Case:
    """Key/value heads, repeated so that there is one for each query head of the device."""

    def call(layer, x):
        k_BTNK = layer(ALL_REDUCE.enter(x))
        return jnp.repeat(k_BTNK, H // lax.axis_size(MP) // k_BTNK.shape[2], axis=2)

    def dense(p, x):
        return jnp.repeat(jnp.einsum("btd,dnk->btnk", x, p["weight"]), H // kv_heads, axis=2)

    return on_residual_stream(partial(Linear.heads, D, kv_heads, K, std=1.0), call, dense, out=HEADS_SHARDED)


def block(options: str, tp: TensorParallel) -> Case:
    model, dense = reference_block(options)
    encoding = make_position_encoding(model, jax.random.key(0))
    return on_residual_stream(
        partial(BLOCKS[model.block], model, Chunked(model.attention_chunk)),
        lambda layer, x: layer(x, Context(tp, encoding))[0],
        dense,
        tp,
    )


@cache
def reference_block(options: str):
    """(the model with these options, the dense reference of its first block)."""
    model = config(*(f"model.{option}" for option in options.split())).model
    return model, partial(reference.block, config=model)


def embedding(tp: TensorParallel) -> Case:
    shape, spec = RESIDUAL_STREAM[tp]
    ids = np.random.default_rng(3).integers(0, VOCABULARY, shape[:2]).astype(np.int32)
    return Case(
        partial(VocabParallelEmbedding, VOCABULARY, V, D, std=1.0),
        lambda layer, ids, like: tp.reduce(layer(ids, like.dtype)) * like,
        reference_embedding,
        ((ids, P(DP, None)), (shape, spec)),
        spec,
        tp,
    )


def reference_embedding(p, ids, like):
    return reference.embedding(p, ids) * like


def head(tp: TensorParallel) -> Case:
    return on_residual_stream(
        partial(VocabParallelHead, VOCABULARY, V, D, std=1.0),
        lambda layer, x: jax.vmap(score, (0, None))(tp.enter(x), OutputProjection(layer.weight)),
        reference_head,
        tp,
        FEATURES_SHARDED,
    )


def reference_head(p, x):
    return x @ p["weight"].T


def learned_positions(tp: TensorParallel) -> Case:
    make = partial(Learned, T + 2, D, std=1.0)
    return on_residual_stream(make, lambda layer, x: layer.add_to_input(x, tp), reference_learned, tp)


def reference_learned(p, x):
    return x + p["weight"][None, :T]


def norm(make, dense) -> Case:
    return on_residual_stream(lambda key: make(D), lambda layer, x: layer(x), dense)


BLOCK = "kv_heads=2 norm=rmsnorm mlp=swiglu positions=rotary"
LAYERS = {
    "column": on_residual_stream(
        partial(Linear.column, D, F, std=1.0),
        lambda layer, x: layer(ALL_REDUCE.enter(x)),
        reference_head,
        out=FEATURES_SHARDED,
    ),
    "row": Case(
        partial(Linear.row, F, D, std=1.0),
        lambda layer, x: ALL_REDUCE.reduce(layer(x)),
        lambda p, x: x @ p["weight"],
        (((B, T, F), FEATURES_SHARDED),),
        BATCH_SHARDED,
    ),
    "gelu": mlp(MLPS[Mlp.gelu], reference.gelu_mlp),
    "gelu, collective_matmul": mlp(MLPS[Mlp.gelu], reference.gelu_mlp, COLLECTIVE_MATMUL),
    "swiglu": mlp(MLPS[Mlp.swiglu], reference.swiglu_mlp),
    "layernorm": norm(LayerNorm, reference.layernorm),
    "rmsnorm": norm(RMSNorm, reference.rmsnorm),
    "embedding": embedding(ALL_REDUCE),
    "embedding, sequence": embedding(SEQUENCE),
    "head": head(ALL_REDUCE),
    "head, sequence": head(SEQUENCE),
    "learned": learned_positions(ALL_REDUCE),
    "learned, sequence": learned_positions(SEQUENCE),
    "key_value_2_of_8": key_value_heads(2),
    "attention_alibi": attention(8, "alibi", T),
    "attention_alibi_24_heads": attention(24, "alibi", T, heads=24),
    "attention_rotary_1_of_8_in_chunks_of_3": attention(1, "rotary", 3),
    "parallel_block_2_of_8": block(BLOCK, ALL_REDUCE),
    "sequential_block": block("block=sequential", ALL_REDUCE),
    "parallel_block_2_of_8, sequence": block(BLOCK, SEQUENCE),
    "sequential_block, sequence": block("block=sequential", SEQUENCE),
    "parallel_block_2_of_8, collective_matmul": block(BLOCK, COLLECTIVE_MATMUL),
    "sequential_block, collective_matmul": block("block=sequential", COLLECTIVE_MATMUL),
}
"""By name; the part after a comma is the tensor-parallel mode, without it all_reduce.  `2_of_8`: two key/value heads
for eight query heads."""

BIASES, TWO_NORMS = "parallel, biases, partial rotary in neighbouring pairs", "two norms, biases, exact gelu"
KV_HEADS, HEAD_NORMS = "sequential, biases with 2 kv heads, gated", "sequential, head norms, scaled rotary"
JOINT_NORMS, UNIT_OFFSET = "sequential, norms after, joint norms of heads", "two rms norms with unit offset, geglu"
ALL_BIASES = "positions=rotary norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true"
OPTIONS = {
    BIASES: f"{ALL_BIASES} block=parallel head_dim=6 rotary_dim=4 rotary_pairing=neighbouring",
    TWO_NORMS: f"{ALL_BIASES} block=parallel_two_norms mlp=gelu_erf head_dim=6 rotary_dim=4",
    KV_HEADS: f"{ALL_BIASES} block=sequential mlp=swiglu kv_heads=2",
    HEAD_NORMS: "block=sequential norm=rmsnorm norm_epsilon=1e-5 qk_norm=true kv_heads=2 head_dim=8 positions=rotary "
    "rotary_base=10 rotary_scaling=llama3 rotary_original_context=32",
    JOINT_NORMS: "block=sequential norm=rmsnorm norm_placement=after qk_norm=true qk_norm_across_heads=true "
    "kv_heads=2 positions=rotary",
    UNIT_OFFSET: "block=parallel_two_norms norm=rmsnorm_unit_offset mlp=geglu kv_heads=1 positions=rotary",
}
OPTION_BLOCKS = {
    f"{name}; {mode}": block(options, tp) for name, options in OPTIONS.items() for mode, tp in MODES.items()
}
"""By name and tensor-parallel mode."""

ROTATIONS = {
    "all": Rotation(10_000.0),
    "partial": Rotation(10_000.0, 4),
    "neighbouring": Rotation(10_000.0, None, neighbouring=True),
    "partial, neighbouring": Rotation(10_000.0, 4, neighbouring=True),
    "llama3": Rotation(10.0, None, scaling=Llama3Scaling(8.0, 1.0, 4.0, 32)),
    "yarn_unrounded": Rotation(10.0, None, scaling=YarnScaling(8.0, 1.0, 4.0, 32, 10.0, rounded=False)),
    "yarn": Rotation(10.0, None, scaling=YarnScaling(8.0, 1.0, 4.0, 32, 10.0)),
}
