"""Rules of the house that can be read off the source: what may import what, and what no file may contain."""

import ast
from pathlib import Path

import pytest
import results

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shmap_tp"

ORDER = ["errors", "config", "hardware", "runtime", "parallel", "layers", "model", "data", "training", "plan"]
"""Sub-packages from the lowest to the highest; each imports only itself and those before it (`shmap_tp/errors.py` is a
module that all of them may use)."""
LIBRARY = {"__init__", "api"}
"""What `import shmap_tp` offers, above all sub-packages; only the commands may import it."""
COMMANDS = {"__main__", "cli", "train", "prepare", "verify"}
"""Modules that parse, call and exit: nothing but `__main__` and `cli` imports them."""
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))


def subpackage(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(file: Path) -> set[str]:
    """Modules of shmap_tp that `file` imports anywhere, as dotted paths below the package."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            whole = (
                [f"{node.module}.{name.name}" for name in node.names] if node.module == "shmap_tp" else [node.module]
            )
        elif isinstance(node, ast.Import):
            whole = [name.name for name in node.names]
        else:
            continue
        found |= {name.removeprefix("shmap_tp.") for name in whole if name.startswith("shmap_tp.")}
    return found


def test_every_subpackage_has_its_place_in_the_order():
    assert {subpackage(file) for file in FILES} == {*ORDER, *LIBRARY, *COMMANDS}


@SOURCES
def test_imports_point_to_lower_subpackages_only(file):
    name = subpackage(file)
    lower = {*(ORDER[: ORDER.index(name) + 1] if name in ORDER else ORDER)}
    lower |= {"__init__": {"api"}, "__main__": {"cli"}, "cli": {"train"}}.get(name, set())
    imports = {module.split(".")[0] for module in imported(file)}
    assert imports <= lower, f"{name} imports {sorted(imports - lower)}"


def test_imports_do_not_go_in_circles():
    below = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): imported(file) for file in FILES}
    while below:
        loose = {name for name, needs in below.items() if not needs & below.keys()}
        assert loose, f"a circle among {sorted(below)}"
        below = {name: needs for name, needs in below.items() if name not in loose}


@pytest.mark.parametrize(
    "name",
    ["errors", "config/schema", "config/compose", "config/validate", "model/flops", "data/text_sources"],
)
def test_these_modules_do_not_import_jax(name):
    assert "jax" not in {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in ([ast.alias(node.module)] if isinstance(node, ast.ImportFrom) else node.names)
    }


@SOURCES
def test_axes_are_named_in_mesh_only(file):
    """Everywhere else they are DP and MP, never the words."""
    if file != PACKAGE / "parallel" / "mesh.py":
        words = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not [node.lineno for node in words if node.value in ("dp", "mp")]


@pytest.mark.parametrize(
    "file", [*FILES, *ROOT.glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")], ids=lambda file: file.name
)
def test_the_check_is_switched_off_in_one_place(file):
    """check_vma=True is the default of shard_map: a forgotten collective does not compile.  The one place is the fence
    around kernels that cannot be checked; and it has none that could."""
    tree = ast.parse(file.read_text())
    fence = next((node for node in ast.walk(tree) if getattr(node, "name", None) == "without_vma_check"), None)
    inside = set(ast.walk(fence)) if fence and file == PACKAGE / "layers" / "flash_attention.py" else set()
    for node in ast.walk(tree):
        if node not in inside:
            assert not (isinstance(node, ast.keyword) and node.arg in ("check_vma", "check_rep")), node.value.lineno
    assert len(inside) <= 200, "small enough to be seen whole"


def test_the_results_are_what_their_json_says():
    """Otherwise: python benchmarks/results.py"""
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == results.text()
