"""Messages to the text of a prompt, by the Jinja template of a Hugging Face directory, as transformers renders it.

https://huggingface.co/docs/transformers/chat_templating
"""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

from shmap_tp.errors import UserError, shown

CLOCK = "strftime_now"
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", CLOCK, "raise_exception"}
"""Variables that every template is given."""

SECONDS, CHARACTERS = 5.0, 1 << 24
"""The time and the text of a rendering, at most."""

BEGIN, END, QUOTE, FIRST, LAST = MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
"""Noncharacters of Unicode: around what {% generation %} marks; in a quoted name, and around another name of a special
token (`subwords.py`)."""

Message = dict[str, Any]
"""{"role": "system", "user", "assistant" or another that the template knows, "content": text}."""
Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""


class ChatTemplate:
    """The template of a model, and the special tokens that it may name."""

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
        now = datetime.now if day is None else lambda: datetime.combine(day, time())
        with self._refusals("is not a chat template"):
            self._template = _compiled(self.text, now)

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
        content = json.dumps([[*messages], tools], ensure_ascii=False, default=str)  # dates of tables as texts
        refuse_marks(content, but=QUOTE)
        messages, tools = json.loads(content)
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": asks}
        rendered = self._rendered(given)
        if any(message.get("content", "") is None for message in messages):
            self._check_null(given, rendered)
        text, marked = "", []
        for part in rendered.split(BEGIN):
            inside, end, outside = part.partition(END)
            if end:
                marked.append((len(text), len(text) + len(inside)))
            text += inside + outside
        return text, marked

    def _rendered(self, given: dict[str, Any]) -> str:
        """The text, with the marks of {% generation %}.  Raises UserError."""
        pieces, length = [], 0
        with self._refusals("refuses the messages"):
            for piece in self._template.generate(given | self._tokens):
                pieces.append(piece)
                length += len(piece)
                if length > CHARACTERS:
                    raise ValueError(f"its text has more than {CHARACTERS:,} characters")
        return "".join(pieces)

    @contextmanager
    def _refusals(self, refusal: str) -> Iterator[None]:
        """Context of the template's own code, which may raise anything.  Raises UserError."""
        try:
            with _time_limit(SECONDS):
                yield
        except Exception as error:  # Jinja leaves those of Python as they are
            default = "it needs too much memory" if isinstance(error, MemoryError) else type(error).__name__
            reason = (str(error).strip().splitlines() or [default])[0]
            raise UserError(f"{self._place} {refusal}: {shown(reason)}") from None

    def _check_null(self, given: dict[str, Any], text: str) -> None:
        """Refuse a template that writes the content null of a message as the word None."""
        name = "content-of-a-message-without-one"
        messages = given["messages"]
        named = [each if each.get("content", "") is not None else each | {"content": name} for each in messages]
        other = self._rendered(given | {"messages": named})
        if name in other and other.replace(name, "None") == text:
            raise UserError(f'{self._place} writes the content null of a message as None; write "" there, or change it')

    def _up_to(self, message: str, text: str) -> str:
        """`text` up to the end of its last message, whose outer spaces the template may have removed."""
        start = text.rfind(message.strip())
        if start < 0:
            raise UserError(f"{self._place} changes or leaves out the last message, so that it cannot be continued")
        whole = text[start:].startswith(message.lstrip())
        return text[: start + len(message.lstrip() if whole else message.strip())]


def refuse_marks(text: str, but: str = "") -> None:
    """Raise UserError if a text has one of MARKS, by which it would pass for a part of the template or a token."""
    if found := {*text} & {*MARKS} - {*but}:
        raise UserError(f"a text has the noncharacter U+{ord(min(found)):X} of Unicode, which means nothing; remove it")


def _compiled(text: str, now: Callable[[], datetime]) -> Any:
    """The template with what transformers offers to templates, in Jinja's immutable sandbox; its clock says `now`."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the model's own words for training."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
            return [begin, *body, end]

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    made.globals |= {"raise_exception": refuse, CLOCK: lambda form: now().strftime(form)}
    return made.from_string(text)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context that raises TimeoutError after `seconds`; in the main thread alone, which has the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds} s; correct it, or use another template")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
