"""Look at a Hugging Face directory, or write one from a checkpoint.

    python -m shmap_tp.pretrained inspect DIR
        the model's shape, parameters and meshes, and whether its weights are complete
    python -m shmap_tp.pretrained export RUN_OR_CHECKPOINT --out OUT [--step N] [--dtype bfloat16]
        a directory that AutoModelForCausalLM.from_pretrained of transformers reads, from any checkpoint of any mesh

exit codes: 0 done, 2 an error that is explained in one or two lines, 130 interrupted by Ctrl-C
"""

import argparse
import sys
from pathlib import Path

from shmap_tp.runtime.interrupts import end_at_ctrl_c, raise_at_ctrl_c
from shmap_tp.runtime.output import end_without_readers

if __name__ == "__main__":
    end_at_ctrl_c()

from shmap_tp.errors import ShmapTpError
from shmap_tp.pretrained.inspection import inspect
from shmap_tp.pretrained.writing import OUTPUT_DTYPES, export_checkpoint
from shmap_tp.runtime.exit_codes import INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.pretrained`."""
    top = argparse.ArgumentParser(
        prog="python -m shmap_tp.pretrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("inspect").add_argument("directory", help="a Hugging Face directory, or a name on the hub")
    export = commands.add_parser("export")
    export.add_argument("directory", metavar="RUN_OR_CHECKPOINT", help="run.dir, checkpoint.dir or one checkpoint")
    export.add_argument("--out", type=Path, required=True, help="the directory to write; it must not exist")
    export.add_argument("--step", type=int, help="the checkpoint (default: the newest intact one)")
    export.add_argument("--dtype", default="float32", choices=list(OUTPUT_DTYPES), help="of the weights written")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "inspect":
            print(inspect(arguments.directory))
        else:
            checkpoint, family = export_checkpoint(arguments.directory, arguments.out, arguments.step, arguments.dtype)
            print(f"{arguments.out}: {checkpoint} as {family}, {arguments.dtype}")
    except ShmapTpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    raise_at_ctrl_c()
    sys.exit(end_without_readers(main))
