"""A Hugging Face directory: its config.json, its safetensors files, and the names that a model on the hub has.

Multimodal checkpoints are read as their text model, and the weights of other parts are skipped:

    transformers 4     language_model.model.layers...     vision_tower...          multi_modal_projector...
    transformers 5     model.language_model.layers...     model.vision_tower...    model.multi_modal_projector...
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shmap_tp.data.metadata import COMPANIONS, GENERATION, TEMPLATE
from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.pretrained.config_json import OBJECT, checked, section
from shmap_tp.pretrained.families import find_family
from shmap_tp.pretrained.family import Family
from shmap_tp.pretrained.tensor_files import StoredTensor, read_header
from shmap_tp.runtime.files import read_json_file, reading

_GEMMA3 = {
    **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072},
}
TEXT_OF = {"Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text", _GEMMA3)}
"""Architectures: (that of their text model, its model_type, what keys mean that its text_config does not have)."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are beside text_config."""
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT = re.compile(r"(model\.language_model|language_model\.model)\.")


def text_config(config: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]] | None:
    """(the multimodal architecture, the config.json of its text model); None for a config.json of another kind."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    named = [name for name in names if isinstance(name, str) and name in TEXT_OF]
    if not named:
        return None
    architecture, model_type, defaults = TEXT_OF[named[0]]
    text = {key: config[key] for key in TOKENS if key in config}
    text |= section(config.get("text_config"), "text_config", where)
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return named[0], defaults | text | tied | {"architectures": [architecture], "model_type": model_type}


def text_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the text model, by the names that they have in a checkpoint of its own."""
    return {
        _TEXT.sub("model.", name.replace("language_model.lm_head.", "lm_head.")): tensor
        for name, tensor in tensors.items()
        if not _OTHER_PARTS.match(name)
    }


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
"""Files of the tokenizer, which are copied to what is written."""
DESCRIPTION, WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja"), ("*.safetensors",)
"""What is downloaded of a model on the hub when it is opened, and when its weights are needed."""
NOT_DOWNLOADED = ("*/*", "consolidated*")
"""Directories with other formats of the weights, and Mistral's second copy of them."""
FINGERPRINT_BYTES = 4096


@dataclass(frozen=True)
class Source:
    """A directory with config.json; the weights are looked at when they are needed."""

    directory: Path
    config: Mapping[str, Any]
    family: Family
    hub_name: str | None = None
    """The name on the hub of a snapshot whose weights are not there yet."""
    run: Path | None = None
    """The run directory of what was trained on; the tokenizer's files there, of conversations, replace its own."""
    weights: str = SINGLE
    """The file of the weights, where there are not several."""
    described_by: str | None = None
    """What says which tensors there are, if not config.json."""
    text_of: str | None = None
    """The multimodal architecture whose text model this is."""

    @property
    def config_file(self) -> str:
        """The name of config.json in messages."""
        return self.described_by or str(self.directory / "config.json")

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Where each tensor is.  Raises UserError if files are missing, damaged or not safetensors."""
        return text_tensors(self._in_files) if self.text_of else self._in_files

    @property
    def skipped(self) -> str | None:
        """What of the files is not read, as a sentence for users."""
        if not self.text_of:
            return None
        count = len(self._in_files) - len(self.tensors)
        return (
            f"{self.directory} is a {self.text_of}: its text model is read, and {count} tensors of other parts are "
            f"skipped; what is written of it is a {self.family.architecture}"
        )

    @cached_property
    def _in_files(self) -> dict[str, StoredTensor]:
        if self.hub_name:
            _download(self.hub_name, WEIGHTS, revision=self.directory.name)
        if self.weights != SINGLE or (self.directory / SINGLE).is_file():  # as in transformers, whatever else is there
            return read_header(self.directory / self.weights)
        index = self.directory / INDEX
        if index.is_file():
            content = checked(OBJECT, read_json_file(index), "the content", str(index))
            places = checked(OBJECT, content.get("weight_map"), "weight_map", str(index))
            files = [self.directory / Path(name).name for name in sorted({*map(str, places.values())})]
        else:
            files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            pickles = sorted(self.directory.glob("*.bin")) + sorted(self.directory.glob("*.pt*"))
            if pickles:
                raise UserError(
                    f"{pickles[0]} is a pickle, which can run any program when it is read; write {self.directory} "
                    f"again as safetensors:\n"
                    f"AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
                )
            raise UserError(f"{self.directory} has no *.safetensors file; copy the weights there, too")
        found: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                if name in found:
                    raise UserError(f"{name} is in {found[name].file} and in {file.name}; keep one of the files")
                found[name] = tensor
        return found

    def fingerprint(self) -> str:
        """SHA-256 of config.json, and of the name, dtype, shape and first bytes of each tensor, up to 4096: it tells
        weights apart without reading them all."""
        return self._digest(lambda tensor: next(tensor.blocks(FINGERPRINT_BYTES), b""))

    def sha256(self) -> str:
        """SHA-256 of config.json, and of the name, dtype, shape and all bytes of each tensor, in whichever file."""
        return self._digest(StoredTensor.sha256)

    def _digest(self, content: Callable[[StoredTensor], bytes]) -> str:
        digest, tensors = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()), sorted(self.tensors.items())
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            contents = threads.map(content, [tensor for _, tensor in tensors])
            for (name, tensor), part in zip(tensors, contents, strict=True):
                digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
                digest.update(part)
        return digest.hexdigest()

    def companions(self) -> list[Path]:
        """The files of the tokenizer, and generation_config.json."""
        patterns = (*COPIED, GENERATION)
        found = {file.name: file for pattern in patterns for file in self.directory.glob(pattern) if file.is_file()}
        if self.run is not None and (self.run / TEMPLATE).is_file():
            found |= {name: self.run / name for name in COMPANIONS if (self.run / name).is_file()}
        return sorted(found.values())


def open_source(name: str) -> Source:
    """The directory `name`, or a snapshot of the model `name` (owner/model) of the Hugging Face hub.

    Raises UserError if there is neither, if config.json is missing, or for an architecture that is not supported.
    """
    directory, hub_name = Path(os.path.expanduser(name)), None
    with reading(name):
        if not directory.is_dir() or not name:
            if directory.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
                raise UserError(
                    f"{shown(name) or 'an empty name'} is not a directory; name one with config.json and *.safetensors"
                )
            directory, hub_name = _download(name, DESCRIPTION, revision=None), name
        if not (directory / "config.json").is_file():
            raise UserError(f"{directory} has no config.json; name a directory as save_pretrained writes it")
    where = str(directory / "config.json")
    config = checked(OBJECT, read_json_file(directory / "config.json"), "the content", where)
    text_of, config = text_config(config, where) or (None, config)
    return Source(directory, config, find_family(config, where), hub_name, text_of=text_of)


def _download(name: str, patterns: Sequence[str], revision: str | None) -> Path:
    """The local copy of a model on the hub, a directory with the name of its revision; `patterns` are its files."""
    try:
        import huggingface_hub

        files = {"allow_patterns": list(patterns), "ignore_patterns": list(NOT_DOWNLOADED)}
        return Path(huggingface_hub.snapshot_download(name, revision=revision, **files))
    except Exception as error:  # the library raises those of several HTTP clients
        is_missing = isinstance(error, ImportError)
        reason = "this needs huggingface_hub: pip install -e '.[pretrained]'" if is_missing else first_line(error)
        raise UserError(f"{name} is not a directory, and cannot be read from the Hugging Face hub: {reason}") from error
