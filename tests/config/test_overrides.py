"""Overrides and values that are not what their key asks for; OmegaConf and Hydra alone would accept many of them."""

from shmap_tp.config.compose import CONF
from tests.helpers.config_errors import FIRST, check_messages, error_message, wrong_value

NO_MODEL = "there is no such model; use one of 11b, 128b,"
NOT_A_PAIR = "is not key=value; write for example train.steps=400"
OPTIONS = {group: ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml"))) for group in ("model", "data")}

OVERRIDES = {
    # the syntax
    "": f"'' {NOT_A_PAIR}",
    "=": f"'=' {NOT_A_PAIR}",
    "=3": f"'=3' {NOT_A_PAIR}",
    "'x'=1": NOT_A_PAIR,
    "train.steps": f"'train.steps' {NOT_A_PAIR}",
    "train.steps 3": f"'train.steps 3' {NOT_A_PAIR}",
    "train..steps=3": NOT_A_PAIR,
    "train/steps=3": NOT_A_PAIR,
    "train@steps=3": NOT_A_PAIR,
    "train.steps[0]=3": NOT_A_PAIR,
    "--cfg=x": NOT_A_PAIR,
    "..=x": NOT_A_PAIR,
    "conf/config.yaml": "'conf/config.yaml' is not key=value; write --cfg conf/config.yaml",
    "+train.new=1": NOT_A_PAIR,
    "++train.steps=1": NOT_A_PAIR,
    "~model": NOT_A_PAIR,
    "train.steps=3\n": NOT_A_PAIR,
    "run.name=\udcff": NOT_A_PAIR,
    # characters with a meaning in Hydra's grammar
    "run.name=a,b": "'run.name=a,b'; quote a value that has special characters: 'key=\"a,b\"'",
    "run.name=a=b": "run.name=a=b cannot be parsed; quote special characters",
    "run.name=range(1,3)": "'run.name=range(1,3)' requires --multirun; quote a value",
    'run.name="a': 'run.name="a cannot be parsed; quote special',
    "run.name=(x": "run.name=(x cannot be parsed; quote special",
    "run.name=ü": "run.name=ü cannot be parsed; quote special",
    # settings of Hydra
    "hydra.run.dir=x": "hydra.run.dir=x: settings of Hydra itself have no effect here; leave it out",
    "hydra=null": "settings of Hydra itself have no effect here",
    "hydra/launcher=basic": NOT_A_PAIR,
    "defaults=[x]": "unknown key defaults",
    # groups
    "model=nope": f"model=nope: there is no such model; use one of {OPTIONS['model']}",
    "data=nope": f"data=nope: there is no such data; use one of {OPTIONS['data']}",
    "data=[minipile,stdlib]": f"data=[minipile,stdlib]: there is no such data; use one of {OPTIONS['data']}",
    "data=null": "data=null: there is no such data; use one of fineweb_edu_llama2, ",
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
    # one of what is refused by the schema
    "train.steps=???": "no value for train.steps; give it in the file or as key=value",
    "train.profile.0=3": "Cannot merge DictConfig with ListConfig",
    "train.steps=": "train.steps= must be of type int",
    "run.name=": "run.name is empty; give it a value",
    "model.width.x=3": "model.width={'x': 3} must be of type int",
    "run.compiler_options=[a]": "run.compiler_options: ",
    "train={stepz:3}": "unknown key train.stepz; did you mean train.steps?",
    "train.profile=[true,2]": "train.profile[0]=true must be",
    "data.sources=null": "data.sources=null must be a mapping such as {web: {dir: data/web, weight: 1}}",
}  # fmt: skip


def test_an_override_that_is_not_possible_is_refused():
    check_messages(lambda override: error_message(FIRST, override), OVERRIDES, apart=None)


VALUES = {
    # unknown keys: the closest known one, by its full name or its last part
    "train.stepz=3": "unknown key train.stepz; did you mean train.steps?",
    "trian.steps=3": "unknown key trian; did you mean train?",
    "stpes=3": "unknown key stpes; did you mean train.steps?",
    "modle=test": "unknown key modle; did you mean model?",
    "train.batch_size=1": "unknown key train.batch_size; did you mean train.batch?",
    "train.learning_rate=1": "unknown key train.learning_rate; did you mean optimizer.learning_rate?",
    "model.dropout=1": "unknown key model.dropout; shmap_tp/config/schema.py lists all keys",
    "frobnicate=1": "unknown key frobnicate; shmap_tp/config/schema.py lists all keys",
    "train=5": "train=5 must be a group of keys, such as train.steps=...",
    "mesh=null": "mesh=null must be a group of keys, such as mesh.dp=...",
    # interpolations
    "run.dir=${missing}": "run.dir: Interpolation key 'missing' not found; correct that value",
    "run.dir=${run.dir}": "run.dir: Recursive interpolation detected",
    "run.dir=${run}": "run.dir: Interpolation to parent node detected",
    "run.dir=${oc.env:SHMAP_TP_NOT_SET}": "Environment variable 'SHMAP_TP_NOT_SET' not found",
    "train.steps=${model}": "must be of type int",
    # types
    "train.steps=many": "train.steps=many must be of type int",
    "train.steps=1.5": "train.steps=1.5 must be of type int",
    "train.steps=null": "train.steps=null must be of type int",
    "train.steps=true": "train.steps=true must be of type int",
    "train.steps=.nan": "train.steps=nan must be of type int",
    "optimizer.beta1=big": "optimizer.beta1=big must be of type float",
    "optimizer.beta1=true": "optimizer.beta1=true must be of type float",
    "guard.loss_spike_sigmas=true": "guard.loss_spike_sigmas=true must be of type float | None",
    "mesh.dp=true": "mesh.dp=true must be of type int | str",
    "mesh.dp=1.5": "mesh.dp=1.5 must be of type int | str",
    "log.wandb=maybe": "log.wandb=maybe must be of type bool",
    "checkpoint.keep_every=x": "checkpoint.keep_every=x must be of type int | None",
    "model.block=serial": "model.block=serial must be one of parallel, sequential, parallel_two_norms",
    "mesh.tensor_parallel=line": "mesh.tensor_parallel=line must be one of all_reduce, sequence, collective_matmul",
    "optimizer.schedule=exponential": "optimizer.schedule=exponential must be one of cosine, linear, constant, wsd",
    "model.rotary_scaling=longrope": "model.rotary_scaling=longrope must be one of none, llama3, linear, yarn",
    # lists and mappings
    "train.profile=7": "train.profile=7 must be of type list[int] | None",
    "train.profile=[1,a]": "train.profile[1]=a must be of type list[int] | None",
    "train.profile=[1,[2]]": "train.profile=[1, [2]] must be",
    "model.offload=up": "model.offload=up must be a list, for example [a,b]",
    "model.offload=[heads]": "model.offload[0]=heads must be one of input, sublayer_output, "
    "query_key_value, attention_output, gate, up",
    "model.layer_pattern=[local,sliding]": "model.layer_pattern[1]=sliding must be one of local, global, nope",
    "run.compiler_options={a: null}": "run.compiler_options.a=null must be a mapping such as {name: text}",
    "data.sources=web": "data.sources=web must be a mapping such as {web: {dir: data/web, weight: 1}}",
}  # fmt: skip


def test_a_value_that_is_none_of_its_key_is_refused():
    check_messages(wrong_value, VALUES, apart=None)


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file():
    for override in ("train.stepz=3", "trian.steps=3", "train.steps=many", "run.dir=${missing}"):
        assert wrong_value("train.batch=8", override).startswith(VALUES[override])
    assert error_message(FIRST, "train.batch=8", "train.stepz=3").startswith(VALUES["train.stepz=3"])
