"""Whole models with their configurations, compared with the dense reference on a mesh."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shmap_tp.config.schema import Config
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.context import Batch, next_token_batch, tokens_spec
from shmap_tp.layers.embedding import score
from shmap_tp.model.loss import all_tokens
from shmap_tp.model.sharded_model import shard_model
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.collectives import all_reduce, mark_varying
from shmap_tp.parallel.fsdp import gather_between_slices
from shmap_tp.parallel.mesh import MP, make_mesh, token_axes
from shmap_tp.training.step import loss_and_gradients, make_objective, microbatch
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close, by_path
from tests.helpers.model_fixtures import config, random_like, shapes_of

RING = "mesh.zero=fsdp mesh.fsdp_gradients=ring"
SEQUENCE, COLLECTIVE = "mesh.tensor_parallel=sequence", "mesh.tensor_parallel=collective_matmul"
PATTERNS, FSDP, FEW_HEADS, SLICES = "patterns", "fsdp", "sequence, ring, few heads", "ring, two slices, offload"
GEMMA, COLLECTIVE_MATMUL, OFFLOAD = "collective matmul, fsdp", "collective matmul", "sequence, offload"
MODELS = {
    # name: ((dp, mp), precision, how it is parallel, options of the model)
    PATTERNS: ((1, 8), "float64", SEQUENCE,
        "block=sequential norm=rmsnorm_unit_offset norm_placement=both qk_norm=true mlp=geglu kv_heads=2 "
        "positions=rotary rotary_local_base=10 layers=3 window=3 layer_pattern=[local,nope,global] "
        "attention_sinks=true attention_softcap=1 attention_scale_dim=3 logit_softcap=0.5 tie_embeddings=true "
        "remat=mlp init_std=0.05 vocabulary=64"),
    FSDP: ((2, 4), "float32", "mesh.zero=fsdp",
        "block=sequential norm=rmsnorm positions=learned kv_heads=2 attention_chunk=3"),
    FEW_HEADS: ((8, 1), "float32", f"{RING} {SEQUENCE}",
        "block=sequential norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true tie_embeddings=true "
        "heads=4 kv_heads=4 ffn=36 remat=full layers=1"),
    SLICES: ((4, 2), "float32", f"{RING} mesh.slices=2",
        "norm=rmsnorm norm_epsilon=1e-5 mlp=swiglu kv_heads=2 head_dim=8 positions=rotary rotary_base=10 layers=3 "
        "rotary_scaling=llama3 rotary_original_context=32 remat=attention_and_up "
        "offload=[query_key_value,up]"),
    "sequence, ring, experts": ((4, 2), "float64", f"{RING} {SEQUENCE}",
        "block=sequential norm=rmsnorm mlp=swiglu positions=rotary kv_heads=2 ffn=12 experts=8 experts_per_token=3 "
        "router_normalize=false router_balance_loss=0.1 router_z_loss=0.1 shared_expert_ffn=8 remat=attention "
        "offload=[sublayer_output,attention_output]"),
    OFFLOAD: ((2, 4), "float64", f"{SEQUENCE} train.loss_chunk=7",
        "norm=rmsnorm mlp=swiglu positions=rotary kv_heads=2 qk_norm=true attention_chunk=3 remat=all_matmuls "
        "offload=[input,query_key_value,attention_output,gate,up]"),
    GEMMA: ((8, 1), "float64", f"mesh.zero=fsdp {COLLECTIVE}",
        "block=sequential norm=rmsnorm_unit_offset mlp=geglu positions=rotary kv_heads=1 head_dim=6 remat=full "
        "offload=[input] tie_embeddings=true embedding_scale=4.898979485566356 layers=1"),
    "collective matmul, fsdp, norms after": ((4, 2), "float64", f"mesh.zero=fsdp {COLLECTIVE}",
        "block=sequential norm=rmsnorm norm_placement=after qk_norm=true qk_norm_across_heads=true mlp=swiglu "
        "kv_heads=2 positions=rotary rotary_base=10 rotary_local_base=100 rotary_scaling=linear layers=5 window=3 "
        "layer_pattern=[local,global] remat=attention init_std=0.05"),
    COLLECTIVE_MATMUL: ((4, 2), "float64", f"{COLLECTIVE} train.loss_chunk=7",
        "block=parallel_two_norms norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true mlp=gelu_erf "
        "head_bias=true positions=rotary head_dim=6 rotary_dim=4 attention_chunk=3 remat=attention_output layers=1"),
}  # fmt: skip
"""Every mode of tensor parallelism, with FSDP and without, on meshes with and without mp; every kind of data
parallelism and every policy of rematerialisation; and the options of every family of pretrained models once or more,
those of weights with FSDP.  Few heads: of the ring's 8 devices some have
none, and 8 divides only the columns of an MLP's weights.  llama3 scaling: of four rates one stays, two are interpolated
and one is divided.  In float64 where norms, or a factor of the embedding, amplify rounding errors."""


def settings_of(model: str) -> list[str]:
    _, _, parallel, options = MODELS[model]
    common = ["model.context=8", "model.attention_chunk=8", "train.z_loss=0.01"]
    return [*common, *parallel.split(), *(f"model.{option}" for option in options.split())]


KEY_BIAS, QUERY_BIAS = "blocks.attention.key.bias", "blocks.attention.query.bias"
"""Where keys are not rotated, a bias of them adds the same to all scores of a query, which the softmax ignores: its
gradient is zero, up to rounding errors relative to those of other biases."""


def random_tokens(config: Config) -> np.ndarray:
    """[1 B T+1]: random ids; the ends of some rows are ignored, so that dp ranks count different numbers of targets."""
    shape = (config.train.batch, config.model.context + 1)
    ids = np.random.default_rng(8).integers(0, config.model.vocabulary, shape).astype(np.int32)
    ids[1, 5:], ids[2, 3:], ids[7, -1:] = -1, -1, -1
    return ids[None]


def random_parameters(config: Config, precision: str) -> Transformer:
    """In float32 with the standard deviation of an initial model: larger weights amplify its rounding errors beyond
    1e-6 on any number of devices (2e-6 at a standard deviation of 0.25).  In float64 they are larger."""
    spread = config.model.init_std if precision == "float32" else 0.25
    return random_like(parameter_shapes(config), precision, spread=spread)


def parameter_shapes(config: Config) -> Transformer:
    return shapes_of(partial(Transformer, config.model, Chunked(config.model.attention_chunk)))


def model_on_mesh(
    config: Config, shape: tuple[int, int], precision: str, *, logits: bool = True, gradients: bool = True
) -> Any:
    """The compiled function (params, tokens[A B T+1], segments of that shape or None) -> {loss, gradients, logits of
    the first microbatch}."""
    settings = replace(config.mesh, dp=shape[0], mp=shape[1], slices=min(config.mesh.slices, shape[0]))
    on = make_mesh(settings, jax.devices()[: shape[0] * shape[1]])
    model = shard_model(replace(config, mesh=settings), on, jnp.dtype(precision))
    objective = make_objective(config, model.execution)

    def local(params: Transformer, batch: Batch) -> dict[str, Any]:
        whole = gather_between_slices(model.placed.placements, params)
        if not gradients:
            whole = mark_varying(whole, (*token_axes(), *model.execution.tp.time_axes))
            _, parts = objective(whole, microbatch(batch, 0), objective.counted(batch), all_tokens(batch))
            return {"loss": all_reduce(parts.losses, token_axes())}
        (loss, _), dw = loss_and_gradients(objective, params, batch)
        found = {"loss": loss, "gradients": dw}
        if not logits:
            return found
        h_BTD, _ = whole(batch.inputs[0], model.execution, Carried(segments=microbatch(batch, 0).segments))
        h_BTD, projection = whole.output_projection(h_BTD, model.execution)
        return found | {"logits": jax.vmap(score, (0, None))(h_BTD, projection)}

    axes = on.axis_names
    outs = {"loss": P()} | ({"gradients": model.placed.updated} if gradients else {})
    outs |= {"logits": P(token_axes(axes), None, MP)} if logits else {}

    def run(params: Transformer, tokens: jax.Array, segments: jax.Array | None = None) -> dict[str, Any]:
        batch = next_token_batch(tokens, axes, segments)
        in_specs = (model.placed.stored, tokens_spec(axes))
        return jax.shard_map(local, mesh=on, in_specs=in_specs, out_specs=outs)(params, batch)

    return jax.jit(run)


@cache
def expected(model: str, precision: str) -> dict[str, Any]:
    """Loss and gradients of the dense reference, in float64."""
    conf = config(*settings_of(model))
    objective = partial(reference.objective, config=conf.model, z_loss=conf.train.z_loss)
    with jax.enable_x64(True):
        p = {path: np.asarray(array, "float64") for path, array in by_path(random_parameters(conf, precision)).items()}
        run = jax.jit(jax.value_and_grad(objective, has_aux=True))
        (_, loss), gradients = jax.device_get(run(p, random_tokens(conf)[0]))
        return {"loss": loss, "gradients": gradients}


def compare_model(model: str, shape: tuple[int, int] | None = None, *, gradients: bool = True) -> None:
    """Asserts that loss and gradients, or only the loss, of one of MODELS equal those of the reference: on its own mesh
    or on another.

    The gradients of head, embedding and, by the z-loss, of the sum of all logits leave no freedom to the logits."""
    own, precision, *_ = MODELS[model]
    conf = config(*settings_of(model))
    promotion = "standard" if precision == "float64" else "strict"
    with jax.enable_x64(precision == "float64"), jax.numpy_dtype_promotion(promotion):
        run = model_on_mesh(conf, shape or own, precision, logits=False, gradients=gradients)
        found = run(random_parameters(conf, precision), random_tokens(conf))
    assert all(array.dtype == precision for array in jax.tree.leaves(found))
    wanted = expected(model, precision)
    if gradients:
        wanted, found["gradients"] = wanted | {"gradients": {**wanted["gradients"]}}, by_path(found["gradients"])
        if KEY_BIAS in wanted["gradients"] and conf.model.positions != "rotary":
            wanted["gradients"][KEY_BIAS] = 0 * wanted["gradients"][KEY_BIAS]
            found["gradients"][KEY_BIAS] /= np.abs(wanted["gradients"][QUERY_BIAS]).max()
    assert_close(found, {name: wanted[name] for name in found}, RELATIVE[precision])
