"""The search as `python -m shmap_tp.plan --devices N` runs it: flags to candidates, compilations, and the report."""

import argparse
import importlib.util
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from shmap_tp.config.compose import CONF, quoted
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GIB
from shmap_tp.plan.benchmark import append_json, check_flags
from shmap_tp.plan.calibration import format_calibration
from shmap_tp.plan.search.jobs import ChildProcess, jobs_at_a_time
from shmap_tp.plan.search.loop import Found, Search
from shmap_tp.plan.search.output import LEGEND, Cost, Line, command, compiled_line, formula_line, table, write_recipe
from shmap_tp.plan.search.prune import Pruned, prune
from shmap_tp.plan.search.space import KEYS, Candidate, candidates
from shmap_tp.plan.topologies import Slice, find_slice
from shmap_tp.pretrained.configuration import load
from shmap_tp.runtime.exit_codes import STOPPED

SHOWN = 20
"""Candidates in the table at most."""
SEQUENCES_PER_DEVICE = 16
"""Of a step, where --batch is not given."""


@dataclass(frozen=True)
class Result:
    """The search of one slice."""

    target: Slice
    config: Config
    pruned: Pruned
    lines: list[Line]
    best: Found | None


def search_command(arguments: argparse.Namespace) -> None:
    """Search every slice that was asked for.  Raises UserError; SystemExit(STOPPED) after Ctrl-C or SIGTERM."""
    targets = find_targets(arguments)
    prices = parse_prices(arguments.price, [target.version for target in targets])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    has_compiler = importlib.util.find_spec("libtpu") is not None
    if not has_compiler:
        print("libtpu is not installed: candidates are ranked by formulas only (pip install -e '.[tpu]' to compile)")
    results = []
    for target in targets:
        cost = Cost(arguments.tokens, prices.get(target.version), target_chips(target)) if arguments.tokens else None
        try:
            results.append(search_slice(arguments, target, cost, arguments.minutes / len(targets), has_compiler))
        except UserError as error:
            if len(targets) == 1:
                raise
            print(f"{target}: {str(error).splitlines()[0]}", flush=True)
    if len(targets) > 1:
        print_slices(results, arguments.tokens, prices)


def target_chips(target: Slice) -> int:
    return target.devices // target.generation.cores


def find_targets(arguments: argparse.Namespace) -> list[Slice]:
    """The slices of --version(s) and --devices.  Raises UserError where one does not exist."""
    versions = (arguments.versions or arguments.version).split(",")
    sizes = str(arguments.devices).split(",")
    for size in sizes:
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"--devices {size} is no number of devices; give one such as 16, or several: 16,64,256")
    return [find_slice(v, int(size), arguments.topology, arguments.slices or 1) for v in versions for size in sizes]


def parse_prices(text: str | None, versions: list[str]) -> dict[str, float]:
    """Dollars per chip hour by TPU version: of `2.5` for all, of `v5e=1.2,v6e=2.7` by name.  Raises UserError."""
    if text is None:
        return {}
    words = dict(word.split("=", 1) for word in text.split(",")) if "=" in text else dict.fromkeys(versions, text)
    try:
        return {version: float(price) for version, price in words.items()}
    except ValueError as error:
        raise UserError(f"--price {text} is no price; give dollars per chip hour: 1.2, or v5e=1.2,v6e=2.7") from error


def base_words(arguments: argparse.Namespace) -> list[str]:
    """What names the file and the model, as main.py takes it."""
    if arguments.cfg:
        return ["--cfg", arguments.cfg, *([f"model={arguments.model}"] if arguments.model else []), *free(arguments)]
    if arguments.from_pretrained:
        words = ["model=pretrained", f"model.from_pretrained={quoted(arguments.from_pretrained)}"]
    else:
        words = [f"model={arguments.model or '6_9b'}"]
    return ["--cfg", "conf/config.yaml", *words, *free(arguments)]


def free(arguments: argparse.Namespace) -> list[str]:
    """The overrides of keys that are not searched."""
    return [item for item in arguments.overrides if item.split("=", 1)[0] not in KEYS]


def base_config(arguments: argparse.Namespace, target: Slice) -> Config:
    """The configuration that candidates are applied to.  Raises UserError."""
    check_flags(arguments)
    _, file, *words = base_words(arguments)
    batch = arguments.batch or (None if arguments.cfg else target.devices * SEQUENCES_PER_DEVICE)
    words += [f"train.batch={batch}"] if batch else []
    words += [f"model.context={arguments.context}"] if arguments.context else []
    words += [f"mesh.dp={target.slices}", "mesh.mp=1", f"mesh.slices={target.slices}", "mesh.processes=1"]
    words += ["mesh.zero=none", "mesh.fsdp_gradients=reduce_scatter", "train.microbatches=1", "model.offload=[]"]
    return resolve_auto(load(file if arguments.cfg else str(CONF / "config.yaml"), words))


def fixed_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Keys of the search that the user has set, which are not searched."""
    given = dict(item.split("=", 1) for item in arguments.overrides if "=" in item)
    fixed = {key: given[key] for key in KEYS if key in given}
    return fixed | ({"train.microbatches": str(arguments.microbatches)} if arguments.microbatches else {})


def search_slice(
    arguments: argparse.Namespace, target: Slice, cost: Cost | None, minutes: float, has_compiler: bool
) -> Result:
    """Search one slice, print what is found, and return it.  Raises UserError where no candidate fits or is valid."""
    config, limit = base_config(arguments, target), DEVICES[target.generation.kind].memory
    tokens = config.train.batch * config.model.context
    print(f"\n{config.model.name} on {target}: {config.train.batch} sequences of {config.model.context} = {tokens:,} "
          "tokens a step", flush=True)  # fmt: skip
    choices = candidates(config, target, fixed_keys(arguments))
    if not choices:
        raise UserError(f"no mesh of {target} can shard {config.model.name} with train.batch={config.train.batch};\n"
                        "choose a --batch that more devices divide, or fewer fixed keys")  # fmt: skip
    found = prune(config, target, choices)
    reasons = ", ".join(f"{count:,} {why}" for why, count in found.dropped.items() if count)
    print(f"{found.total:,} candidates; the formulas drop {found.dropped.total():,} ({reasons})", flush=True)
    if not found.kept:
        raise UserError(fits_nowhere(found, limit))
    search = Search(
        list(found.kept), limit, lambda one: ChildProcess(one.apply(config), target),
        lambda line: print(line, flush=True), min(jobs_at_a_time(), arguments.jobs or 10**6), 60 * minutes,
    )  # fmt: skip
    try:
        if has_compiler:
            print(f"compiling up to {search.jobs} at a time, for {minutes:g} minutes", flush=True)
            search.run()
    except KeyboardInterrupt:
        finish(search, found, config, target, cost, arguments)
        print(f"stopped; what was found so far is above (exit code {STOPPED})", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED) from None
    return finish(search, found, config, target, cost, arguments)


def finish(
    search: Search, found: Pruned, config: Config, target: Slice, cost: Cost | None, arguments: argparse.Namespace
) -> Result:
    """Print the table, the command and the recipe; write the files that were asked for."""
    limit, peak = DEVICES[target.generation.kind].memory, DEVICES[target.generation.kind].flops
    compiled = [compiled_line(one) for one in search.found if one.outcome.row is not None]
    estimated = [formula_line(one, config, target, peak, limit) for one in search.remaining]
    lines = compiled or estimated
    lines = sorted(lines, key=lambda line: line.seconds)[:SHOWN]
    print(f"\n{table(lines, cost)}\n{LEGEND}")
    if search.found:
        fitting = sum(one.fits for one in search.found)
        print(f"{len(search.found)} compiled, {fitting} of them fit; {len(search.remaining):,} were not compiled "
              f"({search.stopped}); rank correlation of formulas and compiled times "
              f"{search.correlation():.2f}")  # fmt: skip
    best = search.best()
    winner = best.estimated.candidate if best else next(
        (line.candidate for line in lines if line.basis == "formulas" and line.peak_bytes <= limit), None
    )  # fmt: skip
    save(search, arguments)
    if winner is not None:
        report_winner(winner, best, config, target, arguments)
    else:
        print("nothing that was compiled fits; " + fits_nowhere(found, limit))
    return Result(target, config, found, lines, best)


def report_winner(
    winner: Candidate, best: Found | None, config: Config, target: Slice, arguments: argparse.Namespace
) -> None:
    """The command, the calibration, and the recipe if it was asked for."""
    hosts = max(1, target_chips(target) // _chips_of_a_host(target))
    basis = "predicted from the compiled step" if best else "by formulas, not compiled"
    print(f"\nfastest ({basis}): {winner}\n  {command(winner, config, base_words(arguments), hosts)}")
    if best:
        print(f"calibration: {format_calibration(target.generation.kind, best.seconds)}")
    if arguments.recipe:
        note = f"{config.model.name} on {target}, {basis}: " + shlex.join(
            ["python", "-m", "shmap_tp.plan", *sys.argv[1:]]
        )
        write_recipe(Path(arguments.recipe), winner, config, note, hosts)
        print(f"written: {arguments.recipe}")


def _chips_of_a_host(target: Slice) -> int:
    count = 1
    for side in target.generation.host:
        count *= side
    return count


def save(search: Search, arguments: argparse.Namespace) -> None:
    """Append the compiled rows to the file of --json."""
    for one in search.found if arguments.json else []:
        if one.outcome.row is not None:
            one.outcome.row.command = shlex.join(["python", "-m", "shmap_tp.plan", *sys.argv[1:]])
            append_json(one.outcome.row.to_json(), Path(arguments.json))


def fits_nowhere(found: Pruned, limit: float) -> str:
    """By how much the smallest candidate exceeds the memory, and what would make it fit."""
    least = found.least_memory
    state = least.estimate.memory_terms["state"]
    factor = least.peak_bytes / limit
    advice = "more devices (--devices)" if state > limit / 2 else "a shorter --context or a smaller --batch"
    return (
        f"the smallest, {least.candidate}, needs about {least.peak_bytes / GIB:.1f} of {limit / GIB:.1f} GiB per device, "
        f"{factor:.2f} times what there is ({state / GIB:.1f} GiB of it parameters, optimizer state and gradients);\n"
        f"use {advice}, or a TPU version with more memory"
    )


def print_slices(results: list[Result], tokens: float | None, prices: dict[str, float]) -> None:
    """A line for the fastest of each slice."""
    print("\nthe fastest of each slice")
    for result in results:
        line = result.lines[0]
        cost = Cost(tokens, prices.get(result.target.version), target_chips(result.target)) if tokens else None
        money = (
            ", ".join(
                f"{cell} {name}" for name, cell in zip(cost.head, cost.cells(line.tokens_per_second), strict=True)
            )
            if cost
            else ""
        )
        print(
            f"  {result.target}: {line.tokens_per_second:,.0f} tokens/s, MFU {line.mfu:.1%}, {money}; {line.candidate} ({line.basis})"
        )
