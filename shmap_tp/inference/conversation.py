"""A conversation with a model: the messages so far, and the prompt that they make."""

from collections.abc import Callable
from typing import Any

from shmap_tp.data.chat_template import ChatTemplate, Message
from shmap_tp.data.subwords import quoted
from shmap_tp.data.tokenizer import Tokenizer, check_text
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options
from shmap_tp.inference.text import answers

LEAST_ROOM = 16
"""Tokens that an answer must have room for."""


class Conversation:
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
            f"this message makes a prompt of {len(ids)} tokens, but model.context={context} must also have room for "
            f"{LEAST_ROOM} of the answer; shorten it"
        )
