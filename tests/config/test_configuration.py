"""The configuration: what a file and key=value make of it, and what is said where they cannot be used."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shmap_tp.config import compose as settings
from shmap_tp.config.compose import CONF, load, save, to_dict
from shmap_tp.config.schema import Config, Precision, TensorParallelMode
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from tests.helpers.run_fixtures import FIRST

BASE = Path(FIRST).read_text()
UNCLOSED, TWICE = len(BASE.splitlines()) + 2, BASE.splitlines().index("  steps: 300") + 2
"""Lines where a mistake is seen that a test makes."""
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def refusal(file: str | Path, *overrides: str) -> str:
    """What is said about input that cannot be used: one or two lines."""
    with pytest.raises(UserError) as caught:
        load(str(file), list(overrides))
    said = str(caught.value)
    assert len(said.splitlines()) <= 2, said
    return said


@pytest.mark.parametrize("model", MODELS)
def test_every_model_loads_and_its_saved_configuration_gives_it_back(tmp_path, model):
    config = load(FIRST, [f"model={model}", "mesh.dp=1", "mesh.mp=1", "train.precision=bfloat16", "run.seed=7"])
    assert config.model.name == model and config.run.seed == 7 and config.train.precision is Precision.bfloat16
    save(config, tmp_path / "config.yaml")
    again = load(str(tmp_path / "config.yaml"), [])
    assert again == config and type(again) is Config
    assert to_dict(again) == to_dict(config)


@pytest.mark.parametrize("data", ["stdlib", "minipile"])
def test_every_data_source_loads(data):
    assert load(FIRST, [f"data={data}"]).data.name == data


def test_a_value_follows_the_one_it_is_made_of():
    config = load(FIRST, ["run.name=other"])
    assert (config.run.dir, config.checkpoint.dir) == ("runs/other", "runs/other/checkpoints")


@pytest.mark.parametrize("given, value", [("1e-3", 1e-3), ("1", 1.0), ("0.5", 0.5)])
def test_a_number_may_be_written_as_people_do(given, value):
    assert load(FIRST, [f"optimizer.learning_rate={given}"]).optimizer.learning_rate == value


def test_a_value_with_special_characters_may_be_quoted():
    assert load(FIRST, ['run.dir="a,b=(c)"']).run.dir == "a,b=(c)"


def test_a_file_outside_conf_uses_the_projects_groups(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(BASE.replace("model: bytes", "model: gptj_6b"))
    assert load(str(file), ["mesh.mp=1"]).model.name == "gptj_6b"
    assert load(str(file), ["model=test", "data=minipile"]).model.name == "test"


def test_a_file_outside_conf_may_bring_groups_of_its_own(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text((CONF / "model" / "bytes.yaml").read_text() + "\n")
    (tmp_path / "run.yaml").write_text(BASE.replace("model: bytes", "model: mine"))
    own = load(str(tmp_path / "run.yaml"), [])
    assert own == load(FIRST, [])
    assert load(str(tmp_path / "run.yaml"), ["model=test"]).model.name == "test"


@pytest.mark.parametrize("name", ["plain", "with space", "a,b=(c) [d] {e}", "it's", 'say "x"', "ünï"])
def test_the_checkout_and_the_file_may_lie_anywhere(tmp_path, monkeypatch, name):
    conf = tmp_path / name / "conf"
    for file in CONF.rglob("*.yaml"):
        copy = conf / file.relative_to(CONF)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    monkeypatch.setattr(settings, "CONF", conf)
    assert load(str(conf / "config.yaml"), ["model=test"]).model.name == "test"
    (tmp_path / name / "mine.v2.yaml").write_text(BASE)
    assert load(str(tmp_path / name / "mine.v2.yaml"), ["model=test"]).model.name == "test"


def test_a_key_that_the_file_leaves_out_may_be_given_on_the_command_line(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text(BASE.replace("  z_loss: 0.0\n", "").replace("  seed: 0\n", ""))
    assert refusal(file) == f"{file}: no value for run.seed, train.z_loss; give each in the file or as key=value"
    config = load(str(file), ["train.z_loss=1e-4", "run.seed=3"])
    assert config.train.z_loss == 1e-4 and config.run.seed == 3


OVERRIDES = {
    # unknown keys: the nearest known one, by its whole name or its last part
    "train.stepz=3": "unknown key train.stepz; did you mean train.steps?",
    "trian.steps=3": "unknown key trian; did you mean train?",
    "stpes=3": "unknown key stpes; did you mean train.steps?",
    "modle=test": "unknown key modle; did you mean model?",
    "model.width.x=3": "model.width={'x': 3} must be of type int",
    "frobnicate=1": "unknown key frobnicate; shmap_tp/config.py names them all",
    # unknown options
    "model=nope": f"model=nope: there is no such model; use one of {', '.join(MODELS)}",
    "data=nope": "data=nope: there is no such data; use one of minipile, stdlib",
    # wrong types
    "train.steps=many": "train.steps=many must be of type int",
    "train.steps=1.5": "train.steps=1.5 must be of type int",
    "train.steps=null": "train.steps=None must be of type int",
    "train.steps=": "train.steps= must be of type int",
    "optimizer.beta1=big": "optimizer.beta1=big must be of type float",
    "log.wandb=maybe": "log.wandb=maybe must be of type bool",
    "checkpoint.keep_every=x": "checkpoint.keep_every=x must be of type int | None",
    "model.block=serial": "model.block=serial must be one of parallel, sequential",
    "train=5": "train is not a value but a group of them; set one, such as train.steps=...",
    "mesh=null": "mesh is not a value but a group of them; set one, such as mesh.dp=...",
    # missing values
    "train.steps=???": "no value for train.steps; give each in the file or as key=value",
    "run.dir=${nope}": "run.dir: Interpolation key 'nope' not found",
    # what is no key=value
    "+train.new=1": "+train.new=1: keys cannot be added or deleted; write key=value",
    "++train.steps=1": "++train.steps=1: keys cannot be added or deleted; write key=value",
    "~train.steps": "~train.steps: keys cannot be added or deleted; write key=value",
    "~model": "~model: keys cannot be added or deleted; write key=value",
    "train.steps": "'train.steps' is not key=value; write it as in train.steps=400",
    "train.steps 3": "'train.steps 3' is not key=value; write it as in train.steps=400",
    "=3": "'=3' is not key=value; write it as in train.steps=400",
    # what Hydra's grammar takes for something else
    "run.name=a,b": "'run.name=a,b'; quote a value that has special characters: 'key=\"a,b\"'",
    "run.name=a=b": "run.name=a=b: mismatched input '=' expecting <EOF>; quote a value",
    "run.name=range(1,3)": "'run.name=range(1,3)' requires --multirun; quote a value",
    # sizes
    "run.seed=-1": "run.seed=-1 is too small; it must be 0 or more",
    "run.seed=4294967296": "run.seed=4294967296 is too large; it must be below 2^32 = 4294967296",
    "mesh.dp=0": "mesh.dp=0 is too small; it must be 1 or more",
    "mesh.dp=many": "mesh.dp=many must be a whole number, or auto",
    "mesh.dp=1.5": "mesh.dp=1.5 must be of type int | str",
    "train.max_sequences_per_device=-1": "train.max_sequences_per_device=-1 is too small; it must be 1 or more",
    "run.join_timeout_seconds=0": "run.join_timeout_seconds=0 is too small; it must be 1 or more",
    "mesh.mp=-2": "mesh.mp=-2 is too small; it must be 1 or more",
    "model.kv_heads=0": "model.kv_heads=0 is too small; it must be 1 or more",
    "model.vocabulary_multiple=0": "model.vocabulary_multiple=0 is too small; it must be 1 or more",
    "train.loss_chunk=0": "train.loss_chunk=0 is too small; it must be 1 or more",
    "checkpoint.keep=1": "checkpoint.keep=1 is too small; it must be 2 or more",
    "checkpoint.keep_every=-5": "checkpoint.keep_every=-5 is too small; it must be 1 or more",
    "optimizer.learning_rate=nan": "optimizer.learning_rate=nan is too small; it must be 0 or more",
    "optimizer.decay_steps=30": "optimizer.decay_steps=30 must be above optimizer.warmup_steps=30",
    "optimizer.clip_norm=0": "optimizer.clip_norm=0.0 must be above 0",
    "guard.loss_spike_sigmas=0.5": "guard.loss_spike_sigmas=0.5 is too small; it must be 1 or more",
    "guard.window=1": "guard.window=1 is too small; it must be 2 or more",
    "guard.max_consecutive=0": "guard.max_consecutive=0 is too small; it must be 1 or more",
    "guard.loss_spike_sigmas=true": "guard.loss_spike_sigmas=True must be of type float | None",
    # the steps of a profile
    "train.profile=[5]": "train.profile=[5] must be [first, last], two steps from 1 to train.steps=300",
    "train.profile=[0,2]": "train.profile=[0, 2] must be [first, last], two steps from 1",
    "train.profile=[9,8]": "train.profile=[9, 8] must be [first, last]",
    "train.profile=[299,301]": "train.profile=[299, 301] must be [first, last], two steps from 1 to train.steps=300",
    "train.profile=7": "train.profile=7 must be of type list[int] | None",
    "train.profile=[1,a]": "train.profile[1]=a must be of type list[int] | None",
    # what must divide
    "mesh.mp=3": "mesh.mp=3 does not divide heads=8 (model bytes); use mesh.mp in {1, 2, 4, 8}",
    "model.ffn=510": "mesh.mp=4 does not divide ffn=510 (model bytes); use mesh.mp in {1, 2, 3, 5, 6, 10,",
    "model.vocabulary_multiple=3": "mesh.mp=4 does not divide the padded vocabulary=258 (model bytes); use",
    "mesh.tensor_parallel=line": "mesh.tensor_parallel=line must be one of all_reduce, sequence, collective_matmul",
    "mesh.slices=3": "mesh.slices=3 does not divide mesh.dp=2: mp does not reach from slice to slice; use mesh",
    "mesh.fsdp_gradients=ring": "mesh.fsdp_gradients=ring is of weights that dp shares, but mesh.zero=none; set mesh.zero=fsdp",
    "model.offload=[up]": "model.offload has up, which model.remat=none does not keep; mlp, attention_and_up, all_matmuls would",
    "model.offload=up": "model.offload=up must be a list, as in [a,b]",
    "model.offload=[heads]": "model.offload[0]=heads must be one of input, sublayer_output, query_key_value, attention_output, gate, up",
    "model.kv_heads=3": "model.kv_heads=3 does not divide model.heads=8; choose a divisor",
    "mesh.dp=3": "mesh.dp=3 does not divide a microbatch of 16 windows (train.batch / train.microbatches); "
    "use mesh.dp in {1, 2, 4, 8, 16}",
    "train.microbatches=5": "train.microbatches=5 does not divide train.batch=32; use train.microbatches in {1, 2,",
}  # fmt: skip


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_bad_override_is_explained(override):
    assert OVERRIDES[override] in refusal(FIRST, override)


def test_one_ring_does_not_go_around_for_each_step_of_another():
    said = refusal(FIRST, "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=collective_matmul")
    assert said.endswith("use mesh.tensor_parallel=sequence, or mesh.fsdp_gradients=reduce_scatter")


@pytest.mark.parametrize("wire", ["sequence", "collective_matmul"])
def test_a_context_that_the_wire_cannot_cut(wire):
    assert load(FIRST, ["model.context=6"]).mesh.tensor_parallel is TensorParallelMode.all_reduce
    said = refusal(FIRST, "model.context=6", f"mesh.tensor_parallel={wire}")
    assert said == (
        f"mesh.mp=4 does not divide context=6 (model bytes, mesh.tensor_parallel={wire}); use mesh.mp in {{1, 2, 3, 6}}"
    )


def test_grouped_heads_that_mp_neither_divides_nor_multiplies():
    said = refusal(
        FIRST, "model.heads=12", "model.kv_heads=4", "mesh.mp=6", "model.ffn=48", "model.vocabulary_multiple=6"
    )
    assert said == (
        "mesh.mp=6 neither divides kv_heads=4 (model bytes) nor is a multiple of it; use mesh.mp in {1, 2, 4, 12}"
    )


@pytest.mark.parametrize(
    ("devices", "given", "dp", "microbatches"),
    [
        (8, "mesh.dp=auto mesh.mp=2", 4, 2),
        (2, "mesh.dp=auto mesh.mp=2", 1, 2),
        (8, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2", 8, 2),
        (4, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2", 4, 4),
        (1, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2", 1, 16),
        (
            None,
            "mesh.dp=4 mesh.mp=2 train.max_sequences_per_device=3",
            4,
            4,
        ),  # 4 at a time are too many, 3 do not divide them
        (None, "mesh.dp=4 mesh.mp=2", 4, 2),
    ],
)
def test_auto_takes_all_devices_and_keeps_what_one_computes_at_a_time(devices, given, dp, microbatches):
    made = resolve_auto(load(FIRST, given.split()), devices)
    assert (made.mesh.dp, made.train.microbatches, made.train.batch) == (dp, microbatches, 32)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (6, "mesh.mp=4 does not divide the 6 devices there are (mesh.dp=auto); use mesh.mp in {1, 2, 3, 6}"),
        (12, "mesh.dp=auto is 3 on 12 devices, and mesh.dp=3 does not divide a microbatch of 16 windows"),
        (None, "mesh.dp=auto is for training on the devices there are; here give its number"),
    ],
)
def test_an_auto_that_cannot_be_is_explained(devices, said):
    with pytest.raises(UserError) as caught:
        resolve_auto(load(FIRST, ["mesh.dp=auto"]), devices)
    assert str(caught.value).startswith(said)


def test_what_is_offloaded_is_named_once():
    said = refusal(FIRST, "model.remat=all_matmuls", "model.offload=[up,input,up]")
    assert said == "model.offload=[up,input,up] names one twice; name each once"


def test_what_a_parallel_block_never_reads_again_is_not_offloaded():
    given = ["model.remat=attention", "model.offload=[sublayer_output]"]
    assert "in a parallel block nothing reads" in refusal(FIRST, "model.block=parallel", *given)
    assert load(FIRST, ["model.block=sequential", *given]).model.offload == ["left"]


def test_a_gate_that_is_not_there_is_not_offloaded():
    given = ["model.remat=all_matmuls", "model.offload=[gate]"]
    assert "gate, but model.mlp=gelu has none" in refusal(FIRST, "model.mlp=gelu", *given)
    assert load(FIRST, ["model.mlp=swiglu", *given]).model.offload == ["gate"]


FILES = {
    "a bracket that is never closed": (BASE + "more: [a, b\n", f", line {UNCLOSED}: not YAML, expected ',' or ']'"),
    "a tab": ("run:\n\tname: x\n", ", line 2: not YAML, found character '\\t'"),
    "a key twice": (BASE.replace("  steps: 300", "  steps: 4\n  steps: 5"), f"line {TWICE}: not YAML, found dup"),
    "an unknown key": (BASE.replace("  steps: 300", "  steps: 300\n  stepz: 1"), "did you mean train.steps?"),
    "an unknown section": (BASE + "training:\n  steps: 3\n", "unknown key training; did you mean train?"),
    "a wrong type": (BASE.replace("steps: 300", "steps: many"), "train.steps=many must be of type int"),
    "no value": (BASE.replace("steps: 300", "steps:"), "train.steps=None must be of type int"),
    "an unknown option": (BASE.replace("model: bytes", "model: nope"), "model=nope: there is no such model; use"),
    "an unknown group": (BASE.replace("model: bytes", "modle: bytes"), "modle/bytes"),
    "an interpolation that leads nowhere": (BASE.replace("${run.name}", "${run.nam}"), "'run.nam' not found"),
    "an interpolation that is never closed": (BASE.replace("${run.name}", "${run.name"), "run.dir: no viable"),
    "nothing": ("", "no value for checkpoint, data, evaluate, guard, log, mesh, model, optimizer, run, train; give"),
    "a list": ("- 1\n- 2\n", "must be a DictConfig, got ListConfig"),
    "a word": ("hello\n", "unknown key hello"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_explained_with_its_name(tmp_path, case):
    text, expected = FILES[case]
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    said = refusal(file)
    assert expected in said
    assert str(file) in said or "model=nope" in said


@pytest.mark.parametrize("bytes_", [b"run:\n  name: \xe9\n", b"run:\n  name: \x00\n"], ids=["latin-1", "NUL"])
def test_a_file_that_is_not_text_is_refused(tmp_path, bytes_):
    (tmp_path / "mine.yaml").write_bytes(bytes_)
    assert re.search(r"mine.yaml: not text in UTF-8 \(.+\); save it as that", refusal(tmp_path / "mine.yaml"))


def test_a_file_that_is_not_there_or_not_called_yaml_is_refused(tmp_path):
    (tmp_path / "mine.yml").write_text(BASE)
    assert refusal("nope.yaml") == "--cfg nope.yaml: no such file; the first run's is conf/config.yaml"
    assert "no such file" in refusal(tmp_path)
    assert "ends in .yaml; rename it" in refusal(tmp_path / "mine.yml")


def test_a_saved_configuration_has_no_groups_to_replace_and_says_so(tmp_path):
    file = tmp_path / "config.yaml"
    save(load(FIRST, []), file)
    assert load(str(file), ["model.layers=2"]).model.layers == 2
    said = refusal(file, "model=test")
    assert str(file) in said and "names no default to replace" in said and "start from conf/config.yaml" in said


def test_the_first_runs_file_spells_out_every_key_of_the_schema():
    """So that conf/ is the home of every value, and `--help` can say that the file names every key."""
    values = OmegaConf.load(FIRST)
    for section, field in Config.__dataclass_fields__.items():
        if section not in ("model", "data"):
            assert set(values[section]) == set(field.type.__dataclass_fields__), section
