"""Messages to the text of a prompt, by the Jinja template of a Hugging Face directory, as transformers renders it.

https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.runtime.files import file_size, parse_json, reading

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""


class ChatTemplate:
    """The template of a model, and the special tokens that it may name."""

    def __init__(self, text: str, place: str, tokens: dict[str, str]):
        """`place` names the template in messages.  Raises UserError if it is no template."""
        try:
            import jinja2
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError(f"{place} needs `jinja2`: pip install -e '.[pretrained]'") from None

        class Generation(Extension):
            """{% generation %} marks the model's own words for training; here it is left out."""

            tags = frozenset({"generation"})

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self.text = text
        self._error, self._place, self._tokens = jinja2.exceptions.TemplateError, place, tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except Exception as error:  # Jinja leaves those of Python as they are
            raise UserError(f"{place} is not a chat template: {shown(first_line(error))}") from error

    def render(self, messages: Sequence[Message], *, continued: bool = False) -> str:
        """The prompt to which the model's answer to `messages` is the continuation; with `continued` the rest of the
        last message is.

        Raises UserError if the template refuses them.
        """
        given: dict[str, Any] = {"messages": [*messages], "tools": None, "documents": None}
        try:
            text = self._template.render(**given, add_generation_prompt=not continued, **self._tokens)
        except Exception as error:  # a template is a program
            raise UserError(f"{self._place} refuses the messages: {shown(first_line(error))}") from error
        return _up_to(messages[-1]["content"], text) if continued else text

    def _raise(self, message: str) -> NoReturn:
        raise self._error(message)


def chat_template_of_model(model: Any, file: str | None) -> ChatTemplate:
    """That in `file`, or of the Hugging Face directory or run that an `api.Model` was read from.  Raises UserError."""
    return chat_template_of(Path(model.checkpoint) if model.source is None else model.source.directory, file)


def chat_template_of(directory: Path, file: str | None = None) -> ChatTemplate:
    """The template in `file`, or in chat_template.jinja or tokenizer_config.json of a Hugging Face directory.

    Raises UserError if there is none.
    """
    config = _config(directory)
    tokens = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None}
    path = directory / TEMPLATE if file is None else Path(file)
    if file_size(path) is not None:
        with reading(path):
            return ChatTemplate(path.read_bytes().decode(errors="replace"), str(path), tokens)
    if file is not None:
        raise UserError(f"--template {file}: no such file; give a chat template in Jinja")
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in text if _is_named(each)}
        text = named.get("default")
    if not isinstance(text, str):
        raise UserError(
            f"{directory} has no chat template: the model was not trained to chat; use shmap_tp.generate, or chat with "
            f"--template FILE,\nand evaluate without --apply-chat-template"
        )
    return ChatTemplate(text, str(directory / CONFIG), tokens)


def _is_named(template: Any) -> bool:
    """Whether one of several templates has a name, as it should."""
    return isinstance(template, dict) and isinstance(template.get("name"), str)


def _up_to(message: str, text: str) -> str:
    """`text` up to the end of its last message, whose outer spaces the template may have removed."""
    start = text.rindex(message.strip())
    whole = text[start:].startswith(message.lstrip())
    return text[: start + len(message.lstrip() if whole else message.strip())]


def _config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if file_size(path) is None:
        return {}
    with reading(path):
        found = parse_json(path.read_bytes(), path)
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str:
    """The text of a special token of tokenizer_config.json."""
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
