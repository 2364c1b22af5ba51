"""The tokenizer of a model, that of its training data or of its Hugging Face directory, and prompts as token ids."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from shmap_tp.data.metadata import META, TOKENIZER, read_meta
from shmap_tp.data.tokenizer import Bytes, Tokenizer, check_text, open_tokenizer_file, read_subwords, special_token
from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.files import parse_json, reading
from shmap_tp.training.checkpoint_files import read_facts


def tokenizer_of_model(model: Any, file: str | None) -> Tokenizer:
    """That in `file`, or of the checkpoint or the Hugging Face directory that an `api.Model` was read from.

    Raises UserError if there is none.
    """
    if file is not None:
        return open_tokenizer_file(file)
    if model.checkpoint is not None:
        return tokenizer_of_checkpoint(model.checkpoint, model.config.data.dir)
    if model.source is None:
        raise UserError("a model that was neither restored nor read from a Hugging Face directory has no tokenizer")
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
        return Bytes()
    for directory in (epath.Path(checkpoint).parent.parent, epath.Path(data_dir)):
        file = directory / TOKENIZER
        if file.exists() and sha256 in (None, hashlib.sha256(file.read_bytes()).hexdigest()):
            return read_subwords(file.read_bytes(), str(file), end_of_text=meta.get("end_of_text"))
    raise UserError(
        f"the tokenizer of {checkpoint} ({name or 'its name was not recorded'}) is not in its run directory, nor in "
        f"data.dir={data_dir};\nname its file with --tokenizer"
    )


def tokenizer_of_pretrained(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory; text ends at the eos_token_id of generation_config.json or
    config.json, and a prompt gets the special tokens that transformers adds.

    Raises UserError if there is no tokenizer.json, or one of the files is damaged.
    """
    file = directory / TOKENIZER
    if not file.is_file():
        raise UserError(f"{directory} has no {TOKENIZER}; copy it there, or name one with --tokenizer")
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            values = parse_json((directory / name).read_bytes(), directory / name)
            found = values.get("eos_token_id") if isinstance(values, dict) else None
            found = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(token) is int for token in found):
                raise UserError(f"{directory / name}: eos_token_id={shown(found)} must be ids; copy the file again")
            ids |= {*found}
    with reading(file):
        tokenizer = read_subwords(file.read_bytes(), str(file), special_tokens=True)
    tokenizer.end_of_text = tokenizer.id_of(special_token(directory, "eos_token"))
    tokenizer.begin_of_text = tokenizer.id_of(special_token(directory, "bos_token"))
    tokenizer.stop_tokens = tuple(sorted(ids))
    return tokenizer


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
    """The ids of each prompt, text or ids already.  Raises UserError if a text is not Unicode."""
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt)
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _meta(data_dir: str) -> dict[str, Any]:
    """What meta.json of the data says; {} if it is not on this machine."""
    return vars(read_meta(Path(data_dir))) if (Path(data_dir) / META).is_file() else {}
