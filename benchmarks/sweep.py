"""Measure or predict every combination of settings, sorted by tokens/s.

    python benchmarks/sweep.py --version v4 --topology 4x8x8 --out sweeps/t5x model=11b mesh.dp=16 mesh.mp=16 \\
        'mesh.tile=[2,2,4,1],[2,4,2,1],[4,2,2,1]' train.batch=896,1792 train.microbatches=4,8
    python benchmarks/sweep.py --emulate 8 --out sweeps/try model=test mesh=8x1,4x2,2x4 train.batch=16

A key=value may list several values, separated by commas; `mesh=4x8,2x16` sets mesh.dp and mesh.mp together.  The grid
is the set of all combinations.  They are measured if the slice is attached, else predicted; --emulate N runs them on N
emulated CPU devices.  A setting that does not fit becomes a row with the memory it needs, an invalid setting a row with
the reason.  Rows are appended to OUT/rows.jsonl as they finish, and a restarted sweep continues after them.  At the end
OUT contains rows.json and rows.csv, sorted, and sweep.png.
"""

import argparse
import csv
import itertools
import json
import re
import sys
from pathlib import Path

import check_environment  # noqa: F401
import matplotlib
from benchmark_tpu import slice_is_attached
from measuring import measure_attached, measure_emulated

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS, GIB
from shmap_tp.plan.flags import append_json
from shmap_tp.plan.predict import predict
from shmap_tp.plan.tpu import find_slice
from shmap_tp.runtime.command_line import run_command

COLUMNS = [
    *("kind", "setting", "dp", "mp", "tile", "global_batch", "microbatches", "remat", "offload", "fits"),
    *("tokens_per_second", "step_seconds", "mfu", "hfu", "exposed_comm_seconds"),
    *("peak_bytes_per_device", "limit_bytes_per_device", "host_bytes_per_device", "error"),
]


def grid(overrides: list[str]) -> list[dict[str, str]]:
    """All combinations of the values given for each key.  Raises UserError for anything but key=value."""
    keys, choices = [], []
    for given in overrides:
        key, equals, values = given.partition("=")
        if not key or not equals:
            raise UserError(f"{given!r} is not key=value[,value...]; use the form train.microbatches=4,8")
        keys.append(key)
        choices.append(re.split(r",(?![^\[]*\])", values))
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*choices)]


def configuration(setting: dict[str, str]) -> Config:
    """conf/base.yaml with the settings of one grid point."""
    given = dict(setting)
    if "mesh" in given:
        sizes = given.pop("mesh").split("x")
        if len(sizes) != 2:
            raise UserError(f"mesh={setting['mesh']} is not of the form DPxMP; use the form mesh=4x8")
        given |= {"mesh.dp": sizes[0], "mesh.mp": sizes[1]}
    return resolve_auto(load(str(CONF / "base.yaml"), [f"{key}={value}" for key, value in given.items()]))


def run(setting: dict[str, str], arguments: argparse.Namespace) -> dict:
    """The row of one grid point, as JSON."""
    try:
        config = configuration({"mesh.slices": str(arguments.slices)} | setting)
        devices = config.mesh.devices
        if arguments.emulate:
            if devices != arguments.emulate:
                raise UserError(
                    f"mesh dp={config.mesh.dp} x mp={config.mesh.mp} differs from --emulate {arguments.emulate}"
                )
            row = measure_emulated(config, arguments.steps).row
        elif slice_is_attached(config, arguments.version):
            row = measure_attached(config, arguments.steps).row
        else:
            row = predict(config, find_slice(arguments.version, devices, arguments.topology, config.mesh.slices)).row
    except UserError as error:
        return {"kind": "impossible", "fits": False, "error": str(error)}
    return row.to_json()


def main(arguments: argparse.Namespace) -> None:
    points, out = grid(arguments.overrides), Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    file, fixed = out / "rows.jsonl", [arguments.version, arguments.topology, arguments.slices, arguments.emulate]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if any(row["sweep"] != fixed for row in rows):
        raise UserError(f"{file} contains rows of another slice ({rows[0]['sweep']}); choose another --out")
    done = [row["setting"] for row in rows]
    for number, setting in enumerate(points, 1):
        label = " ".join(f"{key}={value}" for key, value in setting.items())
        if setting in done:
            continue
        row = run(setting, arguments) | {"setting": setting, "sweep": fixed}
        append_json(row, file)
        rows.append(row)
        print(f"{number}/{len(points)}  {label}: {outcome(row)}", flush=True)
    finish([row for row in rows if row["setting"] in points], out)


def outcome(row: dict) -> str:
    """The result of a row in one line."""
    if row["kind"] == "impossible":
        return row["error"].splitlines()[0]
    if not row["fits"]:
        needs, has = row["peak_bytes_per_device"], row["limit_bytes_per_device"]
        return f"does not fit: needs {(needs or 0) / GIB:.2f} of {(has or 0) / GIB:.2f} GiB per device"
    mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return f"{row['tokens_per_second']:,.0f} tokens/s{mfu} ({row['kind']})"


def finish(rows: list[dict], out: Path) -> None:
    """Sort and print the rows; write rows.json, rows.csv and sweep.png."""
    rows.sort(key=lambda row: -(row.get("tokens_per_second") or 0))
    varied = [key for key in rows[0]["setting"] if len({row["setting"][key] for row in rows}) > 1]
    names = [" ".join(f"{key}={row['setting'][key]}" for key in varied) or "(single setting)" for row in rows]
    (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    with (out / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows([row | {"setting": name} for name, row in zip(names, rows, strict=True)])
    print()
    width = max(map(len, names))
    for name, row in zip(names, rows, strict=True):
        print(f"{name:<{width}}  {outcome(row)}")
    draw(names, rows, out / "sweep.png")
    print(f"\nwritten: {out}/rows.json, rows.csv, sweep.png")


def draw(names: list[str], rows: list[dict], file: Path) -> None:
    """A bar chart of tokens/s, fastest on top; rows without a throughput show the reason."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1 + 0.32 * len(rows)), layout="constrained")
    rates = [row.get("tokens_per_second") or 0 for row in rows]
    axes.barh(range(len(rows)), rates, color="C0", alpha=0.4)
    for index, row in enumerate(rows):
        text = outcome(row) if rates[index] else outcome(row).split(":")[0]
        axes.text(max(rates) * 0.01, index, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens/s, {', '.join(sorted({row['kind'] for row in rows if row['fits']}))}")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="v3", choices=list(GENERATIONS), help="TPU version (default v3)")
    parser.add_argument("--topology", help="chips along each side of a slice, such as 4x8x8 (default: most compact)")
    parser.add_argument("--slices", type=int, default=1, help="number of slices that dp spans (default 1)")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices")
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps, where steps are run (default 10)")
    parser.add_argument("--out", required=True, help="output directory")
    parser.add_argument("overrides", nargs="+", metavar="key=value[,value...]")
    parsed = parser.parse_intermixed_args()
    sys.exit(run_command(lambda: main(parsed)))
