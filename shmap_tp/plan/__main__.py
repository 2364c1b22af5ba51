"""Plan a training run on TPUs or GPUs that are not there: memory, communication, step time, the best configuration.

    python -m shmap_tp.plan search --version v5e --devices 16 --model 6b             search the fastest step
    python -m shmap_tp.plan search --version h100 --nodes 1 --model llama3_8b        the same on a node of 8 GPUs
    python -m shmap_tp.plan search --version v5e --devices 16 --from-pretrained DIR  the same for a Hugging Face model
    python -m shmap_tp.plan search --version v5e,v6e --devices 16,64 --model 6b --tokens 100B --price v5e=1.2,v6e=2.7
                                                                                     time and cost of a run
    python -m shmap_tp.plan step --version v5e --model 6b --dp 2 --mp 8              one mesh in detail
    python -m shmap_tp.plan step --version v5e --model 6b --dp 2 --mp 8 --plot step.png    and a timeline of its step
    python -m shmap_tp.plan step --version v3 --cfg conf/recipes/6_9b_v3-32.yaml     the step of a file
    python -m shmap_tp.plan ledger --model 6_9b --dp 2 --mp 8                        only its communication
    python -m shmap_tp.plan decode --version v5e --model llama3_8b --dp 1 --mp 8     generation: seconds a token

`python -m shmap_tp.plan MODE --help` lists the flags of step, search, decode or ledger.  Nothing runs on a TPU or a
GPU: their own compilers compile the training step, and the compiled schedule is simulated.  For GPUs its time is an
estimate by formulas.  `ledger` needs no compiler.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from shmap_tp.runtime.command_line import end_at_ctrl_c, end_without_readers

if __name__ == "__main__":
    end_at_ctrl_c()  # a compilation would not be interrupted; only the search has something to keep

from shmap_tp.config.choices import HeldIn
from shmap_tp.config.schema import Config
from shmap_tp.config.yaml_files import as_installed
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import DP_SLICE, axis_sizes
from shmap_tp.plan.compiled_communication import communication_in_hlo, inter_slice_communication
from shmap_tp.plan.flags import (
    Parser,
    add_mesh_flags,
    add_step_flags,
    config_from_flags,
    plannable,
    save_row,
)
from shmap_tp.plan.generation import generation_command
from shmap_tp.plan.ledger import Entry, Operation, comparison, format_bytes, table
from shmap_tp.plan.plot import PlannedMemory, plot_step
from shmap_tp.plan.predict import Prediction, format_memory, memory_by_kind, predict, step_communication, step_dtype
from shmap_tp.plan.report import FORMULA, PREDICTED, ROW_INDENT, format_row
from shmap_tp.plan.search.command import search_command
from shmap_tp.plan.search.output import token_count
from shmap_tp.plan.targets import VERSION, VERSIONS, find_target
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.console import wrap_lines
from shmap_tp.runtime.files import writing_output

DEFAULTS = ("6_9b", 1, 16)
"""(model, sequences per microbatch on each dp rank, microbatches) where the flags say nothing else."""


def main(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        if value == "":
            raise UserError(f"--{name.replace('_', '-')} is empty; give it a value, or omit it")
    if arguments.from_pretrained and (arguments.model or arguments.cfg):
        raise UserError("--from-pretrained, --model and --cfg each name a model; give one")
    MODES[arguments.mode](arguments)


def ledger(arguments: argparse.Namespace) -> None:
    """Print the communication of the step of a mesh, for which nothing is compiled."""
    config = plannable(config_from_flags(arguments, *DEFAULTS))
    print_communication(step_communication(config, step_dtype(config)), config)


def step(arguments: argparse.Namespace) -> None:
    """Print the predicted row of a mesh, its memory, and its communication as planned and as compiled."""
    config = plannable(config_from_flags(arguments, *DEFAULTS))
    target = find_target(arguments.version, config.mesh.devices, arguments.topology, config.mesh.slices)
    print(f"compiling the step for {target} ...", flush=True)
    prediction = predict(config, target, record=arguments.plot is not None)
    save_row(prediction.row, arguments)
    print(wrap_lines(format_row(prediction.row), ROW_INDENT))
    print(wrap_lines(FORMULA))
    print("\nMEMORY per device")
    print(format_memory(memory_by_kind(prediction.programs, prediction.compiled), prediction.compiled))
    traced = prediction.communication
    print_communication(traced, config)
    if prediction.text is not None:
        print_compiled_collectives(config, prediction, traced)
    if arguments.plot:
        write_plot(config, prediction, Path(arguments.plot))


def write_plot(config: Config, prediction: Prediction, file: Path) -> None:
    """Draw the predicted step.  Raises UserError where it does not fit, or the file cannot be written."""
    if prediction.schedule is None:
        raise UserError(f"--plot {file}: a program that does not fit has no schedule; make it fit first")
    row, compiled = prediction.row, prediction.compiled
    memory = PlannedMemory(memory_by_kind(prediction.programs, compiled), compiled.limit_bytes, compiled.host_bytes)
    title = (
        f"{row.model} on {row.devices} x {row.device_kind}, dp={row.dp}, mp={row.mp}, {row.microbatches} microbatches, "
        f"tensor parallelism {row.tensor_parallel}, zero {row.zero}: {row.kind}"
    )
    sizes = {axis: size for axis, size in axis_sizes(config.mesh).items() if axis != DP_SLICE}  # those of the module
    with writing_output(f"--plot {file}"):
        plot_step(prediction.schedule, memory, sizes, title, file)
    print(f"\nwritten: {file}")


def print_communication(traced: list[Entry], config: Config) -> None:
    print(f"\nCOMMUNICATION of the traced step, {config.model.name}\n{table(traced)}")


def print_compiled_collectives(config: Config, prediction: Prediction, traced: list[Entry]) -> None:
    """Compare the compiled module with the traced step.

    With several slices the module numbers only the devices of its own slice; then only communication between slices is
    compared, without all-reduces over all of dp, which the compiler splits freely.
    """
    if config.mesh.slices == 1 or prediction.row.kind != PREDICTED:
        found = communication_in_hlo(prediction.text, axis_sizes(config.mesh))
        print(wrap_lines(f"\nCOMPILED COLLECTIVES: {comparison(traced, found)}"))
        return
    found = inter_slice_communication(prediction.text)
    others = [entry for entry in found if entry.operation != Operation.all_reduce]
    print("\nCOMPILED COLLECTIVES between slices: ", end="")
    print(wrap_lines(comparison([entry for entry in traced if entry.axis == DP_SLICE], others)))
    sums = sum(entry.total for entry in found if entry.operation == Operation.all_reduce)
    print(f"all-reduces over all of dp: {format_bytes(sums)}")


# Flags

MODES: dict[str, Callable[[argparse.Namespace], None]] = {
    "step": step,
    "search": search_command,
    "decode": generation_command,
    "ledger": ledger,
}


def parse(words: list[str]) -> argparse.Namespace:
    """The flags of a mode, which is the first word.  Without a mode, flags of the release before say which."""
    if words and words[0] in MODES:
        mode, *rest = words
        return make_parser(mode).parse_intermixed_args(rest)
    if not words or words[0] in ("-h", "--help"):
        print(as_installed(__doc__))
        raise SystemExit(0 if words else 2)
    names = [word.split("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    mode = next((mode for mode in ("decode", "ledger") if mode in names), "step")
    mode = "search" if {"devices", "nodes", "versions"}.intersection(names) else mode
    print(f"say python -m shmap_tp.plan {mode} ...; the next release asks for the mode", file=sys.stderr)
    return make_parser(mode).parse_intermixed_args([word for word in words if word not in ("--decode", "--ledger")])


def make_parser(mode: str) -> argparse.ArgumentParser:
    prog = as_installed(f"python -m shmap_tp.plan {mode}")
    parser = Parser(prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(mode=mode, json=None, slices=None)
    add_step_flags(parser)
    parser.add_argument("--from-pretrained", metavar="DIR", help="a Hugging Face model; its config.json is enough")
    if mode != "search":
        add_mesh_flags(parser)
    parser.add_argument("--slices", type=int, metavar="N", help="number of slices that dp spans (default 1)")
    if mode == "ledger":
        return parser
    parser.add_argument("--json", metavar="FILE", help="append the predicted rows to FILE, one JSON object per line")
    parser.add_argument("--topology", help="chips along each side of a slice, such as 4x8x8 (default: most compact)")
    {"step": _add_step, "search": _add_search, "decode": _add_decode}[mode](parser)
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", choices=VERSIONS, default=VERSION, help="TPU version or GPU (default %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw a timeline of the predicted step, and its memory, as PNG")


def _add_decode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", choices=VERSIONS, default=VERSION, help="TPU version (default %(default)s)")
    prompt = "length of each prompt (default 1024, or half the context)"
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help=prompt)
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="tokens that continue it (default 256, or a quarter)"
    )
    held = [HeldIn.bfloat16.value, HeldIn.int8.value]
    parser.add_argument("--dtype", choices=held, help="of the weights (default bfloat16); int8 computes in bfloat16")


def _add_search(parser: argparse.ArgumentParser) -> None:
    versions = "TPU versions or GPUs, separated by commas: v5e,v6e,h100 (default %(default)s)"
    parser.add_argument("--version", "--versions", default=VERSION, help=versions)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--devices", metavar="N", help="devices of all slices together, or several: 16,64")
    size.add_argument("--nodes", type=int, metavar="N", help="nodes of 8 GPUs")
    minutes = "time to compile, of all targets (default %(default)g)"
    parser.add_argument("--minutes", type=float, metavar="N", default=30.0, help=minutes)
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilations at a time, at most what cores and memory allow"
    )
    precisions = "values of train.matmul_precision to search, separated by commas: bfloat16,int8"
    parser.add_argument("--precisions", help=precisions)
    parser.add_argument("--recipe", metavar="FILE", help="write the fastest configuration to FILE")
    of_run = "tokens of the whole run, such as 100B or 1e11: prints its time and cost"
    parser.add_argument("--tokens", type=token_count, metavar="N", help=of_run)
    parser.add_argument("--price", help="dollars per chip hour: 1.2, or by version: v5e=1.2,v6e=2.7")


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    sys.exit(end_without_readers(lambda: run_command(lambda: main(parsed))))
