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


# Paths


def fifo(file: Path) -> Path:
    os.mkfifo(file)
    return file


def loop_of_links(file: Path) -> Path:
    file.symlink_to(file)
    return file


def dangling_link(file: Path) -> Path:
    file.symlink_to(file.with_name("nowhere"))
    return file


def unreadable(file: Path) -> str:
    return "/proc/self/mem"  # a regular file whose beginning even root cannot read


PATHS = {
    "a directory": (lambda file: file.parent, "is not a file; name a YAML file"),
    "a FIFO": (fifo, "is not a file; name a YAML file"),
    "a loop of links": (loop_of_links, ""),
    "a link to nowhere": (dangling_link, "no such file; start with conf/config.yaml"),
    "a file that cannot be read": (unreadable, "cannot be read: Input/output error"),
    "below a file": (lambda file: written(file.parent, BASE) / "x.yaml", "no such file"),
    "a name of 300 bytes": (lambda file: "a" * 300 + ".yaml", "cannot be read: File name too long"),
    "a path of 6000 bytes": (lambda file: "a/" * 3000 + "x.yaml", "(6006 characters) cannot be read: File name too"),
    "an empty name": (lambda file: "", "is not a file"),
    "a URL": (lambda file: "foo://x.yaml", "--cfg foo://x.yaml is not a path of this machine"),
    "a NUL": (lambda file: "a\0b.yaml", r"--cfg a\x00b.yaml is not a path of this machine"),
    "bytes that are not UTF-8": (lambda file: "\udcff.yaml", "is not a path of this machine"),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_is_no_readable_file_is_refused(tmp_path, case):
    make, expected = PATHS[case]
    assert expected in error_message(make(tmp_path / "mine.yaml"))


# Contents


NO_SECTIONS = "it holds no sections with keys; begin as conf/config.yaml does"
LAUGHS = "".join(f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi"))

CONTENTS = {
    "a number": ("5", NO_SECTIONS),
    "a boolean": ("true", NO_SECTIONS),
    "null": ("---\n", NO_SECTIONS),
    "bytes": (bytes(range(256)), "not UTF-8 text"),
    "UTF-16": (BASE.encode("utf-16"), "not UTF-8 text"),
    "two megabytes": ("#" * 2 * MAX_BYTES, f"has more than {MAX_BYTES} bytes, which no configuration needs"),
    "an unclosed JSON": ('{"run": {"name": ', "line 1: invalid YAML"),
    "lists 5000 deep": ("a: " + "[" * 5000 + "]" * 5000, "line 1: more than 20 lists or sections within each other"),
    "JSON 3000 deep": ('{"a":' * 3000 + "1" + "}" * 3000, "line 1: more than 20 lists or sections"),
    "sections 900 deep": ("\n".join(" " * i + "a:" for i in range(900)), "line 21: more than 20 lists or sections"),
    "9^9 aliases": (f"a: &a [1]\n{LAUGHS}", "more than 10000 values, aliases included"),
    "a section within itself": ("run: &a\n  name: *a\n", "line 2: the YAML alias *a contains itself"),
    "an unknown alias": ("run: *a\n", "line 1: the YAML alias *a is not defined before"),
    "a Python object": ("run: !!python/object:os.system {}", "the YAML tag !!python/object:os.system is not allowed"),
    "a Python call": ("run: !!python/object/apply:os.system ['ls']", "the YAML tag !!python/object/apply:os.system"),
    "a wrong tag": ("run: !!bool x", "the YAML tag !!bool is not allowed"),
    "a duplicate section": (BASE + "\nrun:\n  name: x\n", "invalid YAML, found duplicate key run"),
    "an integer of 5000 digits": (BASE.replace("seed: 0", f"seed: {'9' * 5000}"), "more than 3000 characters"),
    "a hexadecimal integer of 2000 digits": (BASE.replace("seed: 0", f"seed: 0x{'f' * 2000}"), "run.seed=", "below"),
    "a wrong header": ("# @package a b\n" + BASE, "Too many components in '@package a b'"),
    "a null key": ("null: 3\n", "Incompatible key type"),
    "settings of Hydra": (BASE + "hydra:\n  verbose: true\n", "settings of Hydra itself have no effect here"),
    "a section that is a list": ("run: [1]\n", "run is a group of keys, not a value; set one of them"),
    "defaults that are no list": ("defaults: {model: bytes}\n", "defaults must be a list, such as [model: bytes"),
    "no model": ("defaults:\n  - model: null\n", "defaults has {'model': None}; write each item as GROUP: NAME"),
    "two models": ("defaults:\n  - model: [bytes, test]\n", "defaults has {'model': ['bytes', 'test']}; write each"),
    "an interpolated default": ("defaults: [model: '${x}']\n", "defaults has {'model': '${x}'}; write each item as"),
    "a long name": (f"defaults:\n  - model: {'a' * 300}\n", "longer than the name of a file can be; correct it"),
    "a long file": (f"defaults:\n  - {'a' * 251}\n", "longer than the name of a file can be; correct it"),
    "an empty group": ("defaults: [{'': x}]\n", "defaults has {'': 'x'}; write each item as GROUP: NAME"),
    "defaults of Hydra": ("defaults: [{hydra/launcher: x}]\n", "settings of Hydra have no effect here"),
    "an unknown default": ("defaults: [nope]\n", "its defaults list names nope.yaml, which is neither"),
    "defaults that name themselves": ("defaults: [mine]\n", "its defaults list names files that name each other"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTENTS)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, case):
    content, *expected = CONTENTS[case]
    file, begin = written(tmp_path, content), time.perf_counter()
    message = error_message(file)
    assert time.perf_counter() - begin < 20
    for part in (str(file) if len(expected) == 1 else "", *expected):
        assert part in message


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
    text = BASE.replace("  steps: 300", "  steps: &steps 300").replace("decay_steps: 300", "decay_steps: *steps")
    text = text.replace("log:\n", "log:\n  <<: {wandb: true}\n").replace("  wandb: false\n", "")
    config = load(str(written(tmp_path, text.replace("decay_steps: &steps 300", "decay_steps: *steps"))), [])
    assert (config.train.steps, config.optimizer.decay_steps, config.log.wandb) == (300, 300, True)


def test_the_values_of_a_file_replace_those_of_its_groups_without_a_self_entry(tmp_path):
    """Hydra would warn that the entry is missing."""
    text = BASE.replace("  - _self_\n", "") + "model:\n  layers: 3\n"
    assert load(str(written(tmp_path, text)), []).model.layers == 3


@pytest.mark.parametrize("name", ["???", "a@b", "${x}", "_self_", "[a]", "null", "override x", "a.yaml", "*", "'"])
def test_a_file_can_have_any_name(tmp_path, name):
    assert load(str(written(tmp_path, BASE, f"{name}.yaml")), ["model=test"]).model.name == "test"


NAMED = ["{model: bad}", "{optional model: bad}", "{/model: bad}", "{model@model: bad}", "{model: ../model/bad}"]


@pytest.mark.parametrize("item", [*NAMED, "model/bad", "../b/model/bad", "model/bad.yaml"])
def test_the_files_that_a_defaults_list_names_are_checked_however_it_names_them(tmp_path, item):
    """Hydra would read, for hours or without an end, what is not checked."""
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "b/model/bad.yaml")
    assert "bad.yaml, line" in error_message(written(tmp_path, f"defaults: [{item}]\n", "b/mine.yaml"))


def test_the_files_that_the_files_of_a_group_name_are_checked(tmp_path):
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "model/kinds/bad.yaml")
    written(tmp_path, "defaults: [kinds: bad]\n", "model/mine.yaml")
    assert "bad.yaml, line" in error_message(written(tmp_path, BASE), "model=mine")


def test_a_file_that_another_option_replaces_is_not_read(tmp_path):
    written(tmp_path, f"a: &a [1]\n{LAUGHS}", "model/bad.yaml")
    file = written(tmp_path, BASE.replace("model: bytes", "model: bad"))
    assert "bad.yaml, line" in error_message(file)
    assert load(str(file), ["model=test"]).model.name == "test"


# The config.yaml of an earlier run


@pytest.mark.parametrize(
    "content", ["- 1\n", "5", b"\xff\0", "", "run: *a", "a: " + "[" * 5000, "checkpoint: 5"], ids=repr
)
def test_a_saved_configuration_that_cannot_be_read_has_no_values(tmp_path, content):
    assert saved_value(written(tmp_path, content), "checkpoint.dir") is None


def test_a_value_of_a_saved_configuration_is_found_without_validation(tmp_path):
    assert saved_value(written(tmp_path, "checkpoint: {dir: x, gone: 1}"), "checkpoint.dir") == "x"
    assert saved_value(tmp_path / "nowhere", "checkpoint.dir") is None
    os.mkfifo(tmp_path / "fifo")
    assert saved_value(tmp_path / "fifo", "checkpoint.dir") is None
