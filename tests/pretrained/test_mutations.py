"""Options of a family that are others, or parts of its model, give other logits than transformers computed.

They show how much the recorded logits say, which changes only with tests/pretrained/reference and the cases: so they
are slow ones.  (Each tensor has random numbers of its own, so that exchanged ones, or no bias, need no such test.)
Errors with dense references are in tests/test_option_mutations.py.
"""

from dataclasses import replace
from typing import Any

import jax
import pytest

from shmap_tp import api
from shmap_tp.layers.linear import Kind, Linear
from shmap_tp.layers.mlp import GATES
from shmap_tp.layers.positions import YarnScaling
from shmap_tp.pretrained.families.olmo import OLMO2
from tests.helpers.pretrained_models import logit_error, write_directory

pytestmark = pytest.mark.slow
CALL, ADD_BIAS = Linear.__call__, Linear.add_bias
AT_LEAST = 5e-5


def unlimited(gate, up):
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def norms_before(row):
    return replace(row, ours=row.ours.replace("_output_norm", "_norm"))


NORM = "shmap_tp.layers.norm.all_reduce"
SOFTMAX = "shmap_tp.layers.causal_attention._softmax"


def with_bias(self: Linear, x: Any) -> Any:
    return ADD_BIAS(self, CALL(self, x)) if self.kind == Kind.row else CALL(self, x)


REPLACED = {
    "no amplitude of yarn": ("qwen2", (YarnScaling, "amplitude", 1.0)),
    "no sinks of gpt-oss": ("gpt_oss", (SOFTMAX, lambda x, sinks_H: jax.nn.softmax(x, axis=-1))),
    "no limits of gpt-oss": ("gpt_oss", (GATES, "clamped_swiglu", unlimited)),
    "a norm over the heads of one device": ("olmo2", (NORM, lambda mean, axes: 4 * mean)),
    "the norms of OLMo before the sublayers": (
        "olmo2",
        (vars(OLMO2), "rows", tuple(map(norms_before, OLMO2.rows))),
        (vars(OLMO2), "fixed", {**OLMO2.fixed, "norm_placement": "before"}),
    ),
    "a bias added before the reduction, so mp times": (
        "gpt2",
        (Linear, "__call__", with_bias),
        (Linear, "add_bias", lambda self, y: y if self.kind == Kind.row else ADD_BIAS(self, y)),
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_the_comparison_fails_with_a_part_of_the_model_replaced(tmp_path, monkeypatch, what):
    case, *replaced = REPLACED[what]
    directory = write_directory(tmp_path / "m", case)
    for owner, *name_and_value in replaced:
        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, *name_and_value)
    assert logit_error(directory, case, mp=4) > AT_LEAST


OPTIONS = {
    "llama": "norm_epsilon=1e-4 rotary_scaling=none",
    "mistral": "window=99 window=101",
    "qwen2": "rotary_high_frequency_factor=8",
    "gemma": "embedding_scale=1.0",
    "gemma2": "layer_pattern=[global,local] attention_softcap=null attention_scale_dim=null logit_softcap=null",
    "gemma3": "rotary_scaling=none rotary_local_base=null layer_pattern=[local,global,local]",
    "olmo3": "layer_pattern=[global,local,local,local] rotary_local_base=100 window=99",
    "phi3": "rotary_dim=null",
    "gpt_oss": "window=101 layer_pattern=[global,local] rotary_scaling=yarn",
    "smollm3": "layer_pattern=[] layer_pattern=[nope,global]",
    "gpt2": "norm_epsilon=1e-4 mlp=gelu_erf",
    "gpt_neox": "rotary_dim=null rotary_pairing=neighbouring block=sequential",
    "gptj": "rotary_pairing=half",
}


@pytest.mark.parametrize(("case", "changed"), [(case, one) for case in OPTIONS for one in OPTIONS[case].split()])
def test_the_comparison_fails_with_another_option(tmp_path, monkeypatch, case, changed):
    directory = write_directory(tmp_path / "m", case)
    monkeypatch.setattr("shmap_tp.pretrained.configuration.ARCHITECTURE_KEYS", frozenset())
    load = api.load_config
    monkeypatch.setattr(api, "load_config", lambda *given, **more: load(*given, f"model.{changed}", **more))
    assert logit_error(directory, case) > AT_LEAST
