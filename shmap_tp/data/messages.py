"""Messages of other people's records, in the form that chat templates read.

Records come from logs of services and from tables, where a message may have its text in parts, the arguments of a call
as a JSON text, and the tools as one, too.  A template that is given these as they are writes something else than was
said, so they are decoded here, and what is neither is refused by its place.
"""

import json
from collections.abc import Callable
from typing import Any

from shmap_tp.data.chat_template import Message
from shmap_tp.errors import UserError, shown

TEXT_PARTS = '[{"type": "text", "text": ...}]'


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
