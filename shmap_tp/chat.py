"""Talk to a model: `python -m shmap_tp.chat --pretrained DIR`."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmap_tp import command_model
from shmap_tp.errors import UserError
from shmap_tp.runtime.command_line import end_without_readers, importing, run_command
from shmap_tp.runtime.console import print_error, write_text

if TYPE_CHECKING:
    from shmap_tp.inference.text import Chat

EPILOG = """\
in the chat
  /reset   forget what was said
  /exit    leave, as Ctrl-D does
  Ctrl-C   ends an answer, not the chat

examples
  python -m shmap_tp.chat --pretrained DIR
  python -m shmap_tp.chat --checkpoint runs/first --template chat_template.jinja --temperature 0.7 mesh.mp=4
"""


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.chat`."""
    parser = command_model.model_parser("chat", __doc__, EPILOG, several=False)
    add = parser.add_argument
    add("--template", metavar="FILE", help="a chat template in Jinja (default: that of the model)")
    add("--system", metavar="TEXT", help="the system's message (default: that of the template)")
    add("--template-argument", action="append", default=[], metavar="NAME=VALUE", help="a variable of the template")
    command_model.add_sampling_arguments(parser, max_new_tokens=512)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_intermixed_args(argv)

    def chat() -> None:
        with command_model.joined(arguments):
            _chat(_opened(arguments))

    return run_command(chat)


def _opened(arguments: argparse.Namespace) -> "Chat":
    """The conversation that the arguments describe.  Raises UserError."""
    with importing():
        from shmap_tp.data.chat_template import template_arguments
        from shmap_tp.inference.text import Chat, chat_template_of_model, tokenizer_of_model

    options = command_model.sampling_options(arguments, decode_tokens=4)
    model = command_model.open_model(arguments)
    tokenizer = tokenizer_of_model(model, arguments.tokenizer)
    template = chat_template_of_model(model, arguments.template, template_arguments(arguments.template_argument))
    given = arguments.system, arguments.special_tokens_in_text
    return Chat(model, tokenizer, template, options, *given)


def _chat(conversation: "Chat") -> None:
    """Questions and answers until /exit or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history in input()
    print("/reset forgets what was said, /exit leaves, Ctrl-C ends an answer.", flush=True)
    while (text := _read()) is not None:
        if text == "/reset":
            conversation.reset()
            print("(forgotten)", flush=True)
        elif text:
            _answer(conversation, text)


def _read() -> str | None:
    """The next message, "" after Ctrl-C; None at the end."""
    try:
        text = input("> ").strip()
    except EOFError:
        print(flush=True)
        return None
    except KeyboardInterrupt:
        print("\n(/exit leaves)", flush=True)
        return ""
    return None if text == "/exit" else text


def _answer(conversation: "Chat", text: str) -> None:
    """Print the answer as it comes."""
    try:
        conversation.answer(text, show=write_text, notify=lambda note: print(f"({note})", flush=True))
        print(flush=True)
    except KeyboardInterrupt:
        print("\n(ended)", flush=True)
    except UserError as error:
        print_error(error, sys.stdout)


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
