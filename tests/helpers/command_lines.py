"""The commands that documents, help texts, scripts and recipes name, and a check of each on any machine.

A check parses the arguments with the command's own parser, and composes and validates the configuration that they
describe.  Nothing is trained, compiled or sent.
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import benchmark_gpu
import benchmark_layerwise
import benchmark_tpu
import sweep

from shmap_tp import prepare, report, train, verify
from shmap_tp.check import check_mesh, check_places
from shmap_tp.config.compose import load
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.data.location import stdlib_meta
from shmap_tp.hardware.devices import find_slices
from shmap_tp.plan import __main__ as plan
from shmap_tp.plan.flags import config_from_flags
from shmap_tp.plan.search.command import find_targets
from shmap_tp.plan.targets import find_target
from tests.helpers.documents import DOCUMENTS, blocks, name_of
from tests.helpers.paths import ROOT

FIRST = "conf/base.yaml"


class NotChecked(Exception):
    """A command of another program, or one that this module cannot check."""


@dataclass(frozen=True)
class Command:
    """A command line and the place that names it."""

    place: str
    words: tuple[str, ...]
    mark: str = ""
    """`check` or another mark of its block in a document."""

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def in_documents() -> Iterator[Command]:
    """The commands in the `sh` blocks of all documents."""
    for file in DOCUMENTS:
        for block in blocks(file):
            if block.info[:1] == ("sh",):
                mark = " ".join(block.info[1:])
                yield from (Command(block.place, words, mark) for words in split(block.text))


def in_texts() -> Iterator[Command]:
    """The commands in help texts, in the comments of scripts and configuration files, and in what scripts print."""
    given = {"command": "python main.py"} | dict.fromkeys(("models", "data", "default", "recipes"), "")
    texts = {"main.py --help": train.EPILOG.format(**given)}
    texts |= {"shmap_tp.verify": verify.__doc__, "shmap_tp.plan": plan.__doc__, "shmap_tp.prepare": prepare.__doc__}
    for file in sorted([*(ROOT / "benchmarks").glob("*.py"), *ROOT.glob("*.sh"), *(ROOT / "scripts").glob("*.sh")]):
        texts[name_of(file)] = file.read_text()
    for file in sorted((ROOT / "conf").rglob("*.yaml")):
        texts[name_of(file)] = file.read_text()
    starts = re.compile(r"^[#\s]*((?:python |sbatch |scripts/pod\.sh )(?:.*\\\n)*.*)", re.MULTILINE)
    for place, text in texts.items():
        for found in starts.finditer(text):
            line = re.sub(r"\\+\n[#\s]*", "", found[1])
            line = re.split(r"\s{3,}", line)[0]  # an explanation follows
            line = re.sub(r"(?<= )\[[^\]]*\]( |$)", r"\1", line)  # arguments that may be left out
            yield from (Command(place, words) for words in split(line))


def split(text: str) -> Iterator[tuple[str, ...]]:
    """The commands of a shell text, each as words; a backslash or an open quotation continues a line."""
    rest = ""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(rest + line, comments=True)
        except ValueError:  # a quotation goes on in the next line
            rest += f"{line} "
            continue
        rest = ""
        if words:
            yield tuple(words)
    assert not rest, f"a quotation has no end: {rest}"


def check(words: tuple[str, ...]) -> None:
    """Check a command.  Raises UserError or SystemExit for a wrong one, NotChecked for one of another program."""
    match list(words):
        case ["python", "main.py", *rest] | ["shmap-tp", "train", *rest]:
            check_training(rest)
        case ["python", "-m", "shmap_tp.verify", *rest]:
            arguments = verify.parser().parse_args(rest)
            if arguments.command in ("resume", "replicas"):
                load(str(ROOT / arguments.cfg), arguments.overrides)
        case ["python", "-m", "shmap_tp.report", *rest] | ["shmap-tp", "report", *rest]:
            report.parser().parse_args(rest)
        case ["python", "-m", "shmap_tp.prepare", *rest]:
            prepare.parser().parse_args(rest)
        case ["python", "-m", "shmap_tp.plan", *rest]:
            check_plan(rest)
        case ["python", "benchmarks/benchmark_tpu.py", *rest]:
            arguments, config = parsed_step(benchmark_tpu, rest)
            if not arguments.emulate:
                find_target(arguments.version, config.mesh.dp * config.mesh.mp, arguments.topology, config.mesh.slices)
        case ["python", "benchmarks/benchmark_gpu.py" | "benchmarks/pytorch_baseline.py", *rest]:
            parsed_step(benchmark_gpu, rest)
        case ["python", "benchmarks/benchmark_layerwise.py", *rest]:
            benchmark_layerwise.make_parser().parse_args(rest)
        case ["python", "benchmarks/sweep.py", *rest]:
            for setting in sweep.grid([word for word in rest if "=" in word]):
                sweep.configuration(setting)
        case ["scripts/pod.sh", step, _, *rest] if step in ("run", "train") or "--" in rest:
            check_pod(step, rest)
        case ["scripts/pod.sh", *_]:
            pass  # tests/scripts runs it with --dry-run
        case ["sbatch", *rest]:
            given = rest[rest.index("scripts/slurm.sh") + 1 :]
            check_training(given if "--cfg" in given else ["--cfg", FIRST, *given])
        case ["xpk", "workload", "create", *rest]:
            options = dict(word.split("=", 1) for word in rest if "=" in word)
            *command, arguments = options["--command"].partition("exec python main.py ")
            assert command == ["", "exec python main.py "]
            check_slices(shlex.split(arguments), f"{options['--num-slices']}x{options['--tpu-type']}")
        case _:
            raise NotChecked(shlex.join(words))


def check_training(words: list[str]) -> Config:
    """The configuration that the arguments of `main.py` describe, validated."""
    arguments = train._parser("python main.py").parse_intermixed_args(words)
    models = [word for word in words if re.match("model.from_pretrained=(runs/|DIR$)", word)]
    cfg = {None: FIRST, "runs/first/config.yaml": "conf/config.yaml"}.get(arguments.cfg, arguments.cfg)
    if cfg.startswith(("runs/", "conf/finetune_")) or models:
        raise NotChecked("it needs what an earlier command writes, a directory of the user's, or a model of the hub")
    overrides = ["checkpoint.resume=must"] if arguments.resume else []
    overrides += [f"mesh.processes={arguments.processes}"] if arguments.processes else []
    config = load(str(ROOT / cfg), [*arguments.overrides, *overrides])
    data = stdlib_meta(config.data)
    assert data is None or config.model.vocabulary == data.vocabulary, f"{config.model.name} needs other tokens"
    return config


def check_slices(words: list[str], name: str) -> None:
    """The arguments of `main.py` describe a run that new slices of type `name` could start, with what is in buckets."""
    slices = find_slices(name)
    config = resolve_auto(check_training(words), slices.devices)
    check_mesh(config.mesh, slices)
    check_places(config, slices)


def check_pod(step: str, rest: list[str]) -> None:
    """The options and the arguments after -- of `pod.sh run`, `train` or `create`."""
    assert "--" in rest, "a run needs arguments of main.py after --"
    options, given = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    given = given if "--cfg" in given else ["--cfg", FIRST, *given]
    if step == "run":  # on slices that an earlier command has created
        check_training(given)
        return
    slices = options[options.index("--slices") + 1] if "--slices" in options else "1"
    named = next(options[i + 1].split() for i, word in enumerate(options) if word in ("--type", "--any"))
    for each in named:  # pod.sh gives the processes where there are several types
        count = find_slices(f"{slices}x{each}").hosts
        check_slices([*given, f"mesh.processes={count}"] if "--any" in options else given, f"{slices}x{each}")


def check_plan(words: list[str]) -> None:
    assert words[0] in plan.MODES, "documents name the mode"
    arguments = plan.parse(words)
    if arguments.mode == "search":
        find_targets(arguments)
    elif arguments.mode != "ledger":
        with_paths(arguments)
        mesh = config_from_flags(arguments, *plan.DEFAULTS).mesh
        find_target(arguments.version, mesh.dp * mesh.mp, arguments.topology, mesh.slices)


def parsed_step(module: ModuleType, words: list[str]) -> tuple[Namespace, Config]:
    """The arguments and the configuration of a benchmark of a training step."""
    arguments = module.make_parser().parse_intermixed_args(words)
    with_paths(arguments)
    return arguments, module.configuration(arguments)


def with_paths(arguments: Namespace) -> None:
    """Files are named relative to the repository; those that are written need not exist."""
    arguments.cfg = arguments.cfg and str(ROOT / arguments.cfg)
    for flag in ("json", "hlo", "plot"):
        if vars(arguments).get(flag):
            setattr(arguments, flag, None)
