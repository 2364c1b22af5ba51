"""Plan a training run on TPUs or GPUs that are not there: memory, communication, step time, the best configuration.

    python -m shmap_tp.plan --version v5e --devices 16 --model 6b                    search the fastest step
    python -m shmap_tp.plan --version h100 --nodes 1 --model llama3_8b               the same on a node of 8 GPUs
    python -m shmap_tp.plan --version v5e --devices 16 --from-pretrained DIR         the same for a Hugging Face model
    python -m shmap_tp.plan --versions v5e,v6e --devices 16,64 --model 6b --tokens 100B --price v5e=1.2,v6e=2.7
                                                                                     time and cost of a run
    python -m shmap_tp.plan --version v5e --model 6b --dp 2 --mp 8                   one mesh in detail
    python -m shmap_tp.plan --version v5e --model 6b --dp 2 --mp 8 --plot step.png   and a timeline of its step
    python -m shmap_tp.plan --version v3 --cfg conf/recipes/6_9b_v3-32.yaml          the step of a file
    python -m shmap_tp.plan --model 6b --dp 2 --mp 8 --ledger                        only its communication
    python -m shmap_tp.plan --version v5e --model llama3_8b --dp 1 --mp 8 --decode   generation: seconds a token

Nothing runs on a TPU or a GPU: their own compilers compile the training step, and the compiled schedule is simulated.
For GPUs its time is an estimate by formulas.  --ledger needs no compiler.
"""

import argparse
import sys
from pathlib import Path

from shmap_tp.runtime.command_line import end_at_ctrl_c, end_without_readers

if __name__ == "__main__":
    end_at_ctrl_c()  # a compilation would not be interrupted; only the search has something to keep

from shmap_tp.config.packaged import as_installed
from shmap_tp.config.schema import Config, HeldIn
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import DP, DP_SLICE, MP, axis_sizes
from shmap_tp.plan.communication.from_hlo import communication_in_hlo, inter_slice_communication
from shmap_tp.plan.communication.ledger import Entry, Operation, comparison, format_bytes, table
from shmap_tp.plan.flags import Parser, append_json, command_line, config_from_flags, plannable
from shmap_tp.plan.generation import generation_command
from shmap_tp.plan.layout import ROW_INDENT, wrapped
from shmap_tp.plan.plot import PlannedMemory, plot_step
from shmap_tp.plan.predict import Prediction, format_memory, memory_by_kind, predict, step_communication, step_dtype
from shmap_tp.plan.report import FORMULA, PREDICTED, Row, format_row
from shmap_tp.plan.search.command import search_command
from shmap_tp.plan.search.cost import token_count
from shmap_tp.plan.targets import VERSIONS, devices_of_nodes, find_target
from shmap_tp.runtime.command_line import run_command

DEFAULTS = ("6_9b", 1, 16)
"""(model, sequences per microbatch on each dp rank, microbatches) where the flags say nothing else."""
VERSION = "v3"
"""Devices, where neither --version nor --versions is given."""
MINUTES = 30.0
"""Time of a search, where --minutes is not given."""


def main(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        if value == "":
            raise UserError(f"--{name.replace('_', '-')} is empty; give it a value, or omit it")
    check_devices(arguments)
    check_generation_flags(arguments)
    check_mesh_flags(arguments)
    check_search_flags(arguments)
    arguments.minutes = arguments.minutes or MINUTES
    if arguments.from_pretrained and (arguments.model or arguments.cfg):
        raise UserError("--from-pretrained, --model and --cfg each name a model; give one")
    if arguments.ledger and arguments.devices:
        raise UserError("--ledger applies to one mesh; give --dp and --mp")
    if arguments.ledger and arguments.json:
        raise UserError("--json writes predicted rows, and --ledger predicts none; omit one of them")
    if arguments.plot and (arguments.devices or arguments.ledger):
        raise UserError("--plot draws the step of one mesh; give --dp and --mp, and omit --ledger")
    if arguments.decode:
        generation_command(arguments)
    elif arguments.devices:
        search_command(arguments)
    elif arguments.ledger:
        config = plannable(config_from_flags(arguments, *DEFAULTS))
        print_communication(step_communication(config, step_dtype(config)), config)
    else:
        plan_one_mesh(arguments)


def check_devices(arguments: argparse.Namespace) -> None:
    """Raises UserError for an unknown name in --versions, and for flags that name the same twice; sets `version` and
    `devices`."""
    if arguments.versions and arguments.version:
        raise UserError("--version and --versions both name the devices; give one")
    if arguments.nodes is not None and arguments.devices is not None:
        raise UserError("--nodes and --devices both give the number of devices; give one")
    arguments.version = arguments.version or VERSION
    for version in (arguments.versions or arguments.version).split(","):
        if version not in VERSIONS:
            raise UserError(f"--versions {version}: unknown; use some of {', '.join(VERSIONS)}, separated by commas")
    arguments.devices = devices_of_nodes(arguments.versions or arguments.version, arguments.nodes) or arguments.devices


def check_mesh_flags(arguments: argparse.Namespace) -> None:
    """Raises UserError unless the flags name either a search or one mesh."""
    given = [f"--{name} {vars(arguments)[name]}" for name in (DP, MP) if vars(arguments)[name] is not None]
    if arguments.devices and given:
        raise UserError(
            f"{given[0]}: a search chooses the mesh; fix it as mesh.dp=N or mesh.mp=N,\n"
            "or omit --devices and --nodes, and give --dp and --mp for one mesh"
        )
    if len(given) == 1 and not arguments.cfg:
        raise UserError(f"{given[0]} is half a mesh; give --dp and --mp for one mesh, or --devices to search it")
    if not arguments.devices and not given and not arguments.cfg:
        raise UserError(
            "give --devices or --nodes to search the best configuration, --dp and --mp for one mesh, or --cfg"
        )


def check_search_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags of the search that would be ignored, and values that it cannot use."""
    of_search = ("versions", "minutes", "tokens", "price", "recipe", "jobs")
    ignored = [f"--{name}" for name in of_search if vars(arguments)[name] is not None]
    if not arguments.devices and ignored:
        raise UserError(f"{ignored[0]} applies to the search; give --devices, or omit it")
    for key in ("mesh.slices", "mesh.processes"):
        if arguments.devices and any(word.startswith(f"{key}=") for word in arguments.overrides):
            raise UserError(f"{key} follows from the devices that are searched; omit it, and give --slices for several")
    if arguments.price is not None and arguments.tokens is None:
        raise UserError("--price needs --tokens, the tokens of the run; add it, such as --tokens 100B")
    for name in ("minutes", "tokens", "jobs"):
        value = vars(arguments)[name]
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value:g} must be above 0 and finite")


def check_generation_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags of generation without --decode, and those that would be ignored with it."""
    of_generation = ("prompt_tokens", "new_tokens", "dtype")
    ignored = of_generation if not arguments.decode else ("devices", "microbatches", "ledger", "plot")
    for name in ignored:
        if vars(arguments)[name]:
            flag = "--" + name.replace("_", "-")
            if name in of_generation:
                raise UserError(f"{flag} applies to generation; add --decode")
            mesh = ", and give --dp and --mp" if name == "devices" else ""
            raise UserError(f"{flag} applies to training, and --decode plans generation; omit {flag}{mesh}")


def plan_one_mesh(arguments: argparse.Namespace) -> None:
    """Print the predicted row of a mesh, its memory, and its communication as planned and as compiled."""
    config = plannable(config_from_flags(arguments, *DEFAULTS))
    target = find_target(arguments.version, config.mesh.devices, arguments.topology, config.mesh.slices)
    print(f"compiling the step for {target} ...", flush=True)
    prediction = predict(config, target, record=arguments.plot is not None)
    save_rows([prediction.row], arguments)
    print(wrapped(format_row(prediction.row), ROW_INDENT))
    print(wrapped(FORMULA))
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
    try:
        plot_step(prediction.schedule, memory, sizes, title, file)
    except OSError as error:
        raise UserError(f"--plot {file} cannot be written: {error.strerror}; choose another file") from error
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
        print(wrapped(f"\nCOMPILED COLLECTIVES: {comparison(traced, found)}"))
        return
    found = inter_slice_communication(prediction.text)
    others = [entry for entry in found if entry.operation != Operation.all_reduce]
    print("\nCOMPILED COLLECTIVES between slices: ", end="")
    print(wrapped(comparison([entry for entry in traced if entry.axis == DP_SLICE], others)))
    sums = sum(entry.total for entry in found if entry.operation == Operation.all_reduce)
    print(f"all-reduces over all of dp: {format_bytes(sums)}")


def save_rows(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Append the rows to the file of --json, if it is given."""
    for row in rows if arguments.json else []:
        row.command = command_line()
        append_json(row.to_json(), Path(arguments.json))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m shmap_tp.plan",
        description=as_installed(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    devices = parser.add_argument_group("devices")
    devices.add_argument("--version", choices=VERSIONS, help=f"TPU version or GPU (default {VERSION})")
    devices.add_argument("--topology", help="chips along each side of a slice, such as 4x8x8 (default: most compact)")
    devices.add_argument("--slices", type=int, metavar="N", help="number of slices that dp spans (default 1)")
    step = parser.add_argument_group("the step")
    step.add_argument("--model", help=as_installed("a model of conf/model/ (default 6_9b, with --decode llama3_8b)"))
    step.add_argument("--from-pretrained", metavar="DIR", help="a Hugging Face model; its config.json is enough")
    step.add_argument(
        "--cfg", metavar="FILE", help=as_installed("plan the step of FILE, such as a recipe of conf/recipes/")
    )
    step.add_argument("--dp", type=int, metavar="N", help="data-parallel size of the mesh to plan")
    step.add_argument("--mp", type=int, metavar="N", help="model-parallel size of the mesh to plan")
    batch = "sequences per optimizer step (default: 16 per dp rank, or device), or prompts of --decode (8 per dp rank)"
    step.add_argument("--batch", type=int, metavar="N", help=batch)
    step.add_argument("--context", type=int, metavar="N", help="tokens per sequence (default: the model's)")
    step.add_argument("--microbatches", type=int, metavar="N", help="gradient accumulation: microbatches per step")
    search = parser.add_argument_group("search, in place of --dp and --mp")
    search.add_argument("--devices", metavar="N", help="devices of all slices together: search the best configuration")
    search.add_argument("--nodes", type=int, metavar="N", help="nodes of 8 GPUs: search the best configuration")
    search.add_argument("--minutes", type=float, metavar="N", help="time to compile, of all targets (default 30)")
    search.add_argument(
        "--jobs", type=int, metavar="N", help="compilations at a time, at most what cores and memory allow"
    )
    search.add_argument("--recipe", metavar="FILE", help="write the fastest configuration to FILE")
    of_run = "tokens of the whole run, such as 100B or 1e11: prints its time and cost"
    search.add_argument("--tokens", type=token_count, metavar="N", help=of_run)
    search.add_argument("--price", help="dollars per chip hour: 1.2, or by version: v5e=1.2,v6e=2.7")
    search.add_argument("--versions", help="search several versions: v5e,v6e,h100 (and --devices 16,64)")
    decode = parser.add_argument_group("generation, in place of a training step")
    decode.add_argument("--decode", action="store_true", help="plan generation on one mesh of TPUs, not training")
    prompt = "length of each prompt (default 1024, or half the context)"
    decode.add_argument("--prompt-tokens", type=int, metavar="N", help=prompt)
    decode.add_argument(
        "--new-tokens", type=int, metavar="N", help="tokens that continue it (default 256, or a quarter)"
    )
    held = [HeldIn.bfloat16.value, HeldIn.int8.value]
    decode.add_argument("--dtype", choices=held, help="of the weights (default bfloat16); int8 computes in bfloat16")
    output = parser.add_argument_group("output")
    output.add_argument("--ledger", action="store_true", help="print only the communication; nothing is compiled")
    output.add_argument("--json", metavar="FILE", help="append the predicted rows to FILE, one JSON object per line")
    output.add_argument("--plot", metavar="FILE", help="draw a timeline of the predicted step, and its memory, as PNG")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, such as model.remat=all_matmuls"
    )
    parser.set_defaults(steps=None)
    return parser


if __name__ == "__main__":
    parsed = make_parser().parse_intermixed_args()
    sys.exit(end_without_readers(lambda: run_command(lambda: main(parsed))))
