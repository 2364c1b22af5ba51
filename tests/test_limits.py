"""docs/limits.md: what it calls not supported is refused by name, and what it recommends instead is accepted."""

import json
import re
import shlex

import pytest
from omegaconf import OmegaConf

import shmap_tp
from shmap_tp import cli, generate, prepare
from shmap_tp.command_model import mesh_sizes
from shmap_tp.config.compose import load
from shmap_tp.config.validate import validate
from shmap_tp.errors import UserError
from tests.helpers.config_errors import error_message
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import reference
from tests.helpers.run_fixtures import FIRST

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "limits.md").read_text().splitlines()
    if line.startswith("| ") and "---" not in line and not line.startswith("| not supported")
]
"""(what is not supported, what is refused, what to use instead)."""
COMMAND = "shmap-tp "
PACKAGED = OmegaConf.structured(load(FIRST, []))
"""Composed once: Hydra takes some tenths of a second."""
PARSERS = {"prepare": prepare.parser, "generate": generate.parser}


def code(column: int) -> list[str]:
    return [span for row in ROWS for span in re.findall(r"`([^`]+)`", row[column])]


def settings(column: int) -> list[str]:
    return [span for span in code(column) if re.match(r"\w+(\.\w+)*=", span)]


@pytest.mark.parametrize("given", settings(1))
def test_a_configuration_that_is_not_supported_is_refused_by_name(given):
    message = error_message(FIRST, *given.split())
    assert any(setting.split("=")[0] in message for setting in given.split())


@pytest.mark.parametrize("name", [span for span in code(1) if span.isidentifier()])
def test_an_architecture_that_is_not_supported_is_refused_by_name(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(reference("llama")["config"] | {"architectures": [name]}))
    with pytest.raises(UserError, match=name):
        shmap_tp.load_config(f"model.from_pretrained={tmp_path}", "mesh.mp=1", file=ROOT / "conf" / "finetune.yaml")


@pytest.mark.parametrize("line", [span for span in code(1) if span.startswith(COMMAND)])
def test_a_command_that_is_not_supported_is_refused_by_name(capsys, line):
    name, *arguments = shlex.split(line.removeprefix(COMMAND))
    if name not in PARSERS:
        assert cli.main([name, *arguments]) == 2
        assert repr(name) in capsys.readouterr().err
        return
    with pytest.raises((SystemExit, UserError)) as ended:
        mesh_sizes(PARSERS[name]().parse_args(arguments).mesh)
    said = f"{capsys.readouterr().err}{ended.value}"
    assert any(word in said for word in arguments if word.startswith(("--", "mesh."))), said


def test_every_row_is_tried():
    assert ROWS and all("`" in row[1] for row in ROWS)
    known = (*settings(1), *(span for span in code(1) if span.isidentifier() or span.startswith(COMMAND)))
    assert set(known) == set(code(1))


@pytest.mark.parametrize("given", settings(2))
def test_what_is_recommended_instead_is_accepted(given):
    validate(OmegaConf.to_object(OmegaConf.merge(PACKAGED, OmegaConf.from_dotlist(given.split()))))
