"""Composition of the configuration from a file and overrides, and the messages for input that cannot be used."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shmap_tp.config import compose
from shmap_tp.config.compose import CONF, load, to_dict, to_yaml
from shmap_tp.config.schema import Config, Precision
from shmap_tp.errors import UserError
from tests.helpers import model_fixtures
from tests.helpers.config_errors import error_message
from tests.helpers.run_fixtures import FIRST

BASE = Path(FIRST).read_text()
UNCLOSED_LINE, DUPLICATE_LINE = len(BASE.splitlines()) + 2, BASE.splitlines().index("  steps: 300") + 2
"""Line numbers in the messages about an unclosed bracket and a duplicate key."""
MODELS, DATA = (sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in ("model", "data"))


@pytest.mark.parametrize("model", [model for model in MODELS if model != "pretrained"])  # it needs a directory
def test_every_model_loads_and_its_saved_configuration_loads_equal(tmp_path, model):
    config = load(FIRST, [f"model={model}", "mesh.dp=1", "mesh.mp=1", "train.precision=bfloat16", "run.seed=7"])
    assert config.model.name == model and config.run.seed == 7 and config.train.precision is Precision.bfloat16
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load(str(tmp_path / "config.yaml"), [])
    assert again == config and type(again) is Config
    assert to_dict(again) == to_dict(config)


@pytest.mark.parametrize("data", DATA)
def test_every_data_source_loads(data):
    assert load(FIRST, [f"data={data}"]).data.name == data


def test_the_shortcut_of_the_tests_composes_what_the_command_does():
    """`model_fixtures.config` leaves Hydra out; values of every type."""
    given = ["model=bytes_llama", "mesh.dp=4", "mesh.mp=2", "mesh.tile=[1,2,1]", "mesh.zero=none"]
    given += ["model.offload=[input,gate]", "model.remat=all_matmuls", "model.tie_embeddings=true", "log.wandb=false"]
    given += ["optimizer.learning_rate=1e-3", "optimizer.weight_decay=0.02", "model.window=null"]
    small = [f"model.{setting}" for setting in model_fixtures.MODEL.split()]
    expected = load(FIRST, ["model=test", *small, "train.batch=8", *given])
    found = model_fixtures.config(*given)
    assert found == expected and to_dict(found) == to_dict(expected)


def test_an_interpolated_value_follows_its_source():
    config = load(FIRST, ["run.name=other"])
    assert (config.run.dir, config.checkpoint.dir) == ("runs/other", "runs/other/checkpoints")


@pytest.mark.parametrize("given, value", [("1e-3", 1e-3), ("1", 1.0), ("0.5", 0.5)])
def test_a_float_can_be_written_in_scientific_or_integer_notation(given, value):
    assert load(FIRST, [f"optimizer.learning_rate={given}"]).optimizer.learning_rate == value


def test_steps_can_be_given_as_tokens():
    """4096 tokens are a step."""
    given = ["train.steps=1.5M tokens", "optimizer.decay_steps=12K tokens", "optimizer.warmup_steps=4097 tokens"]
    config = load(FIRST, given)
    assert (config.train.steps, config.optimizer.decay_steps, config.optimizer.warmup_steps) == (367, 3, 2)
    with pytest.raises(UserError, match=r"train\.steps=1M tokens needs train\.batch and model\.context"):
        load(FIRST, ["train.steps=1M tokens", "train.batch=0"])
    with pytest.raises(UserError, match=r"train\.steps=1M words must be of type int"):
        load(FIRST, ["train.steps=1M words"])


def test_a_value_with_special_characters_can_be_quoted():
    assert load(FIRST, ['run.dir="a,b=(c)"']).run.dir == "a,b=(c)"


def test_a_file_outside_conf_can_use_the_groups_of_conf(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(BASE.replace("model: bytes", "model: 6b"))
    assert load(str(file), ["mesh.mp=1"]).model.name == "6b"
    assert load(str(file), ["model=test", "data=minipile"]).model.name == "test"


def test_a_file_outside_conf_can_have_groups_of_its_own(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text((CONF / "model" / "bytes.yaml").read_text() + "\n")
    (tmp_path / "run.yaml").write_text(BASE.replace("model: bytes", "model: mine"))
    own = load(str(tmp_path / "run.yaml"), [])
    assert own == load(FIRST, [])
    assert load(str(tmp_path / "run.yaml"), ["model=test"]).model.name == "test"


@pytest.mark.parametrize("name", ["plain", "with space", "a,b=(c) [d] {e}", "it's", 'say "x"', "ünï"])
def test_the_path_of_the_configuration_can_contain_any_characters(tmp_path, monkeypatch, name):
    conf = tmp_path / name / "conf"
    for file in CONF.rglob("*.yaml"):
        copy = conf / file.relative_to(CONF)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    monkeypatch.setattr(compose, "CONF", conf)
    assert load(str(conf / "config.yaml"), ["model=test"]).model.name == "test"
    (tmp_path / name / "mine.v2.yaml").write_text(BASE)
    assert load(str(tmp_path / name / "mine.v2.yaml"), ["model=test"]).model.name == "test"


def test_a_key_missing_in_the_file_can_be_given_on_the_command_line(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text(BASE.replace("  z_loss: 0.0\n", "").replace("  seed: 0\n", ""))
    assert error_message(file) == f"{file}: no value for run.seed, train.z_loss; give each in the file or as key=value"
    config = load(str(file), ["train.z_loss=1e-4", "run.seed=3"])
    assert config.train.z_loss == 1e-4 and config.run.seed == 3


OVERRIDES = {
    # unknown keys: the closest known one, by its full name or its last part
    "train.stepz=3": "unknown key train.stepz; did you mean train.steps?",
    "trian.steps=3": "unknown key trian; did you mean train?",
    "stpes=3": "unknown key stpes; did you mean train.steps?",
    "modle=test": "unknown key modle; did you mean model?",
    "model.width.x=3": "model.width={'x': 3} must be of type int",
    "train.batch_size=1": "unknown key train.batch_size; did you mean train.batch?",
    "train.learning_rate=1": "unknown key train.learning_rate; did you mean optimizer.learning_rate?",
    "model.dropout=1": "unknown key model.dropout; shmap_tp/config/schema.py lists all keys",
    "data.pack=1": "unknown key data.pack; shmap_tp/config/schema.py lists all keys",
    "mesh.fsdp=1": "unknown key mesh.fsdp; shmap_tp/config/schema.py lists all keys",
    "frobnicate=1": "unknown key frobnicate; shmap_tp/config/schema.py lists all keys",
    # unknown options
    "model=nope": f"model=nope: there is no such model; use one of {', '.join(MODELS)}",
    "data=nope": f"data=nope: there is no such data; use one of {', '.join(DATA)}",
    # wrong types
    "train.steps=many": "train.steps=many must be of type int",
    "train.steps=1.5": "train.steps=1.5 must be of type int",
    "train.steps=null": "train.steps=None must be of type int",
    "train.steps=": "train.steps= must be of type int",
    "optimizer.beta1=big": "optimizer.beta1=big must be of type float",
    "log.wandb=maybe": "log.wandb=maybe must be of type bool",
    "checkpoint.keep_every=x": "checkpoint.keep_every=x must be of type int | None",
    "model.block=serial": "model.block=serial must be one of parallel, sequential, parallel_two_norms",
    "train=5": "train is a group of keys, not a value; set one of them, for example train.steps=...",
    "mesh=null": "mesh is a group of keys, not a value; set one of them, for example mesh.dp=...",
    # missing values
    "train.steps=???": "no value for train.steps; give each in the file or as key=value",
    "run.dir=${nope}": "run.dir: Interpolation key 'nope' not found",
    # not key=value
    "+train.new=1": "+train.new=1: keys cannot be added or deleted; write key=value",
    "++train.steps=1": "++train.steps=1: keys cannot be added or deleted; write key=value",
    "~train.steps": "~train.steps: keys cannot be added or deleted; write key=value",
    "~model": "~model: keys cannot be added or deleted; write key=value",
    "train.steps": "'train.steps' is not key=value; write for example train.steps=400",
    "conf/config.yaml": "'conf/config.yaml' is not key=value; write --cfg conf/config.yaml",
    "train.steps 3": "'train.steps 3' is not key=value; write for example train.steps=400",
    "=3": "'=3' is not key=value; write for example train.steps=400",
    # characters with a meaning in Hydra's grammar
    "run.name=a,b": "'run.name=a,b'; quote a value that has special characters: 'key=\"a,b\"'",
    "run.name=a=b": "run.name=a=b: mismatched input '=' expecting <EOF>; quote a value",
    "run.name=range(1,3)": "'run.name=range(1,3)' requires --multirun; quote a value",
}  # fmt: skip


@pytest.mark.parametrize("override", OVERRIDES)
def test_the_message_for_a_bad_override_states_the_problem(override):
    assert OVERRIDES[override] in error_message(FIRST, override)


@pytest.mark.parametrize("override", ["train.stepz=3", "trian.steps=3", "train.steps=many", "run.dir=${nope}"])
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(override):
    assert error_message(FIRST, "train.batch=8", override).startswith(OVERRIDES[override])


FILES = {
    "a bracket that is never closed": (
        BASE + "more: [a, b\n", f", line {UNCLOSED_LINE}: invalid YAML, expected ',' or ']'"
    ),
    "a tab": ("run:\n\tname: x\n", ", line 2: invalid YAML, found character '\\t'"),
    "a duplicate key": (
        BASE.replace("  steps: 300", "  steps: 4\n  steps: 5"), f"line {DUPLICATE_LINE}: invalid YAML, found dup"
    ),
    "an unknown key": (BASE.replace("  steps: 300", "  steps: 300\n  stepz: 1"), "did you mean train.steps?"),
    "an unknown section": (BASE + "training:\n  steps: 3\n", "unknown key training; did you mean train?"),
    "a wrong type": (BASE.replace("steps: 300", "steps: many"), "train.steps=many must be of type int"),
    "no value": (BASE.replace("steps: 300", "steps:"), "train.steps=None must be of type int"),
    "an unknown option": (BASE.replace("model: bytes", "model: nope"), "model=nope: there is no such model; use"),
    "an unknown group": (BASE.replace("model: bytes", "modle: bytes"), "modle/bytes"),
    "an interpolation that leads nowhere": (BASE.replace("${run.name}", "${run.nam}"), "'run.nam' not found"),
    "an interpolation that is never closed": (BASE.replace("${run.name}", "${run.name"), "run.dir: no viable"),
    "nothing": ("", "no value for checkpoint, data, evaluate, guard, log, mesh, model, optimizer, run, sample, train"),
    "a list": ("- 1\n- 2\n", ", line 1: it holds no sections with keys; begin as conf/config.yaml does"),
    "a word": ("hello\n", "line 1: it holds no sections with keys; begin as conf/config.yaml does"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_the_message_for_a_bad_file_states_the_problem_and_the_file(tmp_path, case):
    text, expected = FILES[case]
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    message = error_message(file)
    assert expected in message
    assert str(file) in message or "model=nope" in message


@pytest.mark.parametrize("bytes_", [b"run:\n  name: \xe9\n", b"run:\n  name: \x00\n"], ids=["latin-1", "NUL"])
def test_a_file_that_is_not_utf8_text_is_rejected(tmp_path, bytes_):
    (tmp_path / "mine.yaml").write_bytes(bytes_)
    assert re.search(r"mine.yaml: not UTF-8 text \(.+\); save it as UTF-8", error_message(tmp_path / "mine.yaml"))


def test_a_missing_file_and_a_wrong_suffix_are_rejected(tmp_path):
    (tmp_path / "mine.yml").write_text(BASE)
    assert error_message("nope.yaml") == "--cfg nope.yaml: no such file; start with conf/config.yaml"
    assert "is not a file; name a YAML file" in error_message(tmp_path)
    assert "must end in .yaml; rename it" in error_message(tmp_path / "mine.yml")


def test_a_saved_configuration_has_no_groups_to_override(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(FIRST, [])))
    assert load(str(file), ["model.layers=2"]).model.layers == 2
    message = error_message(file, "model=test")
    assert str(file) in message and "has no defaults list to override" in message and "use conf/config.yaml" in message


def test_the_configuration_of_an_earlier_run_keeps_its_meaning(tmp_path):
    """It was saved before there were other schedules than a cosine, several sources and isolated documents."""
    file = tmp_path / "config.yaml"
    later = ("  schedule: cosine\n", "  decay_fraction: 0.1\n", "  documents: isolated\n", "  sources: {}\n")
    text = to_yaml(load(FIRST, []))
    assert all(line in text for line in later)
    for line in later:
        text = text.replace(line, "")
    file.write_text(text)
    earlier = load(str(file), [])
    assert (earlier.optimizer.schedule, earlier.data.documents, earlier.data.sources) == ("cosine", "joined", {})


def test_conf_config_yaml_has_every_key_of_the_schema():
    """conf/ is the only place of values, and `--help` says that this file has every key."""
    values = OmegaConf.load(FIRST)
    for section, field in Config.__dataclass_fields__.items():
        if section not in ("model", "data"):
            assert set(values[section]) == set(field.type.__dataclass_fields__), section
