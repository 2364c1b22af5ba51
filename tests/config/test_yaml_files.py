"""What messages name: main.py and conf/ in a clone, and what is there instead in an installed wheel."""

import ast
from collections.abc import Iterator
from pathlib import Path

from shmap_tp import train
from shmap_tp.config import yaml_files
from tests.helpers.paths import ROOT

COMMAND = "python main.py"


def shown_texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module that are neither docstrings nor given to `as_installed`."""
    for node in ast.iter_child_nodes(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "as_installed"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if not is_docstring and not is_call:
            yield from shown_texts(node)


def test_what_only_a_clone_has_is_named_as_installed():
    allowed = {train.EPILOG, COMMAND, "train a model, or continue training (the same as python main.py)"}
    for file in {*(ROOT / "shmap_tp").rglob("*.py")} - {Path(yaml_files.__file__)}:
        texts = [text for text in shown_texts(ast.parse(file.read_text())) if "main.py" in text or "conf/" in text]
        assert not {*texts} - allowed, file


def test_a_wheel_names_its_own_command_and_configuration(monkeypatch):
    text = "python main.py --cfg conf/config.yaml"
    assert yaml_files.as_installed(text) == text
    monkeypatch.setattr(yaml_files, "IN_CLONE", False)
    assert yaml_files.as_installed(text) == f"shmap-tp train --cfg {yaml_files.CONF}/config.yaml"
