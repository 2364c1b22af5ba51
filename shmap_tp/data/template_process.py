"""Renders a chat template in a process of its own, which ends where a template takes too long: a template is a program.

`chat_template.ChatTemplate` starts it, as a script that needs only Jinja.  Each line of stdin and of stdout is a JSON
object: first the template and its limits, then the variables of each rendering.  The answers are {"error": ...}, or
{"text": ..., "marked": [[first, last + 1], ...]}: where the parts in {% generation %} are.  The process ends with its
stdin, and by SIGPROF once one of them takes too much processor time.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
"""Unicode's noncharacters, around what {% generation %} marks."""


class Generation(Extension):
    """{% generation %} marks the model's own words for training."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return [begin, *body, end]


def environment(date: str | None) -> jinja2.Environment:
    """What transformers offers to templates; `date` is what the clock says, None for now."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    now = datetime.now if date is None else lambda: datetime.fromisoformat(date)
    made.globals["strftime_now"] = lambda form: now().strftime(form)
    return made


def refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def render(template: jinja2.Template, given: dict[str, Any], characters: int) -> dict[str, Any]:
    """The text and its marked parts; raises ValueError once it has more than `characters`."""
    if any(mark in json.dumps(given, ensure_ascii=False) for mark in (BEGIN, END)):
        raise ValueError("they have a noncharacter of Unicode, U+FDD0 or U+FDD1")
    pieces, length = [], 0
    for piece in template.generate(given):
        pieces.append(piece)
        length += len(piece)
        if length > characters:
            raise ValueError(f"its text has more than {characters:,} characters")
    text, marked = "", []
    for part in "".join(pieces).split(BEGIN):
        inside, end, outside = part.partition(END)
        if end:
            marked.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return {"text": text, "marked": marked}


def answer(make: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What `make` returns, or its error; ends the process if that takes longer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return make()
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # Jinja leaves those of Python as they are
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a profiler may have left it ignored in the parent process
    compiled: list[jinja2.Template] = []
    limits = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # a system without it
        resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))

    def compile_template() -> dict[str, Any]:
        compiled.append(environment(limits["date"]).from_string(limits["template"]))
        return {}

    print(json.dumps(answer(compile_template, limits["seconds"])), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        found = answer(lambda given=given: render(compiled[0], given, limits["characters"]), limits["seconds"])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
