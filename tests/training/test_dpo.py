"""Direct preference optimisation: the published formula on every mesh, and a preference that is learned."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.model.adapters import is_factor
from shmap_tp.training import dpo
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import assert_close, by_path
from tests.helpers.model_cases import model_on_mesh
from tests.helpers.model_fixtures import config, mesh_of, random_like
from tests.helpers.mutations import wrong
from tests.helpers.step_fixtures import step_config

BETA, SMOOTHING, T = 0.3, 0.1, 16
SETTINGS = (f"train.dpo_beta={BETA}", "model.adapter.rank=3", f"model.context={T}", "model.kv_heads=2")
LENGTHS = [(4, 5, 3, 4), (6, 7), (3, 3, 3, 3), (5, 3, 3, 4), (8, 8), (3, 4, 4, 3), (3, 3), (4, 4, 4, 4)]
"""Tokens of the documents of each row: one pair or two, then filling, a document for each token."""


def settings_of(*overrides: str) -> Config:
    return config(*SETTINGS, f"train.dpo_label_smoothing={SMOOTHING}", *overrides)


@cache
def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments)[B T+1]; the first two tokens of each document are its prompt."""
    rng, tokens, segments = np.random.default_rng(seed), [], []
    for lengths in LENGTHS:
        filling = T + 1 - sum(lengths)
        numbers = np.repeat(np.arange(len(lengths) + filling), [*lengths, *[1] * filling])
        place = np.concatenate([np.arange(n) for n in [*lengths, *[1] * filling]])
        ids = rng.integers(0, 50, T + 1)
        tokens.append(np.where((place < 2) | (numbers >= len(lengths)), ~ids, ids))
        segments.append(numbers)
    return np.array(tokens, np.int32), np.array(segments, np.int32)


def published(params, without, logits, normalized: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Equation 7 of Rafailov et al., with label smoothing, from all logits, pair by pair; `normalized`: with means over
    the tokens of each answer."""
    tokens, segments = rows()
    ids, targets = np.where(tokens < 0, ~tokens, tokens)[:, :-1], tokens[:, 1:]
    both = params, jax.lax.stop_gradient(without)
    log_p, log_r = (jax.nn.log_softmax(logits(p, ids, segments[:, :-1])[..., :50]) for p in both)

    def of(log, row: int, document: int) -> jax.Array:
        inside = (segments[row, :-1] == document) & (segments[row, 1:] == document) & (targets[row] >= 0)
        places = np.flatnonzero(inside)
        return log[row, places, targets[row, places]]

    losses, margins, of_tokens = [], [], []
    for row, lengths in enumerate(LENGTHS):
        for chosen in range(0, len(lengths), 2):
            of_tokens.append([of(log_p, row, each) for each in (chosen, chosen + 1)])
            ratios = [tokens - of(log_r, row, chosen + i) for i, tokens in enumerate(of_tokens[-1])]
            ratio = [jnp.mean(each) if normalized else jnp.sum(each) for each in ratios]
            margins.append(BETA * (ratio[0] - ratio[1]))
            smooth = (1 - SMOOTHING) * jnp.log(jax.nn.sigmoid(margins[-1]))
            losses.append(-smooth - SMOOTHING * jnp.log(jax.nn.sigmoid(-margins[-1])))
    margin = jnp.stack(margins)
    metrics = {"reward_accuracy": jnp.mean(margin > 0, dtype=float), "reward_margin": jnp.mean(margin)}
    for name, answers in zip(("chosen", "rejected"), zip(*of_tokens, strict=True), strict=True):
        metrics[f"{name}_log_probability"] = sum(map(jnp.sum, answers)) / len(answers)
        metrics[f"{name}_log_probability_per_token"] = sum(map(jnp.mean, answers)) / len(answers)
    return jnp.mean(jnp.stack(losses)), metrics


@cache
def expected(normalized: bool) -> tuple[dict, dict]:
    """(random parameters, {loss, gradients, metrics} by the published formula), in float64."""
    conf = settings_of("mesh.dp=1", "mesh.mp=1")
    with jax.enable_x64(True):
        return _expected(conf, normalized)


def _expected(conf: Config, normalized: bool) -> tuple[dict, dict]:
    functions = build_model_functions(conf, mesh_of(conf), jnp.float64)
    params = random_like(functions.shapes, "float64", spread=0.25)
    without = jax.tree_util.tree_map_with_path(lambda path, w: np.zeros_like(w) if is_factor(path) else w, params)
    formula = partial(published, without=without, logits=functions.logits, normalized=normalized)
    (loss, metrics), gradients = jax.jit(jax.value_and_grad(formula, has_aux=True))(params)
    return params, {"loss": loss, "gradients": gradients, **metrics}


def compare(
    shape: tuple[int, int],
    mode: str = "all_reduce",
    zero: str = "none",
    microbatches: int = 1,
    normalized: bool = False,
) -> None:
    """Asserts that loss, metrics and gradients of the factors on a mesh are those of the formula."""
    params, wanted = expected(normalized)
    how = f"train.dpo_length_normalized={str(normalized).lower()}"
    conf = settings_of(f"mesh.tensor_parallel={mode}", f"mesh.zero={zero}", how)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        run = model_on_mesh(conf, shape, "float64", logits=False)
        found = run(params, *(x.reshape(microbatches, -1, T + 1) for x in rows()))
    names = ("loss", *dpo.METRICS)
    values = dict(zip(names, found["loss"], strict=True))
    for name in names:
        assert_close(values[name], wanted[name], 1e-9)
    gradients = by_path(found["gradients"])
    for path, gradient in by_path(wanted["gradients"]).items():
        if "adapter" in path:
            assert_close(gradients[path], gradient, 1e-9)


PLACES = [
    ((1, 1), "all_reduce", "none", 1, True), ((2, 2), "sequence", "fsdp", 2, False),
    *[pytest.param(*place, marks=pytest.mark.slow) for place in [
        ((1, 4), "collective_matmul", "none", 1, True), ((4, 1), "all_reduce", "zero1", 2, False),
    ]],
]  # fmt: skip


@pytest.mark.parametrize(("shape", "mode", "zero", "microbatches", "normalized"), PLACES, ids=str)
def test_loss_and_gradients_are_those_of_the_published_formula(shape, mode, zero, microbatches, normalized):
    compare(shape, mode, zero, microbatches, normalized)


def rejected_is_preferred(monkeypatch):
    document = dpo._document
    monkeypatch.setattr(dpo, "_document", lambda batch: (*document(batch)[:2], 1 - document(batch)[2]))


def reference_has_the_adapter(monkeypatch):
    monkeypatch.setattr(dpo, "without_adapters", lambda tree: tree)


@pytest.mark.parametrize("mutate", [rejected_is_preferred, reference_has_the_adapter])
def test_mutations_are_noticed(monkeypatch, mutate):
    mutate(monkeypatch)
    with wrong:
        compare((1, 1))


def test_an_adapter_learns_a_preference_beside_a_base_that_keeps_its_bits():
    conf = step_config((2, 2), *SETTINGS, "train.z_loss=0", "train.batch=8", "train.microbatches=1")
    made = build_step_functions(conf, mesh_of(conf), jnp.float32)
    tokens, segments = (jax.device_put(x[None], made.tokens.sharding) for x in rows())
    state, seen = made.init(), []
    before = by_path(state.params)
    for _ in range(50):
        state, metrics = made.step(state, tokens, segments)
        seen.append({name: float(value) for name, value in metrics.items()})
    assert abs(seen[0]["loss"] - np.log(2)) < 1e-6 and seen[0]["reward_margin"] == 0
    assert seen[-1]["reward_accuracy"] == 1 and seen[-1]["reward_margin"] > 1 and seen[-1]["loss"] < 0.3
    assert seen[-1]["chosen_log_probability"] > seen[0]["chosen_log_probability"]
    loss, pairs, _ = made.evaluate(state.params, tokens, segments)
    assert pairs == sum(len(lengths) // 2 for lengths in LENGTHS) and loss < seen[-1]["loss"]
    changed = {path for path, w in by_path(state.params).items() if not np.array_equal(w, before[path])}
    assert changed and all("adapter" in path for path in changed)


def test_rows_without_documents_are_refused():
    conf = step_config((1, 1), *SETTINGS, "train.z_loss=0")
    made = build_step_functions(conf, mesh_of(conf), jnp.float32)
    with pytest.raises(UserError, match=r"the rows have no documents; give segments"):
        made.step.trace(made.shapes, made.tokens)
