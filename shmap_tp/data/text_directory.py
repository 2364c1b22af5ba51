"""What begins and ends a text, and how messages become one: the files of a tokenizer beside weights, data or a run.

A Hugging Face directory, prepared data and the directory of a run have them under the same names.  Preparation,
training, generation, scoring, chat and export read them here.
"""

import json
from collections.abc import Mapping
from datetime import date
from os import PathLike
from pathlib import Path
from typing import Any

from etils import epath

from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.metadata import COMPANIONS, CONFIG, GENERATION, TEMPLATE, TOKENIZER, Meta
from shmap_tp.data.subwords import Subwords, open_subwords, read_subwords
from shmap_tp.data.tokenizer import END_OF_TEXT, Bytes, Tokenizer
from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.files import file_size, parse_json, read_file, reading

MODEL = "config.json"
"""The configuration of the model, which also names ids that end a text."""
ADDING = {"add_bos_token", "add_eos_token", "auto_map", "tokenizer_file"}
"""Keys of tokenizer_config.json by which transformers adds tokens to a text, or runs other code."""
SPECIAL_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"


class TextDirectory:
    """The files of a tokenizer and of a chat template, by name; those that are missing say nothing."""

    def __init__(self, files: Mapping[str, bytes], place: object):
        """`place` names the directory in messages."""
        self.files, self.place = {name: files[name] for name in (*COMPANIONS, MODEL) if name in files}, str(place)

    @classmethod
    def read(cls, directory: str | PathLike) -> "TextDirectory":
        """The files of a directory, local or in a bucket.  Raises UserError if a file cannot be read."""
        files, bucket = {}, "://" in str(directory)
        for name in (*COMPANIONS, MODEL):
            file = (epath.Path if bucket else Path)(directory) / name
            if file.exists() if bucket else file_size(file) is not None:
                with reading(file):
                    files[name] = file.read_bytes()
        return cls(files, directory)

    def values(self, name: str) -> dict[str, Any]:
        """The content of a JSON file, {} if it is missing.  Raises UserError if it is no object."""
        found = parse_json(self.files.get(name, b"{}"), f"{self.place}/{name}")
        return self._checked(isinstance(found, dict), found, name, "a JSON object")

    def _checked(self, is_valid: bool, value: Any, name: str, what: str) -> Any:
        """`value`, which is found in the file `name`.  Raises UserError unless it is valid, as `what` says."""
        if not is_valid:
            raise UserError(f"{self.place}/{name} has {shown(value)}, which must be {what}; copy it again")
        return value

    def special_token(self, key: str) -> str | None:
        """The token that tokenizer_config.json names, such as eos_token.  Raises UserError."""
        token = self.values(CONFIG).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return self._checked(isinstance(token, str | None), token, CONFIG, f"{key}, the text of a token")

    def ends(self, *names: str) -> set[int]:
        """The ids that end a text: each eos_token_id, which may be several, of the files `names`, by default of all.
        Raises UserError."""
        ends = set()
        for name in names or (MODEL, GENERATION):
            found = self.values(name).get("eos_token_id")
            found = found if isinstance(found, list) else [] if found is None else [found]
            ends |= {*self._checked(all(type(token) is int for token in found), found, name, "eos_token_id, ids")}
        return ends

    def tokenizer_of_data(self, meta: Meta) -> Tokenizer:
        """The tokenizer of prepared data, or of a run on it; nothing is added to a prompt, as in the data.

        Raises UserError if it is not known, or cannot be used.
        """
        if meta.tokenizer == Bytes.name:
            return Bytes()
        return self._subwords({meta.end_of_text} - {None}, end_of_text=meta.end_of_text)

    def tokenizer_of_model(self) -> Subwords:
        """The tokenizer of a pretrained model.  A text ends at each of `ends` and at the tokenizer's own end; a prompt
        gets the special tokens that transformers adds.

        Raises UserError if there is none, or one of the files is damaged.
        """
        found = self._subwords(set(), special_tokens=True)
        found.end_of_text, found.begin_of_text = map(found.id_of, map(self.special_token, ("eos_token", "bos_token")))
        found.stop_tokens = tuple(sorted({*found.stop_tokens, found.end_of_text} - {None}))
        return found

    def _subwords(self, ends: set[int], **given: Any) -> Subwords:
        if TOKENIZER not in self.files:
            raise UserError(f"{self.place} has no {TOKENIZER}; copy it there, or name one with --tokenizer")
        ends = tuple(sorted(ends | self.ends()))
        found = read_subwords(self.files[TOKENIZER], f"{self.place}/{TOKENIZER}", **given)
        found.stop_tokens = ends
        return found

    def template(
        self, file: str | None = None, arguments: Mapping[str, Any] | None = None, day: date | None = None
    ) -> ChatTemplate:
        """The chat template in `file`, or in chat_template.jinja or tokenizer_config.json.

        Raises UserError if there is none, and as `ChatTemplate` does.
        """
        config, content, place = self.values(CONFIG), self.files.get(TEMPLATE), f"{self.place}/{TEMPLATE}"
        if file is not None:
            content, place = read_file(file, f"--template {file}"), file
        text = _of_config(config.get("chat_template")) if content is None else content.decode(errors="replace")
        if not isinstance(text, str):
            raise UserError(
                f"{self.place} has no chat template: the model was not trained to chat; use shmap_tp.generate, or chat "
                f"with --template FILE,\nand evaluate without --apply-chat-template"
            )
        tokens = {name: self.special_token(name) for name in SPECIAL_TOKENS if config.get(name) is not None}
        return ChatTemplate(text, place if content else f"{self.place}/{CONFIG}", tokens, arguments, day)

    def for_export(self, tokenizer: Tokenizer, context: int) -> "TextDirectory":
        """The files by which transformers and inference engines read the model of a run from nothing, whose data had
        this `tokenizer`: what is missing is added, and nothing begins a text or ends it but what did in the data."""
        ends = sorted({*tokenizer.stop_tokens, tokenizer.end_of_text} - {None})
        config = {key: value for key, value in self.values(CONFIG).items() if key not in ADDING}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
        if ends:
            config.setdefault("eos_token", tokenizer.name_of(ends[0]))
        ids: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
        for key in ("bos", "pad"):
            ids[f"{key}_token_id"] = tokenizer.id_of(self.special_token(f"{key}_token"))
        written = {CONFIG: config, GENERATION: self.values(GENERATION) | ids, MODEL: ids}
        files = {name: json.dumps(values, indent=2).encode() + b"\n" for name, values in written.items()}
        return TextDirectory(self.files | {TOKENIZER: tokenizer.file_for_export()} | files, self.place)


def _of_config(template: Any) -> Any:
    """The template of tokenizer_config.json; of several, by name, one that is `tool_use` where tools are given, as
    transformers chooses, else `default`.  The signs + keep the spaces around the tags, and a template's last line break
    is none of its text."""
    if not isinstance(template, list):
        return template
    named = [(each.get("name"), each.get("template")) for each in template if isinstance(each, dict)]
    default, with_tools = (next((text for name, text in named if name == n), None) for n in ("default", "tool_use"))
    if not isinstance(default, str) or not isinstance(with_tools, str):
        return default
    default, with_tools = (text.removesuffix("\n") for text in (default, with_tools))
    return f"{{%+ if tools +%}}{with_tools}{{%+ else +%}}{default}{{%+ endif +%}}"


def open_tokenizer(name: str, end_of_text: str | None) -> Bytes | Subwords:
    """The tokenizer `name` for documents: "bytes", a JSON file, a Hugging Face directory, or a name on the hub.

    Without `end_of_text` a directory's own end-of-sequence token is used, for others END_OF_TEXT.
    Raises UserError if it cannot be opened, lacks that token, or has ids that the directory's model does not have.
    """
    if name == Bytes.name:
        if end_of_text is not None:
            raise UserError(f"--end-of-text {end_of_text} does not apply to --tokenizer bytes, which has byte 0")
        return Bytes()
    if not Path(name).is_dir():
        return open_subwords(name, end_of_text or END_OF_TEXT)
    directory = TextDirectory.read(name)
    own = directory.special_token("eos_token")
    found = open_subwords(str(Path(name) / TOKENIZER), end_of_text or own or END_OF_TEXT)
    vocabulary = directory.values(MODEL).get("vocab_size")
    if isinstance(vocabulary, int) and found.vocabulary > vocabulary:
        raise UserError(
            f"--tokenizer {name} has ids up to {found.vocabulary - 1}, but the model's vocab_size is {vocabulary}; "
            f"name the tokenizer that belongs to the model"
        )
    return found
