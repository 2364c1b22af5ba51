"""Numbers that would overflow or fill the memory, and paths that no file system has, are refused with their bound."""

import math
from dataclasses import replace

import pytest

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
    value_of,
)
from shmap_tp.errors import UserError
from tests.helpers.config_errors import error_message
from tests.helpers.run_fixtures import FIRST

INTEGERS = [key for section in SECTIONS for key in keys(section) if int in kinds_of(key)]
FLOATS = [key for section in SECTIONS for key in keys(section) if float in kinds_of(key)]


@pytest.fixture(scope="module")
def refusal():
    """A function: the message about the default configuration with another value of one key."""
    config = load(FIRST, [])

    def with_value(part: object, name: str, *inside: str, value: object) -> object:
        return replace(part, **{name: with_value(getattr(part, name), *inside, value=value) if inside else value})

    def message(key: str, value: object) -> str:
        with pytest.raises(UserError) as caught:
            validate(with_value(config, *key.split("."), value=value))
        return str(caught.value)

    return message


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [10**12, 10**30, 10**5000], ids=["10^12", "10^30", "10^5000"])
def test_no_integer_is_unbounded(refusal, key, value):
    message = refusal(key, [1, value] if key in ("mesh.tile", "train.profile") else value)
    bound = BOUND.get(key, INT32)
    assert message.startswith(f"{key}=") and "is too large; it must be below " in message and str(bound) in message


@pytest.mark.parametrize("value", [1e300, 1e-300, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", FLOATS)
def test_every_float_is_finite_in_float32(refusal, key, value):
    if (key, value) == ("optimizer.clip_norm", math.inf):
        assert load(FIRST, ["optimizer.clip_norm=inf"]).optimizer.clip_norm == value  # never clips
    else:
        assert refusal(key, value).startswith(f"{key}=")


@pytest.mark.parametrize("key", sorted({*INTEGERS, *FLOATS} - OTHER_RULES))
def test_every_number_has_a_smallest_value(refusal, key):
    least = MINIMUM.get(key, 1)
    below = -1 if key in ZERO_IS_NULL else least - 1 if key in INTEGERS else least - 0.01
    assert refusal(key, below) == f"{key}={below} is too small; it must be {least} or more"
    assert {*MINIMUM, *OTHER_RULES, *ZERO_IS_NULL} <= {*INTEGERS, *FLOATS}


@pytest.mark.parametrize("key", ["optimizer.beta1", "optimizer.beta2"])
def test_a_decay_rate_that_is_1_in_float32_is_refused(key):
    assert f"{key}=0.99999999 is 1 in float32, which divides by 0" in error_message(FIRST, f"{key}=0.99999999")
    assert value_of(load(FIRST, [f"{key}=0.9999999"]), key) == 0.9999999


@pytest.mark.parametrize("size", ["layers=60000 model.width=1000000", "width=16000000 model.vocabulary=2000000000"])
def test_a_model_that_no_machine_can_hold_is_refused(size):
    message = error_message(FIRST, *f"model.{size}".split())
    assert message.startswith("model bytes has ") and "weights, more than 1e+13; lower model.layers=" in message


def test_the_largest_models_of_conf_are_within_the_bounds():
    assert load(FIRST, ["model=gpt2_128b", "mesh.dp=256", "mesh.mp=1", "train.batch=4096"]).model.layers > 1


# Paths

PATHS = {
    "foo://bar": "{key}=foo://bar is not a path of this machine",
    "file:///tmp/x": "{key}=file:///tmp/x is not a path of this machine",
    "gs:/bucket/x": "{key}=gs:/bucket/x is not a path of this machine",
    "gs://": "{key}=gs:// is not a path of this machine",
    "~/x": "{key}=~/x: only a shell replaces ~; write $HOME on the command line, ${{oc.env:HOME}} in a file",
    "x/" + 256 * "a": "has a name of 256 bytes; file systems allow 255, choose a shorter one",
    128 * "ü": "has a name of 256 bytes; file systems allow 255",
    "a\0b": r"{key}=a\x00b has a NUL, which no path can have; remove it",
    "": "{key} is empty, which would be the working directory; ",
}


@pytest.mark.parametrize("key", SCHEMES)
@pytest.mark.parametrize("path", PATHS)
def test_a_directory_that_cannot_exist_is_refused(refusal, key, path):
    assert PATHS[path].format(key=key) in refusal(key, path)


@pytest.mark.parametrize("key", SCHEMES)
def test_a_path_of_more_than_4000_bytes_is_refused(refusal, key):
    assert "has 4500 bytes; 4000 are allowed, choose a shorter one" in refusal(key, "ü/" * 1500)


def test_only_checkpoints_can_be_in_a_bucket():
    assert load(FIRST, ["checkpoint.dir=gs://bucket/run"]).checkpoint.dir == "gs://bucket/run"
    assert "run.dir=gs://b/r is not a path of this machine; name another" in error_message(FIRST, "run.dir=gs://b/r")
    assert "or gs://BUCKET/...; name another directory" in error_message(FIRST, "checkpoint.dir=s3://bucket/run")


def test_every_directory_of_the_schema_is_checked():
    found = {key for section in SECTIONS for key in keys(section) if key.endswith((".dir", "cache"))}
    assert found == SCHEMES.keys()
    assert list(Config.__dataclass_fields__) == list(SECTIONS)
