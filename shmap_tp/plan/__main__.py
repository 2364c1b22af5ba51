"""Plan a training run on TPUs or GPUs that are not there: memory, communication, step time, and the best mesh.

    python -m shmap_tp.plan --version v5e --devices 16 --model 6b                   all meshes, fastest first
    python -m shmap_tp.plan --version v5e --model 6b --dp 2 --mp 8                  one mesh in detail
    python -m shmap_tp.plan --version v5e --model 6b --dp 2 --mp 8 --plot step.png   and a timeline of its step
    python -m shmap_tp.plan --version v3 --cfg conf/recipes/6_9b_v3-32.yaml         the step of a file
    python -m shmap_tp.plan --version v5e --devices 16 --from-pretrained DIR        a Hugging Face model
    python -m shmap_tp.plan --version h100 --nodes 1 --model llama3_8b              all meshes of a node of 8 GPUs
    python -m shmap_tp.plan --model 6b --dp 2 --mp 8 --ledger                       only its communication

Nothing runs on a TPU or a GPU: their own compilers compile the training step, and the compiled schedule is simulated.
For GPUs its time is an estimate by formulas.  --ledger needs no compiler.
"""

import argparse
import shlex
import sys
from pathlib import Path

import jax.numpy as jnp

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GIB
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.benchmark import append_json, config_from_flags, run_command
from shmap_tp.plan.communication.analytic import analytic_communication
from shmap_tp.plan.communication.from_hlo import communication_in_hlo
from shmap_tp.plan.communication.inter_slice import compare_dcn, inter_slice_communication
from shmap_tp.plan.communication.ledger import table, without_trivial_axes
from shmap_tp.plan.communication.reconcile import reconcile
from shmap_tp.plan.memory import format_memory, memory_by_kind
from shmap_tp.plan.plot import PlannedMemory, plot_step
from shmap_tp.plan.predict import Prediction
from shmap_tp.plan.report import FORMULA, PREDICTED, Row, format_row
from shmap_tp.plan.targets import VERSIONS, Target, devices_of_nodes, find_target, predict_on

DEFAULTS = ("6_9b", 1, 16)
"""(model, sequences per microbatch on each dp rank, microbatches) where the flags say nothing else."""


def main(arguments: argparse.Namespace) -> None:
    arguments.devices = devices_of_nodes(arguments.version, arguments.nodes) or arguments.devices
    one_mesh = arguments.cfg is not None or None not in (arguments.dp, arguments.mp)
    if one_mesh == (arguments.devices is not None) or (arguments.devices and (arguments.dp or arguments.mp)):
        raise UserError("give --dp and --mp for one mesh, or --devices for all meshes of that many devices, or --cfg")
    if arguments.from_pretrained and (arguments.model or arguments.cfg):
        raise UserError("--from-pretrained, --model and --cfg each name a model; give one")
    if arguments.ledger and arguments.devices:
        raise UserError("--ledger applies to one mesh; give --dp and --mp")
    if arguments.ledger and arguments.json:
        raise UserError("--json writes predicted rows, and --ledger predicts none; omit one of them")
    if arguments.plot and (arguments.devices or arguments.ledger):
        raise UserError("--plot draws the step of one mesh; give --dp and --mp, and omit --ledger")
    if arguments.devices:
        plan_all_meshes(arguments)
    elif arguments.ledger:
        print_communication(config_from_flags(arguments, *DEFAULTS))
    else:
        plan_one_mesh(arguments)


def plan_one_mesh(arguments: argparse.Namespace) -> None:
    """Print the predicted row of a mesh, its memory, and its communication as planned and as compiled."""
    config = config_from_flags(arguments, *DEFAULTS)
    target = find_target(arguments.version, config.mesh.dp * config.mesh.mp, arguments.topology, config.mesh.slices)
    print(f"compiling the step for {target} ...", flush=True)
    prediction = predict_on(config, target, record=arguments.plot is not None)
    save_rows([prediction.row], arguments)
    print(format_row(prediction.row))
    print(FORMULA)
    print("\nMEMORY per device")
    print(format_memory(memory_by_kind(prediction.programs, prediction.compiled), prediction.compiled))
    print_communication(config)
    if prediction.text is not None:
        print_compiled_collectives(config, prediction)
    if arguments.plot:
        write_plot(config, prediction, Path(arguments.plot))


def write_plot(config: Config, prediction: Prediction, file: Path) -> None:
    """Draw the predicted step.  Raises UserError where it does not fit."""
    if prediction.schedule is None:
        raise UserError(f"--plot {file}: a program that does not fit has no schedule; make it fit first")
    row, compiled = prediction.row, prediction.compiled
    memory = PlannedMemory(memory_by_kind(prediction.programs, compiled), compiled.limit_bytes, compiled.host_bytes)
    title = (
        f"{row.model} on {row.devices} x {row.device_kind}, dp={row.dp}, mp={row.mp}, {row.microbatches} microbatches, "
        f"tensor parallelism {row.tensor_parallel}, zero {row.zero}: {row.kind}"
    )
    sizes = {DP: config.mesh.dp // config.mesh.slices, MP: config.mesh.mp}  # a module is that of one slice
    plot_step(prediction.schedule, memory, sizes, title, file)
    print(f"\nwritten: {file}")


def print_communication(config: Config) -> None:
    print(f"\nCOMMUNICATION per step (analytic), {config.model.name}")
    print(table(planned_communication(config)))


def planned_communication(config: Config) -> list:
    sizes = {DP: config.mesh.dp, MP: config.mesh.mp}
    return without_trivial_axes(analytic_communication(config, jnp.bfloat16), sizes)


def print_compiled_collectives(config: Config, prediction: Prediction) -> None:
    """Compare the compiled module with the plan.

    With several slices the module numbers only the devices of its own slice; then only communication between slices is
    compared.
    """
    planned, sizes = planned_communication(config), {DP: config.mesh.dp, MP: config.mesh.mp}
    if config.mesh.slices > 1 and prediction.row.kind == PREDICTED:
        found = inter_slice_communication(prediction.text)
        print(f"\nCOMPILED COLLECTIVES between slices: {compare_dcn(planned, found)}")
        print(table(found))
        return
    found = reconcile(planned, communication_in_hlo(prediction.text, sizes), sizes)
    verdict = "as planned" if found.balanced else "NOT as planned"
    if found.balanced and str(found):
        verdict += "; the lines below are choices of the compiler that move the same bytes"
    print(f"\nCOMPILED COLLECTIVES: {verdict}")
    if str(found):
        print(f"{found}\nmeaning of these lines:\n{found.legend}")


def plan_all_meshes(arguments: argparse.Namespace) -> None:
    """Predict every (dp, mp) of the devices for the same batch, and print them by speed.

    Without --microbatches each mesh starts with one sequence per device and microbatch, and doubles the number of
    microbatches until the step fits.
    """
    target = find_target(arguments.version, arguments.devices, arguments.topology, arguments.slices or 1)
    arguments.batch = arguments.batch or target.devices * DEFAULTS[2]
    rows, microbatches = [], arguments.microbatches
    for mp in [n for n in range(1, target.devices + 1) if target.devices % n == 0]:
        arguments.dp, arguments.mp = target.devices // mp, mp
        try:
            row = fewest_microbatches_that_fit(arguments, target, microbatches)
        except UserError as error:
            print(f"dp={arguments.dp} mp={mp}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"dp={row.dp} mp={row.mp}: " + ("compiled" if row.fits else "does not fit"), flush=True)
        rows.append(row)
    if not rows:
        raise UserError(f"no mesh of {target} can shard this model; the reasons are listed above")
    save_rows(rows, arguments)
    print_ranking(rows, target)


def save_rows(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Append the rows to the file of --json, if it is given."""
    for row in rows if arguments.json else []:
        row.command = shlex.join(["python", "-m", "shmap_tp.plan", *sys.argv[1:]])
        append_json(row.to_json(), Path(arguments.json))


def fewest_microbatches_that_fit(arguments: argparse.Namespace, target: Target, given: int | None) -> Row:
    """The row with the fewest microbatches that fits into memory; if none fits, the row with the most."""
    fewest = max(1, arguments.batch // target.devices)
    most = max(1, arguments.batch // arguments.dp)
    choices = [given] if given else [fewest * 2**i for i in range(most // fewest) if fewest * 2**i <= most]
    for microbatches in choices or [most]:
        arguments.microbatches = microbatches
        config = config_from_flags(arguments, *DEFAULTS)
        print(f"dp={arguments.dp} mp={arguments.mp}: compiling with {microbatches} microbatches ...", flush=True)
        row = predict_on(config, target).row
        if row.fits:
            break
    return row


def print_ranking(rows: list[Row], target: Target) -> None:
    rows.sort(key=lambda row: row.step_seconds or float("inf"))
    print(f"\n{rows[0].model}, {rows[0].tokens_per_step:,} tokens per step, on {target}: {rows[0].kind}")
    for row in rows:
        memory = f"{row.peak_bytes_per_device / GIB:.2f} of {row.limit_bytes_per_device / GIB:.2f} GiB"
        memory += f", host {row.host_bytes_per_device / GIB:.2f} GiB" if row.host_bytes_per_device else ""
        mesh = f"  dp={row.dp:<4} mp={row.mp:<4} {row.microbatches:>4} microbatches  "
        if row.fits:
            print(f"{mesh}{row.tokens_per_second:>12,.0f} tokens/s  MFU {row.mfu:>5.1%}  {memory}")
        else:
            print(f"{mesh}does not fit: needs {memory}")
    if rows[0].fits:
        print(f"\nfastest: --dp {rows[0].dp} --mp {rows[0].mp}\n{FORMULA}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shmap_tp.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", default="v3", choices=VERSIONS, help="TPU version or GPU (default v3)")
    parser.add_argument("--topology", help="chips along each side of a slice, such as 4x8x8 (default: most compact)")
    parser.add_argument("--nodes", type=int, help="nodes of 8 GPUs: estimate every mesh of them")
    parser.add_argument("--slices", type=int, help="number of slices that dp spans (default 1)")
    parser.add_argument("--cfg", metavar="FILE", help="plan the step of FILE, such as a recipe of conf/recipes")
    parser.add_argument("--devices", type=int, help="devices of all slices together: predict every mesh of them")
    parser.add_argument("--dp", type=int, help="data-parallel size")
    parser.add_argument("--mp", type=int, help="model-parallel size")
    parser.add_argument("--model", help="a model of conf/model (default 6_9b)")
    parser.add_argument("--from-pretrained", metavar="DIR", help="a Hugging Face model; its config.json is enough")
    parser.add_argument("--batch", type=int, help="sequences per optimizer step (default: 16 per dp rank, or device)")
    parser.add_argument("--context", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument("--microbatches", type=int, help="microbatches per optimizer step (gradient accumulation)")
    parser.add_argument("--ledger", action="store_true", help="print only the communication; nothing is compiled")
    parser.add_argument("--json", metavar="FILE", help="append the predicted rows to FILE, one JSON object per line")
    parser.add_argument("--plot", metavar="FILE", help="draw a timeline of the predicted step, and its memory, as PNG")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, such as model.remat=all_matmuls"
    )
    parser.set_defaults(steps=None)
    return parser


if __name__ == "__main__":
    parsed = make_parser().parse_intermixed_args()
    sys.exit(run_command(lambda: main(parsed)))
