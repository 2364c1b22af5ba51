"""Errors in the options of pretrained architectures, each made on purpose: the dense reference detects every one.

They are those that other frameworks have had: a dropped bias, rotation of a whole head where only a part is rotated,
the other pairing, another epsilon.  (A bias added on every device of mp: tests/silent_bugs.)
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shmap_tp.layers import attention
from shmap_tp.layers.attention import Attention
from shmap_tp.layers.linear import Kind, Linear
from shmap_tp.layers.mlp import MlpLayer, swiglu
from shmap_tp.layers.norm import AfterNorm, LayerNorm, RMSNorm
from shmap_tp.layers.positions import Llama3Scaling, Rotary, Rotation
from shmap_tp.model import loss
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import MP
from tests.helpers.layer_cases import BIASES, HEAD_NORMS, KV_HEADS, TWO_NORMS, UNIT_OFFSET
from tests.helpers.loss_cases import LOSS_WITH_BIAS
from tests.helpers.model_cases import GEMMA, compare_model
from tests.helpers.mutations import compare_layer, compare_loss, mutate, of_kind, wrong


def without(_: Any) -> Any:
    return lambda self, y: y


def with_other(**fields: Any) -> Any:
    """The same function of a module with other values of these fields, or functions of the module which give them."""

    def instead(function: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            changed = jax.tree.map(lambda leaf: leaf, self)
            for name, value in fields.items():
                object.__setattr__(changed, name, value(self) if callable(value) else value)
            return function(changed, *arguments)

        return call

    return instead


def with_ones_for(name: str) -> Any:
    return with_other(**{name: lambda layer: jax.tree.map(jnp.ones_like, getattr(layer, name))})


ten_times_epsilon = with_other(epsilon=lambda norm: 10 * norm.epsilon)
swapped = lambda pairs: lambda self, *of: pairs(replace(self, neighbouring=not self.neighbouring), *of)  # noqa: E731


def one_norm_for_both(_: Any) -> Any:
    """Attention's, for the MLP, too."""
    first: list[Any] = []

    def call(self: AfterNorm, n: Any) -> Any:
        first.append(self.norm)
        return tuple(layer(first[0].affine(n)) for layer in self.layers)

    return call


def first_bias(of_this_device: Any) -> Any:
    """Where mp exceeds the number of key/value heads, several devices share one."""
    first = lambda w: lax.pcast(w[:1], MP, to="varying")  # noqa: E731
    return lambda self, w: of_this_device(self, w) if w.ndim > 2 else first(w)


IN_BLOCKS = {
    "a column without its bias": (Linear, "add_bias", of_kind(Kind.column, without), BIASES),
    "key/value heads without their biases": (Linear, "add_bias", of_kind(Kind.heads, without), KV_HEADS),
    "a row without its bias": (Linear, "add_bias", of_kind(Kind.row, without), TWO_NORMS),
    "halves in place of neighbouring pairs": (Rotation, "pairs", swapped, BIASES),
    "neighbouring pairs in place of halves": (Rotation, "pairs", swapped, TWO_NORMS),
    "rotation of the whole head": (Rotation, "size", lambda _: lambda self, head_dim: head_dim, TWO_NORMS),
    "rates without their scaling": (Llama3Scaling, "scaled", without, HEAD_NORMS),
    "ten times the epsilon of a layernorm": (LayerNorm, "_normalized", ten_times_epsilon, TWO_NORMS),
    "ten times an epsilon that is given": (RMSNorm, "_normalized", ten_times_epsilon, HEAD_NORMS),
    "ten times the epsilon of an rmsnorm": (RMSNorm, "_normalized", ten_times_epsilon, UNIT_OFFSET),
    "a norm without its bias": (LayerNorm, "_scaled", with_other(bias=None), TWO_NORMS),
    "a norm without its unit offset": (
        RMSNorm, "_scaled", lambda _: lambda self, n: n * self.scale[None, None], UNIT_OFFSET,
    ),
    "one layernorm for both sublayers": (AfterNorm, "__call__", one_norm_for_both, TWO_NORMS),
    "one rmsnorm for both sublayers": (AfterNorm, "__call__", one_norm_for_both, UNIT_OFFSET),
    "queries that are not normalised": (Attention, "mix", with_ones_for("query_norm"), HEAD_NORMS),
    "keys that are not normalised": (Attention, "mix", with_ones_for("key_norm"), HEAD_NORMS),
    "the approximate gelu": (MlpLayer, "activate", with_other(activation=lambda _: jax.nn.gelu), TWO_NORMS),
    "swiglu in place of geglu": (MlpLayer, "activate", with_other(activation=lambda _: swiglu), UNIT_OFFSET),
    "key/value biases of another head": (Linear, "of_this_device", of_kind(Kind.heads, first_bias), KV_HEADS),
}  # fmt: skip


@pytest.mark.parametrize("mistake", IN_BLOCKS)
def test_a_mistake_in_an_option_of_a_block_gives_wrong_values(monkeypatch, mistake):
    owner, name, instead, block = IN_BLOCKS[mistake]
    mutate(monkeypatch, owner, name, instead)
    with wrong:
        compare_layer(f"{block}; all_reduce", gradients=False)


def test_heads_normalised_after_their_rotation_give_wrong_values(monkeypatch):
    normalize, rotate, norms = attention._normalize_heads, Rotary.rotate, []

    def later(norm: RMSNorm, x: Any, context: Any) -> Any:
        norms.append((norm, context))
        return x

    def rotate_first(self: Rotary, x: Any, at: Any = None) -> Any:
        norm, context = norms.pop(0)
        return normalize(norm, rotate(self, x, at), context)

    monkeypatch.setattr(attention, "_normalize_heads", later)
    monkeypatch.setattr(Rotary, "rotate", rotate_first)
    with wrong:
        compare_layer(f"{HEAD_NORMS}; all_reduce", gradients=False)


@pytest.mark.parametrize(("owner", "name", "instead", "compare"), [
    (
        loss, "score", lambda score: lambda x, head: score(x, replace(head, bias=None)),
        partial(compare_loss, LOSS_WITH_BIAS),
    ),
    (Transformer, "__call__", with_other(embedding_scale=1.0), partial(compare_model, GEMMA, gradients=False)),
], ids=["a head without its bias", "an embedding without its scale"])  # fmt: skip
def test_a_mistake_in_an_option_of_a_model_gives_wrong_values(monkeypatch, owner, name, instead, compare):
    mutate(monkeypatch, owner, name, instead)
    with wrong:
        compare()
