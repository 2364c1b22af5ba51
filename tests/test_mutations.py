"""What must not pass does not: each fault is put into the code, and either fails to build or fails the parity test."""

from typing import Any

import jax
import optax
import pytest
from closeness import RELATIVE, assert_close, by_path
from jax import lax
from small import config, mesh
from test_model import MODELS, expected, on_mesh, parameters, tokens

import shmap_tp.layers.attention
import shmap_tp.layers.embedding
import shmap_tp.loss
import shmap_tp.optimizer
import shmap_tp.step
import shmap_tp.transformer
from shmap_tp.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from shmap_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from shmap_tp.layers.norm import LayerNorm
from shmap_tp.mesh import MP
from shmap_tp.step import build_programs

MODEL = "parallel layernorm gelu alibi"
SHAPE = (2, 4)


def compare() -> None:
    """The parity test of the model on one mesh, in float64."""
    conf = config(*MODELS[MODEL])
    with jax.enable_x64(True):
        found = on_mesh(conf, SHAPE, "float64")(parameters(conf, "float64"), tokens(conf))
    assert_close(found | {"gradients": by_path(found["gradients"])}, expected(MODEL, "float64"), RELATIVE["float64"])


def build_step(*overrides: str) -> Any:
    made = build_programs(config("mesh.dp=2", "mesh.mp=4", *overrides), mesh(SHAPE), jax.numpy.float32)
    return made.step.lower(made.shapes, made.tokens)


def test_without_a_fault_all_is_well():
    compare()
    build_step()


def test_a_dropped_sum_does_not_build(monkeypatch):
    monkeypatch.setattr(shmap_tp.transformer, "leave_parallel", lambda x: x)
    with pytest.raises(ValueError, match="pcast from=varying|manual axis types"):
        build_step()


def test_a_dropped_sum_over_dp_does_not_build(monkeypatch):
    monkeypatch.setattr(shmap_tp.step, "sum_over", lambda tree, axis: tree)
    with pytest.raises(ValueError, match="out_specs"):
        build_step()


def test_a_sum_dropped_from_the_loss_does_not_build(monkeypatch):
    class Silent:
        psum = staticmethod(lambda x, axis: x)

        def __getattr__(self, name: str) -> Any:
            return getattr(lax, name)

    monkeypatch.setattr(shmap_tp.loss, "lax", Silent())
    with pytest.raises((TypeError, ValueError), match=r"out_specs|manual axis types|varying|carry"):
        build_step()


@pytest.mark.parametrize(
    ("layer", "name", "axes"),
    [
        (RowParallelLinear, "weight", (None, None)),
        (RowParallelLinear, "weight", (None, MP)),
        (ColumnParallelLinear, "weight", (MP, None)),
        (VocabParallelEmbedding, "weight", (None, MP)),
        (LayerNorm, "scale", (MP,)),
    ],
    ids=str,
)
def test_a_spec_that_lies_does_not_build(monkeypatch, layer, name, axes):
    field = layer.__dataclass_fields__[name]
    monkeypatch.setattr(field, "metadata", {**field.metadata, "axes": axes})
    with pytest.raises(Exception):  # noqa: B017 - shapes that do not fit, or a type: never a program
        build_step()


def test_a_head_that_is_whole_but_said_to_be_cut_is_caught(monkeypatch):
    """Every device would score all rows as if they were its own."""
    field = VocabParallelHead.__dataclass_fields__["weight"]
    monkeypatch.setattr(field, "metadata", {**field.metadata, "axes": (None, None)})
    with pytest.raises(AssertionError, match="logits: shape"):
        compare()


def test_optax_clipping_inside_the_step_does_not_build(monkeypatch):
    """It is the norm of one device's shards: its type says so."""

    def clip(gradients: Any, limit: float) -> tuple[Any, Any]:
        clipped, _ = optax.clip_by_global_norm(limit).update(gradients, optax.EmptyState())
        return clipped, optax.tree.norm(gradients)

    monkeypatch.setattr(shmap_tp.step, "clip_by_global_norm", clip)
    with pytest.raises(ValueError, match="out_specs"):
        build_step()


@pytest.mark.parametrize("module", [shmap_tp.layers.embedding, shmap_tp.loss, shmap_tp.layers.positions], ids=str)
def test_a_permuted_order_of_shards_is_caught(monkeypatch, module):
    """Devices that count from the other end build a program, and it computes something else."""

    class Reversed:
        axis_index = staticmethod(lambda axis: lax.axis_size(axis) - 1 - lax.axis_index(axis))

        def __getattr__(self, name: str) -> Any:
            return getattr(lax, name)

    monkeypatch.setattr(module, "lax", Reversed())
    with pytest.raises(AssertionError, match="from its expected value"):
        compare()


def test_the_classic_custom_gradient_is_caught(monkeypatch):
    """f of Megatron as a custom_vjp (identity, then a psum): under the check its gradient is mp times too large."""

    @jax.custom_vjp
    def enter(x: Any) -> Any:
        return x

    enter.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(lax.pcast(dx, MP, to="varying"), MP),))
    monkeypatch.setattr(shmap_tp.transformer, "enter_parallel", enter)
    with pytest.raises(AssertionError, match="from its expected value"):
        compare()


def test_a_loss_counted_twice_is_caught(monkeypatch):
    """A sum over mp of what is whole already multiplies by mp, and nothing but the reference notices."""
    original = shmap_tp.step.vocab_parallel_cross_entropy

    def doubled(*arguments: Any) -> Any:
        nll, logz = original(*arguments)
        return lax.psum(nll, MP), logz

    monkeypatch.setattr(shmap_tp.step, "vocab_parallel_cross_entropy", doubled)
    with pytest.raises(AssertionError, match="from its expected value"):
        compare()
