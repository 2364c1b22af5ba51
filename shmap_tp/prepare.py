"""Turns text into the token files that training reads: `python -m shmap_tp.prepare --source stdlib --out data/stdlib`.

Documents follow one another in train.bin and validation.bin, an end-of-text token after each; meta.json says what they
are.  All three are written in a hidden directory beside the target, which takes the target's name when it is complete:
whatever interrupts a preparation, nothing is left that looks finished.  The same text gives the same bytes every time.
"""

import argparse
import sys
from pathlib import Path

from shmap_tp.data import text_sources as sources
from shmap_tp.data.prepare import prepare
from shmap_tp.data.token_files import SPLITS
from shmap_tp.data.tokenizer import open_tokenizer
from shmap_tp.errors import UserError


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shmap_tp.prepare", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--source", choices=["stdlib"], help="stdlib: the Python library on this machine, no download")
    what.add_argument("--text", nargs="+", type=Path, metavar="PATH", help=".txt or .jsonl files, or directories")
    what.add_argument("--dataset", metavar="NAME", help="a Hugging Face data set, such as JeanKaddour/minipile")
    parser.add_argument("--out", required=True, type=Path, help="directory for train.bin, validation.bin, meta.json")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a tokenizers JSON file, or a name on the hub")
    parser.add_argument("--end-of-text", default="<|endoftext|>", help="the tokenizer's token after each document")
    parser.add_argument("--field", default="text", help="the field that holds the text of a record")
    parser.add_argument("--validation", type=float, default=0.01, help="fraction kept to validate (default 0.01)")
    parser.add_argument("--overwrite", action="store_true", help="replace what was prepared in --out before")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = _arguments(argv)
    try:
        tokenizer = open_tokenizer(given.tokenizer, given.end_of_text)
        if given.source:
            source = sources.stdlib()
        elif given.text:
            source = sources.text_files(given.text, given.field, given.validation)
        else:
            source = sources.hub_dataset(given.dataset, given.field, given.validation)
        meta = prepare(source, tokenizer, given.out, overwrite=given.overwrite)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; nothing was written to {given.out}", file=sys.stderr)
        return 130
    train, validation = (f"{meta['tokens'][split]:,}" for split in SPLITS)
    size = f"vocabulary {meta['vocabulary']}, {meta['dtype']}"
    print(f"{given.out}: {train} tokens to train on, {validation} to validate ({meta['tokenizer']}, {size})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
