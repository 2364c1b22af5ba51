"""Tokenize text into the files that training reads: `python -m shmap_tp.prepare --source stdlib --out data/stdlib`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shmap_tp.errors import UserError
from shmap_tp.runtime.command_line import end_without_readers, importing, raising, run_command

if TYPE_CHECKING:
    from shmap_tp.data.text_sources import TextSource


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.prepare`."""
    parser = argparse.ArgumentParser(prog="python -m shmap_tp.prepare", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--source", choices=["stdlib"], help="stdlib: the Python standard library of this machine, no download"
    )
    source.add_argument(
        "--text", nargs="+", metavar="PATH", help="text, .jsonl, .parquet or .arrow files, .gz, .zst, directories, URLs"
    )
    source.add_argument(
        "--dataset", metavar="NAME", help="a Hugging Face data set: its name on the hub, or its directory"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory for train.bin, validation.bin, meta.json"
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes (default), a JSON file, a model's directory, a hub name",
    )
    tokenizer.add_argument(
        "--train-tokenizer", type=int, metavar="N", help="train a tokenizer of N ids on the text (byte-level BPE)"
    )
    parser.add_argument(
        "--end-of-text", metavar="TOKEN", help="the token after each document (default: the model's, or <|endoftext|>)"
    )
    parser.add_argument(
        "--endings",
        nargs="+",
        metavar=".EXT",
        help="which files are read in a directory of --text (those above, and .txt)",
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="the field or column with the text (text)")
    parser.add_argument(
        "--validation",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="share of the text that is for validation, by size (0.01)",
    )
    parser.add_argument(
        "--pack",
        type=int,
        metavar="T",
        help="put whole documents into rows of T tokens, for runs with model.context=T and isolated documents",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that tokenize large files (default: those of the machine, if that is faster)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace data that was prepared in --out before")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    return run_command(lambda: _prepare(arguments))


def _prepare(arguments: argparse.Namespace) -> None:
    """Prepare the data, and print what they are.  Raises UserError."""
    with importing():
        from shmap_tp.data.metadata import SPLITS
        from shmap_tp.data.prepare import check_out, prepare
        from shmap_tp.data.staging import has_parts
        from shmap_tp.data.tokenizer import open_tokenizer
        from shmap_tp.data.tokenizing import default_workers
        from shmap_tp.data.train_tokenizer import train_tokenizer

    if (row := arguments.pack) is not None and not 2 <= row < 1 << 24:
        raise UserError(f"--pack {row} must be the model.context of the runs that will read it, such as 2048")
    if arguments.workers is not None and not 1 <= arguments.workers <= 1024:
        raise UserError(f"--workers {arguments.workers} must be a number of processes, such as 8")
    if not arguments.tokenizer:
        raise UserError("--tokenizer has no name; give bytes, a JSON file, a model's directory or a name on the hub")
    try:
        if arguments.train_tokenizer is None:
            tokenizer = open_tokenizer(arguments.tokenizer, arguments.end_of_text)
        else:
            check_out(arguments.out, arguments.overwrite)
            source = _source(arguments)
            with importing():  # as there, Ctrl-C ends the process: the library would not return
                tokenizer = train_tokenizer(source, arguments.train_tokenizer, arguments.end_of_text)
        source = _source(arguments)
        workers = arguments.workers or default_workers(source, tokenizer)
        with raising():  # SIGTERM removes what was written as Ctrl-C does
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
    size = f"vocabulary {meta['vocabulary']}, {meta['dtype']}"
    print(f"{arguments.out}: {train} training tokens, {validation} validation tokens ({meta['tokenizer']}, {size})")


def _source(arguments: argparse.Namespace) -> "TextSource":
    """The text that the arguments name, to be read once.  Raises UserError."""
    with importing():
        from shmap_tp.data import text_sources

    if arguments.source:
        return text_sources.stdlib()
    if arguments.text:
        endings = arguments.endings or text_sources.ENDINGS
        return text_sources.text_files(arguments.text, arguments.field, arguments.validation, endings)
    if "://" in arguments.dataset or Path(arguments.dataset).is_dir():
        return text_sources.dataset_directory(arguments.dataset, arguments.field, arguments.validation)
    return text_sources.hub_dataset(arguments.dataset, arguments.field, arguments.validation)


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
