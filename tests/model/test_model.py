"""The whole model on every mesh is its dense reference: logits, loss, and the gradient of every parameter.

And what follows without a reference: no position sees a later one, and k microbatches are one batch.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.config.schema import Config
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.embedding import score
from shmap_tp.model.loss import LinearCrossEntropy
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.fsdp import held, place_parameters
from shmap_tp.parallel.mesh import DataParallelGroups
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.tensor_parallel import TENSOR_PARALLEL
from shmap_tp.training.step import TOKENS, Objective, loss_and_gradients
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close, by_path
from tests.helpers.model_fixtures import config, every_mesh, every_precision, mesh, random_like, shapes_of
from tests.helpers.sharded_harness import COLUMNS, widened

MODELS = {
    "parallel layernorm gelu alibi": [],
    "parallel rmsnorm swiglu rotary, 2 kv heads of 8, in chunks of 4, tied, dots, z-loss in chunks of 5": [
        "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rotary", "model.kv_heads=2",
        "model.attention_chunk=4", "model.tie_embeddings=true", "model.remat=all_matmuls", "train.z_loss=0.01", "train.loss_chunk=5",
    ],
    "sequential layernorm gelu learned, 1 kv head of 8, no padding, full, z-loss": [
        "model.block=sequential", "model.positions=learned", "model.kv_heads=1", "model.vocabulary=64",
        "model.remat=full", "train.z_loss=0.01",
    ],
    "sequence: parallel rmsnorm swiglu rotary, 2 kv heads of 8, in chunks of 3, dots, offload, z-loss in chunks of 7": [
        "model.offload=[input,query_key_value,attention_output,gate,up]",
        "mesh.tensor_parallel=sequence", "model.context=8", "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rotary",
        "model.kv_heads=2", "model.attention_chunk=3", "model.remat=all_matmuls", "train.z_loss=0.01", "train.loss_chunk=7",
    ],
    "sharded: sequential rmsnorm gelu learned, 2 kv heads of 8, in chunks of 3, MLP, z-loss": [
        "mesh.zero=fsdp", "model.block=sequential", "model.norm=rmsnorm", "model.positions=learned",
        "model.kv_heads=2", "model.attention_chunk=3", "model.remat=mlp", "train.z_loss=0.01",
    ],
    "sharded over two slices, gradients in rings: parallel rmsnorm swiglu rotary, 2 kv heads of 8, attention": [
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.slices=2", "model.norm=rmsnorm", "model.mlp=swiglu",
        "model.positions=rotary", "model.kv_heads=2", "model.remat=attention",
    ],
    "sequence, sharded, gradients in a ring: sequential layernorm gelu learned, 1 kv head of 8, tied, full": [
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=sequence", "model.context=8",
        "model.block=sequential", "model.positions=learned", "model.kv_heads=1", "model.tie_embeddings=true", "model.remat=full",
    ],
    "sharded, gradients in a ring, on the host: sequential rmsnorm swiglu rotary, 4 kv heads of 8, up": [
        "model.offload=[sublayer_output,query_key_value,up]",
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "model.block=sequential", "model.norm=rmsnorm",
        "model.mlp=swiglu", "model.positions=rotary", "model.kv_heads=4", "model.remat=attention_and_up",
    ],
    "sequence, sharded, gradients in a ring, on the host: parallel layernorm gelu learned, tied, attention": [
        "model.offload=[input,attention_output]",
        "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=sequence", "model.context=8",
        "model.positions=learned", "model.tie_embeddings=true", "model.remat=attention",
    ],
    "sequence, sharded: parallel layernorm swiglu rotary, 4 kv heads of 8, tied": [
        "mesh.zero=fsdp", "mesh.tensor_parallel=sequence", "model.context=8", "model.mlp=swiglu", "model.positions=rotary",
        "model.kv_heads=4", "model.tie_embeddings=true",
    ],
    "ring: parallel rmsnorm swiglu rotary, 2 kv heads of 8, in chunks of 3, dots, z-loss in chunks of 7": [
        "mesh.tensor_parallel=collective_matmul", "model.context=8", "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rotary",
        "model.kv_heads=2", "model.attention_chunk=3", "model.remat=all_matmuls", "train.z_loss=0.01", "train.loss_chunk=7",
    ],
    "ring, sharded: sequential layernorm gelu learned, 1 kv head of 8, tied, full, input on the host": [
        "model.offload=[input]",
        "mesh.zero=fsdp", "mesh.tensor_parallel=collective_matmul", "model.context=8", "model.block=sequential",
        "model.positions=learned", "model.kv_heads=1", "model.tie_embeddings=true", "model.remat=full",
    ],
    "sequence: sequential layernorm gelu learned, 1 kv head of 8, no padding, tied, full": [
        "mesh.tensor_parallel=sequence", "model.context=8", "model.block=sequential", "model.positions=learned",
        "model.kv_heads=1", "model.vocabulary=64", "model.tie_embeddings=true", "model.remat=full",
    ],
}  # fmt: skip
FEW_HEADS = "gradients in a ring: parallel layernorm gelu alibi, 4 heads, 36 hidden columns"
MODELS[FEW_HEADS] = [
    "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "model.heads=4", "model.kv_heads=4", "model.ffn=36",
]  # fmt: skip
"""On (8, 1): fewer heads than the ring has devices, and a weight that 8 divide only by its columns."""
ON_HOST = next(model for model in MODELS if model.startswith("sharded, gradients in a ring, on the host"))
DEEP = f"{ON_HOST}, 4 layers"
MODELS[DEEP] = [*MODELS[ON_HOST], "model.layers=4"]
CUT_IN_TIME = [model for model in MODELS if model.startswith(("sequence", "ring"))]


def tokens(config: Config) -> np.ndarray:
    """[1 B T+1]: random ids, the ends of some rows ignored, so that devices of dp count differently many targets."""
    shape = (config.train.batch, config.model.context + 1)
    ids = np.random.default_rng(8).integers(0, config.model.vocabulary, shape).astype(np.int32)
    ids[1, 5:], ids[2, 3:], ids[7, -1:] = -1, -1, -1
    return ids[None]


def parameters(config: Config, precision: str) -> Transformer:
    """In float32 as spread as they are at the start of a run: wilder weights amplify its own rounding beyond 1e-6, on
    one device or many (2e-6 at a spread of 0.25).  Float64 takes them wilder."""
    spread = config.model.init_std if precision == "float32" else 0.25
    return random_like(shapes(config), precision, spread=spread)


def shapes(config: Config) -> Transformer:
    return shapes_of(partial(Transformer, config.model, Chunked(config.model.attention_chunk)))


def on_mesh(config: Config, shape: tuple[int, int], precision: str, *, forward_too: bool = True) -> Any:
    """The compiled (params, tokens[A B T+1]) -> {loss, gradients, logits}."""
    wire = TENSOR_PARALLEL[config.mesh.tensor_parallel]
    model, sizes = shapes(config), dict(mesh(shape).shape)
    slices = min(config.mesh.slices, shape[0])
    parts = DataParallelGroups.of(replace(config.mesh, dp=shape[0], mp=shape[1], slices=slices))
    specs, _, placements = place_parameters(config.mesh.zero, model, partition_specs(model, sizes), sizes, parts)
    loss = LinearCrossEntropy(config.model.vocabulary, config.train.z_loss, config.train.loss_chunk)
    objective = Objective(loss, jnp.dtype(precision), wire, placements)

    def local(params: Transformer, tokens_ABT: Any) -> dict[str, Any]:
        loss, gradients = loss_and_gradients(objective, params, tokens_ABT)
        if not forward_too:
            return {"loss": loss, "gradients": gradients}
        params = held(placements, params)
        h_BTD = params(tokens_ABT[0, :, :-1], objective.dtype, wire, placements)
        h_BTD, table_VD = params.scored_by(h_BTD, objective.dtype, placements)
        logits_BTV = jax.vmap(score, (0, None))(h_BTD, table_VD)
        return {"logits": logits_BTV, "loss": loss, "gradients": gradients}

    outs = ({"logits": COLUMNS} if forward_too else {}) | {"loss": P(), "gradients": specs}
    return jax.jit(jax.shard_map(local, mesh=mesh(shape), in_specs=(specs, TOKENS), out_specs=outs))


@cache
def expected(model: str, precision: str) -> dict[str, Any]:
    conf = config(*MODELS[model])
    objective = partial(reference.objective, config=conf.model, z_loss=conf.train.z_loss)

    def dense(p: dict, tokens_BT: Any) -> dict[str, Any]:
        (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(p, tokens_BT)
        logits = reference.transformer(p, tokens_BT[:, :-1], conf.model)
        return {"logits": logits, "loss": loss, "gradients": gradients}

    with jax.enable_x64(True):
        p = {path: widened(array) for path, array in by_path(parameters(conf, precision)).items()}
        return jax.device_get(jax.jit(dense)(p, tokens(conf)[0]))


@every_precision
@every_mesh
@pytest.mark.parametrize("model", [model for model in MODELS if model not in (FEW_HEADS, DEEP, *CUT_IN_TIME)])
def test_the_model_is_its_dense_reference(model, shape, precision):
    hold(model, shape, precision)


@every_mesh
@pytest.mark.parametrize(("model", "precision"), [*zip(CUT_IN_TIME, cycle(["float32", "float64"]))])
def test_the_model_cut_in_time_is_its_dense_reference(model, shape, precision):
    """Its blocks are compared in both precisions (test_layers); compiling takes seconds."""
    hold(model, shape, precision)


SLICED, SEQUENCE = (next(model for model in MODELS if model.startswith(f"{kind}, gradients in")) for kind in (
    "sharded over two slices", "sequence, sharded"
))  # fmt: skip


@pytest.mark.parametrize(
    ("model", "longest"), [(FEW_HEADS, 8), (FEW_HEADS, 4), (FEW_HEADS, 2), (SLICED, 2), (SEQUENCE, 4)]
)
def test_gradients_go_home_in_one_ring_or_several(monkeypatch, model, longest):
    """Of 8 parts of dp: in one ring, two or four, and in two of each of two slices."""
    monkeypatch.setattr("shmap_tp.parallel.mesh.MAX_RING_SIZE", longest)
    hold(model, (8, 1), "float64")


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)], ids=str)
def test_each_layer_goes_back_with_a_weight_of_its_own(shape):
    """One that the layer before gathered."""
    hold(DEEP, shape, "float64")


def hold(model: str, shape: tuple[int, int], precision: str) -> None:
    conf = config(*MODELS[model])
    promotion = "standard" if precision == "float64" else "strict"
    with jax.enable_x64(precision == "float64"), jax.numpy_dtype_promotion(promotion):
        found = on_mesh(conf, shape, precision)(parameters(conf, precision), tokens(conf))
    assert all(array.dtype == precision for array in jax.tree.leaves(found))
    assert_close(found | {"gradients": by_path(found["gradients"])}, expected(model, precision), RELATIVE[precision])


def test_microbatches_are_one_batch():
    """1, 2 or 4 of them, each counting differently many targets: the same loss and gradients."""
    found = {}
    with jax.enable_x64(True):
        for parts in (1, 2, 4):
            conf = config("train.batch=32", f"train.microbatches={parts}", "train.z_loss=0.01")
            ids = tokens(conf).reshape(parts, 32 // parts, -1)
            found[parts] = on_mesh(conf, (2, 4), "float64", forward_too=False)(parameters(conf, "float64"), ids)
    assert_close(found[2], found[1], RELATIVE["float64"])
    assert_close(found[4], found[1], RELATIVE["float64"])


def test_no_position_sees_a_later_one():
    """Nor another row: the logits up to t do not change by a bit when tokens after t, or in other rows, do."""
    conf = config("model.attention_chunk=3", "model.remat=all_matmuls")
    run, params, ids = on_mesh(conf, (2, 4), "float32"), parameters(conf, "float32"), np.abs(tokens(conf))
    before = np.asarray(run(params, ids)["logits"])
    for t in (0, 3, 5):
        changed = ids.copy()
        changed[0, 2, t + 1 :] = (changed[0, 2, t + 1 :] + 1) % conf.model.vocabulary
        after = np.asarray(run(params, changed)["logits"])
        rows = np.arange(len(ids[0])) != 2
        np.testing.assert_array_equal(after[rows], before[rows])
        np.testing.assert_array_equal(after[2, : t + 1], before[2, : t + 1])
        assert np.any(after[2, t + 1] != before[2, t + 1])
