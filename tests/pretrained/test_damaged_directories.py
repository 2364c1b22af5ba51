"""A Hugging Face directory whose files are damaged, or were written by another program, is refused with a message."""

import itertools
import json
import struct

import pytest

import shmap_tp
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.errors import UserError
from shmap_tp.pretrained.configuration import model_options
from shmap_tp.pretrained.source import INDEX, open_source
from shmap_tp.runtime.run_lock import lock_directories
from tests.helpers.pretrained_models import CASES, write_directory

ODD = (None, True, 0, -1, 1.5, float("nan"), 10**30, "", "x", "x" * 5000, [], [1], {}, {"a": 1}, [[]], "\ud800")
DEEP = "[" * 100_000


def refusal(call, *arguments) -> str:
    """The message of a UserError, of one or two lines; "" if there is none."""
    try:
        call(*arguments)
    except UserError as error:
        assert len(str(error).splitlines()) <= 2 and len(str(error)) < 1500
        return str(error)
    return ""


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"llama_tied", "gpt_neox_sequential"}))  # of each family one
def test_every_key_of_config_json_may_have_any_value(tmp_path, case):
    file = write_directory(tmp_path / "model", case) / "config.json"
    good = json.loads(file.read_text())
    refused = set()
    for key, value in itertools.product([*good, "rope_parameters", "sliding_window", "layer_types"], ODD):
        file.write_text(json.dumps(good | {key: value}))
        if refusal(lambda: model_options(open_source(str(file.parent)))):
            refused.add(key)
    assert refused >= {"architectures", "vocab_size"}


@pytest.mark.parametrize("content", ["", "[]", "5", DEEP, "9" * 5000, "\0"], ids=lambda text: repr(text[:3]))
def test_a_config_json_that_is_none_is_refused(tmp_path, content):
    (write_directory(tmp_path / "model", "llama") / "config.json").write_text(content)
    assert "config.json" in refusal(open_source, str(tmp_path / "model"))


def test_every_entry_of_a_header_may_have_any_value(tmp_path):
    directory = write_directory(tmp_path / "model", "llama")
    file = directory / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    odd = [header | {name: header[name] | {key: value}} for key in header[name] for value in (*ODD, [None], [-1, 5])]
    odd += [header | {name: value} for value in ODD]
    for text in [*map(json.dumps, odd), DEEP, "5"]:
        file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + length :])
        assert refusal(lambda: open_source(str(directory)).tensors)


def test_every_place_in_an_index_may_have_any_value(tmp_path):
    directory = write_directory(tmp_path / "model", "llama")
    (directory / "model.safetensors").rename(directory / "part.safetensors")  # else the index is not read
    for value in ODD:
        for index in (value, {"weight_map": value}, {"weight_map": {"a": "part.safetensors", "b": value}}):
            (directory / INDEX).write_text(json.dumps(index))
            assert refusal(lambda: open_source(str(directory)).tensors) or index == {"weight_map": {}}


@pytest.mark.parametrize("name", ["", "x" * 300, "~nobody/x", "a\0b"], ids=["empty", "long", "home", "NUL"])
def test_a_name_that_no_directory_has_is_refused(name):
    assert refusal(open_source, name)


def _tokenizer(directory):
    return TextDirectory.read(directory).tokenizer_of_model()


def _template(directory):
    return TextDirectory.read(directory).template()


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:9])
def test_special_tokens_may_have_any_value(tmp_path, value):
    directory = write_directory(tmp_path / "model", "llama")
    (directory / "tokenizer.json").write_text("{}")
    for name, content in (
        ("generation_config.json", {"eos_token_id": value}),
        ("tokenizer_config.json", {"eos_token": value, "chat_template": [value, {"name": "default"}]}),
        ("tokenizer_config.json", value),
    ):
        (directory / name).write_text(json.dumps(content))
        assert refusal(_tokenizer, directory)  # at the latest by the tokenizer that is none
        refusal(_template, directory)


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ messages.x.y }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_a_template_that_fails_is_named(tmp_path, text):
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(text)
    template = TextDirectory.read(tmp_path).template(str(tmp_path / "chat.jinja"))
    assert "chat.jinja refuses the messages" in refusal(template.render, [{"role": "user", "content": "a"}])


def test_an_export_needs_a_name_and_replaces_no_directory_of_the_user_and_no_export_in_progress(tmp_path, monkeypatch):
    """OUT.incomplete is removed only if an export has left it."""
    monkeypatch.chdir(tmp_path)
    model = shmap_tp.from_pretrained(write_directory(tmp_path / "model", "llama"))
    for out in ("", ".", "/"):
        assert "exists and is not an empty directory" in refusal(model.save_pretrained, out)
    (tmp_path / "mine.incomplete").mkdir()
    (tmp_path / "mine.incomplete" / "thesis.tex").write_text("five years")
    assert "no export that was interrupted left it" in refusal(model.save_pretrained, tmp_path / "mine")
    assert (tmp_path / "mine.incomplete" / "thesis.tex").read_text() == "five years"
    with lock_directories({"--out": str(tmp_path / "out.incomplete")}):
        (tmp_path / "out.incomplete" / "model.safetensors").write_text("of the first")
        assert "out.incomplete is in use" in refusal(model.save_pretrained, tmp_path / "out")
        assert (tmp_path / "out.incomplete" / "model.safetensors").read_text() == "of the first"
