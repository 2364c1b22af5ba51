"""Continue texts with a trained model: `python -m shmap_tp.generate --checkpoint runs/first --prompt "def main("`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from shmap_tp import command_model
from shmap_tp.errors import StorageError, UserError, refuse_first
from shmap_tp.runtime.command_line import end_without_readers, importing, run_command
from shmap_tp.runtime.console import write_text

EPILOG = """\
examples
  python -m shmap_tp.generate --checkpoint runs/first --prompt "def main("
  python -m shmap_tp.generate --checkpoint runs/first --prompts FILE.txt --out FILE.jsonl mesh.dp=2 mesh.mp=4
  python -m shmap_tp.generate --pretrained DIR --prompt "The capital of France is" mesh.mp=4
  python -m shmap_tp.generate --checkpoint runs/first --prompt "import" --temperature 0.8 --top-p 0.95 --samples 3
  git diff --name-only | python -m shmap_tp.generate --checkpoint runs/first --prompts -

A sampled token is a function of (seed, prompt number, sample number, position), on every mesh, in every batch.
The mesh is (1, 1) where mesh.dp and mesh.mp are not given; on accelerators dp x mp must be all devices.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.generate`."""
    parser = command_model.model_parser("generate", __doc__, EPILOG, several=True)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompts", metavar="FILE", help="a prompt per line; in .jsonl the field `prompt`; - is stdin")
    add("--out", metavar="FILE", help="lines of JSON, not printed; FILE.partial until all are there")
    add("--overwrite", action="store_true", help="replace the file of --out")
    command_model.add_sampling_arguments(parser, max_new_tokens=200)
    add("--samples", type=int, default=1, metavar="N", help="answers to each prompt (1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends an answer before this text")
    add("--batch", type=int, default=16, metavar="N", help="prompts that are answered at a time (16)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_intermixed_args(argv)
    return run_command(lambda: _generate(arguments))


def _generate(arguments: argparse.Namespace) -> None:
    prompts = [*arguments.prompt, *(_read_prompts(arguments.prompts) if arguments.prompts else [])]
    with importing():
        from shmap_tp.data.tokenizer import check_text
    for number, prompt in enumerate(prompts):
        check_text(prompt, f"prompt {number}")
    refuse_first(_faults(arguments, prompts))
    with importing():
        from tqdm import tqdm

        from shmap_tp.inference.text import answers, encode_prompts, tokenizer_of_model

    options = command_model.sampling_options(arguments, samples=arguments.samples, decode_tokens=8)
    with command_model.joined(arguments, prompts=prompts), ExitStack() as stack:
        out = _open_out(arguments, stack) if arguments.out and command_model.is_first_process() else None
        model = command_model.open_model(arguments)
        tokenizer = tokenizer_of_model(model, arguments.tokenizer)
        ids = encode_prompts(tokenizer, prompts, special_tokens_in_text=arguments.special_tokens_in_text)
        if command_model.is_first_process():
            _say_if_short(model.config.model.context, max(map(len, ids)), options.max_new_tokens)
        given = model.generation_programs, model.parameters, tokenizer
        answer = partial(answers, *given, options=options, stop=arguments.stop)
        hidden = None if out else True  # None: where stderr is no terminal
        for first in tqdm(range(0, len(prompts), arguments.batch), unit=" batches", disable=hidden):
            part = prompts[first : first + arguments.batch]
            show = _printer(part, arguments.samples, first) if arguments.out is None else None
            found = answer(ids[first : first + arguments.batch], requests=range(first, first + len(part)), show=show)
            if out is not None:
                _write(out, part, found)


def _say_if_short(context: int, longest: int, new: int) -> None:
    """Say on stderr if the context has no room for `new` tokens after a prompt of `longest` tokens."""
    room = context - longest
    if 0 < room < new:
        print(f"model.context={context} ends answers after {room} tokens, not --max-new-tokens {new}", file=sys.stderr)


def _faults(arguments: argparse.Namespace, prompts: list[str]) -> Iterator[str]:
    if not prompts:
        yield "there is no prompt; give --prompt TEXT or --prompts FILE"
    if arguments.batch < 1:
        yield f"--batch {arguments.batch} must be at least 1"
    if arguments.prompts and arguments.out and os.path.realpath(arguments.prompts) == os.path.realpath(arguments.out):
        yield f"--out {arguments.out} is the file of --prompts, which it would replace; name another"


def _open_out(arguments: argparse.Namespace, stack: ExitStack) -> IO[str]:
    """The file of --out, to be written; at the end of `stack` it replaces what is there.

    Raises UserError if that has content, unless --overwrite is given, or if the file cannot be written.
    """
    from shmap_tp.runtime.files import file_size, replacing, writing_output

    if not arguments.overwrite and file_size(Path(arguments.out)):
        raise UserError(f"--out {arguments.out} exists; choose another file, or replace it with --overwrite")
    with writing_output(f"--out {arguments.out}"):
        return stack.enter_context(replacing(Path(arguments.out), keep=True))


def _write(file: IO[str], prompts: list[str], found: list[list[str]]) -> None:
    """A line of JSON for each answer.  Raises StorageError."""
    lines = [
        {"prompt": prompt, "sample": number, "answer": text}
        for prompt, texts in zip(prompts, found, strict=True)
        for number, text in enumerate(texts)
    ]
    try:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
    except OSError as error:
        raise StorageError(f"{file.name} could not be written: {error.strerror}") from error


def _printer(prompts: list[str], samples: int, first: int) -> Callable[[int, int, str, str | None], None]:
    """Prints the pieces of an only answer as they come; of several answers, each when it has ended."""
    alone = len(prompts) == samples == 1
    if alone:
        write_text(prompts[0])

    def show(number: int, sample: int, piece: str, ended: str | None) -> None:
        if alone:
            write_text(piece, end="" if ended is None else "\n")
        elif ended is not None:
            write_text(f"--- prompt {first + number}, sample {sample}\n{prompts[number]}{ended}\n")

    return show


def _read_prompts(name: str) -> list[str]:
    """The prompts of a file, or of stdin for "-".  Raises UserError."""
    with importing():
        from shmap_tp.runtime.files import read_file

    try:
        content = (sys.stdin.buffer.read() if name == "-" else read_file(name, f"--prompts {name}")).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {name} is not UTF-8 at byte {error.start}; convert it") from error
    lines = content.replace("\r\n", "\n").removesuffix("\n").split("\n") if content else []
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"] if name.endswith(".jsonl") else line
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            more = ', in an object such as {"prompt": "..."}' if name.endswith(".jsonl") else ""
            raise UserError(f"--prompts {name}, line {number} must be a prompt that is not empty{more}")
        prompts.append(prompt)
    return prompts


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
