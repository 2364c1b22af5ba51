"""The documents: their commands work, their links and generated parts are current, and all text uses the field's words.

The info string of a fenced block says how it is checked:

    sh run        the block is run, on CPU, in a temporary copy of the working tree
    sh check      its configuration is composed and validated, and its flags are looked up in the command's help
    sh hardware   not run: it needs hardware, a network or a long time
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from shmap_tp import verify
from shmap_tp.config.compose import load
from shmap_tp.plan.report import Row, describe

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"sh", "python", "yaml", "json", "text"}
MARKS = {"run", "check", "hardware"}
README_LINES = 125


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


EVERY_DOCUMENT = pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)


# Command blocks


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    file: Path
    line: int
    info: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        return f"{name_of(self.file)}:{self.line}"


def blocks(file: Path) -> list[Block]:
    found, begin, info, lines = [], 0, (), []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif begin:
            found.append(Block(file, begin, info, "\n".join(lines)))
            begin = 0
        else:
            begin, info, lines = number, tuple(line.strip().strip("`").split()), []
    assert not begin, f"{name_of(file)}:{begin}: a fenced block has no end"
    return found


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


def commands(block: Block) -> list[list[str]]:
    """The commands of a block, each as words; a backslash continues a line."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@marked("check")
def test_a_check_block_has_valid_configurations_and_flags(block):
    for words in commands(block):
        match words:
            case ["python", "main.py", *rest]:
                check_training(rest)
            case ["python", "-m", "shmap_tp.verify", *rest]:
                arguments = verify.parser().parse_args(rest)
                load(str(ROOT / arguments.cfg), arguments.overrides)
            case ["python", "-m", module, *rest]:
                check_benchmark(("-m", module), rest)
            case ["python", script, *rest]:
                check_benchmark((script,), rest)
            case ["scripts/pod.sh", *rest]:
                if "--" in rest:
                    check_training(["--cfg", "conf/config.yaml", *rest[rest.index("--") + 1 :]])
            case ["sbatch", *rest]:
                check_training(["--cfg", "conf/config.yaml", *rest[rest.index("scripts/slurm.sh") + 1 :]])
            case _:
                pytest.fail(f"{block.place}: {shlex.join(words)} cannot be checked; mark it sh run or sh hardware")


def check_training(words: list[str]) -> None:
    """Compose and validate the configuration of a `main.py` command."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--cfg", required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--processes", type=int)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(words)
    flags = ["checkpoint.resume=must"] if given.resume else []
    flags += [f"mesh.processes={given.processes}"] if given.processes else []
    load(str(ROOT / given.cfg), [*given.overrides, *flags])


def check_benchmark(command: tuple[str, ...], words: list[str]) -> None:
    """The flags exist, and the configuration that they and the overrides make is valid."""
    known = set(re.findall(r"--[a-z][a-z-]*", help_text(command)))
    unknown = {word for word in words if word.startswith("--")} - known
    assert not unknown, f"{' '.join(command)} has no {sorted(unknown)}"
    value = {flag: words[i + 1] for i, flag in enumerate(words[:-1]) if flag.startswith("--")}
    dp, mp = int(value.get("--dp", 1)), int(value.get("--mp", 1))
    given = [f"model={value['--model']}"] if "--model" in value else []
    given += [f"mesh.dp={dp}", f"mesh.mp={mp}", f"train.batch={value.get('--batch', 8 * dp)}"]
    given += [f"train.microbatches={value.get('--microbatches', 1)}"]
    load(str(ROOT / "conf" / "config.yaml"), given + [word for word in words if re.match(r"[a-z_]+\.?[a-z_]+=", word)])


@cache
def help_text(command: tuple[str, ...]) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_configuration", "make_performance_notes"])
def test_generated_parts_are_current(name):
    generator = script(name)
    document = generator.DOCUMENT.read_text()
    assert generator.updated(document) == document, f"run: python docs/{name}.py"


def test_every_configuration_key_has_a_row_in_the_reference():
    text = (ROOT / "docs" / "configuration.md").read_text()
    generator = script("make_configuration")
    known = generator.classes()
    for section, kind, _ in generator.fields(known["Config"]):
        for key, _, _ in generator.fields(known[kind]):
            assert f"| `{section}.{key}` |" in text, f"run: python docs/make_configuration.py ({section}.{key})"


def test_the_report_in_the_planning_guide_is_that_of_a_recorded_result():
    """The first explicit row of 6_9b in tpu.jsonl, as the benchmarks print it, with an explanation of every line."""
    rows = map(json.loads, (ROOT / "benchmarks" / "results" / "tpu.jsonl").read_text().splitlines())
    report = describe(Row(**next(row for row in rows if (row["model"], row["program"]) == ("6_9b", "explicit"))))
    guide = ROOT / "docs" / "planning.md"
    (shown,) = [block.text for block in blocks(guide) if block.info == ("text", "report")]
    assert shown == report, f"docs/planning.md must show:\n{report}"
    for label in (line.split()[0] for line in report.splitlines()):
        assert f"\n| `{label}` |" in guide.read_text(), f"docs/planning.md does not explain the line {label}"


@pytest.mark.parametrize("file", sorted((ROOT / "docs").rglob("*.png")), ids=name_of)
def test_pictures_are_small(file):
    assert file.stat().st_size < 150_000


# Words

NOT_IN_A_WORD = r"(?<![A-Za-z])(?:{})(?![A-Za-z])"
"""Also matches parts of identifiers, such as wire in `wire_bytes`."""

PRIVATE_WORDS = {
    "wires?": "tensor-parallel mode, communication, or link",
    "twins?": "baseline, GSPMD baseline",
    "windows|window of tokens|training window": "sequences",
    "doors?": "command line, entry point; or leave it out",
    "owed": "partial sum, not yet reduced",
    "heed(?:s|ed)?": "handle, respond to",
    "told": "reported, requested, or given",
    "handed": "passed, returned",
    "(?:at|go|goes|going|gone|send|sends|sent)[ _]home": "local; gradients are reduced",
    "who keeps": "how it is sharded",
    "parts? of dp": "dp ranks",
    "put[ _]off": "deferred, saved at the end of the block",
    "by[ _]adding": "sum by additions",
    "(?:go|goes|going)[ _]around": "ring reduction",
    "(?:share|shares|shared)[ _]out": "shard over dp",
    "cut[ _]further|cut along|cuts along": "sharded over, split along",
    "meets?|meeting": "are reduced; communicate; connect",
    "travels?|travelling": "is communicated, is sent",
    "the way (?:back|through)": "backward pass; scan over layers",
    "nothing hides": "exposed communication",
    "the host keeps|kept by the host": "offloaded to host memory",
    "replay(?:s|ed|ing)?": "simulation of the schedule",
    "doctor": "verify",
    "settled": "resolve_auto",
    "everyone(?:'s)?": "Replicated; replicated over dp",
    "InputError": "UserError",
    "AnyWire|SharedUpdate|SharedWeight|RingWeight|DpParts": "the present class names",
    "meet_over|owed_by|scatter_sum|gather_whole|own_part|scored_by|dp_meets": "the present function names",
}
"""Words of an earlier private vocabulary, and the field's words for them."""

PATTERNS = {
    re.compile(NOT_IN_A_WORD.format(words), re.IGNORECASE): standard for words, standard in PRIVATE_WORDS.items()
}

TEXTS = [
    *(ROOT / "shmap_tp").rglob("*.py"),
    *(file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__).resolve()),
    *(ROOT / "benchmarks").glob("*.py"),
    *(ROOT / "conf").rglob("*.yaml"),
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "docs").rglob("*.py"),
    *ROOT.glob("*.py"),
    *ROOT.glob("*.sh"),
    *DOCUMENTS,
]


@pytest.mark.parametrize("file", sorted(TEXTS), ids=name_of)
def test_texts_use_the_words_of_the_field(file):
    found = [
        f"{name_of(file)}:{number}: {match[0]!r} (use: {standard}): {line.strip()[:100]}"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for pattern, standard in PATTERNS.items()
        for match in pattern.finditer(line)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line, accepted",
    [
        ("the wire that is handed down", False),
        ("gradients go home", False),
        ("self.at_home", False),
        ("bytes_on_wires = 3", False),
        ("a wireless window", True),
        ("guard.window steps; the gradient is reduced", True),
    ],
)
def test_the_word_check_finds_private_words_and_no_others(line, accepted):
    assert accepted is not any(pattern.search(line) for pattern in PATTERNS)
