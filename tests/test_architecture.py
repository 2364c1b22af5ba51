"""The rules of the architecture that can be read off the source: which module may import which, and what no file may
contain."""

import ast
from pathlib import Path

import make_results
import pytest

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
LIBRARY = {"__init__", "api", "trainer", "command_model"}
"""What `import shmap_tp` offers, above all sub-packages; only the commands may import it."""
COMMANDS = {"__main__", "cli", "train", "prepare", "verify", "generate", "chat", "evaluate"}
"""Modules that parse, call and exit: nothing but `__main__` and `cli` imports them."""
UPPER = {
    "__init__": LIBRARY,
    "__main__": {"cli"},
    "cli": {"train"},
    "trainer": {"api"},
    "command_model": {"api"},
    "generate": {"command_model"},
    "chat": {"command_model"},
    "evaluate": {"command_model"},
}
"""What each of these may import beside the sub-packages."""
FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
PYTHON = [*FILES, *ROOT.glob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *TESTS.rglob("*.py")]
every_python_file = pytest.mark.parametrize("file", sorted(PYTHON), ids=lambda file: str(file.relative_to(ROOT)))

MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 10
"""Of a file, of a function with its docstring, and of a function with `self`."""
CUSTOM_GRADIENTS = {
    "parallel",
    "layers/flash_attention.py",
    "layers/grouped_matmul.py",
    "layers/products.py",
    "layers/xla_workarounds.py",
    "model/host_offload.py",
    "model/loss.py",
    "model/offloaded_scan.py",
}
"""Files and sub-packages that may define gradients by hand."""


def subpackage(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def absolute_imports(file: Path) -> set[str]:
    """Everything that `file` imports anywhere, as dotted paths: `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
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


@every_file
def test_imports_point_to_lower_subpackages_only(file):
    name = subpackage(file)
    lower = {*(ORDER[: ORDER.index(name) + 1] if name in ORDER else ORDER)}
    lower |= UPPER.get(name, set())
    imports = {module.split(".")[0] for module in imported_modules(file)}
    assert imports <= lower, f"{name} imports {sorted(imports - lower)}"


def test_imports_are_not_circular():
    remaining = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): imported_modules(file) for file in FILES}
    while remaining:
        independent = {name for name, imports in remaining.items() if not imports & remaining.keys()}
        assert independent, f"circular imports among {sorted(remaining)}"
        remaining = {name: imports for name, imports in remaining.items() if name not in independent}


@every_python_file
def test_no_import_is_relative(file):
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    assert not [node.lineno for node in imports if node.level > 0]


@pytest.mark.parametrize("file", sorted(TESTS.rglob("*.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_no_file_imports_a_test_module(file):
    """What tests share is in tests/helpers."""
    parts = [name.split(".") for name in absolute_imports(file)]
    assert not [".".join(name) for name in parts if any(part.startswith("test_") for part in name[:3])]


@pytest.mark.parametrize(
    "name",
    ["errors", "config/schema", "config/compose", "config/validate", "data/text_sources"],
)
def test_these_modules_do_not_import_jax(name):
    assert "jax" not in {imported.split(".")[0] for imported in absolute_imports(PACKAGE / f"{name}.py")}


@every_python_file
def test_no_file_is_longer_than_400_lines(file):
    assert len(file.read_text().splitlines()) <= MAX_LINES


@every_python_file
def test_no_function_is_longer_than_60_lines(file):
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES]


@every_file
def test_no_function_has_more_than_nine_parameters(file):
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    counts = {node.name: len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) for node in functions}
    assert not {name for name, count in counts.items() if count > MAX_PARAMETERS}


@every_file
def test_gradients_are_defined_by_hand_in_few_places(file):
    """Elsewhere JAX derives them, and with them the collectives of the backward pass."""
    path = file.relative_to(PACKAGE)
    if str(path) not in CUSTOM_GRADIENTS and subpackage(file) not in CUSTOM_GRADIENTS:
        tree = ast.parse(file.read_text())
        names = [node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None) for node in ast.walk(tree)]
        assert not {"custom_vjp", "custom_jvp", "custom_gradient"} & {*names}
        assert not [name for name in absolute_imports(file) if "custom_vjp" in name or "custom_jvp" in name]
    elif "custom_vjp" in file.read_text() or "custom_jvp" in file.read_text():
        assert "plain version" in file.read_text(), "say what the code would be without the gradient defined by hand"


PRIVATE_NAMES = {"runtime/agreement.py", "plan/cudnn_questions.py"}
"""Files that import private modules of other libraries, each with its reason."""


@every_file
def test_private_modules_of_other_libraries_are_imported_in_few_files(file):
    names = {name for name in absolute_imports(file) if not name.startswith("shmap_tp.")}
    private = [name for name in names if any(part.startswith("_") and part != "__future__" for part in name.split("."))]
    assert not private or str(file.relative_to(PACKAGE)) in PRIVATE_NAMES, private


@every_python_file
def test_arrays_are_named_in_one_module(file):
    """By the functions of key_paths.py."""
    if file != PACKAGE / "parallel" / "key_paths.py":
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        assert not [node.lineno for node in nodes if node.attr == "keystr"]


@every_file
def test_mesh_axes_are_named_by_constants(file):
    """Only mesh.py contains the strings "dp" and "mp"; all others use DP and MP."""
    if file != PACKAGE / "parallel" / "mesh.py":
        strings = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not [node.lineno for node in strings if node.value in ("dp", "mp")]


@pytest.mark.parametrize(
    "file", [*FILES, *ROOT.glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")], ids=lambda file: file.name
)
def test_check_vma_is_switched_off_in_one_function(file):
    """check_vma=True is the default of shard_map, with which a missing collective does not compile.  The exception is
    `without_vma_check`, for kernels whose operations have no varying types."""
    tree = ast.parse(file.read_text())
    exception = next((node for node in ast.walk(tree) if getattr(node, "name", None) == "without_vma_check"), None)
    excepted = set(ast.walk(exception)) if exception and file == PACKAGE / "parallel" / "collectives.py" else set()
    for node in ast.walk(tree):
        if node not in excepted:
            assert not (isinstance(node, ast.keyword) and node.arg in ("check_vma", "check_rep")), node.value.lineno
    assert len(excepted) <= 200, "the function is small enough to be read at once"


def test_results_are_generated_from_their_json():
    """If not: python benchmarks/make_results.py"""
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == make_results.text()
