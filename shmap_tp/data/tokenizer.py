"""Text to token ids and back, and the bytes of the text of tokens.  Subword tokenizers are in `subwords.py`."""

import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from shmap_tp.errors import UserError

END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a part of a character is decoded to."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    name: str
    vocabulary: int
    """Ids are below it."""
    end_of_text: int | None
    """The id after each document of the training data; None where it is not known."""
    begin_of_text: int | None
    """The id before a text whose first token has no token before it; None where the model has none."""
    stop_tokens: tuple[int, ...]
    """Ids that end an answer."""
    json: bytes | None
    """The bytes of the tokenizer's file; None for bytes."""

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, unsigned.  Names of special tokens in it are ordinary text."""
        ...

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """The ids of a prompt.  Names of special tokens in it are these tokens, unless they are quoted (`quoted`).

        `special_tokens` adds what the file of a subword tokenizer adds to every text, such as a first token; None: as
        the model was trained.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included.  What is not UTF-8 becomes replacement characters."""
        ...

    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text, the lowest first."""
        ...

    def id_of(self, token: str | None) -> int | None:
        """The id of a token; None if there is none."""
        ...

    def name_of(self, number: int) -> str:
        """The token with this id."""
        ...

    def file_for_export(self) -> bytes:
        """A tokenizer.json that adds nothing to a text, as nothing was added in the data."""
        ...

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of the text of each id, int[2, vocabulary]: within a document, and at its beginning."""
        ...


class Bytes:
    """Every UTF-8 byte is a token.  Byte 0 does not occur in text and marks the end of a document."""

    name, vocabulary, end_of_text, begin_of_text, stop_tokens, json = "bytes", 256, 0, None, (0,), None

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, uint8.  Raises `UserError` if a text contains byte 0."""
        ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        for text, text_ids in zip(texts, ids, strict=True):
            if not text_ids.all():
                raise UserError(
                    f"the document that begins {text[:40]!r} contains a NUL, which --tokenizer bytes uses as the end "
                    "of text; remove it or use another --tokenizer"
                )
        return ids

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """The bytes of a prompt; bytes have no special tokens to add."""
        return list(text.encode())

    def encode_with_places(self, text: str) -> tuple[Int[np.ndarray, " _"], Int[np.ndarray, "2 _"]]:
        """(the ids of `encode`, the first character of each and the one after its last)."""
        sizes = [len(character.encode()) for character in text]
        first = np.repeat(np.arange(len(text)), sizes)
        return np.array(self.encode(text), np.int64), np.stack([first, first + 1])

    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text: none."""
        return {}

    def id_of(self, token: str | None) -> int | None:
        return self.end_of_text if token == END_OF_TEXT else None

    def name_of(self, number: int) -> str:
        return END_OF_TEXT if number == self.end_of_text else bytes([number]).decode("latin-1")

    def file_for_export(self) -> bytes:
        """A byte-level tokenizer without merges, whose id of a byte is its value; byte 0 is the end of text."""
        shown_as = [*range(33, 127), *range(161, 173), *range(174, 256)]  # other bytes are named by later characters
        hidden = {byte: 256 + number for number, byte in enumerate(b for b in range(256) if b not in shown_as)}
        names = {chr(hidden.get(byte, byte)): byte for byte in range(1, 256)}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        described = {
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": END_OF_TEXT} | special],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {END_OF_TEXT: 0} | names, "merges": []},
        }
        return json.dumps(described, ensure_ascii=False).encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8, and ids that are not bytes, become replacement characters."""
        return bytes(token if token < 256 else 0xFF for token in ids).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        return np.ones((2, self.vocabulary), np.int64)


class TextBytes:
    """Counts the UTF-8 bytes of the text of tokens; the ends of documents, and ids without a token, have none."""

    isolated: int | None
    """The id that ends a document, where the first token of the next one is no target, and None where it is."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int | None, isolated: int | None = None):
        """`end_of_text` is the id after each document, beside those that `tokenizer` knows."""
        self.isolated = isolated
        self._bytes = np.pad(tokenizer.token_bytes(), [(0, 0), (0, 1)])
        self._ends = [end for end in {*tokenizer.stop_tokens, tokenizer.end_of_text, end_of_text} if end is not None]
        self._bytes[:, [end for end in self._ends if end < tokenizer.vocabulary]] = 0

    def __call__(self, rows: Int[np.ndarray, "rows tokens"]) -> int:
        """Bytes of all targets that count: tokens but the first of each row, and of each document that is isolated.

        Each token has bytes of its own, so it does not matter where rows cut the text, be it within a character.
        """
        counted, inputs = rows[:, 1:] >= 0, np.maximum(rows, ~rows)[:, :-1]
        ids = np.clip(rows[:, 1:], 0, self._bytes.shape[1] - 1)
        found = self._bytes[np.isin(inputs, self._ends).astype(int), ids]
        return int(found[counted & (inputs != self.isolated)].sum())


def check_text(text: str, name: str = "the text") -> None:
    """Raise UserError if `text`, called `name` in messages, cannot be encoded: Python reads bytes that are not UTF-8 as
    surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = ascii(text[max(error.start - 20, 0) : error.end + 20])
        what = f"bytes that are not UTF-8, or half of a surrogate pair: {place} at character {error.start}"
        raise UserError(f"{name} has {what}") from error
