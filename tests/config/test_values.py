"""What one key may be: the rules of its field, which refuse what would overflow, fill the memory or have no effect."""

import math
from dataclasses import replace

from shmap_tp.config.compose import load
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.config.values import INT32, RULES, SCHEMES, SECTIONS, kinds_of
from tests.helpers.config_errors import FIRST, broken_rule, check_messages, composed, error_message, refusal

INTEGERS = [key for key in RULES if int in kinds_of(key)]
FLOATS = [key for key in RULES if float in kinds_of(key)]
OF_LISTS = ("mesh.tile", "train.profile")
OPTIONS = ["least", "above", "most", "below", "usual", "zero_is_null", "infinite", "schemes", "unless", "needs"]


def message(key: str, value: object) -> str:
    """The refusal of the default configuration with another value of one key."""

    def with_value(part: object, name: str, *inside: str) -> object:
        return replace(part, **{name: with_value(getattr(part, name), *inside) if inside else value})

    return refusal(validate, with_value(composed(), *key.split(".")))


def test_a_rule_of_the_schema_is_one_that_is_checked():
    assert {name for rules in RULES.values() for name in rules} == {*OPTIONS}
    assert [key for key, rules in RULES.items() for name in rules.get("needs", "").split()
            if name.partition("=")[0] not in RULES] == []  # fmt: skip
    assert list(Config.__dataclass_fields__) == list(SECTIONS)


def test_no_integer_is_unbounded():
    for key in INTEGERS:
        for exponent in (12, 30, 5000):
            found = message(key, [1, 10**exponent] if key in OF_LISTS else 10**exponent)
            assert found.startswith(f"{key}=") and str(RULES[key].get("below", INT32)) in found, key


def test_every_float_is_finite_in_float32():
    for key in FLOATS:
        for value in (1e300, 1e-300, math.nan, math.inf, -math.inf):
            never_clips = key == "optimizer.clip_norm" and value > 1e100
            assert message(key, value).startswith("accepted" if never_clips else f"{key}="), (key, value)


def test_every_number_has_a_smallest_value():
    for key in {*INTEGERS, *FLOATS} - {*OF_LISTS}:
        rules = RULES[key]
        least = rules["above"] if "above" in rules else rules.get("least", 1)
        below = least if "above" in rules else least - 1
        below = -1 if "zero_is_null" in rules else below if key in INTEGERS else float(below)
        words = f"above {least}" if "above" in rules else f"{least} or more"
        assert message(key, below).startswith(f"{key}={below} must be {words}"), key


LEAST = {
    0: "run.seed optimizer.weight_decay optimizer.final_learning_rate optimizer.learning_rate optimizer.beta1 "
    "model.init_std train.z_loss model.router_bias_rate",
    1: "mesh.dp mesh.mp train.max_sequences_per_device run.join_timeout_seconds model.kv_heads model.window "
    "model.vocabulary_multiple train.loss_chunk checkpoint.keep_every guard.loss_spike_sigmas guard.max_consecutive "
    "model.rotary_base",
    1.1: "guard.max_norm_change",
    2: "checkpoint.keep guard.window",
}
"""Least values, written out where another one would be a fault of the run."""


def test_the_least_values_of_keys_are_these():
    for least, each in LEAST.items():
        assert all(RULES[key].get("least", 1) == least for key in each.split())


def test_numbers_are_refused_with_what_they_may_be():
    rules = {
        "run.seed=4294967296": "run.seed=4294967296 must be 0 or more and below 2^32 = 4294967296",
        "optimizer.weight_decay=nan": "optimizer.weight_decay=nan must be 0 or more in float32",
        "optimizer.beta2=1.0": "optimizer.beta2=1.0 must be 0 or more and below 1 in float32",
        "optimizer.beta1=0.99999999": "optimizer.beta1=0.99999999 must be 0 or more and below 1 in float32",
        "optimizer.beta1=0.9999999 optimizer.beta2=0.9999999": "accepted",
        "optimizer.epsilon=0": "optimizer.epsilon=0.0 must be above 0 in float32; 1e-08 is usual",
        "optimizer.decay_fraction=1.1": "optimizer.decay_fraction=1.1 must be above 0 and at most 1 in float32; 0.1 is",
        "model.adapter.alpha=0": "model.adapter.alpha=0.0 must be above 0 in float32; the rank, or twice the rank, is",
        "model.vocabulary=2147483648": "model.vocabulary=2147483648 must be 1 or more and below 2^31 = 2147483648",
        "run.join_timeout_seconds=1000000": "must be 1 or more and below 1000000",
    }
    check_messages(broken_rule, rules)
    assert load(FIRST, ["model=gpt2_128b", "mesh.dp=256", "mesh.mp=1", "train.batch=4096"]).model.layers > 1


def test_an_option_that_needs_another_is_refused_without_it():
    rules = {
        "model.rotary_dim=4": "model.rotary_dim=4 needs model.positions=rotary, but model.positions=alibi (model "
        "bytes); change that, or use model.rotary_dim=null",
        "model.rotary_pairing=neighbouring": "change that, or use model.rotary_pairing=half",
        "model.rotary_scaling=llama3": "needs model.positions=rotary, but model.positions=alibi",
        "model.positions=rotary model.rotary_local_base=10": "model.rotary_local_base=10.0 needs a value of "
        "model.window, but model.window=null (model bytes); change that, or use model.rotary_local_base=null",
        "model.positions=rotary model.rotary_local_base=10 model.window=8": "accepted",
        "model.head_bias=true model.tie_embeddings=true": "change that, or use model.head_bias=false",
        "model.norm=rmsnorm model.norm_bias=true": "needs model.norm=layernorm, but model.norm=rmsnorm",
        "model.qk_norm_across_heads=true": "needs model.qk_norm=true, but model.qk_norm=false",
        "model.norm_placement=after": "model.norm_placement=after needs model.block=sequential",
        "model.expert_capacity=2": "model.expert_capacity=2.0 needs a value of model.experts, but model.experts=0",
        "model.router_bias_rate=0": "change that, or use model.router_bias_rate=null",
        "model.router_z_loss=0.1": "change that, or use model.router_z_loss=0",
        "mesh.ep=2": "mesh.ep=2 needs a value of model.experts, but model.experts=0; change that, or use mesh.ep=1",
        "mesh.fsdp_gradients=ring": "needs mesh.zero=fsdp, but mesh.zero=none; change that, or use "
        "mesh.fsdp_gradients=reduce_scatter",
        "train.dpo_label_smoothing=0.1": "needs a value of train.dpo_beta, but train.dpo_beta=null",
        "optimizer.head_rate=2 model.tie_embeddings=true": "optimizer.head_rate=2.0 needs model.tie_embeddings=false",
        "optimizer.hyperball=true model.adapter.rank=2": "optimizer.hyperball=true needs model.adapter.rank=0, but",
        "optimizer.vector_rate=-1": "optimizer.vector_rate=-1.0 must be 0 or more",
    }
    check_messages(broken_rule, rules)


PATHS = {
    "foo://bar": "{key}=foo://bar is not a path of this machine",
    "gs:/bucket/x": "{key}=gs:/bucket/x is not a path of this machine",
    "gs://": "{key}=gs:// is not a path of this machine",
    "~/x": "{key}=~/x: only a shell replaces ~; write $HOME in a command, ${{oc.env:HOME}} in a file",
    "": "{key} is empty; name a directory, or . for the working directory",
}


def test_a_directory_that_is_a_mistake_is_refused():
    for key in SCHEMES:
        for path, words in PATHS.items():
            assert words.format(key=key) in message(key, path), (key, path)
    assert message("run.name", "") == "run.name is empty; give it a value"


def test_only_data_checkpoints_and_compiled_programs_can_be_in_a_bucket():
    found = {key for key, schemes in SCHEMES.items() if schemes == ("gs",)}
    assert found == {key for key in SCHEMES if message(key, "gs://bucket/run") == "accepted"}
    assert found == {"data.dir", "checkpoint.dir", "run.compilation_cache"}
    assert "or gs://BUCKET/...; name another directory" in error_message(FIRST, "checkpoint.dir=s3://bucket/run")


def test_every_directory_of_the_schema_is_checked():
    assert {key for key in RULES if key.endswith((".dir", "_dir", "cache"))} == SCHEMES.keys()
