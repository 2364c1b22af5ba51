"""Subword tokenizers of the `tokenizers` library: opened, trained, and with names of special tokens that stay text.

A chat template puts control tokens and contents into one text, and a tokenizer cannot tell which of both a name such as
<|im_end|> is from.  So names in contents are quoted before they are rendered: a noncharacter of Unicode stands behind
their first character.  The tokenizer removes it, and reads the name as ordinary text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from shmap_tp.data.chat_template import FIRST, LAST, QUOTE, refuse_marks
from shmap_tp.data.metadata import TOKENIZER, Meta
from shmap_tp.data.text_sources import TRAIN, TextSource
from shmap_tp.data.tokenizer import END_OF_TEXT, REPLACEMENT, Bytes, Tokenizer
from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.runtime.files import read_file

SMALLEST, LARGEST = 257, 1 << 20
"""Ids of a trained tokenizer: the 256 bytes and the end of text; four times the largest published vocabularies."""
LONG, OVERLAP = 1 << 18, 1 << 12
"""Characters of a long text that are tokenized at a time, and how many of these two pieces have in common."""

_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")
_BYTE_LEVEL = re.compile("[!-~¡-¬®-ÿĀ-Ń]+")
"""The characters by which byte-level vocabularies name the 256 bytes."""


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
        return self._encoded(text, self._special_tokens if special_tokens is None else special_tokens)[0]

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
    tokenizer = _opened(lambda library: library.from_str(content.decode()), place)
    return Subwords(tokenizer, Path(place).name, content, end_of_text, special_tokens)


def _opened(opening: Callable[[Any], Any], place: str) -> Any:
    """What `opening` makes of the class tokenizers.Tokenizer; `place` names the file in messages."""
    import tokenizers

    try:
        return opening(tokenizers.Tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{place} cannot be opened as a tokenizer: {first_line(error)}") from None


def open_subwords(name: str, end_of_text: str) -> Subwords:
    """The tokenizer in the file `name`, or of that name on the hub.  Raises UserError."""
    if name.endswith(".json") or Path(name).is_file():
        found = read_subwords(read_file(name, f"--tokenizer {name}"), f"--tokenizer {name}")
        found.name = Path(name).name
    else:
        tokenizer = _opened(lambda library: library.from_pretrained(name), f"--tokenizer {name}")
        found = Subwords(tokenizer, name, tokenizer.to_str().encode(), None, special_tokens=False)
    found.end_of_text = found.id_of(end_of_text)
    if found.end_of_text is None:
        raise UserError(f"--tokenizer {name} has no token {end_of_text!r}; name its own with --end-of-text")
    return found


def open_tokenizer_file(name: str) -> Tokenizer:
    """The tokenizer `name` for prompts: "bytes" or a tokenizer.json.  Raises UserError if it cannot be used."""
    if name == Bytes.name:
        return Bytes()
    return read_subwords(read_file(name, f"--tokenizer {name}"), name)


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
    import tokenizers

    try:
        again = tokenizers.Tokenizer.from_str(content.decode()).to_str()
    except Exception:  # the library raises bare Exception
        return False
    return hashlib.sha256(again.encode()).hexdigest() == sha256


def train_tokenizer(source: TextSource, vocabulary: int, end_of_text: str | None = None) -> Subwords:
    """Byte-level byte-pair encoding of at most `vocabulary` ids, trained on the training split of `source`, which is
    read once.  Any text can be encoded, since each byte has an id.

    Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners", section 2.2.  `end_of_text` is the token after each document (default: END_OF_TEXT).
    Raises UserError if the vocabulary is too small or too large, or if that token is ordinary text.
    """
    import tokenizers

    if not SMALLEST <= vocabulary <= LARGEST:
        rule = f"must be at least {SMALLEST}, 256 bytes and the end of text, and at most {LARGEST:,}"
        raise UserError(f"--train-tokenizer {shown(vocabulary)} {rule}")
    end_of_text = end_of_text or END_OF_TEXT
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end_of_text],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    made.train_from_iterator((text for split, text in source.documents if split == TRAIN), trainer)
    end, content = made.token_to_id(end_of_text), made.to_str(pretty=True).encode()
    found = Subwords(made, TOKENIZER, content, end, special_tokens=False)
    if end in found.encode_documents([end_of_text])[0]:
        raise UserError(f"--end-of-text {shown(end_of_text)} is ordinary text; choose a name such as {END_OF_TEXT}")
    return found


def quoted(value: Any, names: Collection[str]) -> Any:
    """`value`, a text or a nest of lists and objects, with each of `names` in its texts quoted.  Raises UserError as
    `refuse_marks` does."""
    longest_first = sorted(names, key=len, reverse=True)

    def quote(value: Any) -> Any:
        if isinstance(value, str):
            refuse_marks(value)
            for name in longest_first:
                value = value.replace(name, name[0] + QUOTE + name[1:])
            return value
        if isinstance(value, list | tuple):
            return [quote(each) for each in value]
        if isinstance(value, dict):
            return {quote(key): quote(each) for key, each in value.items()}
        return value

    return quote(value)


def renamed_tokenizer(content: bytes) -> tuple[str, dict[str, str]]:
    """(a tokenizer.json in which the special tokens of `content` have names that occur in no text, these names)."""
    described = json.loads(content)
    special = [token for token in described.get("added_tokens") or [] if token["special"]]
    names = {token["content"]: f"{FIRST}{token['id']}{LAST}" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
    model = described["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(described, ensure_ascii=False), names


def renamed_text(text: str, names: dict[str, str]) -> tuple[str, list[int]]:
    """(`text` without quotes and with the names that are not quoted replaced, the place in `text` of each character and
    of the end)."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
    pieces, places, last = [], [], 0

    def add(until: int) -> None:
        kept = [place for place in range(last, until) if text[place] != QUOTE]
        pieces.extend(text[place] for place in kept)
        places.extend(kept)

    for found in re.finditer(f"(?:{pattern})(?!{QUOTE})", text):
        add(found.start())
        pieces.append(names[found[0]])
        places.extend([found.start()] * len(pieces[-1]))
        last = found.end()
    add(len(text))
    return "".join(pieces), [*places, len(text)]
