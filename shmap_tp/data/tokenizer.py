"""Tokenizers: text to token ids, by bytes or by a subword tokenizer of the `tokenizers` library.

Both have a `name`, the size of the `vocabulary` (ids are below it), the id `end_of_text`, `json`, the bytes of the
tokenizer's file or None, and `encode`.
"""

import json
from pathlib import Path

import numpy as np

from shmap_tp.data.files import file_size, first_line, reading
from shmap_tp.errors import UserError

END_OF_TEXT = "<|endoftext|>"


class Bytes:
    """Every UTF-8 byte is a token.  Byte 0 does not occur in text and marks the end of a document."""

    name, vocabulary, end_of_text, json = "bytes", 256, 0, None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, uint8.  Raises `UserError` if a text contains byte 0."""
        ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        for text, text_ids in zip(texts, ids, strict=True):
            if not text_ids.all():
                raise UserError(
                    f"the document that begins {text[:40]!r} contains a NUL, which --tokenizer bytes uses as the end "
                    "of text; remove it or use another --tokenizer"
                )
        return ids


class Subwords:
    """A tokenizer of the `tokenizers` library, from a JSON file or from the Hugging Face hub."""

    def __init__(self, name: str, end_of_text: str):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"--tokenizer {name} needs `tokenizers`: pip install -e '.[data]'") from None
        local = name.endswith(".json") or Path(name).is_file()
        if local and file_size(Path(name)) is None:
            raise UserError(f"--tokenizer {name} cannot be opened: no such file")
        try:
            self._tokenizer = (tokenizers.Tokenizer.from_file if local else tokenizers.Tokenizer.from_pretrained)(name)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"--tokenizer {name} cannot be opened: {first_line(error)}") from None
        with reading(name):
            self.json = Path(name).read_bytes() if local else self._tokenizer.to_str().encode()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is ordinary text
        vocabulary = self._tokenizer.get_vocab()
        if end_of_text not in vocabulary:
            raise UserError(f"--tokenizer {name} has no token {end_of_text!r}; name its own with --end-of-text")
        self.name = Path(name).name if local else name
        self.vocabulary, self.end_of_text = max(vocabulary.values()) + 1, vocabulary[end_of_text]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, uint32."""
        return [np.array(one.ids, np.uint32) for one in self._tokenizer.encode_batch_fast(texts, False)]


def open_tokenizer(name: str, end_of_text: str | None) -> Bytes | Subwords:
    """The tokenizer `name`: "bytes", a JSON file, a Hugging Face directory, or a name on the hub.

    Without `end_of_text` a directory's own end-of-sequence token is used, for others END_OF_TEXT.
    Raises UserError if it cannot be opened, lacks that token, or has ids that the directory's model does not have.
    """
    if name == Bytes.name:
        return Bytes()
    if not Path(name).is_dir():
        return Subwords(name, end_of_text or END_OF_TEXT)
    found = Subwords(str(Path(name) / "tokenizer.json"), end_of_text or _end_of_sequence(Path(name)))
    vocabulary = _read_json(Path(name) / "config.json").get("vocab_size")
    if vocabulary is not None and found.vocabulary > vocabulary:
        raise UserError(
            f"--tokenizer {name} has ids up to {found.vocabulary - 1}, but the model's vocab_size is {vocabulary}; "
            f"name the tokenizer that belongs to the model"
        )
    return found


def _end_of_sequence(directory: Path) -> str:
    """The token that tokenizer_config.json names as the end of a sequence."""
    token = _read_json(directory / "tokenizer_config.json").get("eos_token")
    return (token["content"] if isinstance(token, dict) else token) or END_OF_TEXT


def _read_json(file: Path) -> dict:
    """The content of a JSON file, or nothing if there is none.  Raises UserError."""
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}; copy it again") from error
