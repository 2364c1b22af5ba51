"""The rules of the architecture that can be read off the source: which module may import which, and what no file may
contain."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import make_results

from tests.helpers.paths import ROOT

PACKAGE = ROOT / "shmap_tp"
TESTS = ROOT / "tests"

ORDER = [
    "errors",
    "config",
    "hardware",
    "runtime",
    "parallel",
    "layers",
    "model",
    "data",
    "training",
    "inference",
    "pretrained",
    "plan",
]
"""Sub-packages from the lowest to the highest; each imports only itself and those before it (`shmap_tp/errors.py` is a
module that all of them may use)."""
LIBRARY = {"__init__", "api", "trainer", "command_model", "verification", "check"}
"""What `import shmap_tp` offers, above all sub-packages; only the commands may import it."""
COMMANDS = {"__main__", "cli", "train", "prepare", "report", "verify", "generate", "chat", "evaluate"}
"""Modules that parse, call and exit: nothing but `__main__` and `cli` imports them."""
UPPER = {
    "__init__": LIBRARY,
    "__main__": {"cli"},
    "cli": {"train"},
    "train": {"check"},
    "trainer": {"api"},
    "verification": {"trainer"},
    "verify": {"verification"},
    "command_model": {"api"},
    "generate": {"command_model"},
    "chat": {"command_model"},
    "evaluate": {"command_model"},
}
"""What each of these may import beside the sub-packages."""
FILES = sorted(PACKAGE.rglob("*.py"))
COMMAND_FILES = [*ROOT.glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
PYTHON = [*FILES, *COMMAND_FILES, *TESTS.rglob("*.py")]

MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 10
"""Lines of a file, lines of a function with its docstring, and parameters of a function with `self`."""
CUSTOM_GRADIENTS = {
    "parallel",
    "layers/expert_dispatch.py",
    "layers/flash_attention.py",
    "layers/grouped_matmul.py",
    "layers/head_kernels.py",
    "layers/linear.py",
    "layers/positions.py",
    "layers/xla_workarounds.py",
    "model/blocks.py",
    "model/loss.py",
}
"""Files and sub-packages that may define gradients by hand."""


def subpackage(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text()))]


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in nodes(file) if isinstance(node, ast.FunctionDef))


def places(files: list[Path], found: Callable[[ast.AST], bool]) -> list[str]:
    """FILE:LINE of the nodes that `found`(node) is true of."""
    return [f"{file.relative_to(ROOT)}:{node.lineno}" for file in files for node in nodes(file) if found(node)]


@cache
def absolute_imports(file: Path) -> set[str]:
    """Everything that `file` imports anywhere, as dotted paths: `from a import b` counts as a.b."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def imported_modules(file: Path) -> set[str]:
    """Modules of shmap_tp that `file` imports anywhere, as dotted paths below the package."""
    below = {name.removeprefix("shmap_tp.") for name in absolute_imports(file) if name.startswith("shmap_tp.")}
    return {name if name in MODULES else name.rpartition(".")[0] or name for name in below}


MODULES = {".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in FILES}


def test_every_subpackage_has_a_place_in_the_order():
    assert {subpackage(file) for file in FILES} == {*ORDER, *LIBRARY, *COMMANDS}


def test_imports_point_to_lower_subpackages_only():
    wrong = {}
    for file in FILES:
        name = subpackage(file)
        lower = {*(ORDER[: ORDER.index(name) + 1] if name in ORDER else ORDER)} | UPPER.get(name, set())
        if higher := {module.split(".")[0] for module in imported_modules(file)} - lower:
            wrong[str(file.relative_to(PACKAGE))] = sorted(higher)
    assert not wrong


def test_imports_are_not_circular():
    remaining = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): imported_modules(file) for file in FILES}
    while remaining:
        independent = {name for name, imports in remaining.items() if not imports & remaining.keys()}
        assert independent, f"circular imports among {sorted(remaining)}"
        remaining = {name: imports for name, imports in remaining.items() if name not in independent}


def test_no_import_is_relative():
    assert not places(PYTHON, lambda node: isinstance(node, ast.ImportFrom) and node.level > 0)


def test_no_file_imports_a_test_module():
    """What tests share is in tests/helpers."""
    imported = {str(file.relative_to(TESTS)): absolute_imports(file) for file in TESTS.rglob("*.py")}
    is_test = lambda name: any(part.startswith("test_") for part in name.split(".")[:3])  # noqa: E731
    assert not {file: names for file, names in imported.items() if any(map(is_test, names))}


def test_these_modules_do_not_import_jax():
    for name in ["errors", "config/schema", "config/compose", "config/validate", "data/text_sources"]:
        assert "jax" not in {imported.split(".")[0] for imported in absolute_imports(PACKAGE / f"{name}.py")}, name


def test_no_file_function_or_list_of_parameters_is_too_long():
    """In lines of a file, lines of a function, parameters of a function of the package."""
    files = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in PYTHON}
    assert not {file: count for file, count in files.items() if count > MAX_LINES}
    is_function = lambda node: isinstance(node, ast.FunctionDef)  # noqa: E731
    is_long = lambda node: is_function(node) and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES  # noqa: E731
    assert not places(PYTHON, is_long)
    count = lambda args: len([*args.posonlyargs, *args.args, *args.kwonlyargs])  # noqa: E731
    assert not places(FILES, lambda node: is_function(node) and count(node.args) > MAX_PARAMETERS)


def test_gradients_are_defined_by_hand_in_few_places():
    """Elsewhere JAX derives them, and with them the collectives of the backward pass."""
    by_hand = {"custom_vjp", "custom_jvp", "custom_gradient"}
    for file in FILES:
        path = str(file.relative_to(PACKAGE))
        if path not in CUSTOM_GRADIENTS and subpackage(file) not in CUSTOM_GRADIENTS:
            names = {getattr(node, "attr", getattr(node, "id", None)) for node in nodes(file)}
            names |= {part for name in absolute_imports(file) for part in name.split(".")}
            assert not by_hand & names, path
        elif by_hand & {*re.findall(r"\w+", file.read_text())}:
            assert "plain version" in file.read_text(), f"{path}: say what the code would be without this gradient"


PRIVATE_NAMES = {"runtime/agreement.py", "plan/predict.py"}
"""Files that import private modules of other libraries, each with its reason."""


def test_private_modules_of_other_libraries_are_imported_in_few_files():
    for file in FILES:
        names = {name for name in absolute_imports(file) if not name.startswith("shmap_tp.")}
        parts = {part for name in names for part in name.split(".")} - {"__future__"}
        path = str(file.relative_to(PACKAGE))
        assert path in PRIVATE_NAMES or not [part for part in parts if part.startswith("_")], path


def test_arrays_are_named_in_one_module():
    """By the functions of partitioning.py."""
    others = [file for file in PYTHON if file != PACKAGE / "parallel" / "partitioning.py"]
    assert not places(others, lambda node: isinstance(node, ast.Attribute) and node.attr == "keystr")


def test_mesh_axes_are_named_by_constants():
    """Only mesh.py contains the strings "dp" and "mp"; all others use DP and MP."""
    others = [file for file in FILES if file != PACKAGE / "parallel" / "mesh.py"]
    assert not places(others, lambda node: isinstance(node, ast.Constant) and node.value in ("dp", "mp"))


def test_check_vma_is_switched_off_in_one_function():
    """check_vma=True is the default of shard_map, with which a missing collective does not compile.  The exception is
    `without_vma_check`, for kernels whose operations have no varying types."""
    home = PACKAGE / "parallel" / "collectives.py"
    (exception,) = [node for node in functions(home) if node.name == "without_vma_check"]
    excepted = {*ast.walk(exception)}
    assert len(excepted) <= 200, "the function is small enough to be read at once"
    names = ("check_vma", "check_rep")
    is_switch = lambda node: isinstance(node, ast.keyword) and node.arg in names and node not in excepted  # noqa: E731
    assert not places([*FILES, *COMMAND_FILES], is_switch)


def test_results_are_generated_from_their_json():
    """If not: python benchmarks/make_results.py"""
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == make_results.text()
