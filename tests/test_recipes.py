"""conf/recipes: each file is a complete run, valid, and as fast and as large as its header says."""

import shlex
import sys

import benchmark_tpu
import pytest
import yaml

from shmap_tp import prepare, train
from shmap_tp.config.validate import product_in_words
from shmap_tp.hardware.devices import GENERATIONS, GIB
from shmap_tp.plan.predict import predict
from shmap_tp.plan.tpu import find_slice
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from make_recipes import Recipe, recipes

sys.path.pop(0)

OWN_KEYS = """
run.name mesh.dp mesh.mp mesh.tensor_parallel mesh.zero mesh.processes model.remat model.attention
train.steps train.batch train.microbatches optimizer.learning_rate optimizer.final_learning_rate optimizer.warmup_steps
optimizer.weight_decay optimizer.clip_norm evaluate.every evaluate.batches sample.every
sample.prompts checkpoint.every checkpoint.keep
"""
"""What a recipe states itself, because the values of conf/base.yaml are those of a byte-level model."""

RECIPES = recipes()
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
PLANNED = [recipe for recipe in RECIPES if recipe.plan]
EVERY_PLANNED_RECIPE = pytest.mark.parametrize("recipe", PLANNED, ids=lambda recipe: recipe.name)


@EVERY_RECIPE
def test_a_recipe_states_its_own_schedule_and_mesh_its_command_and_how_its_data_are_prepared(recipe):
    text, config = recipe.file.read_text(), recipe.config
    sections = {name: keys for name, keys in yaml.safe_load(text).items() if isinstance(keys, dict)}
    stated = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    assert not {*OWN_KEYS.split()} - stated
    assert config.optimizer.decay_steps == config.train.steps
    assert config.train.steps % config.checkpoint.every == config.evaluate.every % config.checkpoint.every == 0
    header = text.partition("defaults:")[0]
    assert f"#   python main.py --cfg conf/recipes/{recipe.file.name}" in header
    assert f"conf/recipes/{recipe.file.name}" in recipe.command
    assert recipe.command[1] == f"benchmarks/benchmark_{'tpu' if recipe.plan else 'gpu'}.py"
    assert f"conf/data/{config.data.name}.yaml" in text
    prepare.parser().parse_args([*shlex.split(config.data.source), "--out", config.data.dir])


@EVERY_RECIPE
def test_main_py_accepts_a_recipe(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--check", "--cfg", str(recipe.file)]) == 0
    assert product_in_words(recipe.config.mesh) in capsys.readouterr().out and not list(tmp_path.iterdir())


@EVERY_PLANNED_RECIPE
def test_the_time_in_the_header_follows_from_the_speed(recipe):
    config, (amount, unit) = recipe.config, recipe.plan.duration.split()
    chips = config.mesh.devices / GENERATIONS[version(recipe)].cores
    tokens = config.train.steps * config.train.batch * config.model.context
    seconds = tokens / recipe.plan.tokens_per_second_per_chip / chips
    assert float(amount) == round(seconds / {"hours": 3600, "days": 86400}[unit], 1 if "." in amount else None)


@pytest.mark.slow
@EVERY_PLANNED_RECIPE
def test_a_recipe_is_planned_to_fit_and_to_be_as_fast_as_its_header_says(recipe, monkeypatch):
    """Minutes for each: the TPU compiler compiles the whole step."""
    pytest.importorskip("libtpu")
    monkeypatch.chdir(ROOT)
    arguments = benchmark_tpu.make_parser().parse_intermixed_args(recipe.command[2:])
    config = benchmark_tpu.configuration(arguments)
    row = predict(config, find_slice(arguments.version, config.mesh.devices, None, 1)).row
    assert row.fits
    assert row.tokens_per_second_per_chip == pytest.approx(recipe.plan.tokens_per_second_per_chip, rel=0.02)
    assert row.peak_bytes_per_device / GIB == pytest.approx(recipe.plan.gib, rel=0.05)


def version(recipe: Recipe) -> str:
    return recipe.command[recipe.command.index("--version") + 1]
