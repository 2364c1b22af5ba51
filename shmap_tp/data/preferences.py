"""Preference pairs as training data: two answers to one prompt, of which the first was preferred.

Rafailov et al. 2023, "Direct Preference Optimization", https://arxiv.org/abs/2305.18290

A pair is one document: the conversation with the chosen answer to its end of text, then the one with the rejected
answer to its own.  So whole pairs are packed into rows, and the documents of a row are a chosen and a rejected one in
turn.  Only the turns after the prompt count.
"""

import re
from dataclasses import replace
from typing import Any

from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.conversations import ASSISTANT, Conversation, Kind, Sample, answered, samples_of, turns_of
from shmap_tp.errors import UserError

FORMS = (
    '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages [{"role": ..., "content": ...}, ...], or '
    "chosen and rejected alone, each all messages"
)


def pair(row: Any, place: str) -> tuple[Conversation, Conversation] | None:
    """The chosen and the rejected conversation of a record, in one of `FORMS`; `place` is where it was read.

    None if they are equal, so that neither is preferred.  Without a prompt, it is the longest common beginning.  Raises
    UserError.
    """
    if not isinstance(row, dict):
        raise UserError(f"{place}: an object is needed, in the form {FORMS}")
    given = [row.get(name) for name in ("chosen", "rejected")]
    prompt = row.get("prompt")
    kinds = list if prompt is None else (str, list)
    if not all(isinstance(each, kinds) for each in given) or not isinstance(prompt, str | list | None):
        raise UserError(f"{place}: no preference pair in the fields {', '.join(row)}; give {FORMS}")
    asked = [] if prompt is None else turns_of(prompt, "user")
    whole = [_after(asked, turns_of(each, ASSISTANT)) for each in given]
    chosen, rejected = (
        answered(messages, row.get("tools"), f"{place}, {name}")
        for name, messages in zip(("chosen", "rejected"), whole, strict=True)
    )
    if chosen.messages == rejected.messages:
        return None
    both = [*zip(chosen.messages, rejected.messages, strict=False)]
    same = next((number for number, (a, b) in enumerate(both) if a != b), len(both))
    first = same if prompt is None else len(asked)
    for each in (chosen, rejected):
        if not 0 < first < len(each.messages) or each.messages[first]["role"] != ASSISTANT:
            what = "messages with which both begin" if prompt is None else "messages of the prompt"
            raise UserError(
                f"{each.place}: no assistant turn follows the {first} {what}; give two answers to one prompt"
            )
    return replace(chosen, prompt=first), replace(rejected, prompt=first)


def _after(asked: list[Any], answer: list[Any]) -> list[Any]:
    """All messages of one side, whose answer may begin with the prompt again."""
    return answer if answer[: len(asked)] == asked else [*asked, *answer]


def _documents(row: Any, place: str, template: ChatTemplate, ends: re.Pattern[str]) -> list[list[Sample]]:
    """The pair of a record, if it is one.  Raises UserError as `pair` and `samples_of` do."""
    sides = [samples_of(each, template, ends) for each in pair(row, place) or ()]
    if any(len(samples) > 1 for samples in sides):
        raise UserError(
            f"{place}: an answer has several assistant turns, and the chat template ends turns with no special token, "
            f"or writes earlier ones in another way than the last;\nput those before the last one into the prompt"
        )
    return [[sample for (sample,) in sides]] if sides else []


PAIRS = Kind("preference pairs", "pair", _documents)
