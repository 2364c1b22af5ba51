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
from shmap_tp.layers.embedding import score
from shmap_tp.model.sharded_model import shard_model
from shmap_tp.model.tokens import Batch, next_token_batch, tokens_spec
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.fsdp import gather_between_slices
from shmap_tp.parallel.mesh import MP, make_mesh, token_axes
from shmap_tp.training.preferences import make_objective
from shmap_tp.training.step import loss_and_gradients, microbatch
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close, by_path
from tests.helpers.families import FAMILIES
from tests.helpers.model_fixtures import config, random_like, shapes_of
from tests.helpers.sharded_harness import to_float64

FSDP = "fsdp: sequential rmsnorm gelu learned, 2 kv heads of 8, chunks of 3, remat mlp, z-loss"
FSDP_RING_TWO_SLICES = "fsdp ring, two slices: parallel rmsnorm swiglu rotary, 2 kv heads of 8, remat attention"
FSDP_RING_SEQUENCE = "sequence, fsdp ring: sequential layernorm gelu learned, 1 kv head of 8, tied, remat full"
FSDP_RING_OFFLOAD = "fsdp ring, offload: sequential rmsnorm swiglu rotary, 4 kv heads of 8, remat attention_and_up"
FSDP_RING_OFFLOAD_DEEP = f"{FSDP_RING_OFFLOAD}, 4 layers"
FSDP_RING_FEW_HEADS = "fsdp ring: parallel layernorm gelu alibi, 4 heads, 36 hidden columns"
MODELS = {
    "parallel layernorm gelu alibi": [],
    "parallel rmsnorm swiglu rotary, 2 kv heads of 8, chunks of 4, tied, remat all_matmuls, z-loss in chunks of 5": [
        "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rotary", "model.kv_heads=2",
        "model.attention_chunk=4", "model.tie_embeddings=true", "model.remat=all_matmuls", "train.z_loss=0.01",
        "train.loss_chunk=5",
    ],
    "sequential layernorm gelu learned, 1 kv head of 8, no padding, remat full, z-loss": [
        "model.block=sequential", "model.positions=learned", "model.kv_heads=1", "model.vocabulary=64",
        "model.remat=full", "train.z_loss=0.01",
    ],
    "sequence: parallel rmsnorm swiglu rotary, 2 kv heads of 8, chunks of 3, remat all_matmuls, offload, z-loss": [
        "model.offload=[input,query_key_value,attention_output,gate,up]",
        "mesh.tensor_parallel=sequence", "model.context=8", "model.norm=rmsnorm", "model.mlp=swiglu",
        "model.positions=rotary", "model.kv_heads=2", "model.attention_chunk=3", "model.remat=all_matmuls",
        "train.z_loss=0.01", "train.loss_chunk=7",
    ],
    FSDP: [
        "mesh.zero=fsdp", "model.block=sequential", "model.norm=rmsnorm", "model.positions=learned",
        "model.kv_heads=2", "model.attention_chunk=3", "model.remat=mlp", "train.z_loss=0.01",
    ],
    FSDP_RING_TWO_SLICES: [
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.slices=2", "model.norm=rmsnorm", "model.mlp=swiglu",
        "model.positions=rotary", "model.kv_heads=2", "model.remat=attention",
    ],
    FSDP_RING_SEQUENCE: [
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=sequence", "model.context=8",
        "model.block=sequential", "model.positions=learned", "model.kv_heads=1", "model.tie_embeddings=true",
        "model.remat=full",
    ],
    FSDP_RING_OFFLOAD: [
        "model.offload=[sublayer_output,query_key_value,up]",
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "model.block=sequential", "model.norm=rmsnorm",
        "model.mlp=swiglu", "model.positions=rotary", "model.kv_heads=4", "model.remat=attention_and_up",
    ],
    "sequence, fsdp ring, offload: parallel layernorm gelu learned, tied, remat attention": [
        "model.offload=[input,attention_output]",
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=sequence", "model.context=8",
        "model.positions=learned", "model.tie_embeddings=true", "model.remat=attention",
    ],
    "sequence, fsdp: parallel layernorm swiglu rotary, 4 kv heads of 8, tied": [
        "mesh.zero=fsdp", "mesh.tensor_parallel=sequence", "model.context=8", "model.mlp=swiglu",
        "model.positions=rotary", "model.kv_heads=4", "model.tie_embeddings=true",
    ],
    "collective_matmul: parallel rmsnorm swiglu rotary, 2 kv heads of 8, chunks of 3, remat all_matmuls, z-loss": [
        "mesh.tensor_parallel=collective_matmul", "model.context=8", "model.norm=rmsnorm", "model.mlp=swiglu",
        "model.positions=rotary", "model.kv_heads=2", "model.attention_chunk=3", "model.remat=all_matmuls",
        "train.z_loss=0.01", "train.loss_chunk=7",
    ],
    "collective_matmul, fsdp: sequential layernorm gelu learned, 1 kv head of 8, tied, remat full, input offloaded": [
        "model.offload=[input]",
        "mesh.zero=fsdp", "mesh.tensor_parallel=collective_matmul", "model.context=8", "model.block=sequential",
        "model.positions=learned", "model.kv_heads=1", "model.tie_embeddings=true", "model.remat=full",
    ],
    "sequence: sequential layernorm gelu learned, 1 kv head of 8, no padding, tied, remat full": [
        "mesh.tensor_parallel=sequence", "model.context=8", "model.block=sequential", "model.positions=learned",
        "model.kv_heads=1", "model.vocabulary=64", "model.tie_embeddings=true", "model.remat=full",
    ],
}  # fmt: skip
MODELS[FSDP_RING_FEW_HEADS] = [
    "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "model.heads=4", "model.kv_heads=4", "model.ffn=36",
]  # fmt: skip
"""On (8, 1) the heads are fewer than the devices of the ring, and 8 divides only the columns of an MLP's weights."""
MODELS[FSDP_RING_OFFLOAD_DEEP] = [*MODELS[FSDP_RING_OFFLOAD], "model.layers=4"]
SETTINGS = MODELS | FAMILIES


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


def model_on_mesh(config: Config, shape: tuple[int, int], precision: str, *, logits: bool = True) -> Any:
    """The compiled function (params, tokens[A B T+1], segments of that shape or None) -> {loss, gradients, logits of
    the first microbatch}."""
    settings = replace(config.mesh, dp=shape[0], mp=shape[1], slices=min(config.mesh.slices, shape[0]))
    on = make_mesh(settings, jax.devices()[: shape[0] * shape[1]])
    model = shard_model(replace(config, mesh=settings), on, jnp.dtype(precision))
    objective = make_objective(config, model.execution)

    def local(params: Transformer, batch: Batch) -> dict[str, Any]:
        (loss, _), gradients = loss_and_gradients(objective, params, batch)
        if not logits:
            return {"loss": loss, "gradients": gradients}
        params = gather_between_slices(model.placed.placements, params)
        h_BTD, _ = params(batch.inputs[0], model.execution, Carried(segments=microbatch(batch, 0).segments))
        h_BTD, projection = params.output_projection(h_BTD, model.execution)
        logits_BTV = jax.vmap(score, (0, None))(h_BTD, projection)
        return {"logits": logits_BTV, "loss": loss, "gradients": gradients}

    axes, specs = on.axis_names, model.placed.updated
    features = {"logits": P(token_axes(axes), None, MP)} if logits else {}
    outs = features | {"loss": P(), "gradients": specs}

    def run(params: Transformer, tokens: jax.Array, segments: jax.Array | None = None) -> dict[str, Any]:
        batch = next_token_batch(tokens, axes, segments)
        in_specs = (model.placed.stored, tokens_spec(axes))
        return jax.shard_map(local, mesh=on, in_specs=in_specs, out_specs=outs)(params, batch)

    return jax.jit(run)


@cache
def expected(model: str, precision: str) -> dict[str, Any]:
    """Logits, loss and gradients of the dense reference, in float64."""
    conf = config(*SETTINGS[model])
    objective = partial(reference.objective, config=conf.model, z_loss=conf.train.z_loss)

    def dense(p: dict, tokens_BT: Any) -> dict[str, Any]:
        (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(p, tokens_BT)
        logits = reference.transformer(p, tokens_BT[:, :-1], conf.model)
        return {"logits": logits, "loss": loss, "gradients": gradients}

    with jax.enable_x64(True):
        p = {path: to_float64(array) for path, array in by_path(random_parameters(conf, precision)).items()}
        return jax.device_get(jax.jit(dense)(p, random_tokens(conf)[0]))


def compare_model(model: str, shape: tuple[int, int], precision: str, *settings: str) -> None:
    """Asserts that logits, loss and gradients of one of SETTINGS on this mesh equal those of the reference, whatever
    `settings` of the mesh there are besides."""
    conf = config(*SETTINGS[model], *settings)
    promotion = "standard" if precision == "float64" else "strict"
    with jax.enable_x64(precision == "float64"), jax.numpy_dtype_promotion(promotion):
        run = model_on_mesh(conf, shape, precision)
        found = run(random_parameters(conf, precision), random_tokens(conf))
    assert all(array.dtype == precision for array in jax.tree.leaves(found))
    found, wanted = found | {"gradients": by_path(found["gradients"])}, expected(model, precision)
    if KEY_BIAS in wanted["gradients"] and conf.model.positions != "rotary":
        wanted = wanted | {"gradients": wanted["gradients"] | {KEY_BIAS: 0 * wanted["gradients"][KEY_BIAS]}}
        scale = np.abs(wanted["gradients"][QUERY_BIAS]).max()
        found["gradients"][KEY_BIAS] /= scale
    assert_close(found, wanted, RELATIVE[precision])
