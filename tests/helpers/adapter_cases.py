"""Models with adapters on meshes, and the model in which each is merged into its matrix."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shmap_tp.config.schema import Config
from shmap_tp.training.model_functions import ModelFunctions, build_model_functions
from shmap_tp.training.step import StepFunctions, build_step_functions
from tests.helpers.assertions import assert_close, assert_replicas_agree, assert_same_bits, by_path
from tests.helpers.model_fixtures import config, mesh_of, random_like
from tests.helpers.step_fixtures import STEPS, learnable_batch, step_config

ADAPTER = ("model.adapter.rank=3", "model.adapter.alpha=6", "model.context=8", "model.kv_heads=2")
BLOCKS = {
    "all_reduce": ["model.block=parallel", "model.mlp=swiglu"],
    "sequence": ["model.block=sequential", "model.qkv_bias=true", "model.mlp_bias=true"],
    "collective_matmul": ["model.block=parallel_two_norms", "model.positions=rotary"],
}
TOKENS = np.random.default_rng(1).integers(0, 50, (8, 8)).astype(np.int32)


def step_functions(conf: Config) -> StepFunctions:
    return build_step_functions(conf, mesh_of(conf), jnp.float32)


@cache
def trained_on(
    shape: tuple[int, int], mode: str = "all_reduce", zero: str = "none", steps: int = STEPS
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """(initial parameters, the loss of each step, parameters after them)."""
    made = step_functions(step_config(shape, *ADAPTER, f"mesh.tensor_parallel={mode}", f"mesh.zero={zero}"))
    state, losses = made.init(), []
    before = by_path(state.params)
    for i in range(steps):
        tokens = jax.device_put(learnable_batch(i, made.tokens.shape), made.tokens.sharding)
        state, metrics = made.step(state, tokens)
        losses.append(float(metrics["loss"]))
    assert_replicas_agree(state.params)
    return before, np.array(losses), by_path(state.params)


def assert_base_keeps_its_bits(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    """Asserts that training changed the factors and nothing else; returns their names."""
    factors = {name for name in before if "adapter" in name}
    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    assert changed == factors, f"the base is updated, or a factor is not: {changed ^ factors}"
    return factors


def functions_of(*overrides: str) -> ModelFunctions:
    conf = config(*overrides, "model.context=8", "model.kv_heads=2")
    return build_model_functions(conf, mesh_of(conf), jnp.float32)


def placed(values: dict[str, np.ndarray], functions: ModelFunctions) -> Any:
    """The parameters of `functions` with these values."""
    paths = by_path(jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), functions.shapes))
    tree = jax.tree.unflatten(jax.tree.structure(functions.shapes), [values[path] for path in paths])
    return jax.tree.map(lambda w, to: jax.device_put(np.asarray(w, to.dtype), to.sharding), tree, functions.shapes)


def merged(values: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """The matrices, with the products of their factors added, computed here."""
    found = {path: w for path, w in values.items() if "adapter" not in path}
    for path in [path for path in values if path.endswith(".adapter.a.weight")]:
        matrix = path.replace("adapter.a.", "")
        is_stored_outputs_first = matrix.split(".")[2] in ("query", "gate", "up")
        sizes = "ldr,lfr->lfd" if is_stored_outputs_first else "ldr,lr...->ld..."
        product = np.einsum(sizes, values[path], values[path.replace(".a.", ".b.")], dtype=np.float64)
        found[matrix] = found[matrix] + scale * product
    return found


def compare_with_merged(mode: str) -> None:
    """Asserts that a fresh adapter changes no bit of the logits, and that one with random factors gives those of the
    merged matrices."""
    settings, tokens = [*BLOCKS[mode], f"mesh.tensor_parallel={mode}", "mesh.dp=2", "mesh.mp=4"], jnp.asarray(TOKENS)
    base, adapted = functions_of(*settings), functions_of(*settings, *ADAPTER)
    values = by_path(random_like(adapted.shapes, "float32", spread=0.1))
    fresh = {name: 0 * w if ".adapter.b." in name else w for name, w in values.items()}
    assert_same_bits(
        adapted.logits(placed(fresh, adapted), tokens), base.logits(placed(merged(fresh, 0), base), tokens)
    )
    found = adapted.logits(placed(values, adapted), tokens)
    assert_close(found, base.logits(placed(merged(values, 6 / 3), base), tokens), 2e-6)
