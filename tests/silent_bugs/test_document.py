"""docs/silent-bugs.md names every test of this directory, and other tests only with their file."""

import ast
import re
from pathlib import Path

from tests.helpers.paths import ROOT

HERE = Path(__file__).parent


def functions(file: Path) -> set[str]:
    names = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


def test_the_document_names_each_test_once():
    text = (ROOT / "docs" / "silent-bugs.md").read_text()
    mistakes = set().union(*[functions(file) for file in HERE.glob("test_*.py") if file != Path(__file__)])
    named = re.findall(r"`(test_\w+)`", text)
    assert sorted(named) == sorted(mistakes)
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text):
        assert name in functions(ROOT / file), f"{file} has no {name}"
