"""A bias that is dropped, or added on every device of mp, differs from what transformers computed.

The other errors are in test_mutations.py, and with dense references in tests/test_option_mutations.py.
"""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp.layers.linear import RowParallelLinear
from shmap_tp.pretrained.reading import paths_of
from tests.helpers.pretrained_models import POSITIONS, reference, tokens, write_directory

MESH = {"dp": 2, "mp": 4, "tensor_parallel": "sequence"}
WITHOUT_EFFECT = {("gpt2", "blocks.attention.key.bias")}
"""Without rotary encoding it adds the same to the scores of all keys, and softmax does not change."""


def error(model: shmap_tp.Model, case: str) -> float:
    """The largest difference from the logits of transformers, as a fraction of the largest logit."""
    expected = reference(case)["logits"]
    logits = np.asarray(model.logits(tokens()[:1, :-1]))[0, POSITIONS]
    return float(np.max(np.abs(logits - expected)) / np.max(np.abs(expected)))


def without(parameters: Any, path: str) -> Any:
    """`parameters` with zeros in place of the one at `path`."""

    def found(tree: Any) -> Any:
        for name in path.split("."):
            tree = getattr(tree, name)
        return tree

    return eqx.tree_at(found, parameters, jnp.zeros_like(found(parameters)))


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "gptj", "qwen2", "llama_tied"])
def test_every_dropped_bias_is_detected(tmp_path: Path, case: str):
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "m", case), **MESH)
    biases = [path for path in paths_of(model.parameters) if path.endswith(".bias")]
    assert error(model, case) < 2e-5 and len(biases) >= 3
    for path in biases:
        found = error(model.with_parameters(without(model.parameters, path)), case)
        assert (found > 1e-3) == ((case, path) not in WITHOUT_EFFECT), (path, found)


def test_a_bias_added_before_the_reduction_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every device of mp adds it, so that it counts mp times."""
    call, add_bias = RowParallelLinear.__call__, RowParallelLinear.add_bias
    monkeypatch.setattr(RowParallelLinear, "__call__", lambda self, x: add_bias(self, call(self, x)))
    monkeypatch.setattr(RowParallelLinear, "add_bias", lambda self, y: y)
    assert error(shmap_tp.from_pretrained(write_directory(tmp_path / "m", "gpt2"), **MESH), "gpt2") > 1e-3
