"""Blocks with the options of pretrained architectures as `Case`s, in every tensor-parallel mode, and rotations.

B batch, T time, D model width, H heads, K head dim.
"""

from functools import partial

import jax

from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.context import Context
from shmap_tp.layers.positions import Rotary, make_position_encoding
from shmap_tp.layers.rotation import Llama3Scaling, Rotation, YarnScaling
from shmap_tp.model.blocks import BLOCKS
from shmap_tp.parallel.tensor_parallel import TensorParallel
from tests.helpers import reference
from tests.helpers.layer_cases import RESIDUAL_STREAM
from tests.helpers.model_fixtures import config
from tests.helpers.sharded_harness import ALL_REDUCE, COLLECTIVE_MATMUL, SEQUENCE, Case

BIASES = "norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true"
BLOCK_OPTIONS = {
    "parallel, biases, partial rotary in neighbouring pairs": (
        f"{BIASES} block=parallel head_dim=6 rotary_dim=4 rotary_pairing=neighbouring"
    ),
    "two norms, biases, exact gelu, partial rotary": (
        f"{BIASES} block=parallel_two_norms mlp=gelu_erf head_dim=6 rotary_dim=4"
    ),
    "sequential, biases with 2 kv heads, gated": f"{BIASES} block=sequential mlp=swiglu kv_heads=2",
    "sequential, head norms with 2 kv heads, scaled rotary": (
        "block=sequential norm=rmsnorm norm_epsilon=1e-5 qk_norm=true kv_heads=2 head_dim=8 rotary_base=10 "
        "rotary_scaling=llama3 rotary_original_context=32"
    ),
    "sequential, norms after, joint norms of 2 kv heads": (
        "block=sequential norm=rmsnorm norm_placement=after qk_norm=true qk_norm_across_heads=true kv_heads=2"
    ),
    "two rms norms with unit offset, geglu": "block=parallel_two_norms norm=rmsnorm_unit_offset mlp=geglu kv_heads=1",
}


def block(options: str, tp: TensorParallel) -> Case:
    model = config("model.positions=rotary", *(f"model.{option}" for option in options.split())).model
    encoding = make_position_encoding(model, jax.random.key(0))
    return Case(
        partial(BLOCKS[model.block], model, Chunked(model.attention_chunk)),
        lambda layer, x: layer(x, Context(tp, encoding))[0],
        partial(reference.block, config=model),
        (RESIDUAL_STREAM[tp],),
        RESIDUAL_STREAM[tp][1],
        tp,
    )


MODES = {"all_reduce": ALL_REDUCE, "sequence": SEQUENCE, "collective_matmul": COLLECTIVE_MATMUL}
OPTION_BLOCKS = {
    f"{name}; {mode}": block(options, tp) for name, options in BLOCK_OPTIONS.items() for mode, tp in MODES.items()
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
ROTARIES = {name: Rotary(rotation) for name, rotation in ROTATIONS.items()}
