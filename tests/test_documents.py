"""The documents: their command blocks work, and their links and generated parts are current.

The info string of a fenced block says how it is checked:

    sh run        the block is run, on CPU, in a temporary copy of the working tree
    sh check      every command is followed up to its loaded and validated configuration (main.py --check)
    sh hardware   not run, since it needs hardware, a network or a long time; this project's commands in it are checked
    python run    all such blocks of a document are run as one program, on CPU
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from shmap_tp.errors import UserError
from tests.helpers.command_checks import check_command, commands, commands_of_help, help_texts, own_commands
from tests.helpers.documents import DOCUMENTS, ROOT, blocks, name_of

LANGUAGES = {"sh", "python", "yaml", "json", "text"}
MARKS = {"run", "check", "hardware"}
README_LINES = 125

EVERY_DOCUMENT = pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)


# Command blocks


def marked(mark: str) -> pytest.MarkDecorator:
    found = [block for file in DOCUMENTS for block in blocks(file) if block.info == ("sh", mark)]
    return pytest.mark.parametrize("block", found, ids=lambda block: block.place)


@EVERY_DOCUMENT
def test_every_command_block_is_marked(file):
    for block in blocks(file):
        language, *marks = block.info or ("",)
        assert language in LANGUAGES, f"{block.place}: name the language, one of {sorted(LANGUAGES)}"
        if language == "sh":
            assert len(marks) == 1 and marks[0] in MARKS, f"{block.place}: mark it sh run, sh check or sh hardware"


@pytest.fixture(scope="module")
def working_copy(tmp_path_factory) -> Path:
    """What git knows of the working tree, in a temporary directory."""
    copy = tmp_path_factory.mktemp("copy")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@marked("run")
def test_a_run_block_succeeds(block, working_copy):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PATH": path, "PYTHONPATH": str(working_copy)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=working_copy, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.place} failed:\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("file", [file for file in DOCUMENTS if "```python run" in file.read_text()], ids=name_of)
def test_the_python_blocks_of_a_document_run(file):
    program = "\n".join(block.text for block in blocks(file) if block.info == ("python", "run"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{name_of(file)}:\n{done.stderr[-2000:]}"


@pytest.fixture
def in_the_repository(monkeypatch) -> None:
    """Commands are given from the root of the repository."""
    monkeypatch.chdir(ROOT)


@marked("check")
def test_the_commands_of_a_check_block_reach_their_configuration(block, in_the_repository):
    for words in commands(block.text):
        check_command(words)


@marked("hardware")
def test_the_commands_of_a_hardware_block_reach_their_configuration(block, in_the_repository):
    for words in own_commands(block.text):
        check_command(words)


HELP = help_texts()


@pytest.mark.parametrize("name", HELP)
def test_the_commands_of_a_help_text_reach_their_configuration(name, in_the_repository):
    for words in commands_of_help(HELP[name]):
        check_command(words)


def test_the_commands_of_the_help_texts_are_found():
    assert {"python main.py --help", "shmap_tp/plan/__main__.py", "benchmarks/benchmark_gpu.py"} <= HELP.keys()
    assert len(commands_of_help(HELP["python main.py --help"])) == 5
    assert sum(len(commands_of_help(text)) for text in HELP.values()) >= 30


@pytest.mark.parametrize(
    "command",
    [
        "python main.py --cfg conf/config.yaml mesh.mp=3",
        "python main.py --config conf/config.yaml",
        "scripts/pod.sh run p -- model=nope",
        "sbatch --nodes=2 scripts/slurm.sh mesh.dp=7",
        "python -m shmap_tp.plan --dp 1 --mp 3 --model 6_9b",
        "python -m shmap_tp.verify resume --cfg conf/config.yaml",
        "python -m shmap_tp.prepare --source web --out x",
        "python benchmarks/benchmark_gpu.py --dp 1 --mp 8 --model gpt2_xl",
        "python benchmarks/benchmark_tpu.py --dp 1 --mp 8 --versions v3",
        "python benchmarks/nowhere.py",
        "python benchmarks/sweep.py --nonsense model=test",
        "python docs/make_configuration.py --nonsense",
        "make",
    ],
)
def test_a_wrong_command_is_found(command, in_the_repository, capsys):
    with pytest.raises((AssertionError, SystemExit, OSError, UserError)):
        check_command(commands(command)[0])


# Size, links and generated parts


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("file", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_to_files_that_exist(file):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text()):
        if "://" not in target:
            assert (file.parent / target).exists(), f"{name_of(file)} links to {target}, which does not exist"


@EVERY_DOCUMENT
def test_source_files_named_in_a_document_exist(file):
    pattern = r"`((?:shmap_tp|benchmarks|tests|scripts|conf|docs)/[\w./-]+\.(?:py|md|sh|yaml|png))`"
    missing = [path for path in re.findall(pattern, file.read_text()) if not (ROOT / path).exists()]
    assert not missing, f"{name_of(file)} names {missing}, which do not exist"


@pytest.fixture
def generator(request, monkeypatch) -> ModuleType:
    """A script of docs/, by its name, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return import_module(request.param)


GENERATORS = ["make_communication_table", "make_configuration", "make_performance_notes", "make_planning_report"]


@pytest.mark.parametrize("generator", GENERATORS, indirect=True)
def test_generated_parts_are_current(generator):
    part = generator.PART
    assert part.updated() == part.document.read_text(), f"run: python docs/{generator.__name__}.py"


@pytest.mark.parametrize("generator", ["make_configuration"], indirect=True)
def test_every_configuration_key_has_a_row_in_the_reference(generator):
    text, known = (ROOT / "docs" / "configuration.md").read_text(), generator.classes()
    for section, kind, _ in generator.fields(known["Config"]):
        for key, _, _ in generator.fields(known[kind]):
            assert f"| `{section}.{key}` |" in text, f"run: python docs/make_configuration.py ({section}.{key})"


@pytest.mark.parametrize("generator", ["make_planning_report"], indirect=True)
def test_the_planning_guide_explains_every_line_of_the_report(generator):
    guide = (ROOT / "docs" / "planning.md").read_text()
    for label in (line.split()[0] for line in generator.report().splitlines()[1:-1]):
        assert f"\n| `{label}` |" in guide, f"docs/planning.md does not explain the line {label}"


@pytest.mark.parametrize("file", sorted((ROOT / "docs").rglob("*.png")), ids=name_of)
def test_pictures_are_small(file):
    assert file.stat().st_size < 150_000
