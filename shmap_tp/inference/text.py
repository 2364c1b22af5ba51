"""Text into a model and out of it: its tokenizer, prompts as token ids, answers as they come, a conversation, and the
samples of a training run."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etils import epath
from jax.sharding import Mesh

from shmap_tp.config.schema import Config
from shmap_tp.config.sources import first_source
from shmap_tp.data.chat_template import ChatTemplate, Message
from shmap_tp.data.metadata import META, TEMPLATE, TOKENIZER, Meta, read_meta
from shmap_tp.data.subwords import open_tokenizer_file, quoted
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import REPLACEMENT, Bytes, Tokenizer, check_text
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options, check_prompts, stream
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.model.transformer import Transformer
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.training.checkpoint_files import read_facts
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import Components

Show = Callable[[int, int, str, str | None], None]
"""(number of the prompt, number of the sample, the next piece of its text, its whole text once it has ended)."""


def tokenizer_of_model(model: Any, file: str | None) -> Tokenizer:
    """The tokenizer in `file`, or of the checkpoint or the Hugging Face directory that an `api.Model` was read from.

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
    """The template in `file`, or of the conversations that an `api.Model` was trained on, or of the Hugging Face
    directory that it was read from, with these `arguments`.  Raises UserError if there is none."""
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
    texts, samples = [answer.text for answer in found], options.samples
    return [texts[row : row + samples] for row in range(0, len(texts), samples)]


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


# A conversation

LEAST_ROOM = 16
"""Tokens that an answer must have room for."""


class Chat:
    """Messages, and the answers to them.  Every turn reads the whole prompt again; nothing is cached between turns."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        options: Options,
        system: str | None,
        special_tokens_in_text: bool = False,
    ):
        """With an `api.Model`; `system` is the first message, which is never left out.  With `special_tokens_in_text`
        names of special tokens in messages are these tokens."""
        self._model, self._tokenizer, self._template, self._options = model, tokenizer, template, options
        self._ordinary = () if special_tokens_in_text else tokenizer.special_tokens()
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._turns = 0
        self.messages: list[Message] = []
        """All that was said, beside the system's message."""

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = []

    def answer(self, text: str, show: Callable[[str], None], notify: Callable[[str], None]) -> None:
        """Answer `text`; `show` gets the pieces of the answer, `notify` what the user must know of the history.

        Where the prompt is too long for model.context, the oldest messages are forgotten.
        Raises UserError if the message alone is too long or not Unicode; then it is not part of the history.
        KeyboardInterrupt ends the answer: what was shown of it is.
        """
        ids, forgotten = self._prompt([*self.messages, {"role": "user", "content": text}])
        if forgotten:
            context = self._model.config.model.context
            notify(f"the oldest {forgotten} messages are forgotten: model.context={context} tokens are full")
        self.messages = [*self.messages[forgotten:], {"role": "user", "content": text}]
        pieces: list[str] = []

        def each(_: int, __: int, piece: str, ended: str | None) -> None:
            pieces.append(piece)
            show(piece)

        programs = self._model.generation_programs, self._model.parameters
        try:
            answers(*programs, self._tokenizer, [ids], self._options, requests=[self._turns], show=each)
        finally:
            self._turns += 1
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _prompt(self, messages: list[Message]) -> tuple[list[int], int]:
        """(the ids of the prompt, how many of the oldest messages it leaves out)."""
        context = self._model.config.model.context
        for first in range(0, len(messages), 2):  # a question and its answer are left out together
            text = self._template.render(quoted([*self._first, *messages[first:]], self._ordinary))
            check_text(text)
            ids = self._tokenizer.encode(text, special_tokens=False)
            if len(ids) + LEAST_ROOM <= context:
                return ids, first
        raise UserError(
            f"this message makes a prompt of {len(ids)} tokens, no room for {LEAST_ROOM} in model.context={context}"
        )


# Samples of a training run


def make_training_sampler(
    config: Config, mesh: Mesh, components: Components, tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> "TrainingSampler | None":
    """The sampler of a run, which answers the prompts where there is a chat template and else continues them.

    None, and a line that says why, if the blocks of the model cannot generate.
    Compiles nothing.  Raises UserError if a prompt does not suit the model.
    """
    functions = build_model_functions(config, mesh, compute_dtype(config.train.precision), components)
    try:
        programs = GenerationPrograms(config.model, functions.model)
    except UserError as error:
        print_on_process_0(f"no samples: {error}")
        return None
    prompts = {text: encode_prompts(tokenizer, [text])[0] for text in config.sample.prompts}
    if template is not None:
        ordinary = tokenizer.special_tokens()
        asked = {text: template.render([{"role": "user", "content": quoted(text, ordinary)}]) for text in prompts}
        prompts = {f"{text}\n": tokenizer.encode(asked[text], special_tokens=False) for text in prompts}
    return TrainingSampler(config, programs, tokenizer, prompts)


class Stopped(Exception):
    """A stop was requested while a sample was written."""


class TrainingSampler:
    """A `training.run.Sampler`.  The same seed, run.seed, is used each time, so that samples can be compared."""

    def __init__(
        self, config: Config, programs: GenerationPrograms, tokenizer: Tokenizer, prompts: dict[str, Sequence]
    ):
        """`prompts` are what the model reads, by what is shown before its answer."""
        self._programs, self._tokenizer, self._prompts = programs, tokenizer, prompts
        self._options = Options(
            max_new_tokens=config.sample.max_new_tokens,
            temperature=config.sample.temperature,
            seed=config.run.seed % 2**31,
            decode_tokens=min(32, config.sample.max_new_tokens),
        )
        check_prompts([*prompts.values()], config.model)

    def __call__(self, params: Transformer, stopped: Callable[[], bool]) -> dict[str, str] | None:
        """Communication: that of prefill and decode (`inference/programs.py`)."""

        def look(number: int, sample: int, piece: str, ended: str | None) -> None:
            if ended is None and stopped():
                raise Stopped

        try:
            prompts = [*self._prompts.values()]
            found = answers(self._programs, params, self._tokenizer, prompts, self._options, show=look)
        except Stopped:
            return None
        except UserError as error:  # after a step that trained well, too, the logits can be infinite or NaN
            print_on_process_0(f"no samples: {error}")
            return None
        return {prompt: texts[0] for prompt, texts in zip(self._prompts, found, strict=True)}
