"""Answers as text: prompts encoded, new tokens decoded as they come, stop strings looked for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options, stream
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.inference.text import encode_prompts
from shmap_tp.model.transformer import Transformer

Show = Callable[[int, int, str, str | None], None]
"""(number of the prompt, number of the sample, the next piece of its text, its whole text once it has ended)."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character to."""


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
    options = replace(options, stop_tokens=(*options.stop_tokens, *tokenizer.stop_tokens))
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
        sure = whole.rstrip(UNFINISHED)
        begun = [length for text in self._stop for length in range(1, len(text)) if sure.endswith(text[:length])]
        return self._show(sure[: len(sure) - max(begun, default=0)])

    def end(self) -> str:
        """The text that was held back."""
        return "" if self.stopped else self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new
