"""Messages to the text of a prompt, by the Jinja template of a Hugging Face directory, as transformers renders it.

https://huggingface.co/docs/transformers/chat_templating
"""

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shmap_tp.errors import UserError, shown

CLOCK = "strftime_now"
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", CLOCK, "raise_exception"}
"""Variables that every template is given."""

PROGRAM = str(Path(__file__).with_name("template_process.py"))
SECONDS, CHARACTERS, BYTES = 5, 1 << 24, 1 << 29
"""The processor time and the text of a rendering, and the memory of the process, at most."""

Message = dict[str, Any]
"""{"role": "system", "user", "assistant" or another that the template knows, "content": text}."""
Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""


class ChatTemplate:
    """The template of a model, and the special tokens that it may name; rendered in a process of its own."""

    def __init__(
        self,
        text: str,
        place: str,
        tokens: dict[str, str],
        arguments: Mapping[str, Any] | None = None,
        day: date | None = None,
    ):
        """`place` names the template in messages.  Variables have the values of `arguments` where nothing else is
        given, here and wherever `text` is used.  The clock says `day`, or the time of each rendering.

        Raises UserError if it is no template, or has no such variable, or no clock for a `day`.
        """
        if find_spec("jinja2") is None:
            raise UserError(f"{place} needs `jinja2`: pip install -e '.[pretrained]'")
        self.arguments, self.day = dict(arguments or {}), day
        for name in self.arguments:
            if name in RESERVED or not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text):
                raise UserError(f"--template-argument {name}: {place} has no variable of this name; leave it out")
        given = self.arguments.items()
        values = "".join(f"{{%+ set {name} = {name} | default({_in_jinja(value)}) +%}}" for name, value in given)
        self.text, self._place, self._tokens = values + text, place, tokens
        self._process: subprocess.Popen[str] | None = None
        self._start()

    @property
    def has_clock(self) -> bool:
        """Whether it asks for the time."""
        return CLOCK in self.text

    def render(self, messages: Sequence[Message], *, continued: bool = False) -> str:
        """The prompt to which the model's answer to `messages` is the continuation; with `continued` the rest of the
        last message is.

        Raises UserError if the template refuses them, or reaches one of the limits above.
        """
        text, _ = self.render_marked(messages, asks=not continued)
        return self._up_to(messages[-1]["content"], text) if continued else text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, asks: bool = False
    ) -> tuple[str, list[Span]]:
        """(the text of `messages`, the parts of it that {% generation %} marks as the model's own words); with `asks`
        the beginning of an answer follows.  Errors as of `render`."""
        if self._process is None:
            self._start()
        given = {"messages": [*messages], "tools": tools, "documents": None, "add_generation_prompt": asks}
        found = self._ask(given | self._tokens, "refuses the messages")
        if any(message.get("content", "") is None for message in messages):
            self._check_null(given, messages, found["text"])
        return found["text"], [tuple(span) for span in found["marked"]]

    def _check_null(self, given: dict[str, Any], messages: Sequence[Message], text: str) -> None:
        """Refuse a template that writes the content null of a message as the word None."""
        name = "content-of-a-message-without-one"
        named = [each if each.get("content", "") is not None else each | {"content": name} for each in messages]
        other = self._ask(given | self._tokens | {"messages": named}, "refuses the messages")["text"]
        if name in other and other.replace(name, "None") == text:
            raise UserError(
                f'{self._place} writes the content null of a message as None; write "" there, or use another template'
            )

    def _start(self) -> None:
        """Start the process, which compiles the template."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._end = weakref.finalize(self, _end, self._process)
        limits = {"seconds": SECONDS, "characters": CHARACTERS, "bytes": BYTES}
        limits["date"] = None if self.day is None else self.day.isoformat()
        self._ask({"template": self.text, **limits}, "is not a chat template")

    def _ask(self, line: dict[str, Any], refusal: str) -> dict[str, Any]:
        """The process's answer to a line.  Raises UserError if it is an error, or the process has ended."""
        process, answer = self._process, ""
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(line, default=str), file=process.stdin, flush=True)  # dates of tables as texts
                answer = process.stdout.readline()
        finally:
            if not answer:  # also after Ctrl-C: what it answers later would be taken for another answer
                self._end()
                self._process = None
        if not answer:
            reason = f"it takes more than {SECONDS} s" if process.returncode == -signal.SIGPROF else "its process ended"
            raise UserError(f"{self._place} {refusal}: {reason}; correct it, or use another template")
        found = json.loads(answer)
        if "error" in found:
            raise UserError(f"{self._place} {refusal}: {shown(found['error'])}")
        return found

    def _up_to(self, message: str, text: str) -> str:
        """`text` up to the end of its last message, whose outer spaces the template may have removed."""
        start = text.rfind(message.strip())
        if start < 0:
            raise UserError(f"{self._place} changes or leaves out the last message, so that it cannot be continued")
        whole = text[start:].startswith(message.lstrip())
        return text[: start + len(message.lstrip() if whole else message.strip())]


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, if it has not ended, and close its pipes."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            stream.close()


def template_arguments(given: Sequence[str]) -> dict[str, Any]:
    """The values of NAME=VALUE by name; a value is JSON, or else a text.  Raises UserError."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--template-argument {shown(each)} is not NAME=VALUE, such as enable_thinking=false")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def _in_jinja(value: Any) -> str:
    """A value of JSON as Jinja writes it."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
