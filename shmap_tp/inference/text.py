"""Text into a model and out of it: its tokenizer, prompts as token ids, and answers as they come."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etils import epath

from shmap_tp.config.sources import first_source
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.metadata import META, TEMPLATE, TOKENIZER, Meta, read_meta
from shmap_tp.data.subwords import open_tokenizer_file, quoted
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import REPLACEMENT, Bytes, Tokenizer, check_text
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options, stream
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.model.transformer import Transformer
from shmap_tp.training.checkpoint_files import read_facts

Show = Callable[[int, int, str, str | None], None]
"""(number of the prompt, number of the sample, the next piece of its text, its whole text once it has ended)."""


def tokenizer_of_model(model: Any, file: str | None) -> Tokenizer:
    """That in `file`, or of the checkpoint or the Hugging Face directory that an `api.Model` was read from.

    Raises UserError if there is none.
    """
    if file is not None:
        found = open_tokenizer_file(file)
        if model.source is not None:
            found.stop_tokens = tuple(sorted({*found.stop_tokens, *TextDirectory.read(model.source.directory).ends()}))
        return found
    if model.checkpoint is not None:
        return tokenizer_of_checkpoint(model.checkpoint, first_source(model.config.data).dir)[0]
    if model.source is None:
        raise UserError(
            "a model that was neither restored nor read from a Hugging Face directory has no tokenizer;\n"
            "give it one: model.with_tokenizer('bytes'), or the name of a tokenizer.json"
        )
    return TextDirectory.read(model.source.directory).tokenizer_of_model()


def tokenizer_of_checkpoint(checkpoint: str, data_dir: str) -> tuple[Tokenizer, TextDirectory]:
    """(the tokenizer of the data that the run of `checkpoint` was trained on, the files beside it); `data_dir` is its
    data.dir.

    Its file is looked for in the run's directory, then in `data_dir`; where the checkpoint has its hash, only that file
    is taken.  Raises UserError if it is not found.
    """
    facts = read_facts(epath.Path(checkpoint)).get("data", {}).get("tokenizer") or {}
    meta = read_meta(Path(data_dir)) if (Path(data_dir) / META).is_file() else Meta(dtype="")
    name, end_of_text = facts.get("name") or meta.tokenizer, facts.get("end_of_text", meta.end_of_text)
    meta = replace(meta, tokenizer=name, end_of_text=end_of_text)
    for directory in (epath.Path(checkpoint).parent.parent, epath.Path(data_dir)):
        text, sha256 = TextDirectory.read(directory), facts.get("sha256")
        content = text.files.get(TOKENIZER)
        is_there = content is not None and sha256 in (None, hashlib.sha256(content).hexdigest())
        if is_there or name == Bytes.name:
            return text.tokenizer_of_data(meta), text
    raise UserError(
        f"the tokenizer of {checkpoint} ({name or 'its name was not recorded'}) is not in its run directory, nor in "
        f"data.dir={data_dir};\nname its file with --tokenizer"
    )


def chat_template_of_model(model: Any, file: str | None, arguments: Mapping[str, Any] | None = None) -> ChatTemplate:
    """That in `file`, or of the conversations that an `api.Model` was trained on, or of the Hugging Face directory that
    it was read from, with these `arguments`.  Raises UserError if there is none."""
    runs = [] if model.checkpoint is None else [Path(model.checkpoint).parents[1], model.config.run.dir]
    for text in map(TextDirectory.read, runs if file is None else ()):
        if TEMPLATE in text.files:
            return text.template(None, arguments)
    directory = model.checkpoint if model.source is None else model.source.directory
    return TextDirectory.read(directory).template(file, arguments)


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], *, special_tokens_in_text: bool = False
) -> list[Sequence[int]]:
    """The ids of each prompt, text or ids already.  With `special_tokens_in_text` names of special tokens in a text are
    these tokens.  Raises UserError if a text is not Unicode."""
    ordinary = () if special_tokens_in_text else tokenizer.special_tokens()
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt)
    return [tokenizer.encode(quoted(each, ordinary)) if isinstance(each, str) else each for each in prompts]


def answers(
    programs: GenerationPrograms,
    parameters: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    options: Options,
    *,
    stop: Sequence[str] = (),
    requests: Sequence[int] | None = None,
    show: Show | None = None,
) -> list[list[str]]:
    """The answers to each prompt, text or ids, options.samples of them.

    An answer ends before a text in `stop`, before the end of the document, after options.max_new_tokens, or where the
    context of the model ends.

    `requests` are the numbers of the prompts, on which sampling depends; by default 0, 1, 2 ...
    Raises UserError as `generator.stream` does, if a text in `stop` is empty, and if a prompt is not Unicode.
    """
    if "" in stop:
        raise UserError("a stop text is empty, so every answer would be; leave it out")
    stop_tokens, vocabulary = (*options.stop_tokens, *tokenizer.stop_tokens), tokenizer.vocabulary
    options = replace(options, stop_tokens=stop_tokens, vocabulary=min(vocabulary, options.vocabulary))
    ids = encode_prompts(tokenizer, prompts)
    found = [_Answer(tokenizer, stop) for _ in range(len(ids) * options.samples)]
    stopped: set[int] = set()
    for pieces in stream(programs, parameters, ids, options, requests, stopped):
        for row, (answer, piece) in enumerate(zip(found, pieces, strict=True)):
            new = answer.add(piece)
            if show and new:
                show(*divmod(row, options.samples), new, None)
            if answer.stopped:
                stopped.add(row)
    for row, answer in enumerate(found):
        rest = answer.end()
        if show:
            show(*divmod(row, options.samples), rest, answer.text)
    return [
        [answer.text for answer in found[row : row + options.samples]] for row in range(0, len(found), options.samples)
    ]


class _Answer:
    """One answer as it grows."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self.text = ""
        """What has been shown."""
        self.stopped = False
        """Whether it ended before one of the stop texts."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that can be shown since the last call: none that later tokens may change or cut off."""
        if self.stopped:
            return ""
        self._ids += ids
        whole = self._tokenizer.decode(self._ids)
        places = [place for text in self._stop if (place := whole.find(text)) >= 0]
        if places:
            self.stopped = True
            return self._show(whole[: min(places)])
        sure = whole.rstrip(REPLACEMENT)
        begun = [length for text in self._stop for length in range(1, len(text)) if sure.endswith(text[:length])]
        return self._show(sure[: len(sure) - max(begun, default=0)])

    def end(self) -> str:
        """The text that was held back."""
        return "" if self.stopped else self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new
