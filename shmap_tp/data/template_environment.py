"""What transformers offers to chat templates, in Jinja's immutable sandbox.  Importing this module needs `jinja2`."""

import json
from collections.abc import Callable
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


def compiled(text: str, now: Callable[[], datetime]) -> jinja2.Template:
    """A template whose clock says `now`.  Raises jinja2.TemplateError and whatever its constants raise."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: now().strftime(form)
    return made.from_string(text)


def refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
