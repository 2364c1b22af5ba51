"""Introducing errors on purpose, and the three ways in which they are detected.

refused   the program does not type-check, or its shapes do not match, whatever its inputs
wrong     it runs, and the comparison with the dense reference fails
wasteful  its values are right, and the check of its collectives fails
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shmap_tp.layers.linear import DECLARED, Kind
from shmap_tp.parallel.mesh import MP, make_mesh
from shmap_tp.training.step import build_step_functions
from tests.helpers import sharded_harness
from tests.helpers.communication_checks import check_layer
from tests.helpers.layer_cases import LAYERS, OPTION_BLOCKS
from tests.helpers.loss_cases import LOSSES, PADDED
from tests.helpers.model_fixtures import config

refused_by_type = pytest.raises(
    (TypeError, ValueError),
    match=r"manual axis types|require replication which can't be statically|unexpected JAX type|Unsupported pcast",
)
refused_by_shape = pytest.raises((TypeError, ValueError), match=r"shape|divisible|divide|Size of label|Type-check")
wrong = pytest.raises(AssertionError, match="from its expected value")
wasteful = pytest.raises(AssertionError)


def compare_layer(layer: str, shape: tuple[int, int] = (2, 4), *, gradients: bool = True) -> None:
    """Asserts that one of LAYERS or OPTION_BLOCKS equals its dense reference in float64."""
    sharded_harness.compare((LAYERS | OPTION_BLOCKS)[layer], shape, "float64", gradients=gradients)


def compare_loss(loss: str = f"{PADDED}, chunks of 3") -> None:
    """Asserts that one of LOSSES equals its dense reference; by default one with padding, ignored targets and several
    chunks."""
    sharded_harness.compare(LOSSES[loss], (2, 4), "float64")


def is_wasteful(layer: str) -> None:
    """Asserts that the values of one of LAYERS are right, and that it communicates otherwise than it should."""
    compare_layer(layer)
    with wasteful:
        check_layer(layer, (2, 4))


def trace_step(*settings: str) -> Any:
    """The jaxpr of a step; nothing is compiled."""
    conf = config("mesh.dp=2", "mesh.mp=4", "train.batch=16", "train.microbatches=2", *settings)
    made = build_step_functions(conf, make_mesh(conf.mesh), jnp.float32)
    return jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr


def mutate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, instead: Callable[[Any], Any]) -> None:
    """Replace `name` of a module or type by `instead(what it is)`."""
    monkeypatch.setattr(owner, name, instead(getattr(owner, name)))


def keep_partial(_: Any) -> Callable[[Any], Any]:
    """A cast to varying over mp, in place of `mark_varying` or `enter`, whose gradient is that of one device."""
    share = jax.custom_vjp(lambda w: lax.pcast(w, MP, to="varying"))
    share.defvjp(lambda w: (lax.pcast(w, MP, to="varying"), None), lambda _, dw: (dw,))
    return lambda tree, axes=MP: jax.tree.map(share, tree)


def with_lax(monkeypatch: pytest.MonkeyPatch, module: Any, **replacements: Any) -> None:
    """Replace functions of jax.lax in `module` only."""
    monkeypatch.setattr(module, "lax", SimpleNamespace(**{**vars(lax), **replacements}))


def declare(monkeypatch: pytest.MonkeyPatch, layer: type | Kind, *axes: str | None) -> None:
    """Let `layer`, or linear layers of a kind, declare their first parameter with these axes."""
    changed = partial(replace, axes=axes, replicate_if_fewer=False)
    if isinstance(layer, Kind):
        weight, bias = DECLARED[layer]
        monkeypatch.setitem(DECLARED, layer, (changed(weight), bias))
        return
    field = next(field for field in layer.__dataclass_fields__.values() if "declaration" in field.metadata)
    declared = field.metadata["declaration"]
    monkeypatch.setattr(field, "metadata", {**field.metadata, "declaration": lambda module: changed(declared(module))})


def of_kind(kind: Kind, instead: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`instead` for `mutate`, of a method of `Linear`, in layers of this kind alone."""

    def of(method: Any) -> Any:
        mutated = instead(method)
        return lambda self, *arguments: (mutated if self.kind == kind else method)(self, *arguments)

    return of
