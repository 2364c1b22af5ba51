"""Errors in the options of pretrained architectures, each made on purpose: the dense reference detects every one.

They are those that other frameworks have had: a dropped bias, rotation of a whole head where only a part is rotated,
the other pairing, another epsilon.  (A bias added on every device of mp: tests/silent_bugs.)
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shmap_tp.layers.attention
import shmap_tp.layers.norm
import shmap_tp.model.loss
from shmap_tp.layers.attention import Attention, KeyValueHeads
from shmap_tp.layers.embedding import score
from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.layers.mlp import GatedMlp, GeluMlp, swiglu
from shmap_tp.layers.norm import LayerNorm, RMSNorm
from shmap_tp.layers.positions import Rotary
from shmap_tp.layers.rotation import Llama3Scaling, Rotation
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.linear_protocol import AfterNorm
from shmap_tp.parallel.mesh import MP
from tests.helpers import sharded_harness
from tests.helpers.loss_cases import LOSSES
from tests.helpers.model_cases import compare_model
from tests.helpers.mutations import wrong
from tests.helpers.option_cases import OPTION_BLOCKS

PARALLEL = "parallel, biases, partial rotary in neighbouring pairs"
TWO_NORMS = "two norms, biases, exact gelu, partial rotary"
KV_HEADS = "sequential, biases with 2 kv heads, gated"
HEAD_NORMS = "sequential, head norms with 2 kv heads, scaled rotary"
UNIT_OFFSET = "two rms norms with unit offset, geglu"


def compare_block(name: str) -> None:
    sharded_harness.compare(OPTION_BLOCKS[f"{name}; all_reduce"], (2, 4), "float64")


def unchanged(self: Any, y: Any) -> Any:
    return y


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        (ColumnParallelLinear, PARALLEL),
        (KeyValueHeads, KV_HEADS),
        (RowParallelLinear, TWO_NORMS),
    ],
)
def test_a_dropped_bias_gives_wrong_values(monkeypatch, layer, block):
    monkeypatch.setattr(layer, "add_bias", unchanged)
    with wrong:
        compare_block(block)


@pytest.mark.parametrize("block", [PARALLEL, TWO_NORMS])
def test_swapped_pairs_give_wrong_values(monkeypatch, block):
    pairs = Rotation.pairs
    other = lambda self: Rotation(self.base, self.rotated, not self.neighbouring, self.scaling)  # noqa: E731
    monkeypatch.setattr(Rotation, "pairs", lambda self, head_dim: pairs(other(self), head_dim))
    with wrong:
        compare_block(block)


def test_rotating_the_whole_head_gives_wrong_values(monkeypatch):
    monkeypatch.setattr(Rotation, "size", lambda self, head_dim: head_dim)
    with wrong:
        compare_block(TWO_NORMS)


def test_rotary_without_its_scaling_gives_wrong_values(monkeypatch):
    monkeypatch.setattr(Llama3Scaling, "scaled", lambda self, rates: rates)
    with wrong:
        compare_block(HEAD_NORMS)


@pytest.mark.parametrize(("norm", "block"), [(LayerNorm, TWO_NORMS), (RMSNorm, HEAD_NORMS), (RMSNorm, UNIT_OFFSET)])
def test_an_epsilon_of_ten_times_the_size_gives_wrong_values(monkeypatch, norm, block):
    normalized = norm._normalized

    def with_larger_epsilon(self: Any, x: Any) -> Any:
        return normalized(type(self)(x.shape[-1], 10 * self.epsilon), x)

    monkeypatch.setattr(norm, "_normalized", with_larger_epsilon)
    with wrong:
        compare_block(block)


def test_a_norm_without_its_bias_gives_wrong_values(monkeypatch):
    scaled = LayerNorm._scaled
    dropped = lambda self, n: scaled(eqx.tree_at(lambda norm: norm.bias, self, None), n)  # noqa: E731
    monkeypatch.setattr(LayerNorm, "_scaled", dropped)
    with wrong:
        compare_block(TWO_NORMS)


def test_a_norm_without_its_unit_offset_gives_wrong_values(monkeypatch):
    monkeypatch.setattr(RMSNorm, "_scaled", lambda self, n: n * self.scale[None, None])
    with wrong:
        compare_block(UNIT_OFFSET)


@pytest.mark.parametrize("block", [TWO_NORMS, UNIT_OFFSET])
def test_one_norm_for_both_sublayers_gives_wrong_values(monkeypatch, block):
    """Attention's, for the MLP, too."""
    first: list[Any] = []

    def call(self: AfterNorm, n: Any) -> Any:
        first.append(self.norm)
        return tuple(layer(first[0].affine(n)) for layer in self.layers)

    monkeypatch.setattr(AfterNorm, "__call__", call)
    with wrong:
        compare_block(block)


def test_heads_normalised_after_their_rotation_give_wrong_values(monkeypatch):
    normalize, rotate, norms = shmap_tp.layers.attention._normalize_heads, Rotary.rotate, []

    def later(norm: RMSNorm, x: Any, context: Any) -> Any:
        norms.append((norm, context))
        return x

    def rotate_first(self: Rotary, x: Any, at: Any = None) -> Any:
        norm, context = norms.pop(0)
        return normalize(norm, rotate(self, x, at), context)

    monkeypatch.setattr(shmap_tp.layers.attention, "_normalize_heads", later)
    monkeypatch.setattr(Rotary, "rotate", rotate_first)
    with wrong:
        compare_block(HEAD_NORMS)


@pytest.mark.parametrize("name", ["query_norm", "key_norm"])
def test_heads_that_are_not_normalised_give_wrong_values(monkeypatch, name):
    mix = Attention.mix

    def without(self: Attention, *arguments: Any) -> Any:
        ones = jax.tree.map(jnp.ones_like, getattr(self, name))
        return mix(eqx.tree_at(lambda attention: getattr(attention, name), self, ones), *arguments)

    monkeypatch.setattr(Attention, "mix", without)
    with wrong:
        compare_block(HEAD_NORMS)


@pytest.mark.parametrize(
    ("mlp", "field", "value", "block"),
    [(GeluMlp, "exact", False, TWO_NORMS), (GatedMlp, "gated", swiglu, UNIT_OFFSET)],
)
def test_another_activation_gives_wrong_values(monkeypatch, mlp, field, value, block):
    activate = mlp.activate

    def with_another(self: Any, *hidden: Any) -> Any:
        changed = jax.tree.map(lambda leaf: leaf, self)
        object.__setattr__(changed, field, value)
        return activate(changed, *hidden)

    monkeypatch.setattr(mlp, "activate", with_another)
    with wrong:
        compare_block(block)


def test_key_value_biases_of_the_wrong_head_give_wrong_values(monkeypatch):
    """Where mp exceeds the number of key/value heads, several devices share one."""
    of_this_device = KeyValueHeads._of_this_device

    def first_bias(self: KeyValueHeads, w: Any, dim: int) -> Any:
        return of_this_device(self, w, dim) if dim else lax.pcast(w[:1], MP, to="varying")

    monkeypatch.setattr(KeyValueHeads, "_of_this_device", first_bias)
    with wrong:
        compare_block(KV_HEADS)


def test_a_head_without_its_bias_gives_wrong_values(monkeypatch):
    dropped = lambda x, projection: score(x, replace(projection, bias=None))  # noqa: E731
    monkeypatch.setattr(shmap_tp.model.loss, "score", dropped)
    (case,) = [name for name in LOSSES if name.startswith("with a bias")]
    with wrong:
        sharded_harness.compare(LOSSES[case], (2, 4), "float64")


def test_an_embedding_without_its_scale_gives_wrong_values(monkeypatch):
    call = Transformer.__call__

    def unscaled(self: Transformer, *arguments: Any) -> Any:
        changed = jax.tree.map(lambda leaf: leaf, self)
        object.__setattr__(changed, "embedding_scale", 1.0)
        return call(changed, *arguments)

    monkeypatch.setattr(Transformer, "__call__", unscaled)
    with wrong:
        compare_model("gemma", (2, 2), "float32")
