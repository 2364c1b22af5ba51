"""The documents: their command blocks work, and their links and generated parts are current.

The info string of a fenced block says how it is checked:

    sh run        run, on CPU, in a temporary copy of the working tree, after the blocks before it in the document
    sh check      its arguments are parsed, and the configuration that they describe is composed and validated
    sh hardware   not run: it needs hardware, a network or a long time; commands of this project are checked as above
    python run    all such blocks of a document are run as one program, on CPU
    ... run slow  the same, in the slow tests
    python hardware   not run: it needs a model or a network; it is parsed, and the names that it imports exist
    python source     a function of this project, without its annotations
    text          output or an error, no commands
"""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from matplotlib.patches import FancyBboxPatch
from PIL import Image

import shmap_tp
from shmap_tp.config.values import keys
from tests.helpers import command_lines
from tests.helpers.compiling import quick_environment
from tests.helpers.documents import DOCUMENTS, ROOT, blocks, name_of
from tests.helpers.paths import project_files

LANGUAGES = {"sh", "python", "yaml", "json", "text"}
MARKS = {"sh": ["run", "run slow", "check", "hardware"], "python": ["run", "run slow", "hardware", "source"]}
COMMANDS = {"python", "pip", "pytest", "shmap-tp", "git", "gcloud", "$"}
README_LINES = 90

# Command blocks


def text_of(file: Path, *infos: str) -> str:
    """The blocks with one of these info strings, one after the other."""
    return "\n".join(block.text for block in blocks(file) if " ".join(block.info) in infos)


def python_blocks(mark: str) -> pytest.MarkDecorator:
    found = [block for file in DOCUMENTS for block in blocks(file) if block.info == ("python", mark)]
    return pytest.mark.parametrize("block", found, ids=lambda block: block.place)


def test_every_command_block_is_marked():
    for block in (block for file in DOCUMENTS for block in blocks(file)):
        language, *marks = block.info or ("",)
        assert language in LANGUAGES, f"{block.place}: name the language, one of {sorted(LANGUAGES)}"
        if language in MARKS:
            allowed = [f"{language} {mark}" for mark in MARKS[language]]
            assert " ".join(marks) in MARKS[language], f"{block.place}: mark it one of {allowed}"
        if language == "text":
            first = block.text.split(maxsplit=1)[0]
            assert first not in COMMANDS, f"{block.place}: commands belong into a block of sh"


def run(directory: Path, *command: str) -> None:
    """Run a command on CPU in `directory`, a copy of the working tree."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"JAX_PLATFORMS": "cpu", "PATH": path, "PYTHONPATH": str(directory)}
    done = subprocess.run(
        command,
        cwd=directory, env=os.environ | quick_environment() | environment,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def working_copy(tmp_path_factory) -> Path:
    """The files of the working tree, in a temporary directory."""
    copy = tmp_path_factory.mktemp("copy")
    for name in project_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


def test_the_run_blocks_of_the_documents_succeed(working_copy):
    for file in DOCUMENTS:
        run(working_copy, "bash", "-euxo", "pipefail", "-c", text_of(file, "sh run"))


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in DOCUMENTS if text_of(file, "sh run slow")], ids=name_of)
def test_all_run_blocks_of_a_document_succeed(file, working_copy):
    run(working_copy, "bash", "-euxo", "pipefail", "-c", text_of(file, "sh run", "sh run slow"))


def test_the_python_blocks_of_the_documents_run(working_copy):
    """The program of each document, in one process."""
    programs = {name_of(file): text_of(file, "python run") for file in DOCUMENTS}
    lines = [f"exec(compile({text!r}, {name!r}, 'exec'), {{}})" for name, text in programs.items() if text]
    run(working_copy, sys.executable, "-c", "\n".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in DOCUMENTS if text_of(file, "python run slow")], ids=name_of)
def test_all_python_blocks_of_a_document_run(file, working_copy):
    run(working_copy, sys.executable, "-c", text_of(file, "python run", "python run slow"))


@python_blocks("hardware")
def test_what_a_python_block_imports_exists(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("shmap_tp"):
            try:
                module = import_module(node.module)
            except ModuleNotFoundError as error:  # a package of an extra that is not installed here
                assert not error.name.startswith("shmap_tp"), block.place
                pytest.skip(f"{block.place} needs {error.name}")
            assert all(hasattr(module, name.name) for name in node.names), block.place


@python_blocks("source")
def test_a_function_in_a_document_is_that_of_the_source(block):
    files = (ROOT / "shmap_tp").rglob("*.py")
    assert {*functions(block.text)} <= {one for file in files for one in functions(file.read_text())}, block.place


def functions(source: str) -> Iterator[str]:
    """Every function without annotations, comments and docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for part in [node, *ast.walk(node.args)]:
                for name in {"annotation", "returns"} & {*part._fields}:
                    setattr(part, name, None)
            node.body = node.body[bool(ast.get_docstring(node)) :]
            yield ast.unparse(node)


def test_every_command_is_valid_up_to_its_configuration():
    """The commands of documents, help texts, scripts and recipes, whether their block is run or not."""
    wrong, seen = [], set()
    for command in (*command_lines.in_documents(), *command_lines.in_texts()):
        if (key := (command.words, command.mark == "check")) in seen:
            continue
        seen.add(key)
        try:
            command_lines.check(command.words)
        except command_lines.NotChecked:
            if command.mark == "check":
                wrong.append(f"{command} cannot be checked; mark its block sh run or sh hardware")
        except (Exception, SystemExit) as error:
            wrong.append(f"{command}: {error!r}")
    assert not wrong, "\n".join(wrong)


# Size, links and generated parts


def test_the_readme_is_short_and_its_shell_blocks_speak_for_themselves():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES and max(map(len, lines)) <= 120
    assert not [block.place for block in blocks(ROOT / "README.md") if block.info[0] == "sh" and "#" in block.text]


def test_the_readme_counts_the_silent_bugs():
    bugs = re.findall(r"^\| \[.*https", (ROOT / "docs" / "silent-bugs.md").read_text(), re.MULTILINE)
    assert f"all {len(bugs)} detected" in (ROOT / "README.md").read_text()


def test_the_commands_of_the_table_of_the_readme_are_valid():
    rows = re.findall(r"^\| [^|]+ \| (`.+?`) \| \[.+\]\(docs/", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = [words for row in rows for code in row.split(", ") for words in command_lines.split(code.strip("`"))]
    assert len(commands) >= 10
    for words in commands:
        if words[0] == "shmap-tp" and words[1:2] not in (("train",), ("report",)):
            words = ("python", "-m", f"shmap_tp.{words[1]}", *words[2:])
        try:
            command_lines.check(words)
        except command_lines.NotChecked:
            assert words[:2] == ("python", "-m") or (ROOT / words[0]).is_file(), words


def test_the_forms_of_the_project_page_ask_for_what_explains_a_number():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/wrong_number.yml").read_text())
    needed = {each["id"] for each in form["body"] if each["validations"]["required"]}
    assert needed >= {"number", "command", "config", "check"}
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]["steps"]
    assert steps[-1]["run"] == "bash .ci/run" and steps[0]["with"]["fetch-depth"] == 0
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == shmap_tp.__version__


def test_links_and_names_of_files_lead_to_files_that_exist():
    for file in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text())
        missing = [link for link in links if "://" not in link and not (file.parent / link).exists()]
        if file.name != "CHANGELOG.md":  # which tells of files that are no more
            names = r"`((?:shmap_tp|benchmarks|tests|scripts|conf|docs)/[\w./-]+\.(?:py|md|sh|yaml|png))`"
            missing += [path for path in re.findall(names, file.read_text()) if not (ROOT / path).exists()]
        assert not missing, f"{name_of(file)} names {missing}, which do not exist"


@pytest.fixture
def generator(request, monkeypatch) -> ModuleType:
    """A script of docs/, by its name, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return import_module(request.param)


GENERATORS = ["make_configuration", "make_performance_notes", "make_planning_report", "make_library", "make_recipes"]
GENERATORS += [pytest.param("make_communication_table", marks=pytest.mark.slow)]  # it traces 49 models


@pytest.mark.parametrize("generator", GENERATORS, indirect=True)
def test_generated_parts_are_current(generator):
    part = generator.PART
    assert part.updated() == part.document.read_text(), f"run: python docs/{generator.__name__}.py"


@pytest.mark.parametrize("generator", ["make_configuration"], indirect=True)
def test_every_configuration_key_has_a_row_in_the_reference(generator):
    text = (ROOT / "docs" / "configuration.md").read_text()
    for section, *_ in generator.fields(generator.classes()["Config"]):
        for key in keys(section):
            assert f"| `{key}` |" in text, f"run: python docs/make_configuration.py ({key})"


@pytest.mark.parametrize("generator", ["make_planning_report"], indirect=True)
def test_the_planning_guide_explains_every_line_of_the_report(generator):
    guide = (ROOT / "docs" / "planning.md").read_text()
    lines = [line for line in generator.report().splitlines()[1:-1] if not line.startswith("   ")]  # not continued
    for label in (line.split()[0] for line in lines):
        assert f"\n| `{label}` |" in guide, f"docs/planning.md does not explain the line {label}"


def test_pictures_are_small_and_drawn_by_their_present_script():
    for file in (ROOT / "docs").rglob("*.png"):
        assert file.stat().st_size < 150_000, name_of(file)
    for picture in (ROOT / "docs" / "pictures").glob("*.png"):
        script = picture.with_suffix(".py")
        with Image.open(picture) as opened:
            drawn_by = opened.text["Source"]
        assert drawn_by == hashlib.sha256(script.read_bytes()).hexdigest(), f"run: python {name_of(script)}"


def test_no_text_touches_its_box_in_the_picture_of_the_mlp(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "pictures"))
    figure = import_module("tensor_parallel_mlp").draw()
    figure.draw_without_rendering()
    for axes in figure.axes:
        texts = {text.get_position(): text for text in axes.texts}
        for box in (patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)):
            text = texts[box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2]
            outer, inner = box.get_window_extent(), text.get_window_extent()
            room = min(inner.x0 - outer.x0, outer.x1 - inner.x1, inner.y0 - outer.y0, outer.y1 - inner.y1)
            assert room >= 3, f"{text.get_text()!r} has {room:.1f} pixels of room in its box"
