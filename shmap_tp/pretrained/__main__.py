"""Look at a Hugging Face directory, or write one from a checkpoint.

    python -m shmap_tp.pretrained inspect DIR
        the model's shape, parameters and meshes, and whether its weights are complete
    python -m shmap_tp.pretrained export RUN_OR_CHECKPOINT --out OUT [--step N] [--dtype bfloat16] [--merge | --rslora]
        a directory that AutoModelForCausalLM.from_pretrained of transformers reads, from any checkpoint of any mesh; of
        a run with adapters one that PeftModel.from_pretrained of PEFT reads, or with --merge the whole model

exit codes: 0 done, 2 an error that is explained in one or two lines, 130 interrupted by Ctrl-C
"""

import argparse
import sys
from pathlib import Path

from shmap_tp.runtime.command_line import end_without_readers, importing, run_command
from shmap_tp.runtime.console import write_line


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.pretrained`."""
    with importing():
        from shmap_tp.pretrained.writing import OUTPUT_DTYPES

    top = argparse.ArgumentParser(
        prog="python -m shmap_tp.pretrained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("inspect").add_argument("directory", help="a Hugging Face directory, or a name on the hub")
    export = commands.add_parser("export")
    export.add_argument("directory", metavar="RUN_OR_CHECKPOINT", help="run.dir, checkpoint.dir or one checkpoint")
    export.add_argument("--out", type=Path, required=True, help="the directory to write; it must not exist")
    export.add_argument("--step", type=int, help="the checkpoint (default: the newest intact one)")
    export.add_argument("--dtype", default="float32", choices=list(OUTPUT_DTYPES), help="of the weights written")
    adapter = export.add_mutually_exclusive_group()
    adapter.add_argument("--merge", action="store_true", help="add the adapters of a run to its base")
    rslora = "write use_rslora=true, which some engines ignore, in place of a larger alpha"
    adapter.add_argument("--rslora", action="store_true", help=rslora)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    return run_command(lambda: _pretrained(arguments))


def _pretrained(arguments: argparse.Namespace) -> None:
    with importing():
        from shmap_tp.pretrained.inspection import inspect
        from shmap_tp.pretrained.writing import Form, export_checkpoint

    if arguments.command == "inspect":
        write_line(inspect(arguments.directory))
    else:
        form = Form(arguments.dtype, arguments.merge, arguments.rslora)
        checkpoint, family = export_checkpoint(arguments.directory, arguments.out, arguments.step, form)
        print(f"{arguments.out}: {checkpoint} as {family}, {arguments.dtype}")


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
