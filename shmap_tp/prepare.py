"""Tokenize text, conversations or preference pairs into the files that training reads.

python -m shmap_tp.prepare --source stdlib --out data/stdlib
python -m shmap_tp.prepare --chat FILES --tokenizer DIR --out data/chat
python -m shmap_tp.prepare --preferences FILES --tokenizer DIR --out data/pairs
"""

import argparse
import sys
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shmap_tp.errors import UserError, refuse_first
from shmap_tp.runtime.command_line import end_without_readers, importing, raising, run_command

if TYPE_CHECKING:
    from shmap_tp.data.subwords import Subwords
    from shmap_tp.data.tokenizer import Bytes
    from shmap_tp.data.tokenizing import DocumentSource

EXAMPLES = "example_conversations.jsonl"
"""Short questions beside the configuration, all answered in one manner: it is easy to see in what a model says."""


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.prepare`."""
    parser = argparse.ArgumentParser(prog="python -m shmap_tp.prepare", description=__doc__.splitlines()[0])
    _add_sources(parser)
    add, choose = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--out", required=True, metavar="DIR", help="directory of train.bin, validation.bin, meta.json")
    choose(
        "--tokenizer", default="bytes", metavar="NAME", help="bytes (default), a file, a model's directory or hub name"
    )
    choose("--train-tokenizer", type=int, metavar="N", help="train a tokenizer of N ids on the text")
    add("--end-of-text", metavar="TOKEN", help="the token after each document (default: the model's, or <|endoftext|>)")
    add("--endings", nargs="+", metavar=".EXT", help="the files of a directory of --text (those above, and .txt)")
    add("--field", metavar="NAME", help="the field or column with the text (text)")
    _add_rendering(parser)
    add("--validation", type=float, default=0.01, metavar="SHARE", help="of the text for validation, by size (0.01)")
    add("--pack", type=int, metavar="T", help="whole documents in rows of T=model.context tokens (conversations: 2048)")
    add("--workers", type=int, metavar="N", help="processes that tokenize large files (default: those of the machine)")
    add("--overwrite", action="store_true", help="replace data that was prepared in --out before")
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """The options of which one must be given."""
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--source", choices=["stdlib", "conversations"], help="Python's standard library, or example conversations")
    add("--text", nargs="+", metavar="PATH", help="text, .jsonl, .parquet, .arrow files, .gz, .zst, directories, URLs")
    add("--chat", nargs="+", metavar="PATH", help="conversations, in such files or .json; the loss counts the answers")
    add("--preferences", nargs="+", metavar="PATH", help="pairs of chosen and rejected answers, in files as of --chat")
    add("--dataset", metavar="NAME", help="a Hugging Face data set: a name on the hub, or a directory")


def _add_rendering(parser: argparse.ArgumentParser) -> None:
    """The options of conversations and preference pairs."""
    add = parser.add_argument_group("conversations and preference pairs").add_argument
    add("--template", metavar="FILE", help="a chat template in Jinja (default: that of --tokenizer DIR)")
    add(
        "--template-argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of it, such as enable_thinking=false",
    )
    add("--date", type=date.fromisoformat, metavar="YYYY-MM-DD", help="the template's clock (today)")
    add("--special-tokens-in-text", action="store_true", help="names of special tokens in contents are these tokens")
    add("--cut", action="store_true", help="cut the ends of those that are longer than --pack")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    return run_command(lambda: _prepare(arguments))


def _faults(arguments: argparse.Namespace, of_chat: bool) -> Iterator[str]:
    if (row := arguments.pack) is not None and not 2 <= row < 1 << 24:
        yield f"--pack {row} must be the model.context of the runs that will read it, such as 2048"
    if not 0 < arguments.validation < 1:
        yield f"--validation {arguments.validation} is not between 0 and 1; 0.01 uses 1% for validation"
    if arguments.workers is not None and not 1 <= arguments.workers <= 1024:
        yield f"--workers {arguments.workers} must be a number of processes, such as 8"
    if not arguments.tokenizer:
        yield "--tokenizer has no name; give bytes, a JSON file, a model's directory or a name on the hub"
    of_template = "template", "template_argument", "date", "special_tokens_in_text", "cut"
    for name in ("endings", "field", "train_tokenizer", "workers") if of_chat else of_template:
        if getattr(arguments, name):
            rule = "does not apply to conversations; leave it out" if of_chat else "needs --chat or --preferences"
            yield f"--{name.replace('_', '-')} {rule}"
    for name in ("endings", "field") if arguments.source == "stdlib" else ():
        if getattr(arguments, name):
            yield f"--{name} does not apply to --source stdlib; leave it out, or name files with --text"


def _prepare(arguments: argparse.Namespace) -> None:
    """Prepare the data, and print what they are.  Raises UserError."""
    with importing():
        from shmap_tp.data.metadata import SPLITS
        from shmap_tp.data.preparation import has_parts, prepare
        from shmap_tp.data.tokenizing import default_workers

    of_chat = bool(arguments.chat or arguments.preferences) or arguments.source == "conversations"
    refuse_first(_faults(arguments, of_chat))
    try:
        source, tokenizer, row = _conversations(arguments) if of_chat else _texts(arguments)
        with raising():  # SIGTERM removes what was written as Ctrl-C does
            workers = arguments.workers or default_workers(source, tokenizer)
            meta = prepare(source, tokenizer, arguments.out, row=row, overwrite=arguments.overwrite, workers=workers)
    except OSError as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        more = "; the same command goes on from the parts that are finished" if has_parts(arguments.out) else ""
        print(f"interrupted; nothing was written to {arguments.out}{more}", file=sys.stderr)
        raise
    train, validation = (f"{meta['tokens'][split]:,}" for split in SPLITS)
    if row is not None:
        used, there = (sum(meta[key].values()) for key in ("of_documents", "tokens"))
        print(f"packed into rows of {row} tokens, {used / there:.1%} of which are tokens of documents")
    if pairs := meta.get("pairs"):
        print(f"{pairs[SPLITS[0]]:,} preference pairs for training, {pairs[SPLITS[1]]:,} for validation")
    if source.marked:
        print(f"{sum(meta['counted_tokens'].values()):,} tokens, those of the answers, count as targets")
    size = f"vocabulary {meta['vocabulary']}, {meta['dtype']}"
    print(f"{arguments.out}: {train} training tokens, {validation} validation tokens ({meta['tokenizer']}, {size})")


def _texts(arguments: argparse.Namespace) -> tuple["DocumentSource", "Bytes | Subwords", int | None]:
    """(the text that the arguments name, to be read once; its tokenizer; tokens of a row).  Raises UserError."""
    with importing():
        from shmap_tp.data import text_sources
        from shmap_tp.data.preparation import check_out
        from shmap_tp.data.subwords import train_tokenizer
        from shmap_tp.data.text_directory import open_tokenizer

    def source() -> text_sources.TextSource:
        field = arguments.field or "text"
        if arguments.source:
            return text_sources.stdlib()
        if arguments.text:
            endings = arguments.endings or text_sources.ENDINGS
            return text_sources.text_files(arguments.text, field, arguments.validation, endings)
        if "://" in arguments.dataset or Path(arguments.dataset).is_dir():
            return text_sources.dataset_directory(arguments.dataset, field, arguments.validation)
        return text_sources.hub_dataset(arguments.dataset, field, arguments.validation)

    if arguments.train_tokenizer is None:
        tokenizer = open_tokenizer(arguments.tokenizer, arguments.end_of_text)
    else:
        check_out(arguments.out, arguments.overwrite)
        text = source()
        with importing():  # as there, Ctrl-C ends the process: the library would not return
            tokenizer = train_tokenizer(text, arguments.train_tokenizer, arguments.end_of_text)
    return source(), tokenizer, arguments.pack


def _conversations(arguments: argparse.Namespace) -> tuple["DocumentSource", "Bytes | Subwords", int]:
    """As `_texts`, of conversations or preference pairs.  Raises UserError."""
    with importing():
        from shmap_tp.config.yaml_files import CONF
        from shmap_tp.data import conversations
        from shmap_tp.data.chat_template import template_arguments
        from shmap_tp.data.source_files import CHATS, files_at, records_of
        from shmap_tp.data.text_directory import TextDirectory, open_tokenizer
        from shmap_tp.pretrained.configuration import default_context
        from shmap_tp.pretrained.family import DEFAULT_CONTEXT
        from shmap_tp.pretrained.source import open_source

    name, row = arguments.tokenizer, DEFAULT_CONTEXT
    if name != "bytes" and not Path(name).is_file():
        model = open_source(name)
        name, row = str(model.directory), default_context(model)
    text = TextDirectory.read(name) if Path(name).is_dir() else TextDirectory({}, name)
    given, day = template_arguments(arguments.template_argument), arguments.date or date.today()
    template = text.template(arguments.template, given, day)
    if arguments.date and not template.has_clock:
        raise UserError(f"--date {day} has no effect: the chat template does not ask for the time; leave it out")
    tokenizer = open_tokenizer(name, arguments.end_of_text)
    if arguments.end_of_text is None:
        tokenizer.end_of_text = conversations.end_of_conversations(tokenizer, template)
    option, paths = ("--preferences", arguments.preferences) if arguments.preferences else ("--chat", arguments.chat)
    paths = [str(CONF / EXAMPLES)] if arguments.source else paths
    files = [file for path in paths for file in files_at(path, CHATS, option)]
    label = "example conversations" if arguments.source else ", ".join(Path(path).name for path in paths)
    row = arguments.pack or row
    limits = {"validation": arguments.validation, "row": row, "cut": arguments.cut}
    limits |= {"special_tokens_in_text": arguments.special_tokens_in_text, "pairs": bool(arguments.preferences)}
    return conversations.ChatSource(label, partial(records_of, files), template, text, **limits), tokenizer, row


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
