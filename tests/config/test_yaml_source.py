"""Files of a configuration that cannot be used: each is refused in a line or two, in bounded time and memory."""

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.yaml_source import MAX_BYTES, saved_value
from tests.helpers.config_errors import error_message

BASE = (CONF / "config.yaml").read_text()


def written(directory: Path, content: str | bytes, name: str = "mine.yaml") -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def loop_of_links(file: Path) -> Path:
    file.symlink_to(file)
    return file


def fifo(file: Path) -> Path:
    os.mkfifo(file)
    return file


PATHS = {
    "is not a file; name a YAML file": lambda file: file.parent,
    "mine.yaml is not a file; name a YAML file": fifo,
    "--cfg nope.yaml: no such file; start with conf/config.yaml": lambda file: "nope.yaml",
    "loop.yaml ": lambda file: loop_of_links(file.with_name("loop.yaml")),
    "x.yaml: no such file": lambda file: written(file.parent, BASE, "below.yaml") / "x.yaml",
    # a regular file whose beginning even root cannot read
    "cannot be read: Input/output error": lambda file: "/proc/self/mem",
    "cannot be read: File name too long": lambda file: "a" * 300 + ".yaml",
    "(6006 characters) cannot be read: File name too": lambda file: "a/" * 3000 + "x.yaml",
    "--cfg  is not a file": lambda file: "",
    "--cfg foo://x.yaml is not a path of this machine": lambda file: "foo://x.yaml",
    r"--cfg a\x00b.yaml is not a path of this machine": lambda file: "a\0b.yaml",
    ".yaml is not a path of this machine": lambda file: "\udcff.yaml",
    "must end in .yaml; rename it": lambda file: written(file.parent, BASE, "mine.yml"),
}


def test_a_path_that_is_no_readable_file_is_refused(tmp_path):
    for words, make in PATHS.items():
        assert words in error_message(make(tmp_path / "mine.yaml")), words


NO_SECTIONS = ": it holds no sections with keys; begin as conf/config.yaml does"
LAUGHS = "".join(f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi"))
UNCLOSED_LINE, DUPLICATE_LINE = len(BASE.splitlines()) + 2, BASE.splitlines().index("  steps: 300") + 2
"""Line numbers in the messages about an unclosed bracket and a duplicate key."""

CONTENTS = [
    # no YAML
    (BASE + "more: [a, b\n", f", line {UNCLOSED_LINE}: invalid YAML, expected ',' or ']'"),
    ('{"run": {"name": ', "line 1: invalid YAML"),
    ("run:\n\tname: x\n", ", line 2: invalid YAML, found character '\\t'"),
    (BASE.replace("  steps: 300", "  steps: 4\n  steps: 5"), f"line {DUPLICATE_LINE}: invalid YAML, found dup"),
    (BASE + "\nrun:\n  name: x\n", "invalid YAML, found duplicate key run"),
    (b"run:\n  name: \xe9\n", "mine.yaml: not UTF-8 text (", "); save it as UTF-8"),
    (b"run:\n  name: \x00\n", "mine.yaml: not UTF-8 text (", "); save it as UTF-8"),
    (BASE.encode("utf-16"), "not UTF-8 text"),
    # no sections
    ("", "no value for checkpoint, data, evaluate, guard, log, mesh, model, optimizer, run, sample, train"),
    ("- 1\n- 2\n", ", line 1" + NO_SECTIONS),
    ("hello\n", NO_SECTIONS),
    ("5", NO_SECTIONS),
    ("true", NO_SECTIONS),
    ("---\n", ", line 2" + NO_SECTIONS),
    ("run: [1]\n", "run is a group of keys, not a value; set one of them"),
    # keys and values
    (BASE.replace("  steps: 300", "  steps: 300\n  stepz: 1"), "did you mean train.steps?"),
    (BASE + "training:\n  steps: 3\n", "unknown key training; did you mean train?"),
    (BASE.replace("steps: 300", "steps: many"), "train.steps=many must be of type int"),
    (BASE.replace("steps: 300", "steps:"), "train.steps=null must be of type int"),
    (BASE.replace("  steps: 300", "  steps: ٣٠٠"), "train.steps=٣٠٠ must be of type int"),
    (BASE.replace("name: first", r'name: "a\nb"'), r"run.name=a\x0ab has a line break or a control character"),
    (BASE.replace("seed: 0", f"seed: {'9' * 5000}"), "more than 3000 characters"),
    (BASE.replace("seed: 0", f"seed: 0x{'f' * 2000}"), "run.seed=", "below"),
    (BASE.replace("${run.name}", "${run.nam}"), "'run.nam' not found"),
    (BASE.replace("${run.name}", "${run.name"), "run.dir: no viable"),
    ("null: 3\n", "Incompatible key type"),
    # more than a configuration needs
    ("#" * 2 * MAX_BYTES, f"has more than {MAX_BYTES} bytes, which no configuration needs"),
    ("a: " + "[" * 5000 + "]" * 5000, "line 1: more than 20 lists or sections within each other"),
    ('{"a":' * 3000 + "1" + "}" * 3000, "line 1: more than 20 lists or sections"),
    ("\n".join(" " * i + "a:" for i in range(900)), "line 21: more than 20 lists or sections"),
    (f"a: &a [1]\n{LAUGHS}", "more than 10000 values, aliases included"),
    ("run: &a\n  name: *a\n", "line 2: the YAML alias *a contains itself"),
    ("run: *a\n", "line 1: the YAML alias *a is not defined before"),
    # code
    ("run: !!python/object:os.system {}", "the YAML tag !!python/object:os.system is not allowed"),
    ("run: !!python/object/apply:os.system ['ls']", "the YAML tag !!python/object/apply:os.system"),
    ("run: !!bool x", "the YAML tag !!bool is not allowed"),
    # settings of Hydra
    ("# @package a b\n" + BASE, "Too many components in '@package a b'"),
    (BASE + "hydra:\n  verbose: true\n", "settings of Hydra itself have no effect here"),
    ("defaults: [{hydra/launcher: x}]\n", "settings of Hydra have no effect here"),
    # the defaults list
    ("defaults: {model: bytes}\n", "defaults must be a list, such as [model: bytes"),
    ("defaults:\n  - model: null\n", "defaults has {'model': None}; write each item as GROUP: NAME"),
    ("defaults:\n  - model: [bytes, test]\n", "defaults has {'model': ['bytes', 'test']}; write each"),
    ("defaults: [model: '${x}']\n", "defaults has {'model': '${x}'}; write each item as"),
    (f"defaults:\n  - model: {'a' * 300}\n", "longer than the name of a file can be; correct it"),
    (f"defaults:\n  - {'a' * 251}\n", "longer than the name of a file can be; correct it"),
    ("defaults: [{'': x}]\n", "defaults has {'': 'x'}; write each item as GROUP: NAME"),
    ("defaults: [nope]\n", "its defaults list names nope.yaml, which is neither"),
    ("defaults: [mine]\n", "its defaults list names files that name each other"),
    (BASE.replace("model: bytes", "model: nope"), "model=nope: there is no such model; use", ""),
    (BASE.replace("model: bytes", "modle: bytes"), "modle/bytes"),
]  # fmt: skip


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    for content, *words in CONTENTS:
        file, begin = written(tmp_path, content), time.perf_counter()
        message = error_message(file)
        assert time.perf_counter() - begin < 20, words
        for part in (str(file) if len(words) == 1 else "", *words):
            assert part in message, words


def test_the_files_of_a_group_are_checked_like_the_main_file(tmp_path):
    main = written(tmp_path, BASE)
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "model/laughs.yaml")
    written(tmp_path, b"\xff", "model/bytes_.yaml")
    written(tmp_path, "defaults: [circle]\n", "model/circle.yaml")
    os.mkfifo(tmp_path / "model" / "fifo.yaml")
    assert "laughs.yaml, line" in error_message(main, "model=laughs")
    assert "bytes_.yaml: not UTF-8 text" in error_message(main, "model=bytes_")
    assert "files that name each other" in error_message(main, "model=circle")
    assert "model=fifo: there is no such model; use one of 11b," in error_message(main, "model=fifo")


def test_anchors_and_merge_keys_can_be_used(tmp_path):
    text = BASE.replace("  steps: 300", "  steps: &steps 300").replace(
        "decay_steps: ${train.steps}", "decay_steps: *steps"
    )
    text = text.replace("log:\n", "log:\n  <<: {wandb: true}\n").replace("  wandb: false\n", "")
    config = load(str(written(tmp_path, text)), [])
    assert (config.train.steps, config.optimizer.decay_steps, config.log.wandb) == (300, 300, True)


def test_the_values_of_a_file_replace_those_of_its_groups_without_a_self_entry(tmp_path):
    """Hydra would warn that the entry is missing."""
    text = BASE.replace("  - _self_\n", "") + "model:\n  layers: 3\n"
    assert load(str(written(tmp_path, text)), []).model.layers == 3


@pytest.mark.parametrize("name", ["???", "a@b*'", "${x}", "_self_", "[a]", "null", "override x", "a.yaml"])
def test_a_file_can_have_any_name(tmp_path, name):
    assert load(str(written(tmp_path, BASE, f"{name}.yaml")), ["model=test"]).model.name == "test"


NAMED = ["{model: bad}", "{optional model: bad}", "{/model: bad}", "{model@model: bad}", "{model: ../model/bad}"]
NAMED += ["model/bad", "../b/model/bad", "model/bad.yaml"]


def test_the_files_that_a_defaults_list_names_are_checked_however_it_names_them(tmp_path):
    """Hydra would read, for hours or without an end, what is not checked."""
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "b/model/bad.yaml")
    for item in NAMED:
        assert "bad.yaml, line" in error_message(written(tmp_path, f"defaults: [{item}]\n", "b/mine.yaml")), item
    written(tmp_path, "defaults: [kinds: bad]\n", "model/mine.yaml")
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "model/kinds/bad.yaml")
    assert "bad.yaml, line" in error_message(written(tmp_path, BASE), "model=mine"), "by a file of a group"


def test_a_file_that_another_option_replaces_is_not_read(tmp_path):
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "model/bad.yaml")
    file = written(tmp_path, BASE.replace("model: bytes", "model: bad"))
    assert "bad.yaml, line" in error_message(file)
    assert load(str(file), ["model=test"]).model.name == "test"


# The config.yaml of an earlier run


def test_a_value_of_a_saved_configuration_is_found_without_validation(tmp_path):
    assert saved_value(written(tmp_path, "checkpoint: {dir: x, gone: 1}"), "checkpoint.dir") == "x"
    assert saved_value(tmp_path / "nowhere", "checkpoint.dir") is None
    assert saved_value(fifo(tmp_path / "fifo"), "checkpoint.dir") is None
    for content in ("- 1\n", "5", b"\xff\0", "", "run: *a", "a: " + "[" * 5000, "checkpoint: 5"):
        assert saved_value(written(tmp_path, content), "checkpoint.dir") is None, content
