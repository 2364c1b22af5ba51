"""Grade a trained model: `python -m shmap_tp.evaluate --checkpoint runs/first [--data data/mine]`."""

import argparse
import json
import sys
from collections.abc import Sequence

from shmap_tp.command_model import open_model
from shmap_tp.errors import ShmapTpError, UserError


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.evaluate`."""
    parser = argparse.ArgumentParser(
        prog="python -m shmap_tp.evaluate",
        description="Loss, perplexity, bits per byte and accuracy of a checkpoint on all of validation.bin.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="a run, its checkpoints, or one checkpoint")
    model.add_argument("--pretrained", metavar="DIR", help="a Hugging Face directory, or a name on the hub")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--data", metavar="DIR", help="a directory of shmap_tp.prepare (default: data.dir of the run)")
    parser.add_argument("--split", choices=["validation", "train"], default="validation", help="which file of it")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json or bytes (default: that of the run)")
    parser.add_argument("--sequences", type=int, metavar="N", help="only the first N sequences of the file")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="sequences that are computed at a time (16)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("mesh", nargs="*", metavar="mesh.dp=N mesh.mp=N", help="the mesh (1, 1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        result = _evaluate(arguments)
    except ShmapTpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):<16}{value if isinstance(value, int) else format(value, '.4f')}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> dict[str, int | float]:
    from shmap_tp.inference.evaluation import evaluate_file
    from shmap_tp.inference.text import tokenizer_of_model

    for name in ("batch", "sequences"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    model = open_model(arguments)
    tokenizer = tokenizer_of_model(model, arguments.tokenizer)
    if arguments.pretrained and not arguments.data:
        raise UserError("--pretrained needs --data DIR: the directory does not say what text to evaluate")
    directory = arguments.data or model.config.data.dir
    limits = arguments.sequences, arguments.batch
    return evaluate_file(model.scoring_program, model.parameters, tokenizer, directory, arguments.split, limits)


if __name__ == "__main__":
    sys.exit(main())
