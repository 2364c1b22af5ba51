"""Text to ids and back: prompts, answers, and the bytes of a text.  Documents are tokenized in bulk by tokenizer.py.

A tokenizer here has `encode(text) -> ids`, `decode(ids) -> text` and `end_of_text`, the ids that end a document.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from shmap_tp.data.metadata import Meta
from shmap_tp.errors import UserError


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

    name = "bytes"
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

    def __init__(self, json: str | bytes, file: str, end_of_text: Sequence[int]):
        """`json` is the content of tokenizer.json, `file` its name in messages.  Raises UserError if it is not one."""
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(f"{file} needs `tokenizers`: pip install -e '.[data]'") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.decode() if isinstance(json, bytes) else json)
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


def open_tokenizer_file(name: str) -> Tokenizer:
    """`name` is "bytes" or a tokenizer.json.  Raises UserError if it cannot be used."""
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_file():
        raise UserError(f"--tokenizer {name}: no such file; give a tokenizer.json, or bytes")
    return SubwordTokenizer(Path(name).read_bytes(), name, ())


def tokenizer_of_data(meta: Meta, json: bytes | None, directory: str) -> Tokenizer:
    """The tokenizer of prepared data: `meta` is its meta.json, `json` its tokenizer.json.

    Raises UserError if it is not known, or cannot be used.
    """
    if meta.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    if json is None:
        raise UserError(f"{directory} has no tokenizer.json of its data")
    return SubwordTokenizer(
        json, f"{directory}/tokenizer.json", () if meta.end_of_text is None else (meta.end_of_text,)
    )


def text_bytes(tokenizer: Tokenizer, ids: Iterable[int], end_of_text: int | None) -> int:
    """UTF-8 bytes of the text of `ids`; the ends of documents have none."""
    ends = set(tokenizer.end_of_text) | ({end_of_text} - {None})
    return tokenizer.byte_length([token for token in ids if token not in ends])
