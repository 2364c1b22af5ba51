"""Overrides and values that are not what their key asks for; OmegaConf and Hydra alone would accept many of them."""

from pathlib import Path

import pytest

from shmap_tp.config.compose import load
from shmap_tp.errors import UserError
from tests.helpers.config_errors import error_message
from tests.helpers.run_fixtures import FIRST

NO_MODEL = "there is no such model; use one of 11b, 128b,"
NOT_A_PAIR = "is not key=value; write for example train.steps=400"

OVERRIDES = {
    # the syntax
    "": f"'' {NOT_A_PAIR}",
    "=": f"'=' {NOT_A_PAIR}",
    "'x'=1": NOT_A_PAIR,
    "train..steps=3": NOT_A_PAIR,
    "train/steps=3": NOT_A_PAIR,
    "train@steps=3": NOT_A_PAIR,
    "train.steps[0]=3": NOT_A_PAIR,
    "--cfg=x": NOT_A_PAIR,
    "train.steps=3\n": r"train.steps=3\x0a: has a line break or a control character; remove it",
    "train.steps=\0": r"train.steps=\x00: has a line break or a control character",
    "run.name=\udcff": "has a line break or a control character",
    f"{'a' * 300}=1": "(302 characters): unknown key; shmap_tp/config/schema.py lists all keys",
    f"model.{'a' * 300}=1": "(308 characters): unknown key",
    f"run.name={'a' * 5000}": "(5009 characters): has more than 3000 characters or 50 brackets",
    f"run.name={'[' * 1000}": "has more than 3000 characters or 50 brackets; write the value in a file",
    f"run.name={'a,' * 1400}": "(2809 characters)",
    'run.name="a': 'run.name="a: cannot be parsed; quote a value',
    "run.name=(x": "run.name=(x: cannot be parsed; quote a value",
    "run.name=ü": "run.name=ü: cannot be parsed; quote a value",
    "train.profile.0=3": "a list cannot be merged with keys; give the whole list, for example train.profile=[10,12]",
    # settings of Hydra
    "hydra.run.dir=x": "hydra.run.dir=x: settings of Hydra itself have no effect here; leave it out",
    "hydra=null": "settings of Hydra itself have no effect here",
    "hydra/launcher=basic": NOT_A_PAIR,
    "defaults=[x]": "unknown key defaults",
    # groups
    "model=null": f"model=null: {NO_MODEL}",
    "model=": f"model=: {NO_MODEL}",
    "model=[bytes,test]": f"model=[bytes,test]: {NO_MODEL}",
    "model={a:b}": NO_MODEL,
    "model=../model/bytes": NO_MODEL,
    "model=/etc/passwd": NO_MODEL,
    "model=bytes.yaml": NO_MODEL,
    "model=bytes@x": NO_MODEL,
    "model=${data}": NO_MODEL,
    f"model={'a' * 300}": NO_MODEL,
    "data=null": "data=null: there is no such data; use one of fineweb_edu_llama2, ",
    "..=x": NOT_A_PAIR,
    # interpolations
    "run.dir=${missing}": "run.dir: Interpolation key 'missing' not found; correct its ${...}",
    "run.dir=${run.dir}": "run.dir: Recursive interpolation detected",
    "run.dir=${checkpoint.dir}": "Recursive interpolation detected",
    "run.dir=${run}": "run.dir: Interpolation to parent node detected",
    "run.dir=${oc.env:SHMAP_TP_NOT_SET}": "Environment variable 'SHMAP_TP_NOT_SET' not found",
    "train.steps=${model}": "must be of type int",
    # types
    "data.source=web": "data.source=web: there is no such source; use stdlib, null, or the arguments of",
    "train.steps='٣٣'": "train.steps=٣٣ must be of type int",
    "optimizer.learning_rate='٣'": "optimizer.learning_rate=٣ must be of type float",
    "train.profile=['٣',4]": "train.profile=['٣', 4] must be of type list[int] | None",
    "train.steps=true": "train.steps=True must be of type int",
    "train.steps=nan": "train.steps=nan must be of type int",
    "optimizer.beta1=true": "optimizer.beta1=True must be of type float",
    "mesh.dp=true": "mesh.dp=True must be of type int | str",
    "log.wandb=5": "log.wandb=5 must be of type bool",
    "train.profile=[true,2]": "train.profile[0]=True must be",
    "train.profile=[1,[2]]": "train.profile=[1, [2]] must be",
    "model.offload=[[up]]": "model.offload=[['up']] must be a list, for example [a,b]",
    "run.compiler_options=[a]": "run.compiler_options: ",
    "run.compiler_options={a:[1]}": "run.compiler_options={'a': [1]} must be a mapping of names to text",
    "run.compiler_options={a:null}": "run.compiler_options.a=None must be a mapping of names to text",
    "run.compiler_options.a.b=1": "must be a mapping of names to text",
    "train={stepz:3}": "unknown key train.stepz; did you mean train.steps?",
    # names
    "run.name=": "run.name= must have 1 to 200 characters; choose a name",
    f"run.name={'a' * 201}": "must have 1 to 200 characters",
}  # fmt: skip


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text)[:60])
def test_an_override_that_is_no_value_of_its_key_is_refused(override):
    message = error_message(FIRST, override)
    assert OVERRIDES[override] in message
    assert len(message) < 800


def test_a_working_directory_that_was_deleted_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UserError, match="the working directory does not exist any more; change to another"):
        load(FIRST, [])


def test_a_name_in_a_file_has_no_line_break(tmp_path):
    text = Path(FIRST).read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: first", r'name: "a\nb"'))
    assert r"run.name=a\x0ab has a line break or a control character" in error_message(tmp_path / "mine.yaml")


def test_digits_of_another_script_are_refused_in_a_file(tmp_path):
    text = Path(FIRST).read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("  steps: 300", "  steps: ٣٠٠"), encoding="utf-8")
    assert "train.steps=٣٠٠ must be of type int" in error_message(tmp_path / "mine.yaml")


def test_a_number_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DP", "4")
    config = load(FIRST, ["mesh.dp=${oc.env:DP}", "mesh.mp=${oc.env:DP}", 'run.name="ü, b=(c)"'])
    assert (config.mesh.dp, config.mesh.mp, config.run.name) == (4, 4, "ü, b=(c)")
