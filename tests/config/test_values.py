"""Numbers that would overflow or fill the memory, and paths that no file system has, are refused with their bound."""

import math
from dataclasses import replace

from shmap_tp.config.compose import load
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.config.values import (
    BOUND,
    INT32,
    MINIMUM,
    OTHER_RULES,
    SCHEMES,
    SECTIONS,
    ZERO_IS_NULL,
    keys,
    kinds_of,
)
from tests.helpers.config_errors import FIRST, broken_rule, check_messages, composed, error_message, refusal

INTEGERS = [key for section in SECTIONS for key in keys(section) if int in kinds_of(key)]
FLOATS = [key for section in SECTIONS for key in keys(section) if float in kinds_of(key)]


def message(key: str, value: object) -> str:
    """The refusal of the default configuration with another value of one key."""

    def with_value(part: object, name: str, *inside: str) -> object:
        return replace(part, **{name: with_value(getattr(part, name), *inside) if inside else value})

    return refusal(validate, with_value(composed(), *key.split(".")))


def test_no_integer_is_unbounded():
    for key in INTEGERS:
        for exponent in (12, 30, 5000):
            value = [1, 10**exponent] if key in ("mesh.tile", "train.profile") else 10**exponent
            found = message(key, value)
            assert found.startswith(f"{key}=") and "is too large; it must be below " in found, key
            assert str(BOUND.get(key, INT32)) in found, key


def test_every_float_is_finite_in_float32():
    for key in FLOATS:
        for value in (1e300, 1e-300, math.nan, math.inf, -math.inf):
            never_clips = (key, value) == ("optimizer.clip_norm", math.inf)
            assert message(key, value).startswith("accepted" if never_clips else f"{key}="), (key, value)


def test_every_number_has_a_smallest_value():
    for key in {*INTEGERS, *FLOATS} - OTHER_RULES:
        least = MINIMUM.get(key, 1)
        below = -1 if key in ZERO_IS_NULL else least - 1 if key in INTEGERS else least - 0.01
        assert message(key, below) == f"{key}={below} is too small; it must be {least} or more"
    assert {*MINIMUM, *OTHER_RULES, *ZERO_IS_NULL} <= {*INTEGERS, *FLOATS}


TOO_SMALL = {
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
    for least, each in TOO_SMALL.items():
        for key in each.split():
            below = -5 if key in ZERO_IS_NULL else least - 1 if key in INTEGERS else least - 0.1
            assert message(key, below) == f"{key}={below} is too small; it must be {least} or more"


def test_numbers_are_refused_with_what_they_may_be():
    rules = {
        "run.seed=4294967296": "run.seed=4294967296 is too large; it must be below 2^32 = 4294967296",
        "optimizer.weight_decay=nan": "optimizer.weight_decay=nan is not a number; give one of 0 or more",
        "optimizer.learning_rate=inf": "optimizer.learning_rate=inf is not finite; give a number",
        "optimizer.beta2=1.0": "optimizer.beta2=1.0 is too large; it must be below 1",
        "optimizer.beta1=0.99999999": "optimizer.beta1=0.99999999 is 1 in float32, which divides by 0",
        "optimizer.beta2=0.99999999": "optimizer.beta2=0.99999999 is 1 in float32, which divides by 0",
        "optimizer.beta1=0.9999999 optimizer.beta2=0.9999999": "accepted",
        "model.vocabulary=2147483648": "model.vocabulary=2147483648 is too large; it must be below 2^31 = 2147483648",
        "guard.window=9999999999": "guard.window=9999999999 is too large; it must be below 2^31 = 2147483648",
    }
    check_messages(broken_rule, rules)
    for size in ("layers=60000 model.width=1000000", "width=16000000 model.vocabulary=2000000000"):
        found = broken_rule(*f"model.{size}".split())
        assert found.startswith("model bytes has ") and "weights, more than 1e+13; lower model.layers=" in found
    assert load(FIRST, ["model=gpt2_128b", "mesh.dp=256", "mesh.mp=1", "train.batch=4096"]).model.layers > 1


PATHS = {
    "foo://bar": "{key}=foo://bar is not a path of this machine",
    "file:///tmp/x": "{key}=file:///tmp/x is not a path of this machine",
    "gs:/bucket/x": "{key}=gs:/bucket/x is not a path of this machine",
    "gs://": "{key}=gs:// is not a path of this machine",
    "~/x": "{key}=~/x: only a shell replaces ~; write $HOME on the command line, ${{oc.env:HOME}} in a file",
    "x/" + 256 * "a": "has a name of 256 bytes; file systems allow 255, choose a shorter one",
    128 * "ü": "has a name of 256 bytes; file systems allow 255",
    "ü/" * 1500: "has 4500 bytes; 4000 are allowed, choose a shorter one",
    "a\0b": r"{key}=a\x00b has a NUL, which no path can have; remove it",
    "": "{key} is empty, which would be the working directory; ",
}


def test_a_directory_that_cannot_exist_is_refused():
    for key in SCHEMES:
        for path, words in PATHS.items():
            assert words.format(key=key) in message(key, path), (key, path)


def test_only_data_and_checkpoints_can_be_in_a_bucket():
    for key, schemes in SCHEMES.items():
        assert (
            (message(key, "gs://bucket/run") == "accepted")
            == (schemes == ("gs",))
            == (key in ("data.dir", "checkpoint.dir"))
        )
    assert "run.dir=gs://b/r is not a path of this machine; name another" in message("run.dir", "gs://b/r")
    assert "or gs://BUCKET/...; name another directory" in error_message(FIRST, "checkpoint.dir=s3://bucket/run")


def test_every_directory_of_the_schema_is_checked():
    found = {key for section in SECTIONS for key in keys(section) if key.endswith((".dir", "cache"))}
    assert found == SCHEMES.keys()
    assert list(Config.__dataclass_fields__) == list(SECTIONS)
