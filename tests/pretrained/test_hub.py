"""A model by its name on the Hugging Face hub, with a stand-in for the network."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.pretrained.__main__ import main
from shmap_tp.pretrained.source import open_source
from tests.helpers.assertions import assert_same_bits
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import write_directory


def stand_in(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    """Let `huggingface_hub.snapshot_download` be `download`."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))


def test_a_name_on_the_hub_is_read_from_its_snapshot_and_its_weights_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """A plan needs config.json alone."""
    directory, requested = write_directory(tmp_path / "snapshots" / "0123abc", "llama"), []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "someone/tiny-llama" and "consolidated*" in ignore_patterns and "*.bin" not in allow_patterns
        requested.append((revision, "*.safetensors" in allow_patterns))
        return str(directory)

    stand_in(monkeypatch, download)
    monkeypatch.chdir(tmp_path)
    given = ["model.from_pretrained=someone/tiny-llama", "mesh.mp=1"]
    assert shmap_tp.load_config(*given, file=ROOT / "conf" / "finetune.yaml").model.width == 48
    assert requested and not any(are_weights for _, are_weights in requested)
    assert open_source("someone/tiny-llama").tensors and requested[-1] == ("0123abc", True)
    assert main(["inspect", "someone/tiny-llama"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    model = shmap_tp.from_pretrained("someone/tiny-llama", dp=2, mp=4)
    assert_same_bits(model.parameters, shmap_tp.from_pretrained(directory, dp=2, mp=4).parameters)
    assert {revision for revision, are_weights in requested if are_weights} == {"0123abc"}


def test_a_network_error_of_the_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def refuse(name: str, **_: Any) -> str:
        raise ConnectionError("401 Client Error\nmore\nlines")

    stand_in(monkeypatch, refuse)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "someone/tiny-llama"]) == 2
    said = capsys.readouterr().err
    expected = "error: someone/tiny-llama is not a directory, and cannot be read from the Hugging Face hub: 401 Client"
    assert said.startswith(expected) and len(said.splitlines()) == 1


def test_a_hub_name_without_the_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises ImportError
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"needs huggingface_hub: pip install -e '\.\[pretrained\]'$") as raised:
        shmap_tp.from_pretrained("someone/tiny-llama")
    assert len(str(raised.value).splitlines()) <= 2


@pytest.mark.parametrize("name", ["nothere", "./a/b", "/nowhere/at/all", "a/b/c", "../up/one"])
def test_what_cannot_be_a_name_on_the_hub_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("the network was used")

    stand_in(monkeypatch, never)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not a directory; name one with config"):
        shmap_tp.from_pretrained(name)
