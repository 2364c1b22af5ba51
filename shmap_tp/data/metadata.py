"""meta.json: what a directory of prepared data holds.

`shmap_tp.prepare` writes all of it.  For token files of another program `{"dtype": "uint16"}` is enough, and
`"end_of_text"` where documents are isolated: what is not stated is not checked.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shmap_tp.errors import UserError
from shmap_tp.runtime.files import file_size, parse_json, read_file

META = "meta.json"
TOKENIZER = "tokenizer.json"
"""Copy of the subword tokenizer, beside meta.json; bytes need none."""
CONFIG, TEMPLATE, GENERATION = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
"""Beside conversations: their chat template, its special tokens, and the ids that end an answer."""
COMPANIONS = (TOKENIZER, CONFIG, TEMPLATE, GENERATION)
SPLITS = ("train", "validation")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of meta.json."""

    dtype: str
    """A key of `DTYPES`: both are little-endian."""
    vocabulary: int | None = None
    """Size of the tokenizer's vocabulary: every id is below it."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Number of tokens of each split."""
    sha256: dict[str, str] = field(default_factory=dict)
    """sha256 of each split's file."""
    tokenizer: str | None = None
    """Name of the tokenizer, such as bytes."""
    tokenizer_sha256: str | None = None
    """sha256 of tokenizer.json; None for bytes, and for data that was prepared before it was recorded."""
    end_of_text: int | None = None
    """The id after each document."""
    source: str | None = None
    """Name of the text."""
    row: int | None = None
    """Tokens of a row, where whole documents were packed into rows (`prepare --pack`)."""
    counted: dict[str, str] = field(default_factory=dict)
    """sha256 of each split's file of what counts, where only some tokens do (`prepare --chat`)."""
    pairs: dict[str, int] | None = None
    """Number of preference pairs of each split (`prepare --preferences`); None for other data.  Each pair is two
    consecutive documents, the chosen one and the rejected one."""


def read_meta(directory: Path) -> Meta:
    """meta.json of a prepared directory.  Raises UserError if there is none, or it cannot be used."""
    path = directory / META
    if file_size(path) is None:
        raise UserError(
            f"{path} does not exist, so the dtype of the tokens is not known; for files of another program write it:\n"
            f"""echo '{{"dtype": "uint16", "end_of_text": 50256}}' > {path}\n"""
            "(little-endian uint16 as of nanoGPT, or uint32; the id that ends each document, here that of GPT-2)"
        )
    return parse_meta(read_file(path), path)


def parse_meta(content: bytes, path: object) -> Meta:
    """meta.json, read at `path`.  Raises UserError if it cannot be used."""
    value = parse_json(content, path)
    given = value if isinstance(value, dict) else {}
    known = {name: given[name] for name in Meta.__dataclass_fields__ if given.get(name) is not None}
    if fault := _fault(known):
        raise UserError(f"{path}: {fault}; correct it, or prepare the data again")
    return Meta(**known)


def read_companions(directory: Path, meta: Meta) -> dict[str, bytes]:
    """The `own_companions` that are beside meta.json."""
    there = [name for name in COMPANIONS if file_size(directory / name) is not None]
    return own_companions({name: read_file(directory / name) for name in there}, meta, directory)


def own_companions(found: dict[str, bytes], meta: Meta, place: object) -> dict[str, bytes]:
    """The COMPANIONS of `place` that belong to a run, of those that are found: tokenizer.json only where meta.json
    states its hash.

    Raises UserError if its hash is another one: the tokens would be read with another tokenizer.
    """
    if TOKENIZER not in found or meta.tokenizer_sha256 is None:
        return {name: found[name] for name in found if name != TOKENIZER}
    if (sha256 := hashlib.sha256(found[TOKENIZER]).hexdigest()) != meta.tokenizer_sha256:
        raise UserError(
            f"{place}/{TOKENIZER}: sha256 is {sha256[:12]}..., {META} says {meta.tokenizer_sha256[:12]}...: it is not "
            f"the tokenizer of this data; copy it again, or prepare the data again"
        )
    return found


def _fault(values: dict[str, Any]) -> str | None:
    """The first value that is missing or has the wrong type, in words."""
    if (dtype := values.get("dtype")) not in list(DTYPES):
        return f"dtype is {dtype!r}, but must be {' or '.join(DTYPES)}"
    for name in ("vocabulary", "end_of_text", "row", "tokenizer", "tokenizer_sha256", "source"):
        kind = int if name in ("vocabulary", "end_of_text", "row") else str
        if name in values and type(values[name]) is not kind:
            return f"{name} is {str(values[name])[:40]!r}, but must be of type {kind.__name__}"
    if values.get("row", 1) < 1:
        return f"row is {values['row']}, but must be at least 1"
    for name, kind in {"tokens": int, "sha256": str, "counted": str, "pairs": int}.items():
        splits = values.get(name, dict.fromkeys(SPLITS, kind()))
        if not isinstance(splits, dict) or not all(type(splits.get(split)) is kind for split in SPLITS):
            return f"{name} must have {' and '.join(SPLITS)}, each of type {kind.__name__}"
    return None
