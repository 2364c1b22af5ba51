"""Does a model fit on a slice, which mesh is best, what does it say on the wire, and where does its time go?

    python -m shmap_tp.plan --version v5e --devices 16 --model gptj_6b                 every mesh, the best first
    python -m shmap_tp.plan --version v5e --model gptj_6b --dp 2 --mp 8               one mesh, in full
    python -m shmap_tp.plan --model gptj_6b --dp 2 --mp 8 --ledger                    only what it says on the wire

Nothing runs: the training step is compiled for the slice by the TPU compiler, and what it made is read and replayed.
--ledger needs no compiler.
"""

import argparse
import sys

import jax.numpy as jnp

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS, GIB
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan import memory
from shmap_tp.plan.benchmark import configuration, run_command
from shmap_tp.plan.communication.analytic import analytic_communication
from shmap_tp.plan.communication.from_hlo import communication_in_hlo
from shmap_tp.plan.communication.inter_slice import compare_dcn, inter_slice_communication
from shmap_tp.plan.communication.ledger import table, without_trivial_axes
from shmap_tp.plan.communication.reconcile import reconcile
from shmap_tp.plan.predict import Prediction, predict
from shmap_tp.plan.report import FORMULA, Row, describe
from shmap_tp.plan.topologies import Slice, find_slice

ROWS, PARTS = 1, 16
"""Without --batch: microbatches of one window on each part of dp, sixteen of them."""


def main(arguments: argparse.Namespace) -> None:
    if (arguments.dp is None) != (arguments.mp is None) or (arguments.dp is None) == (arguments.devices is None):
        raise UserError("give --dp and --mp for one mesh, or --devices for every mesh of so many")
    if arguments.ledger and arguments.devices:
        raise UserError("--ledger is of one mesh; give --dp and --mp")
    if arguments.devices:
        every_mesh(arguments)
    elif arguments.ledger:
        print_ledger(configuration(arguments, "6_9b", ROWS, PARTS))
    else:
        one_mesh(arguments)


def one_mesh(arguments: argparse.Namespace) -> None:
    config = configuration(arguments, "6_9b", ROWS, PARTS)
    asked = find_slice(arguments.version, arguments.dp * arguments.mp, arguments.topology, arguments.slices)
    made = predict(config, asked)
    print(describe(made.row))
    print(FORMULA)
    print("\nWHAT FILLS THE MEMORY of a device")
    print(memory.describe(memory.memory(made.programs, made.compiled), made.compiled))
    print_ledger(config)
    if made.text is not None:
        print_account(config, made)


def print_ledger(config: Config) -> None:
    print(f"\nON THE WIRE, in a step of {config.model.name}, by the theory that the docstrings state")
    print(table(without_trivial_axes(analytic_communication(config, jnp.bfloat16), sizes(config))))


def print_account(config: Config, made: Prediction) -> None:
    """What the compiler made of the ledger.  The module of one of several slices numbers only its own devices: of that,
    what leaves it."""
    planned = without_trivial_axes(analytic_communication(config, jnp.bfloat16), sizes(config))
    if config.mesh.slices > 1:
        print("\nBETWEEN SLICES, as compiled; " + compare_dcn(planned, inter_slice_communication(made.text)))
        print(table(inter_slice_communication(made.text)))
        return
    found = reconcile(planned, communication_in_hlo(made.text, sizes(config)), sizes(config))
    print("\nWHAT THE COMPILER MADE OF IT: " + ("as planned" if found.balanced else "NOT as planned"))
    print(found)


def sizes(config: Config) -> dict[str, int]:
    return {DP: config.mesh.dp, MP: config.mesh.mp}


def every_mesh(arguments: argparse.Namespace) -> None:
    """Predict each (dp, mp) of the devices on the same batch, and list them by speed.

    Without --microbatches each mesh starts with as many as make one window a device, and doubles them until it fits.
    """
    asked = find_slice(arguments.version, arguments.devices, arguments.topology, arguments.slices)
    arguments.batch = arguments.batch or asked.devices * PARTS
    rows, given = [], arguments.microbatches
    for mp in [n for n in range(1, asked.devices + 1) if asked.devices % n == 0]:
        arguments.dp, arguments.mp = asked.devices // mp, mp
        try:
            row = largest_fitting(arguments, asked, given)
        except UserError as error:
            print(f"dp={arguments.dp} mp={mp}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"dp={row.dp} mp={row.mp}: " + ("compiled" if row.fits else "does not fit"), flush=True)
        rows.append(row)
    if not rows:
        raise UserError(f"no mesh of {asked} can cut this model; see above why")
    rows.sort(key=lambda row: row.step_seconds or float("inf"))
    print(f"\n{rows[0].model}, {rows[0].tokens_per_step:,} tokens a step, on {asked}: predicted")
    for row in rows:
        needs = f"{row.peak_bytes_per_device / GIB:.2f} of {row.limit_bytes_per_device / GIB:.2f} GiB"
        needs += f", host {row.host_bytes_per_device / GIB:.2f} GiB" if row.host_bytes_per_device else ""
        where = f"  dp={row.dp:<4} mp={row.mp:<4} {row.microbatches:>4} microbatches  "
        if row.fits:
            print(f"{where}{row.tokens_per_second:>12,.0f} tokens/s  MFU {row.mfu:>5.1%}  {needs}")
        else:
            print(f"{where}does not fit: needs {needs}")
    if rows[0].fits:
        print(f"\nthe best: --dp {rows[0].dp} --mp {rows[0].mp}\n{FORMULA}")


def largest_fitting(arguments: argparse.Namespace, asked: Slice, given: int | None) -> Row:
    """The row with the largest microbatches that fit, or with the smallest where none does."""
    least = max(1, arguments.batch // asked.devices)
    most = max(1, arguments.batch // arguments.dp)
    choices = [given] if given else [least * 2**i for i in range(most // least) if least * 2**i <= most]
    for parts in choices or [most]:
        arguments.microbatches = parts
        row = predict(configuration(arguments, "6_9b", ROWS, PARTS), asked).row
        if row.fits:
            break
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m shmap_tp.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", default="v3", choices=list(GENERATIONS), help="of the TPU (default v3)")
    parser.add_argument("--topology", help="chips along each side of a slice, as in 4x8x8 (default: the most compact)")
    parser.add_argument("--slices", type=int, default=1, help="how many slices dp spans (default 1)")
    parser.add_argument("--devices", type=int, help="of all slices together: predict every mesh of them")
    parser.add_argument("--dp", type=int, help="data-parallel size")
    parser.add_argument("--mp", type=int, help="model-parallel size")
    parser.add_argument("--model", help="a shape of conf/model (default 6_9b)")
    parser.add_argument("--batch", type=int, help="windows of an optimizer step (default 16 a part of dp, or a device)")
    parser.add_argument("--context", type=int, help="tokens of a window (default: the model's)")
    parser.add_argument("--microbatches", type=int, help="parts that a step is computed in")
    parser.add_argument("--ledger", action="store_true", help="only the ledger; nothing is compiled")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="any of the configuration: model.remat=all_matmuls"
    )
    parsed = parser.parse_intermixed_args()
    parsed.steps = None
    sys.exit(run_command(lambda: main(parsed)))
