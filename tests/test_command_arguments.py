"""Arguments that a command would ignore or misread are refused in one line, and nothing is written."""

import pytest

from shmap_tp import prepare, verify
from shmap_tp.errors import UserError
from shmap_tp.plan.__main__ import main, parse


@pytest.mark.parametrize("flag", ["model", "from-pretrained", "cfg", "json", "topology"])
def test_the_planner_refuses_an_empty_value_in_place_of_its_default(flag):
    """Such as that of a shell variable that is not set."""
    arguments = parse(["step", "--dp", "1", "--mp", "1", f"--{flag}", ""])
    with pytest.raises(UserError, match=f"--{flag} is empty"):
        main(arguments)


@pytest.mark.parametrize(
    "flags", ["ledger --dp 1 --mp 1", "step --version v5e --dp 1 --mp 1", "search --version v5e --devices 4"]
)
@pytest.mark.parametrize("given", ["train.dpo_beta=0.1", "run.components=own.py:components"])
def test_a_plan_refuses_a_step_that_it_does_not_count(flags, given):
    """The forward pass of the reference of preferences, and parts of the user's own."""
    arguments = parse([*flags.split(), "--model", "test", given, "model.adapter.rank=2"])
    with pytest.raises(UserError, match=f"^{given}: a plan .*; plan with"):
        main(arguments)


@pytest.mark.parametrize("file", ["/nowhere/recipe.yaml", "/tmp", "x" * 300])
def test_a_search_is_refused_before_it_begins_if_its_recipe_cannot_be_written(file):
    arguments = parse(["search", "--version", "v5e", "--devices", "4", "--model", "test", "--recipe", file])
    with pytest.raises(UserError, match=r"--recipe .* cannot be written: .*; (create its directory|correct that), or"):
        main(arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--out=~/tokens", "only a shell replaces ~"),
        ("--out=", "--out is empty"),
        ("--out=gs://bucket/tokens", "is a URL, but --out must name a directory"),
        ("--out=tokens --end-of-text x", "--end-of-text x does not apply to --tokenizer bytes"),
    ],
)
def test_prepare_refuses(tmp_path, monkeypatch, capsys, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text " * 100)
    assert prepare.main(["--text", "a.txt", *given.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("directory", ["", "foo://bucket/run", "x" * 300, "nowhere"])
def test_verify_names_a_directory_that_has_no_checkpoint(directory, capsys):
    assert verify.main(["checkpoint", directory]) == 2
    assert capsys.readouterr().err.count("\n") == 1
