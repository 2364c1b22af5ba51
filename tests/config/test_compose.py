"""Composition of the configuration from a file and overrides."""

from pathlib import Path

from omegaconf import OmegaConf

from shmap_tp.config import compose
from shmap_tp.config.choices import Precision
from shmap_tp.config.compose import CONF, from_values, load, to_dict, to_yaml
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.config.yaml_files import saved_value
from tests.helpers import model_fixtures
from tests.helpers.config_errors import FIRST, error_message, plain

BASE = Path(FIRST).read_text()


def test_every_model_is_valid_on_one_device():
    values = OmegaConf.merge(plain(), {"mesh": {"dp": 1, "mp": 1}})
    for file in {*(CONF / "model").glob("*.yaml")} - {CONF / "model" / "pretrained.yaml"}:  # which needs a directory
        config = from_values({**values, "model": OmegaConf.load(file)}, file.name)
        assert config.model.name == file.stem
        validate(config)


def test_a_saved_configuration_loads_equal(tmp_path):
    for model in ("gemma3_124m", "olmoe_1b_7b", "gpt2"):  # every type of value
        config = load(FIRST, [f"model={model}", "mesh.dp=1", "mesh.mp=1", "train.precision=bfloat16", "run.seed=7"])
        assert config.model.name == model and config.run.seed == 7 and config.train.precision is Precision.bfloat16
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        again = load(str(tmp_path / "config.yaml"), [])
        assert again == config and type(again) is Config
        assert to_dict(again) == to_dict(config)


def test_the_shortcut_of_the_tests_composes_what_the_command_does():
    """`model_fixtures.config` leaves Hydra out; values of every type."""
    given = ["model=bytes_llama", "mesh.dp=4", "mesh.mp=2", "mesh.tile=[1,2,1]", "mesh.zero=none"]
    given += ["model.offload=[input,gate]", "model.remat=all_matmuls", "model.tie_embeddings=true", "log.wandb=false"]
    given += ["optimizer.learning_rate=1e-3", "optimizer.weight_decay=0.02", "model.window=null"]
    small = [f"model.{setting}" for setting in model_fixtures.MODEL.split()]
    expected = load(FIRST, ["model=test", *small, "train.batch=8", *given])
    found = model_fixtures.config(*given)
    assert found == expected and to_dict(found) == to_dict(expected)


def test_values_are_given_as_key_equals_value(monkeypatch):
    """An interpolation follows its source, floats can be written as integers or with an exponent, a value with special
    characters is quoted, and a number can come from the environment."""
    monkeypatch.setenv("DP", "4")
    floats = ["optimizer.learning_rate=1e-3", "train.z_loss=1", "optimizer.weight_decay=0.5"]
    config = load(FIRST, ["mesh.dp=${oc.env:DP}", "mesh.mp=${oc.env:DP}", 'run.name="ü, b=(c)"', *floats])
    assert (config.mesh.dp, config.mesh.mp, config.run.name) == (4, 4, "ü, b=(c)")
    assert (config.run.dir, config.checkpoint.dir) == ("runs/ü, b=(c)", "runs/ü, b=(c)/checkpoints")
    optimizer = config.optimizer
    assert (optimizer.learning_rate, config.train.z_loss, optimizer.weight_decay) == (1e-3, 1.0, 0.5)


def test_steps_can_be_given_as_tokens():
    """4096 tokens are a step."""
    given = ["train.steps=1.5M tokens", "optimizer.decay_steps=12K tokens", "optimizer.warmup_steps=4097 tokens"]
    config = load(FIRST, given)
    assert (config.train.steps, config.optimizer.decay_steps, config.optimizer.warmup_steps) == (367, 3, 2)
    message = error_message(FIRST, "train.steps=1M tokens", "train.batch=0")
    assert "train.steps=1M tokens needs train.batch and model.context" in message
    assert "train.steps=1M words must be of type int" in error_message(FIRST, "train.steps=1M words")


def test_the_decay_ends_at_the_last_step_unless_it_is_set(tmp_path):
    for given, end in {"train.steps=40": 40, "train.steps=1M tokens": 245, "optimizer.decay_steps=50": 50}.items():
        config = load(FIRST, [given])
        assert config.optimizer.decay_steps == end
    (tmp_path / "config.yaml").write_text(to_yaml(load(FIRST, ["train.steps=40"])))
    assert load(tmp_path / "config.yaml", ["train.steps=60"]).optimizer.decay_steps == 40
    warm = load(FIRST, ["train.steps=20"])
    assert warm.optimizer.decay_steps == 20 < warm.optimizer.warmup_steps
    assert "optimizer.decay_steps=20 must be above" in error_message(FIRST, "optimizer.decay_steps=20")


def test_a_file_outside_conf_has_groups_of_its_own_beside_those_of_conf(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text((CONF / "model" / "bytes.yaml").read_text() + "\n")
    (tmp_path / "run.yaml").write_text(BASE.replace("model: bytes", "model: mine"))
    assert load(str(tmp_path / "run.yaml"), []) == load(FIRST, [])
    config = load(str(tmp_path / "run.yaml"), ["model=test", "data=minipile"])
    assert (config.model.name, config.data.name) == ("test", "minipile")


def test_the_path_of_the_configuration_can_contain_any_characters(tmp_path, monkeypatch):
    name = 'with space, a,b=(c) [d] {e} it\'s "x" ünï'
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


def test_a_saved_configuration_has_no_groups_to_override(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(FIRST, [])))
    assert load(str(file), ["model.layers=2"]).model.layers == 2
    assert "No match in the defaults list" in error_message(file, "model=test")


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


def test_a_path_that_is_no_configuration_file_is_refused(tmp_path):
    (tmp_path / "mine.yml").write_text(BASE)
    for file in ("nope.yaml", "", tmp_path, tmp_path / "mine.yml", "gs://bucket/x.yaml"):
        message = error_message(file)
        assert message.startswith(f"--cfg {file}: there is no such file that ends in .yaml; name one such as"), file


CONTENTS = [
    (b"run: \xff\xfe", "invalid start byte"),
    ("run:\n  name: [a\n", "while parsing a flow sequence"),
    ("run:\n\tname: a\n", "found character"),
    ("- 1\n- 2\n", ""),
    ("hello\n", ""),
    (BASE.replace("  steps: 300", "  steps: 300\n  stepz: 1"), "did you mean train.steps?"),
    (BASE + "training:\n  steps: 3\n", "unknown key training; did you mean train?"),
    (BASE.replace("steps: 300", "steps: many"), "train.steps=many must be of type int"),
    (BASE.replace("steps: 300", "steps:"), "train.steps=null must be of type int"),
    (BASE.replace("${run.name}", "${run.nam}"), "'run.nam' not found"),
    ("run: !!python/object/apply:os.system ['ls']", "could not determine a constructor"),
    ("defaults: [nope]\n", "Could not load"),
    (BASE.replace("model: bytes", "model: nope"), "model/nope"),
    (BASE.replace("model: bytes", "modle: bytes"), "modle/bytes"),
]


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    for content, words in CONTENTS:
        file = tmp_path / "mine.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        message = error_message(file)
        assert str(file) in message and words in message, (content[-80:], message)


def test_anchors_and_merge_keys_can_be_used(tmp_path):
    text = BASE.replace("  steps: 300", "  steps: &steps 300")
    text = text.replace("decay_steps: ${train.steps}", "decay_steps: *steps")
    text = text.replace("log:\n", "log:\n  <<: {wandb: true}\n").replace("  wandb: false\n", "")
    (tmp_path / "mine.yaml").write_text(text)
    config = load(tmp_path / "mine.yaml", [])
    assert (config.train.steps, config.optimizer.decay_steps, config.log.wandb) == (300, 300, True)


def test_the_values_of_a_file_replace_those_of_its_groups_without_a_self_entry(tmp_path):
    """Hydra would warn that the entry is missing."""
    (tmp_path / "mine.yaml").write_text(BASE.replace("  - _self_\n", "") + "model:\n  layers: 3\n")
    assert load(tmp_path / "mine.yaml", []).model.layers == 3


def test_a_value_of_a_saved_configuration_is_found_without_validation(tmp_path):
    (tmp_path / "config.yaml").write_text("checkpoint: {dir: x, gone: 1}")
    assert saved_value(tmp_path / "config.yaml", "checkpoint.dir") == "x"
    assert saved_value(tmp_path / "nowhere", "checkpoint.dir") is None
