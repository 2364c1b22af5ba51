"""The house stands as drawn: imports point down, axes have names, the replication check is never switched off."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmap_tp"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    "config": 0, "settings": 0, "mesh": 0, "hardware": 0,
    "sharding": 1, "collectives": 1, "flops": 1,
    "layers": 2,
    "transformer": 3, "loss": 3,
    "optimizer": 4, "tokenizer": 4, "sources": 4, "prepare": 4, "data": 4, "metrics": 4, "stop": 4,
    "step": 5, "checkpoint": 5, "train": 5,
}  # fmt: skip
"""Rooms of one floor may import each other, as far as Python allows: without a cycle."""


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree: ast.Module) -> list[str]:
    """The rooms of shmap_tp that a file imports, wherever in it."""
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [name.split(".")[1] for name in names if name.startswith("shmap_tp.")]


def upward(path: Path, text: str) -> list[str]:
    return [name for name in imported(ast.parse(text)) if FLOORS[name] > FLOORS[room(path)]]


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__init__.py"], ids=lambda path: path.stem)
def test_imports_point_down(path):
    assert not upward(path, path.read_text())


def test_an_upward_import_is_seen():
    assert upward(PACKAGE / "loss.py", "def f():\n    from shmap_tp.step import State") == ["step"]


def test_axes_go_by_their_constants():
    """The strings "dp" and "mp" stand in mesh.py, and nowhere else in the package but in configurations."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in ("dp", "mp"):
                assert path.name == "mesh.py", f"{path.name}:{node.lineno}"


def test_the_replication_check_is_never_switched_off():
    for path in FILES:
        assert not re.search(r"check_vma\s*=\s*False", path.read_text()), path


@pytest.mark.parametrize("name", ["config", "settings", "flops"])
def test_a_configuration_can_be_read_without_jax(name):
    assert "jax" not in {alias.split(".")[0] for alias in _all_imports(PACKAGE / f"{name}.py")}


def _all_imports(path: Path) -> list[str]:
    """Every module that a file imports, and those that its own imports of shmap_tp do."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    for name in imported(tree):
        found += _all_imports(PACKAGE / f"{name}.py")
    return found
