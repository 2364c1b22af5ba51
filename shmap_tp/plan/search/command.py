"""The search as `python -m shmap_tp.plan search` runs it: flags to candidates, compilations, and the report."""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from shmap_tp.config.compose import CONF, load, quoted
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.config.yaml_files import as_installed
from shmap_tp.errors import UserError, first_line, refuse_first
from shmap_tp.plan.flags import check_flags, check_outputs, command_line, plannable, save_row
from shmap_tp.plan.search.candidates import KEYS, PRECISION, Result, candidates, prune, sibling
from shmap_tp.plan.search.compiling import ChildProcess, Search, jobs_at_a_time
from shmap_tp.plan.search.output import (
    Cost,
    Task,
    basis,
    command,
    fits_nowhere,
    legend,
    limited_by,
    parse_prices,
    place,
    short_count,
    slice_lines,
    table,
    trust,
    write_recipe,
)
from shmap_tp.plan.targets import (
    VERSIONS,
    Slice,
    Target,
    compiler_missing,
    devices_of_nodes,
    find_target,
    machine_of,
)
from shmap_tp.pretrained.configuration import derive_model
from shmap_tp.runtime.command_line import raising
from shmap_tp.runtime.console import shell_command, wrap_lines, write_line
from shmap_tp.runtime.exit_codes import STOPPED

OF_COMMAND = ("train.batch", "model.context")
"""Keys that the printed command sets beside the searched ones."""
SHOWN = 20
"""Candidates in the table at most, where none was compiled; else it has all that were."""
SEQUENCES_PER_DEVICE = 16
"""Sequences of a step on each device, where --batch is not given."""


@dataclass(frozen=True)
class Space:
    """What the formulas keep of a target."""

    task: Task
    kept: list[Result]
    smallest: Result
    """The result that needs least memory, of all candidates."""

    @property
    def sort_key(self) -> float:
        """What targets are compared by: `Task.sort_key` of the fastest that fits by formulas."""
        memory = machine_of(self.task.target).memory
        return self.task.sort_key(min(self.kept, key=lambda one: place(one, memory)))


def search_command(arguments: argparse.Namespace) -> None:
    """Search every target that was asked for, the cheapest or fastest by formulas first.  Raises UserError;
    SystemExit(STOPPED) after Ctrl-C, SIGTERM or SIGHUP while it compiles; before that they end the process at once,
    since there is nothing to keep."""
    refuse_first(_faults(arguments))
    targets = find_targets(arguments)
    prices = parse_prices(arguments.price, [target.version for target in targets])
    check_outputs(arguments)
    check_recipe(arguments.recipe, targets)
    check_compilers(arguments, targets)
    summary: dict[Target, str] = {}  # lines of each: its fastest candidate, or why there is none
    spaces = find_spaces(arguments, targets, prices, summary)
    with raising():
        winners, is_stopped = search_spaces(spaces, arguments, summary)
    if len(targets) > 1:
        print("\nthe fastest of each, its speed as predicted")
        for target in targets:
            print(wrap_lines(f"  {target}: {summary[target]}", 8))
    if is_stopped:
        print(f"stopped; what was found so far is above (exit code {STOPPED})", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED)
    if not winners:
        raise UserError("nothing that was searched fits; see above what each needs")


def find_spaces(
    arguments: argparse.Namespace, targets: list[Target], prices: dict[str, float], summary: dict[Target, str]
) -> list[Space]:
    """What the formulas keep of each target, the cheapest or fastest first.  One that has no candidate gets its line in
    `summary`; where it is the only target, its UserError is raised."""
    spaces = []
    for target in targets:
        cost = Cost.on(machine_of(target), arguments.tokens, prices.get(target.version)) if arguments.tokens else None
        try:
            spaces.append(find_space(Task(base_config(arguments, target), target, cost), fixed_keys(arguments)))
        except UserError as error:
            if len(targets) == 1:
                raise
            print(wrap_lines(f"{target}: {error}"), flush=True)
            summary[target] = f"nothing: {first_line(error).rstrip(';')}"
    return sorted(spaces, key=lambda space: space.sort_key)


def search_spaces(
    spaces: list[Space], arguments: argparse.Namespace, summary: dict[Target, str]
) -> tuple[list[Result], bool]:
    """(the fastest of each that has one, whether the search was stopped); adds their lines to `summary`.  Each has an
    equal share of the time that is left, and all of it as long as nothing that was compiled fits.  Raises UserError
    where --json cannot be written any more."""
    end, winners, is_stopped = time.monotonic() + 60 * arguments.minutes, [], False
    for number, space in enumerate(spaces):
        target, left = space.task.target, end - time.monotonic()
        search = make_search(space, arguments, left / (len(spaces) - number), left)
        if len(spaces) > 1:
            print(f"\n{space.task.config.model.name} on {target}", flush=True)
        try:
            if compiler_missing(target) is not None:
                pass
            elif is_stopped or left <= 0:
                search.stopped = "stopped" if is_stopped else "the time is up"
            else:
                is_stopped = compile_some(search)
        finally:
            winner = finish(space, arguments, search)
        winners += [winner] if winner else []
        note = "" if winner is None or winner.row else search.stopped
        summary[target] = slice_lines(space.task, winner, note) if winner else "nothing that was searched fits"
    return winners, is_stopped


# From flags to a task


def find_targets(arguments: argparse.Namespace) -> list[Target]:
    """The targets of --version and --devices or --nodes.  Raises UserError where one does not exist."""
    versions = arguments.version.split(",")
    for version in versions:
        if version not in VERSIONS:
            raise UserError(f"--version {version}: unknown; use some of {', '.join(VERSIONS)}, separated by commas")
    sizes = str(devices_of_nodes(versions, arguments.nodes) or arguments.devices).split(",")
    for size in sizes:
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"--devices {size} is no number of devices; give one such as 16, or several: 16,64,256")
    slices = arguments.slices or 1
    return [find_target(version, int(size), arguments.topology, slices) for version in versions for size in sizes]


def _faults(arguments: argparse.Namespace) -> Iterator[str]:
    """What is wrong with values that a search cannot use."""
    for key in ("mesh.slices", "mesh.processes"):
        if any(word.startswith(f"{key}=") for word in arguments.overrides):
            yield f"{key} follows from the devices that are searched; omit it, and give --slices for several"
    if arguments.price is not None and arguments.tokens is None:
        yield "--price needs --tokens, the tokens of the run; add it, such as --tokens 100B"
    for name in ("minutes", "tokens", "jobs"):
        value = vars(arguments)[name]
        if value is not None and not 0 < value < float("inf"):
            yield f"--{name} {value:g} must be above 0 and finite"


def check_compilers(arguments: argparse.Namespace, targets: list[Target]) -> None:
    """Says which compiler is missing.  Raises UserError where --json would get nothing."""
    missing = {compiler_missing(target) for target in targets}
    if arguments.json and None not in missing:
        raise UserError(
            f"--json {arguments.json} takes compiled steps, and {' and '.join(map(str, missing))};\n"
            "install it, or omit --json and rank by formulas only"
        )
    for reason in missing - {None}:
        print(f"{reason}: candidates are ranked by formulas only")


def check_recipe(file: str | None, targets: list[Target]) -> None:
    """Raises UserError for a --recipe that would overwrite a file, or be written for several slices."""
    if file is None:
        return
    for is_wrong, rule in [
        (len(targets) > 1, f"holds one configuration, and {len(targets)} slices are searched; omit it"),
        (Path(file).exists(), "exists; delete it, or choose another file"),
    ]:
        if is_wrong:
            raise UserError(f"--recipe {file} {rule}")


def find_space(task: Task, fixed: dict[str, str]) -> Space:
    """The candidates that the formulas keep; prints how many there are, and how many are dropped.  Raises UserError
    where none is left."""
    config, target = task.config, task.target
    sequences = f"{config.train.batch} sequences of {config.model.context} = {task.tokens:,} tokens a step"
    print(wrap_lines(f"\n{config.model.name} on {target}: {sequences}"), flush=True)
    choices = candidates(config, target, fixed)
    if not choices:
        keys = " and ".join(f"{key}={value}" for key, value in {"train.batch": config.train.batch, **fixed}.items())
        fewer = f", or give fewer of {', '.join(fixed)}" if fixed else ""
        raise UserError(
            f"no candidate on {target} trains {config.model.name} with {keys};\n"
            f"choose a --batch that more devices divide{fewer}"
        )
    print(f"estimating {len(choices):,} candidates by formulas ...", flush=True)
    kept, dropped, front = prune(config, target, choices)
    known = {one.candidate for one in kept}
    slower = [one for one in front if one.candidate not in known]  # for a model that needs more than the formulas say
    dropped["too slow"] -= len(slower) if kept else 0
    reasons = ", ".join(f"{count:,} {why}" for why, count in dropped.items() if count)
    print(wrap_lines(f"{len(choices):,} candidates; the formulas drop {dropped.total():,} ({reasons})"), flush=True)
    if not kept:
        raise UserError(fits_nowhere(front[-1], machine_of(target).memory))
    return Space(task, kept + slower, front[-1])


def base_config(arguments: argparse.Namespace, target: Target) -> Config:
    """The configuration that candidates are applied to.  Raises UserError."""
    check_flags(arguments)
    _, file, *words = base_words(arguments)
    machine = machine_of(target)
    given = given_keys(arguments)
    words += [] if arguments.cfg else [f"train.batch={machine.devices * SEQUENCES_PER_DEVICE}"]
    words += [f"train.batch={arguments.batch}"] if arguments.batch else []
    words += [f"model.context={arguments.context}"] if arguments.context else []
    words += [f"{key}={given[key]}" for key in OF_COMMAND if key in given]
    words += [
        f"mesh.dp={machine.slices}",
        "mesh.mp=1",
        "mesh.ep=1",
        f"mesh.slices={machine.slices}",
        "mesh.processes=1",
    ]
    words += ["mesh.zero=none", "mesh.fsdp_gradients=reduce_scatter", "train.microbatches=1", "model.offload=[]"]
    return plannable(resolve_auto(load(file if arguments.cfg else str(CONF / "base.yaml"), words, derive_model)))


def base_words(arguments: argparse.Namespace) -> list[str]:
    """What names the file and the model, and the keys that are not searched, as main.py takes them."""
    free = [item for item in arguments.overrides if item.split("=", 1)[0] not in (*KEYS, *OF_COMMAND)]
    if arguments.cfg:
        return ["--cfg", arguments.cfg, *([f"model={arguments.model}"] if arguments.model else []), *free]
    if arguments.from_pretrained:
        words = ["model=pretrained", f"model.from_pretrained={quoted(arguments.from_pretrained)}"]
    else:
        words = [f"model={arguments.model or '6_9b'}", "data.documents=joined"]
    return ["--cfg", as_installed("conf/base.yaml"), *words, *free]


def given_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """The overrides key=value by key."""
    return dict(item.split("=", 1) for item in arguments.overrides if "=" in item)


def fixed_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Keys of the search that the user has set, which are not searched."""
    given = given_keys(arguments)
    fixed = {key: given[key] for key in KEYS if key in given}
    fixed |= {"train.microbatches": str(arguments.microbatches)} if arguments.microbatches else {}
    return fixed | ({PRECISION: arguments.precisions} if arguments.precisions else {})


# From a task to a report


def make_search(space: Space, arguments: argparse.Namespace, seconds: float, longest: float) -> Search:
    """The search of a target, for some seconds, and until the first candidate fits for `longest`."""
    target, config = space.task.target, space.task.config
    jobs = min(jobs_at_a_time(), arguments.jobs or sys.maxsize)
    is_open = isinstance(target, Slice) and "model.row_major" not in fixed_keys(arguments)  # it has no effect on GPUs
    return Search(
        list(space.kept), machine_of(target).memory, lambda one: ChildProcess(one, config, target),
        lambda line: write_line(wrap_lines(line, 11)), jobs, seconds, longest, save=lambda one: save(one, arguments),
        siblings=lambda one: [sibling(one)] if is_open else [],
    )  # fmt: skip


def compile_some(search: Search) -> bool:
    """Compile until the time is up.  Whether it was stopped."""
    longest = f", {plain_time(search.longest)} until one fits" if search.longest > search.seconds else ""
    print(f"compiling up to {search.jobs} at a time, for {plain_time(search.seconds)} at most{longest}", flush=True)
    try:
        with tqdm(bar_format="{desc}", disable=None, leave=False) as status:  # a line on terminals only
            search.progress = status.set_description_str
            search.run()
    except KeyboardInterrupt:
        return True
    return False


def plain_time(seconds: float) -> str:
    """1800 -> '30 minutes', 50 -> '50 s'."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{round(seconds / 60, 1):g} minutes"


def finish(space: Space, arguments: argparse.Namespace, search: Search) -> Result | None:
    """Print the table, the command and the recipe of the answer, which is returned."""
    task, memory, winner = space.task, search.limit_bytes, search.answer()
    compiled = [one for one in search.found if one.row is not None]
    shown = compiled or sorted(search.remaining, key=lambda one: place(one, memory))[:SHOWN]
    shown = shown if winner is None or winner in shown else [*shown, winner]
    print(f"\n{table(task, shown)}\n{legend(task)}")
    if search.found or search.stopped:
        fitting, failed = sum(one.fits_in(memory) for one in compiled), len(search.found) - len(compiled)
        failures = f"{failed} failed to compile, " if failed else ""
        counts = (
            f"{len(compiled)} compiled, {fitting} of them fit; {failures}{len(search.remaining):,} were not compiled "
            f"({search.stopped})"
        )
        print(wrap_lines(counts))
    if winner is None:
        how = "that was compiled fits" if compiled else "surely fits by formulas"
        least = min(compiled, key=lambda one: one.peak_bytes, default=space.smallest)
        print(wrap_lines(f"nothing {how}; {fits_nowhere(least, memory)}"))
        if search.next():
            more = "more --minutes would compile them" if search.stopped else "a compilation would tell"
            print(f"some that were not compiled may fit: {more}")
        return None
    if compiled and winner.row is None:
        print("nothing that was compiled fits; by formulas others do, of which this is the fastest:")
    report_winner(task, arguments, winner)
    return winner


def report_winner(task: Task, arguments: argparse.Namespace, winner: Result) -> None:
    """The command, how far to trust its figures, and the recipe if it was asked for."""
    config, hosts = task.config, machine_of(task.target).hosts
    print(wrap_lines(f"\nfastest ({basis(winner)}): {winner.candidate}"))
    print(shell_command(command(winner.candidate, config, base_words(arguments), hosts), 2))
    print(wrap_lines(f"limited by {limited_by(winner, machine_of(task.target).memory)}; {trust(winner, task.target)}"))
    if task.cost:
        print(wrap_lines(f"{short_count(task.cost.tokens)} tokens: {task.cost.text(task.tokens / winner.seconds)}"))
    if arguments.recipe:
        note = f"{config.model.name} on {task.target}, {basis(winner)}: {command_line()}"
        write_recipe(Path(arguments.recipe), winner.candidate, config, note, hosts)
        print(f"written: {arguments.recipe}")


def save(one: Result, arguments: argparse.Namespace) -> None:
    """Append a compiled row to the file of --json as soon as it is there."""
    if one.row is not None:
        save_row(one.row, arguments)
