"""Tokenizers: text to token ids and back, by bytes or by a subword tokenizer of the `tokenizers` library."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from shmap_tp.data.metadata import Meta
from shmap_tp.data.quoting import QUOTE, renamed_text, renamed_tokenizer
from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.runtime.files import file_size, reading

END_OF_TEXT = "<|endoftext|>"
LONG, OVERLAP = 1 << 18, 1 << 12
"""Characters of a long text that are tokenized at a time, and how many of these two pieces have in common."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a part of a character is decoded to."""

_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")
_BYTE_LEVEL = re.compile("[!-~¡-¬®-ÿĀ-Ń]+")
"""The characters by which byte-level vocabularies name the 256 bytes."""


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
        """The ids of a prompt.  Names of special tokens in it are these tokens, unless they are quoted (`quoting.py`).

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


class Subwords:
    """A tokenizer of the `tokenizers` library."""

    begin_of_text: int | None = None
    stop_tokens: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, name: str, content: bytes, end_of_text: int | None, special_tokens: bool):
        """`content` are the bytes of the file that `tokenizer`, a tokenizers.Tokenizer, was read from."""
        self._tokenizer, self._special_tokens = tokenizer, special_tokens
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name, self.json, self.end_of_text = name, content, end_of_text
        self.vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, uint32.  A text of any length takes memory for LONG characters at a time."""
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is ordinary text
        short = [text for text in texts if len(text) <= LONG]
        with self._messages():
            found = (np.array(one.ids, np.uint32) for one in self._tokenizer.encode_batch_fast(short, False))
            return [next(found) if len(text) <= LONG else self._encode_long(text) for text in texts]

    def _encode_long(self, text: str) -> np.ndarray:
        """The ids of a text, from pieces of LONG characters that overlap.  Two pieces are joined where a token begins
        in both, near the middle of their overlap, so that neither the end nor the beginning of a piece shows.  Where
        there is no such place the second piece is tokenized anew from a token of the first."""

        def piece(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            found = self._tokenizer.encode(text[first:last], add_special_tokens=False)
            return np.array(found.ids, np.uint32), np.array([place for place, _ in found.offsets], np.int64) + first

        (ids, places), join, done = piece(0, LONG), 0, []
        for start in range(LONG - OVERLAP, len(text) - OVERLAP, LONG - OVERLAP):
            before, places_before, joined = ids, places, join
            ids, places = piece(start, start + LONG)
            common = np.intersect1d(places_before, places)
            among = common if len(common) else places_before
            join = int(among[np.abs(among - start - OVERLAP // 2).argmin()])
            if not len(common):
                ids, places = piece(join, start + LONG)
            done.append(before[(places_before >= joined) & (places_before < join)])
        return np.concatenate([*done, ids[places >= join]])

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        added = self._special_tokens if special_tokens is None else special_tokens
        return self._encoded(text, added)[0]

    def encode_with_places(self, text: str) -> tuple[Int[np.ndarray, " _"], Int[np.ndarray, "2 _"]]:
        """(the ids of `encode` without added tokens, the first character of each and the one after its last)."""
        ids, places = self._encoded(text, added=False)
        return np.array(ids, np.int64), np.array(places, np.int64).reshape(-1, 2).T

    def _encoded(self, text: str, added: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """(the ids of a text with names of special tokens, the characters of each)."""
        self._tokenizer.encode_special_tokens = False
        with self._messages():
            if QUOTE not in text:
                found = self._tokenizer.encode(text, add_special_tokens=added)
                return found.ids, found.offsets
            tokenizer, names = self._renamed
            text, places = renamed_text(text, names)
            found = tokenizer.encode(text, add_special_tokens=added)
            return found.ids, [(places[first], places[last]) for first, last in found.offsets]

    @cached_property
    def _renamed(self) -> tuple[Any, dict[str, str]]:
        """(the tokenizer with other names of its special tokens, these names)."""
        content, names = renamed_tokenizer(self.json)
        return type(self._tokenizer).from_str(content), names

    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text, the lowest first."""
        found = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in sorted(found.items()) if token.special}

    def decode(self, ids: Sequence[int]) -> str:
        with self._messages():
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """From the text of each id between two others, and before one: decoders join words, and strip the first space.

        An id that is only a part of a character has no text, but as many bytes as its name has characters in
        byte-level vocabularies, and one in those that name it <0x41>.
        """
        names = {token: name for name, token in self._tokenizer.get_vocab().items()}
        other = [self._tokenizer.token_to_id("a") or min(names)]

        def texts(sequences: Iterable[list[int]]) -> list[str]:
            with self._messages():
                return self._tokenizer.decode_batch([*sequences], skip_special_tokens=False)

        def sizes(sequences: Iterable[list[int]]) -> np.ndarray:
            return np.array([len(text.encode()) for text in texts(sequences)], np.int64)

        ids = range(self.vocabulary)
        one, two = sizes([other, 2 * other])
        inside, first = sizes([*other, token, *other] for token in ids), sizes([token, *other] for token in ids)
        found = np.stack([inside - two, first - (two - one)])
        for token, text in zip(ids, texts([token] for token in ids), strict=True):
            name = names.get(token, "")
            if _BYTE_NAME.fullmatch(name):
                found[:, token] = 1
            elif REPLACEMENT in text and _BYTE_LEVEL.fullmatch(name):
                found[:, token] = len(name)
        return found

    def id_of(self, token: str | None) -> int | None:
        """The id of a token; None if there is none."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def name_of(self, number: int) -> str:
        return self._tokenizer.id_to_token(number)

    def file_for_export(self) -> bytes:
        if self.encode("a", special_tokens=True) == self.encode("a", special_tokens=False):
            return self.json
        return json.dumps(json.loads(self.json) | {"post_processor": None}, ensure_ascii=False).encode()

    @contextmanager
    def _messages(self) -> Iterator[None]:
        """Context that uses the library, whose errors (bare Exception, and a panic that is none) become a UserError."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise UserError(
                f"the tokenizer {shown(self.name)} fails: {shown(first_line(error))}; it has no unknown token for what "
                f"it does not know, or its file is damaged: use another"
            ) from error


def read_subwords(
    content: bytes, place: str, *, end_of_text: int | None = None, special_tokens: bool = False
) -> Subwords:
    """The tokenizer whose tokenizer.json has this content; `place` names it in messages.

    `special_tokens`: whether `encode` adds what the file adds to every text.  Raises UserError.
    """
    library = tokenizers_library(place)
    try:
        tokenizer = library.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{place} cannot be opened as a tokenizer: {first_line(error)}") from None
    return Subwords(tokenizer, Path(place).name, content, end_of_text, special_tokens)


def open_tokenizer_file(name: str) -> Tokenizer:
    """The tokenizer `name` for prompts: "bytes" or a tokenizer.json.  Raises UserError if it cannot be used."""
    if name == Bytes.name:
        return Bytes()
    with reading(name):
        if not Path(name).is_file():
            raise UserError(f"--tokenizer {shown(name)}: no such file; give a tokenizer.json, or bytes")
        return read_subwords(Path(name).read_bytes(), name)


def has_tokenized(tokenizer: Tokenizer, meta: Meta) -> bool:
    """Whether `tokenizer` may be that of prepared data, as far as its meta.json says."""
    if meta.tokenizer is None or Bytes.name in (meta.tokenizer, tokenizer.name):
        return meta.tokenizer in (None, tokenizer.name)
    return None in (tokenizer.json, meta.tokenizer_sha256) or has_sha256(tokenizer.json, meta.tokenizer_sha256)


def has_sha256(content: bytes, sha256: str | None) -> bool:
    """Whether `content`, of a tokenizer.json, has this hash as it is, or as the library writes it again: that is the
    hash of data that was prepared with a name on the hub."""
    if hashlib.sha256(content).hexdigest() == sha256:
        return True
    try:
        again = tokenizers_library("").Tokenizer.from_str(content.decode()).to_str()
    except Exception:  # the library raises bare Exception; or it is not there
        return False
    return hashlib.sha256(again.encode()).hexdigest() == sha256


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
        raise UserError(
            f"{name} has bytes that are not UTF-8, or half of a surrogate pair: {place} at character {error.start}; "
            f"correct it"
        ) from error


def open_subwords(name: str, end_of_text: str) -> Subwords:
    """The tokenizer in the file `name`, or of that name on the hub.  Raises UserError."""
    library = tokenizers_library(f"--tokenizer {name}")
    local = name.endswith(".json") or Path(name).is_file()
    if local and file_size(Path(name)) is None:
        raise UserError(f"--tokenizer {name} cannot be opened: no such file")
    try:
        tokenizer = (library.Tokenizer.from_file if local else library.Tokenizer.from_pretrained)(name)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"--tokenizer {name} cannot be opened: {first_line(error)}") from None
    with reading(name):
        content = Path(name).read_bytes() if local else tokenizer.to_str().encode()
    found = Subwords(tokenizer, Path(name).name if local else name, content, None, special_tokens=False)
    found.end_of_text = found.id_of(end_of_text)
    if found.end_of_text is None:
        raise UserError(f"--tokenizer {name} has no token {end_of_text!r}; name its own with --end-of-text")
    return found


def tokenizers_library(place: str) -> Any:
    """The module `tokenizers`.  Raises UserError if it is not there; `place` names what needs it."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{place} needs `tokenizers`: pip install -e '.[data]'") from None
    return tokenizers
