"""Text in and out of a model: the tokenizer that its training data was made with.

A tokenizer here has `encode(text) -> ids`, `decode(ids) -> text` and `end_of_text`, the ids that end a document.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from etils import epath

from shmap_tp.data.files import parse_json
from shmap_tp.data.metadata import META, TOKENIZER, read_meta
from shmap_tp.errors import UserError
from shmap_tp.training.checkpoint_files import read_facts


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    end_of_text: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def byte_length(self, ids: Sequence[int]) -> int:
        """UTF-8 bytes of the text of `ids`."""
        ...


class ByteTokenizer:
    """Every UTF-8 byte is a token; byte 0 ends a document."""

    end_of_text = (0,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8, and ids that are not bytes, become replacement characters."""
        return bytes(token if token < 256 else 0xFF for token in ids).decode(errors="replace")

    def byte_length(self, ids: Sequence[int]) -> int:
        return len(ids)


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, file: str | epath.Path, end_of_text: Sequence[int]):
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(f"{file} needs `tokenizers`: pip install -e '.[data]'") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(epath.Path(file).read_text())
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{file} cannot be opened as a tokenizer: {str(error).splitlines()[0]}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_of_text = tuple(end_of_text)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def byte_length(self, ids: Sequence[int]) -> int:
        return len(self.decode(ids).encode())


def tokenizer_of_model(model: Any, file: str | None) -> Tokenizer:
    """That in `file`, or of the checkpoint or the Hugging Face directory that an `api.Model` was read from.

    Raises UserError if there is none.
    """
    if file is not None:
        return open_tokenizer_file(file)
    if model.checkpoint is not None:
        return tokenizer_of_checkpoint(model.checkpoint, model.config.data.dir)
    return tokenizer_of_pretrained(model.source.directory)


def tokenizer_of_checkpoint(checkpoint: str, data_dir: str) -> Tokenizer:
    """The tokenizer of the data that the run of `checkpoint` was trained on; `data_dir` is its data.dir.

    Its file is looked for in the run's directory, then in `data_dir`; where the checkpoint has its hash, only that file
    is taken.  Raises UserError if it is not found.
    """
    facts = read_facts(epath.Path(checkpoint)).get("data", {}).get("tokenizer") or {}
    name, sha256 = facts.get("name"), facts.get("sha256")
    meta = _meta(data_dir)
    if (name or meta.get("tokenizer")) == "bytes":
        return ByteTokenizer()
    for directory in (epath.Path(checkpoint).parent.parent, epath.Path(data_dir)):
        file = directory / TOKENIZER
        if file.exists() and sha256 in (None, hashlib.sha256(file.read_bytes()).hexdigest()):
            end_of_text = meta.get("end_of_text")
            return SubwordTokenizer(file, () if end_of_text is None else (end_of_text,))
    raise UserError(
        f"the tokenizer of {checkpoint} ({name or 'its name was not recorded'}) is not in its run directory, nor in "
        f"data.dir={data_dir};\nname its file with --tokenizer"
    )


def tokenizer_of_pretrained(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory; text ends at the eos_token_id of generation_config.json or
    config.json.  Raises UserError if there is no tokenizer.json, or one of the files is damaged."""
    file = directory / TOKENIZER
    if not file.is_file():
        raise UserError(f"{directory} has no {TOKENIZER}; copy it there, or name one with --tokenizer")
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            values = parse_json((directory / name).read_bytes(), directory / name)
            found = values.get("eos_token_id") if isinstance(values, dict) else None
            ids += found if isinstance(found, list) else [] if found is None else [found]
    return SubwordTokenizer(file, sorted({*ids}))


def open_tokenizer_file(name: str) -> Tokenizer:
    """`name` is "bytes" or a tokenizer.json.  Raises UserError if it cannot be used."""
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_file():
        raise UserError(f"--tokenizer {name}: no such file; give a tokenizer.json, or bytes")
    return SubwordTokenizer(name, ())


def _meta(data_dir: str) -> dict[str, Any]:
    """What meta.json of the data says; {} if it is not on this machine."""
    return vars(read_meta(Path(data_dir))) if (Path(data_dir) / META).is_file() else {}
