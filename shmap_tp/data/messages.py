"""Conversations and preference pairs of other people's records, in the form that chat templates read.

Records come from logs of services and from tables, where a message may have its text in parts, the arguments of a call
as a JSON text, and the tools as one, too.  A template that is given these as they are writes something else than was
said, so they are decoded here, and what is neither is refused by its place.

A preference pair is two answers to one prompt, of which the first was preferred.
Rafailov et al. 2023, "Direct Preference Optimization", https://arxiv.org/abs/2305.18290
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shmap_tp.data.chat_template import Message
from shmap_tp.errors import UserError, shown

ASSISTANT = "assistant"
SHAREGPT = {"human": "user", "gpt": ASSISTANT}
"""Speakers of ShareGPT's form that have another name in messages."""
FORMS = '{"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or ShareGPT\'s form'
PAIR_FORMS = (
    '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages [{"role": ..., "content": ...}, ...], or '
    "chosen and rejected alone, each all messages"
)
TEXT_PARTS = '[{"type": "text", "text": ...}]'


@dataclass(frozen=True)
class Conversation:
    """What was said, and with which tools, in the form that templates read."""

    place: str
    """Where it was read, for messages."""
    messages: list[Message]
    tools: list[Any] | None = None
    prompt: int = 1
    """How many messages are only read: assistant turns among them do not count."""


def conversation(row: Any, place: str) -> Conversation:
    """The conversation of a record, in any of `FORMS`; `place` is where it was read.  Raises UserError."""
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("messages"), list):
        messages = row["messages"]
    elif isinstance(row.get("conversations"), list):
        messages = [_of_sharegpt(turn) for turn in row["conversations"]]
    elif {"prompt", "completion"} <= row.keys():
        messages = [*turns_of(row["prompt"], "user"), *turns_of(row["completion"], ASSISTANT)]
    else:
        other = "; for text use --text" if isinstance(row.get("text"), str) else ""
        other = "; for preference pairs use --preferences" if {"chosen", "rejected"} <= row.keys() else other
        raise UserError(f"{place}: no conversation in the fields {', '.join(row) or '(none)'}; give {FORMS}{other}")
    return answered(messages, row.get("tools"), place)


def answered(messages: list[Any], tools: Any, place: str) -> Conversation:
    """The conversation of `messages`, to its last assistant turn.  Raises UserError if one is no message, or there is
    no such turn after the first one."""
    messages = [read_message(message, f"{place}: message {number}") for number, message in enumerate(messages)]
    if not any(after["role"] == ASSISTANT for after in messages[1:]):
        raise UserError(f"{place}: no assistant turn answers a message, so there is nothing to learn; leave it out")
    while messages[-1]["role"] != ASSISTANT:
        messages = messages[:-1]
    return Conversation(place, messages, read_tools(tools, place))


def _of_sharegpt(turn: Any) -> Any:
    """The message of a turn; what is none stays, and is refused as one."""
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        return turn
    return {"role": SHAREGPT.get(turn["from"], turn["from"]), "content": turn.get("value")}


def turns_of(given: Any, role: str) -> list[Any]:
    """The messages of a prompt or a completion, which is a text or messages already."""
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def pair(row: Any, place: str) -> tuple[Conversation, Conversation] | None:
    """The chosen and the rejected conversation of a record, in one of `PAIR_FORMS`; `place` is where it was read.

    None if they are equal, so that neither is preferred.  Without a prompt, it is the longest common beginning.  Raises
    UserError.
    """
    row = row if isinstance(row, dict) else {}
    given = [row.get(name) for name in ("chosen", "rejected")]
    prompt = row.get("prompt")
    kinds = list if prompt is None else (str, list)
    if not all(isinstance(each, kinds) for each in given) or not isinstance(prompt, str | list | None):
        raise UserError(f"{place}: no preference pair in the fields {', '.join(row) or '(none)'}; give {PAIR_FORMS}")
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
            raise UserError(f"{each.place}: no assistant turn follows the {first} {what}; give two answers to a prompt")
    return replace(chosen, prompt=first), replace(rejected, prompt=first)


def _after(asked: list[Any], answer: list[Any]) -> list[Any]:
    """All messages of one side, whose answer may begin with the prompt again."""
    return answer if answer[: len(asked)] == asked else [*asked, *answer]


def read_message(message: Any, place: str) -> Message:
    """A message as templates expect it: its content a text, or null beside tool calls, whose arguments are objects.
    `place` names it.  Raises UserError if it is none."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{place} is {shown(str(message)[:40])}; give an object with a role")
    calls = message.get("tool_calls")
    if calls is not None:
        calls = [_read_call(call, place) for call in _decoded(calls, list, f"{place}: tool_calls")]
        message = message | {"tool_calls": calls}
    return message | {"content": _read_content(message.get("content"), bool(calls), place)}


def read_tools(tools: Any, place: str) -> list[Any] | None:
    """The tools of a record, None if it has none.  Raises UserError if they are no list of objects."""
    if tools is None or tools == "":
        return None
    return [_decoded(tool, dict, f"{place}: a tool") for tool in _decoded(tools, list, f"{place}: tools")] or None


def _read_content(content: Any, has_calls: bool, place: str) -> str | None:
    if isinstance(content, list) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and has_calls):
        found = "null" if content is None else shown(json.dumps(content, default=str)[:40])
        raise UserError(f"{place}: its content is {found}; give a text or {TEXT_PARTS}, or null beside tool_calls")
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _read_call(call: Any, place: str) -> dict[str, Any]:
    """A tool call, also in the older form without `function`."""
    call = _decoded(call, dict, f"{place}: a tool call")
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], place)}
    return _with_arguments(call, place)


def _with_arguments(function: dict[str, Any], place: str) -> dict[str, Any]:
    if function.get("arguments") is None:
        return function
    return function | {"arguments": _decoded(function["arguments"], dict, f"{place}: the arguments of a tool call")}


def _decoded(value: Any, kind: Callable[..., Any], what: str) -> Any:
    """`value`, or what it is the JSON text of.  Raises UserError if that is no list or object, as `kind` asks."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if value.strip() else kind()
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, kind):
        name = {list: "list", dict: "object"}[kind]
        raise UserError(f"{what} is {shown(str(value)[:40])}; give a JSON {name}, or its text")
    return found
