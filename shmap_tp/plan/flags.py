"""Flags of the planner and of the benchmarks, the configuration built from them, and the files that they write."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shmap_tp.config.compose import CONF, load, quoted
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.config.yaml_files import as_installed
from shmap_tp.errors import UserError, refuse_first, shown
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.pretrained.configuration import derive_model
from shmap_tp.runtime.files import writing_output


class Parser(argparse.ArgumentParser):
    """A parser whose errors take two lines, as those of the configuration do, and not the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n--help lists the flags\n")


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which step, of which model, in which batch: those of `config_from_flags`."""
    parser.add_argument(
        "--cfg", metavar="FILE", help=as_installed("take the step from FILE, such as a recipe of conf/recipes/")
    )
    parser.add_argument("--model", help=as_installed("a model of conf/model/"))
    parser.add_argument("--batch", type=int, metavar="N", help="sequences per optimizer step, over all devices")
    parser.add_argument("--context", type=int, metavar="N", help="tokens per sequence (default: the model's)")
    parser.add_argument("--microbatches", type=int, metavar="N", help="gradient accumulation: microbatches per step")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, such as model.remat=all_matmuls"
    )


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of one mesh."""
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel size (default: that of --cfg)")
    parser.add_argument("--mp", type=int, metavar="N", help="model-parallel size; dp x mp is the number of devices")


def config_from_flags(arguments: argparse.Namespace, model: str, sequences: int, microbatches: int) -> Config:
    """The file of --cfg, or else conf/base.yaml, with the flags applied.

    Without --cfg, defaults where flags are missing: this model, `microbatches` microbatches of `sequences` sequences on
    each dp rank, sequence parallelism, ZeRO-1, and joined documents, as in published figures.  With --cfg, its own
    values.  Raises UserError.
    """
    check_flags(arguments)
    if arguments.cfg:
        return resolve_auto(load(arguments.cfg, _settings(vars(arguments)) + arguments.overrides, derive_model))
    if arguments.dp is None or arguments.mp is None:
        raise UserError("give --dp and --mp, or --cfg FILE, which contains them")
    microbatches = arguments.microbatches or microbatches
    batch = arguments.batch
    if batch is None:
        batch = arguments.dp * sequences * microbatches
    elif arguments.microbatches is None:
        microbatches = max(1, batch // max(1, arguments.dp * sequences))
    directory = vars(arguments).get("from_pretrained")
    named = {"model": "pretrained" if directory else arguments.model or model}
    settings = _settings(vars(arguments) | named | {"batch": batch, "microbatches": microbatches})
    settings += [f"model.from_pretrained={quoted(directory)}"] if directory else []
    settings += ["mesh.tensor_parallel=sequence", "mesh.zero=zero1", "data.documents=joined"]
    return resolve_auto(load(str(CONF / "base.yaml"), settings + arguments.overrides, derive_model))


def plannable(config: Config) -> Config:
    """`config`.  Raises UserError for a step that has more than a plan counts."""
    if config.train.dpo_beta is not None:
        raise UserError(
            f"train.dpo_beta={config.train.dpo_beta}: a plan does not count the forward pass of the reference; plan "
            f"with train.dpo_beta=null, and add a third to its time"
        )
    if config.run.components is not None:
        raise UserError(
            f"run.components={shown(config.run.components)}: a plan is of the parts that the configuration names; plan "
            f"with run.components=null, or in Python with predict(..., components=...)"
        )
    return config


def _settings(flags: Mapping[str, Any]) -> list[str]:
    """The flags that are given, by name, as overrides of a configuration."""
    keys = {"model": "model", DP: "mesh.dp", MP: "mesh.mp", "batch": "train.batch", "context": "model.context"}
    keys |= {"microbatches": "train.microbatches", "slices": "mesh.slices"}
    return [f"{key}={flags[flag]}" for flag, key in keys.items() if flags.get(flag) is not None]


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise UserError for a file that could not be written when all is computed."""
    seen: dict[Path, str] = {}
    for name in ("json", "hlo", "plot", "recipe"):
        if file := vars(arguments).get(name):
            if (other := seen.setdefault(Path(file).absolute(), name)) != name:
                raise UserError(f"--{other} and --{name} are both {shown(file)}; choose another file for one of them")
            with writing_output(f"--{name} {shown(file)}"):
                _open_for_writing(Path(file))


def _open_for_writing(file: Path) -> None:
    """Raises OSError where `file` cannot be written.  It keeps its content, or goes away again.  A pipe or a device is
    not opened."""
    if file.exists() and not file.is_file() and not file.is_dir():
        return
    is_new = not file.exists()
    file.open("ab").close()
    if is_new:
        file.unlink()


def check_flags(arguments: argparse.Namespace) -> None:
    """Check what the configuration does not: flags that would be ignored, and output files that cannot be written."""
    refuse_first(_faults(arguments))
    check_outputs(arguments)


def _faults(arguments: argparse.Namespace) -> Iterator[str]:
    given = vars(arguments)
    for name in (DP, MP, "batch", "context", "microbatches", "steps", "slices"):
        if given.get(name) is not None and given[name] < 1:
            yield f"--{name} {given[name]} is too small; it must be 1 or more"
    if given.get("emulate") and (given.get("topology") is not None or given.get("slices") is not None):
        yield "--topology and --slices apply to TPUs only; omit them, or omit --emulate to predict"
    slices = given.get("slices") or 1
    if given.get(DP) is not None and given[DP] % slices:
        yield f"--slices {slices} does not divide --dp {given[DP]}: mp must lie within one slice; choose a divisor"


def command_line(script: str = "") -> str:
    """The command that this process runs, to be repeated; of the planner, or of a script of benchmarks/."""
    return shlex.join(["python", *([f"benchmarks/{script}"] if script else ["-m", "shmap_tp.plan"]), *sys.argv[1:]])


def save_row(row: Any, arguments: argparse.Namespace) -> None:
    """Append a row of a plan, and the command that made it, to the file of --json, if that is given."""
    row.command = command_line()
    if arguments.json:
        append_json(row.to_json(), Path(arguments.json))


def append_json(row: dict, file: Path) -> None:
    """Append one line to a file of JSON objects."""
    with writing_output(f"--json {file}"), file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
