"""The search as `python -m shmap_tp.plan --devices N` runs it: flags to candidates, compilations, and the report."""

import argparse
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from shmap_tp.config.compose import CONF, quoted
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from shmap_tp.plan.benchmark import append_json, check_flags, check_outputs
from shmap_tp.plan.search.candidates import KEYS, Pruned, candidates, prune
from shmap_tp.plan.search.jobs import ChildProcess, jobs_at_a_time
from shmap_tp.plan.search.loop import Found, Search
from shmap_tp.plan.search.output import (
    LEGEND,
    Cost,
    Line,
    command,
    compiled_line,
    fits_nowhere,
    formula_line,
    slices_table,
    table,
    trust,
    write_recipe,
)
from shmap_tp.plan.targets import Target, compiler_missing, find_target, machine_of
from shmap_tp.pretrained.configuration import load
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.interrupts import raising

OF_COMMAND = ("train.batch", "model.context")
"""Keys that the printed command sets beside those that are searched."""
SHOWN = 20
"""Candidates in the table at most, where none was compiled; else it has all that were."""
SEQUENCES_PER_DEVICE = 16
"""Sequences of a step on each device, where --batch is not given."""


@dataclass(frozen=True)
class Task:
    """The search of one target: what was asked, and what the formulas leave."""

    arguments: argparse.Namespace
    target: Target
    config: Config
    """What candidates are applied to."""
    pruned: Pruned
    cost: Cost | None


def search_command(arguments: argparse.Namespace) -> None:
    """Search every target that was asked for.  Raises UserError; SystemExit(STOPPED) after Ctrl-C, SIGTERM or SIGHUP
    while it compiles; before that they end the process at once, since there is nothing to keep."""
    targets = find_targets(arguments)
    prices = parse_prices(arguments.price, [target.version for target in targets])
    check_outputs(arguments)
    check_recipe(arguments.recipe, targets)
    missing = {compiler_missing(target) for target in targets}
    if arguments.json and None not in missing:
        raise UserError(
            f"--json {arguments.json} takes compiled steps, and {' and '.join(map(str, missing))};\n"
            "install it, or omit --json and rank by formulas only"
        )
    for reason in missing - {None}:
        print(f"{reason}: candidates are ranked by formulas only")
    fastest: list[tuple[Target, Line, Cost | None]] = []
    for target in targets:
        chips = machine_of(target).chips
        cost = Cost(arguments.tokens, prices.get(target.version), chips) if arguments.tokens else None
        try:
            task = make_task(arguments, target, cost)
            with raising():
                line = search_target(task, arguments.minutes / len(targets))
        except UserError as error:
            if len(targets) == 1:
                raise
            print(f"{target}: {error}", flush=True)
            continue
        fastest += [(target, line, cost)] if line else []
    if not fastest:
        raise UserError("nothing that was searched fits; see above what each needs")
    if len(targets) > 1:
        print(f"\nthe fastest of each\n{slices_table(fastest)}")


# From flags to a task


def find_targets(arguments: argparse.Namespace) -> list[Target]:
    """The targets of --version(s) and --devices.  Raises UserError where one does not exist."""
    versions = (arguments.versions or arguments.version).split(",")
    sizes = str(arguments.devices).split(",")
    for size in sizes:
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"--devices {size} is no number of devices; give one such as 16, or several: 16,64,256")
    slices = arguments.slices or 1
    return [find_target(version, int(size), arguments.topology, slices) for version in versions for size in sizes]


def parse_prices(text: str | None, versions: list[str]) -> dict[str, float]:
    """Dollars per chip hour by version: of `2.5` for all, of `v5e=1.2,v6e=2.7` by name.  Raises UserError."""
    if text is None:
        return {}
    try:
        words = [word.split("=", 1) for word in text.split(",")] if "=" in text else [(name, text) for name in versions]
        prices = {version: float(price) for version, price in words}
    except ValueError:
        raise UserError(f"--price {text} is no price; give dollars per chip hour: 1.2, or v5e=1.2,v6e=2.7") from None
    for version in versions:
        if not 0 <= prices.get(version, -1.0) < float("inf"):
            raise UserError(f"--price {text} has no price of 0 or more for {version}; add {version}=DOLLARS")
    for version in set(prices) - set(versions):
        raise UserError(f"--price {text}: {version} is not searched; omit it, or add it to --versions")
    return prices


def check_recipe(file: str | None, targets: list[Target]) -> None:
    """Raises UserError for a --recipe that would overwrite a file, or be written for several slices."""
    if file is None:
        return
    if len(targets) > 1:
        raise UserError(f"--recipe {file} holds one configuration, and {len(targets)} slices are searched; omit it")
    if Path(file).exists():
        raise UserError(f"--recipe {file} exists; delete it, or choose another file")


def make_task(arguments: argparse.Namespace, target: Target, cost: Cost | None) -> Task:
    """Print how many candidates there are, and which the formulas drop.  Raises UserError where none is left."""
    config, memory = base_config(arguments, target), machine_of(target).memory
    tokens = config.train.batch * config.model.context
    print(
        f"\n{config.model.name} on {target}: {config.train.batch} sequences of {config.model.context} "
        f"= {tokens:,} tokens a step",
        flush=True,
    )
    fixed = fixed_keys(arguments)
    choices = candidates(config, target, fixed)
    if not choices:
        keys = " and ".join(f"{key}={value}" for key, value in {"train.batch": config.train.batch, **fixed}.items())
        fewer = f", or give fewer of {', '.join(fixed)}" if fixed else ""
        raise UserError(
            f"no candidate on {target} trains {config.model.name} with {keys};\n"
            f"choose a --batch that more devices divide{fewer}"
        )
    print(f"estimating {len(choices):,} candidates by formulas ...", flush=True)
    found = prune(config, target, choices)
    reasons = ", ".join(f"{count:,} {why}" for why, count in found.dropped.items() if count)
    print(f"{found.total:,} candidates; the formulas drop {found.dropped.total():,} ({reasons})", flush=True)
    if not found.kept:
        raise UserError(fits_nowhere(found.least_memory, memory))
    return Task(arguments, target, config, found, cost)


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
    words += [f"mesh.dp={machine.slices}", "mesh.mp=1", f"mesh.slices={machine.slices}", "mesh.processes=1"]
    words += ["mesh.zero=none", "mesh.fsdp_gradients=reduce_scatter", "train.microbatches=1", "model.offload=[]"]
    return resolve_auto(load(file if arguments.cfg else str(CONF / "config.yaml"), words))


def base_words(arguments: argparse.Namespace) -> list[str]:
    """What names the file and the model, and the keys that are not searched, as main.py takes them."""
    free = [item for item in arguments.overrides if item.split("=", 1)[0] not in (*KEYS, *OF_COMMAND)]
    if arguments.cfg:
        return ["--cfg", arguments.cfg, *([f"model={arguments.model}"] if arguments.model else []), *free]
    if arguments.from_pretrained:
        words = ["model=pretrained", f"model.from_pretrained={quoted(arguments.from_pretrained)}"]
    else:
        words = [f"model={arguments.model or '6_9b'}"]
    return ["--cfg", "conf/config.yaml", *words, *free]


def given_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """The overrides key=value by key."""
    return dict(item.split("=", 1) for item in arguments.overrides if "=" in item)


def fixed_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Keys of the search that the user has set, which are not searched."""
    given = given_keys(arguments)
    fixed = {key: given[key] for key in KEYS if key in given}
    return fixed | ({"train.microbatches": str(arguments.microbatches)} if arguments.microbatches else {})


# From a task to a report


def search_target(task: Task, minutes: float) -> Line | None:
    """Compile for some minutes, print what was found, and return the fastest; None where nothing fits."""
    arguments, target = task.arguments, task.target
    status = tqdm(bar_format="{desc}", disable=None, leave=False)  # a line on terminals only
    search = Search(
        list(task.pruned.kept), machine_of(target).memory,
        lambda one: ChildProcess(one.apply(task.config), target), write_line,
        min(jobs_at_a_time(), arguments.jobs or sys.maxsize), 60 * minutes,
        save=lambda one: save(one, arguments), progress=status.set_description_str,
    )  # fmt: skip
    try:
        if compiler_missing(target) is None:
            print(f"compiling up to {search.jobs} at a time, for {minutes:g} minutes at most", flush=True)
            with status:
                search.run()
    except UserError:  # --json cannot be written any more
        finish(task, search)
        raise
    except KeyboardInterrupt:
        finish(task, search)
        print(f"stopped; what was found so far is above (exit code {STOPPED})", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED) from None
    return finish(task, search)


def finish(task: Task, search: Search) -> Line | None:
    """Print the table, the command and the recipe of the fastest, which is returned."""
    machine = machine_of(task.target)
    compiled = [compiled_line(one) for one in search.found if one.outcome.row is not None]
    lines = compiled or [formula_line(one, task.config, machine) for one in search.remaining]
    lines = sorted(lines, key=lambda line: line.place)
    print(f"\n{table(lines if compiled else lines[:SHOWN], task.cost)}\n{LEGEND}")
    if search.found:
        fitting, failed = sum(one.fits for one in search.found), len(search.found) - len(compiled)
        failures = f"{failed} failed to compile, " if failed else ""
        correlation = search.correlation()
        ranked = f"; rank correlation of the formulas with compiled times {correlation:.2f}"
        print(
            f"{len(compiled)} compiled, {fitting} of them fit; {failures}{len(search.remaining):,} were not compiled "
            f"({search.stopped}){'' if math.isnan(correlation) else ranked}"
        )
    winner = next((line for line in lines if line.fits), None)
    if winner is None:
        print(nothing_fits(task, search))
    else:
        report_winner(task, winner)
    return winner


def nothing_fits(task: Task, search: Search) -> str:
    """What is said where no candidate of the table fits."""
    memory, rows = machine_of(task.target).memory, [one for one in search.found if one.outcome.row is not None]
    if not rows:
        return f"nothing fits by formulas; {fits_nowhere(task.pruned.least_memory, memory)}"
    least = min(rows, key=lambda one: one.outcome.row.peak_bytes_per_device)
    peak = least.outcome.row.peak_bytes_per_device
    return f"nothing that was compiled fits; {fits_nowhere(least.estimated, memory, peak)}"


def report_winner(task: Task, winner: Line) -> None:
    """The command, how far to trust its figures, and the recipe if it was asked for."""
    arguments, config, hosts = task.arguments, task.config, machine_of(task.target).hosts
    print(f"\nfastest ({winner.basis}): {winner.candidate}")
    print(f"  {command(winner.candidate, config, base_words(arguments), hosts)}")
    print(trust(winner, task.target))
    if arguments.recipe:
        made_by = shlex.join(["python", "-m", "shmap_tp.plan", *sys.argv[1:]])
        note = f"{config.model.name} on {task.target}, {winner.basis}: {made_by}"
        write_recipe(Path(arguments.recipe), winner.candidate, config, note, hosts)
        print(f"written: {arguments.recipe}")


def save(one: Found, arguments: argparse.Namespace) -> None:
    """Append a compiled row to the file of --json as soon as it is there."""
    if one.outcome.row is not None and arguments.json:
        one.outcome.row.command = shlex.join(["python", "-m", "shmap_tp.plan", *sys.argv[1:]])
        append_json(one.outcome.row.to_json(), Path(arguments.json))
