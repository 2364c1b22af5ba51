"""The search as `python -m shmap_tp.plan --devices N` runs it: flags to candidates, compilations, and the report."""

import argparse
import math
import sys
from pathlib import Path

from tqdm import tqdm

from shmap_tp.config.compose import CONF, quoted
from shmap_tp.config.packaged import as_installed
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from shmap_tp.plan.benchmark import append_json, check_flags, check_outputs, command_line
from shmap_tp.plan.search.candidates import KEYS, Result, candidates, prune
from shmap_tp.plan.search.jobs import ChildProcess, jobs_at_a_time
from shmap_tp.plan.search.loop import Search
from shmap_tp.plan.search.output import (
    LEGEND,
    Cost,
    Task,
    basis,
    command,
    fits_nowhere,
    place,
    slices_table,
    table,
    trust,
    write_recipe,
)
from shmap_tp.plan.targets import Target, compiler_missing, find_target, machine_of
from shmap_tp.pretrained.configuration import load
from shmap_tp.runtime.command_line import raising
from shmap_tp.runtime.console import write_line
from shmap_tp.runtime.exit_codes import STOPPED

OF_COMMAND = ("train.batch", "model.context")
"""Keys that the printed command sets beside those that are searched."""
SHOWN = 20
"""Candidates in the table at most, where none was compiled; else it has all that were."""
SEQUENCES_PER_DEVICE = 16
"""Sequences of a step on each device, where --batch is not given."""


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
    fastest: list[tuple[Task, Result]] = []
    for target in targets:
        chips = machine_of(target).chips
        cost = Cost(arguments.tokens, prices.get(target.version), chips) if arguments.tokens else None
        try:
            task = Task(base_config(arguments, target), target, cost)
            kept, smallest = find_candidates(task, fixed_keys(arguments))
            with raising():
                winner = search_target(task, arguments, kept, smallest, arguments.minutes / len(targets))
        except UserError as error:
            if len(targets) == 1:
                raise
            print(f"{target}: {error}", flush=True)
            continue
        fastest += [(task, winner)] if winner else []
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


def find_candidates(task: Task, fixed: dict[str, str]) -> tuple[list[Result], Result]:
    """(the candidates that the formulas keep, the one that needs least memory of all); prints how many there are, and
    how many are dropped.  Raises UserError where none is left."""
    config, target = task.config, task.target
    print(
        f"\n{config.model.name} on {target}: {config.train.batch} sequences of {config.model.context} "
        f"= {task.tokens:,} tokens a step",
        flush=True,
    )
    choices = candidates(config, target, fixed)
    if not choices:
        keys = " and ".join(f"{key}={value}" for key, value in {"train.batch": config.train.batch, **fixed}.items())
        fewer = f", or give fewer of {', '.join(fixed)}" if fixed else ""
        raise UserError(
            f"no candidate on {target} trains {config.model.name} with {keys};\n"
            f"choose a --batch that more devices divide{fewer}"
        )
    print(f"estimating {len(choices):,} candidates by formulas ...", flush=True)
    kept, dropped, smallest = prune(config, target, choices)
    reasons = ", ".join(f"{count:,} {why}" for why, count in dropped.items() if count)
    print(f"{len(choices):,} candidates; the formulas drop {dropped.total():,} ({reasons})", flush=True)
    if not kept:
        raise UserError(fits_nowhere(smallest, machine_of(target).memory))
    return kept, smallest


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
    return ["--cfg", as_installed("conf/config.yaml"), *words, *free]


def given_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """The overrides key=value by key."""
    return dict(item.split("=", 1) for item in arguments.overrides if "=" in item)


def fixed_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Keys of the search that the user has set, which are not searched."""
    given = given_keys(arguments)
    fixed = {key: given[key] for key in KEYS if key in given}
    return fixed | ({"train.microbatches": str(arguments.microbatches)} if arguments.microbatches else {})


# From a task to a report


def search_target(
    task: Task, arguments: argparse.Namespace, kept: list[Result], smallest: Result, minutes: float
) -> Result | None:
    """Compile for some minutes, print what was found, and return the fastest; None where nothing fits."""
    target, memory = task.target, machine_of(task.target).memory
    status = tqdm(bar_format="{desc}", disable=None, leave=False)  # a line on terminals only
    search = Search(
        list(kept), memory, lambda one: ChildProcess(one, task.config, target), write_line,
        min(jobs_at_a_time(), arguments.jobs or sys.maxsize), 60 * minutes,
        save=lambda one: save(one, arguments), progress=status.set_description_str,
    )  # fmt: skip
    try:
        if compiler_missing(target) is None:
            print(f"compiling up to {search.jobs} at a time, for {minutes:g} minutes at most", flush=True)
            with status:
                search.run()
    except UserError:  # --json cannot be written any more
        finish(task, arguments, search, smallest)
        raise
    except KeyboardInterrupt:
        finish(task, arguments, search, smallest)
        print(f"stopped; what was found so far is above (exit code {STOPPED})", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED) from None
    return finish(task, arguments, search, smallest)


def finish(task: Task, arguments: argparse.Namespace, search: Search, smallest: Result) -> Result | None:
    """Print the table, the command and the recipe of the fastest, which is returned."""
    memory = machine_of(task.target).memory
    compiled = [one for one in search.found if one.row is not None]
    shown = compiled or sorted(search.remaining, key=lambda one: place(one, memory))[:SHOWN]
    print(f"\n{table(task, shown)}\n{LEGEND}")
    if search.found:
        fitting, failed = sum(one.fits_in(memory) for one in compiled), len(search.found) - len(compiled)
        failures = f"{failed} failed to compile, " if failed else ""
        correlation = search.correlation()
        ranked = f"; rank correlation of the formulas with compiled times {correlation:.2f}"
        print(
            f"{len(compiled)} compiled, {fitting} of them fit; {failures}{len(search.remaining):,} were not compiled "
            f"({search.stopped}){'' if math.isnan(correlation) else ranked}"
        )
    winner = min(shown, key=lambda one: place(one, memory), default=None)
    if winner is None or not winner.fits_in(memory):
        how = "that was compiled fits" if compiled else "fits by formulas"
        least = min(compiled, key=lambda one: one.peak_bytes, default=smallest)
        print(f"nothing {how}; {fits_nowhere(least, memory)}")
        return None
    report_winner(task, arguments, winner)
    return winner


def report_winner(task: Task, arguments: argparse.Namespace, winner: Result) -> None:
    """The command, how far to trust its figures, and the recipe if it was asked for."""
    config, hosts = task.config, machine_of(task.target).hosts
    print(f"\nfastest ({basis(winner)}): {winner.candidate}")
    print(f"  {command(winner.candidate, config, base_words(arguments), hosts)}")
    print(trust(winner, task.target))
    if arguments.recipe:
        note = f"{config.model.name} on {task.target}, {basis(winner)}: {command_line()}"
        write_recipe(Path(arguments.recipe), winner.candidate, config, note, hosts)
        print(f"written: {arguments.recipe}")


def save(one: Result, arguments: argparse.Namespace) -> None:
    """Append a compiled row to the file of --json as soon as it is there."""
    if one.row is not None and arguments.json:
        one.row.command = command_line()
        append_json(one.row.to_json(), Path(arguments.json))
