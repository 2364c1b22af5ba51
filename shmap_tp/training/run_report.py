"""A page about one run, or several side by side: report.html, which needs no network and no other file.

`tag` escapes every text, so that what files hold stays text.  Each chart has its numbers in words; it is SVG of
matplotlib, whose colours the style sheet gives, so that they suit a light and a dark background.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from shmap_tp.config.compose import load, to_dict
from shmap_tp.config.validate import named_sizes
from shmap_tp.config.yaml_files import CONF, as_installed, flat
from shmap_tp.errors import escaped
from shmap_tp.errors import shown as in_one_line
from shmap_tp.runtime.files import replacing, writing
from shmap_tp.training.goodput import LABELS, TimeCategory
from shmap_tp.training.run_record import RunRecord, continue_command, read_run, shown_path

REPORT = "report.html"
CHARTS = {
    "train/loss": ("Loss", "nats per target"),
    "validation/bits_per_byte": ("Validation, bits per byte", "bits per byte"),
    "train/tokens_per_second": ("Throughput", "tokens per second"),
    "train/mfu": ("MFU, causal attention at half", "share of the peak FLOP/s"),
    "train/learning_rate": ("Learning rate", "learning rate"),
    "train/grad_norm": ("Gradient norm, before it is clipped", "norm"),
    "train/expert_load": ("Load of the busiest expert", "times the mean"),
    "train/experts_dropped": ("Pairs of a token and an expert that were not computed", "share"),
    "train/router_entropy": ("Entropy of the router", "nats"),
    "train/reward_accuracy": ("Preference pairs in the right order", "share"),
}
"""The title and the unit of each chart, by the series that it shows."""
LOSS = "train/loss"
MOST_POINTS = 500
"""Points of a curve; each of a longer one is the mean of several steps, shown with their range."""
INK, FAINT, RED = "#010203", "#040506", "#0a0bff"
COLOURS = [f"#0a0b0{i}" for i in range(6)]
"""What matplotlib draws with; `_svg` puts variables of the style sheet in their place."""
STYLES = ["-", "--", "-.", ":"]
SETTINGS = dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
SETTINGS |= {"grid.color": FAINT, "svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9, "axes.grid": True}
SETTINGS["text.parse_math"] = False  # a directory may have $ in its name

Points = Float64[np.ndarray, "points 2"]
"""(step, value)."""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #c9ced6; --paper: #fff; --box: #f4f5f7; --red: #c4151c;
  --c0: #1f6fb4; --c1: #c2540a; --c2: #1e7f3e; --c3: #a3158a; --c4: #7a5330; --c5: #6b4fa8 }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe3e8; --faint: #454c56; --paper: #14171b; --box: #1e2329;
  --red: #ff7b72; --c0: #6cb6ff; --c1: #ffa657; --c2: #6fdc8c; --c3: #ff8bd8; --c4: #d9b88f; --c5: #c4a7ff } }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.45 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; margin: 0 0 .5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 } .charts { display: grid; gap: 1.5rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 0 } svg { width: 100%; height: auto } svg text { font-family: system-ui, sans-serif !important }
figcaption { font-size: .875rem } .scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--faint); vertical-align: top }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums } meter { width: 7rem }
pre { padding: .6rem; background: var(--box); white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem }
"""


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element.  Children and the values of attributes are escaped, but for children that are `Html`."""
    given = "".join(f' {key.rstrip("_")}="{_text(value)}"' for key, value in attributes.items())
    inner = "".join(child if isinstance(child, Html) else _text(child) for child in children)
    return Html(f"<{name}{given}>{inner}</{name}>")


def _text(value: object) -> str:
    return escape(escaped(str(value)))


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """A table, which scrolls by itself where it is too wide.  A cell that is `Html` is a whole element."""
    lines = [tag("tr", *(tag("th", each, scope="col") for each in head))]
    lines += [tag("tr", *(cell if isinstance(cell, Html) else tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", *lines), class_="scroll", tabindex=0)


def number(value: float | None, form: str) -> Html:
    """A cell with a number, empty for None."""
    return tag("td", "" if value is None else format(value, form), class_="number")


def write_report(directories: Sequence[Path], file: Path) -> Path:
    """Write the page about the runs in `directories` to `file`, and return its path.

    Raises UserError if one of them has no run, StorageError if the page cannot be written.
    """
    page = report([read_run(directory, CHARTS) for directory in directories])
    with writing(file), replacing(file) as stream:
        stream.write(page)
    return file


def report(records: Sequence[RunRecord]) -> str:
    """The page, a function of the files of the runs, and of the packaged configuration, alone."""
    title = records[0].values["run.name"] if len(records) == 1 else f"{len(records)} runs"
    parts = [tag("h1", title), table(["", *(record.directory for record in records)], _facts(records))]
    if len({record.values["model.vocabulary"] for record in records}) > 1:
        parts.append(tag("p", "Their vocabularies differ: bits per byte can be compared, losses per target cannot."))
    parts += [tag("div", *_charts(records), class_="charts")]
    parts += [tag("h2", "Where the wall time went"), _wall_time(records)]
    parts += [tag("h2", "Starts"), table(["run", "mesh", "steps", "tokens/s, median", "MFU, median"], _starts(records))]
    parts += _differences(records)
    for record in records:
        parts += _details(record, "" if len(records) == 1 else f" of {record.directory}")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page = tag("head", Html(meta), tag("title", title), tag("style", Html(STYLE))) + tag("body", tag("main", *parts))
    return f'<!DOCTYPE html>\n<html lang="en">{page}</html>\n'


def _facts(records: Sequence[RunRecord]) -> Iterator[list[object]]:
    """Rows of what each run is, and how far it is."""
    rows = {
        "model": lambda run: run.values["model.name"],
        "steps": lambda run: f"{run.step:,} of {run.values['train.steps']:,}",
        "loss": lambda run: _last(run, LOSS),
        "validation loss": lambda run: _last(run, "validation/loss"),
        "bits per byte": lambda run: _last(run, "validation/bits_per_byte"),
        "skipped steps": lambda run: len(run.skipped),
        "goodput": lambda run: f"{run.time.seconds(TimeCategory.steps) / run.time.total:.1%}" if run.time.total else "",
    }
    for label, value in rows.items():
        yield [tag("th", label, scope="row"), *(value(record) for record in records)]


def _last(record: RunRecord, name: str) -> str:
    points = record.series(name)
    return f"{points[-1, 1]:.4f}" if len(points) else ""


def _charts(records: Sequence[RunRecord]) -> Iterator[Html]:
    for name, (title, _) in CHARTS.items():
        shown = [record for record in records if _is_drawn(record, name)]
        if shown:
            words = [tag("div", (f"{each.directory}: " * (len(records) > 1)) + _in_words(each, name)) for each in shown]
            yield tag("figure", tag("h3", title), Html(_draw(records, name)), tag("figcaption", *words))


def _in_words(record: RunRecord, name: str) -> str:
    """The numbers of a chart: the first, the last, and the range."""
    points = record.series(name)
    finite, found = points[np.isfinite(points[:, 1])], ""
    if len(finite):
        places = {"": finite[0], "to ": finite[-1]}
        places |= {"lowest ": finite[finite[:, 1].argmin()], "highest ": finite[finite[:, 1].argmax()]}
        words = (f"{label}{_in_digits(value)} at step {step:,.0f}" for label, (step, value) in places.items())
        found = ", ".join(words) + ". "
    if len(finite) < len(points):
        found += f"{len(points) - len(finite):,} of {len(points):,} values are not finite. "
    if name == LOSS and len(validation := record.series("validation/loss")):
        found += f"Validation {validation[-1, 1]:.4f} at step {validation[-1, 0]:,.0f}"
        found += "".join(f", {source} {loss:.4f}" for source, loss in record.sources.items()) + ". "
    return found


def _in_digits(value: float) -> str:
    """At least four digits, and all of those before the point."""
    return f"{value:,.{max(4, len(f'{abs(value):.0f}'))}g}"


def _is_drawn(record: RunRecord, name: str) -> bool:
    """Whether a run has finite values of a series; its loss is drawn anyway."""
    points = record.series(name)
    return len(points) > 0 and (name == LOSS or bool(np.isfinite(points[:, 1]).any()))


def _draw(records: Sequence[RunRecord], name: str) -> str:
    """The chart of a series as SVG: each of several runs in one colour, of one run each mesh."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    with rc_context(SETTINGS):
        figure = Figure(figsize=(4.8, 3.1), layout="constrained")
        axes, keys = figure.add_subplot(), list[str]()
        for key, points in _curves(records, name):
            new = key not in keys
            keys += [key] * new
            number = keys.index(key)
            look = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.2, "markersize": 3}
            look["marker"] = "o" if name.startswith("validation") else ""
            look["linestyle"] = STYLES[number % len(STYLES)] if len(records) > 1 else "-"
            steps, means, low, high = thinned(points)
            axes.plot(steps, means, label=key if new else None, **look)
            if len(records) == 1:
                axes.fill_between(steps, low, high, color=look["color"], alpha=0.25, linewidth=0)
        _mark(axes, records, name)
        if name == "train/grad_norm":
            axes.set_yscale("log")
            axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}", minor_locator=LogLocator(subs=(2, 5)))
        axes.set(xlabel="step", ylabel=CHARTS[name][1])
        axes.spines[["top", "right"]].set_visible(False)
        if len(records) > 1 or name == LOSS:
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(file := io.StringIO(), format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _svg(file.getvalue())


def _curves(records: Sequence[RunRecord], name: str) -> Iterator[tuple[str, Points]]:
    """(what has a colour of its own, the points of one line)."""
    for record in records:
        points = record.series(name)
        if len(records) > 1 or name.startswith("validation"):
            yield escaped(shown_path(record.directory)), points
            continue
        for start in record.starts.values():
            own = (start.first <= points[:, 0]) & (points[:, 0] <= start.last)
            yield f"mesh {', '.join(named_sizes(start.mesh))}", points[own]


def _mark(axes: object, records: Sequence[RunRecord], name: str) -> None:
    """Mark the validation losses, the skipped steps, and of a single run its restarts."""
    for number, record in enumerate(records):
        colour = COLOURS[number % len(COLOURS)] if len(records) > 1 else INK
        if name == LOSS and len(points := record.series("validation/loss")):
            axes.plot(*points.T, "o", color=colour, markersize=3.5, label=None if number else "validation")
        if name in (LOSS, "train/grad_norm") and record.skipped:
            steps, label = [step for step, _ in record.skipped], None if number else "skipped steps"
            axes.plot(steps, [0.02] * len(steps), "|", color=RED, label=label, transform=axes.get_xaxis_transform())
        if len(records) == 1 and not name.startswith("validation"):
            for before, _ in pairwise(record.starts.values()):
                axes.axvline(before.last + 0.5, color=INK, linewidth=0.7, linestyle=":")


def thinned(points: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(steps, means, least, greatest) of at most MOST_POINTS groups of neighbours; NaN if all of a group are."""
    size = -(-len(points) // MOST_POINTS) or 1
    padded = np.pad(points, [(0, -len(points) % size), (0, 0)], constant_values=np.nan)
    steps, values = np.ma.masked_invalid(padded.T.reshape(2, -1, size))
    return tuple(each.filled(np.nan) for each in (steps.mean(1), values.mean(1), values.min(1), values.max(1)))


def _svg(text: str) -> str:
    """An SVG file as an element of a page, its colours variables of the page's style sheet."""
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :].strip())  # the same ids in every chart
    text = text.replace("<svg", '<svg role="img"', 1)
    names = {INK: "ink", FAINT: "faint", RED: "red"} | {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
    return re.sub("|".join(names), lambda found: f"var(--{names[found[0]]})", text)


def _wall_time(records: Sequence[RunRecord]) -> Html:
    """Seconds and share of each category, of each run."""
    head, rows, last = [""], [], ["wall time"]
    for record in records:
        head += ["seconds" if len(records) == 1 else record.directory, "share", ""]
        last += [number(record.time.total, ",.1f"), "", f"starts: {record.time.starts}"]
    for category in TimeCategory:
        if any(record.time.seconds(category) >= 0.1 for record in records):
            rows.append([LABELS[category]])
            for seconds, total in ((record.time.seconds(category), record.time.total) for record in records):
                share = seconds / total if total else 0.0
                bar = tag("td", tag("meter", value=f"{share:.4f}", title=LABELS[category]))
                rows[-1] += [number(seconds, ",.1f"), number(share, ".1%"), bar]
    return table(head, [*rows, last])


def _starts(records: Sequence[RunRecord]) -> Iterator[list[object]]:
    for record in records:
        for start in record.starts.values():
            speed, mfu = (record.median(f"train/{name}", start) for name in ("tokens_per_second", "mfu"))
            steps = f"{start.first:,} to {start.last:,}"
            mesh = ", ".join(named_sizes(start.mesh))
            yield [record.directory, mesh, steps, number(speed, ",.0f"), number(mfu, ".1%")]


def _differences(records: Sequence[RunRecord]) -> list[Html]:
    """The values that differ between the runs; of a single run between it and the nearest packaged configuration."""
    values = {str(record.directory): record.values for record in records}
    compared = ""
    if len(records) == 1:
        name, values[name] = nearest_packaged(records[0].values)
        compared = f" from {name}, the nearest packaged one"
    keys = dict.fromkeys(key for each in values.values() for key in each)
    rows = [[key, *(in_one_line(each.get(key)) for each in values.values())] for key in keys]
    rows = [row for row in rows if len({*row[1:]}) > 1 and row[0] != "checkpoint.resume"]  # which says how to start
    return [tag("h2", f"Configuration: {len(rows)} of {len(keys)} values differ{compared}"), table(["", *values], rows)]


def nearest_packaged(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, values) of the packaged configuration from which `values` differ least: the first run, the defaults, or a
    recipe of the same model."""
    found = {}
    for file in [CONF / "config.yaml", CONF / "base.yaml", *sorted((CONF / "recipes").glob("*.yaml"))]:
        if file.parent == CONF or f"model: {values['model.name']}\n" in file.read_text():
            found[as_installed(f"conf/{file.relative_to(CONF)}")] = flat(to_dict(load(file, [])))
    return min(found.items(), key=lambda item: sum(values.get(key) != value for key, value in item[1].items()))


def _details(record: RunRecord, of_run: str) -> Iterator[Html]:
    """Skipped steps, samples, checkpoints, the way on, and the configuration of one run."""
    if record.skipped:
        yield tag("h2", f"Skipped steps{of_run}")
        yield table(["step", "why"], record.skipped[-20:])
    if record.samples:
        yield tag("h2", f"Samples{of_run}")
        newest = max(step for step, _ in record.samples)
        for step in sorted({step for step, _ in record.samples}, reverse=True):
            texts = [tag("pre", tag("b", p), text) for (at, p), text in record.samples.items() if at == step]
            opened = {"open": ""} if step == newest else {}
            yield tag("details", tag("summary", f"step {step:,}"), *texts, **opened)
    yield tag("h2", f"Checkpoints{of_run}")
    steps = ", ".join(f"{step:,}" for step in record.checkpoints) or "none that can be listed here"
    yield tag("p", f"{record.checkpoint_dir}: {steps}")
    yield tag("h2", f"To continue{of_run}, on any mesh.dp=... mesh.cp=... mesh.mp=...")
    yield tag("pre", continue_command(record.directory, record.values, record.finished))
    whole = "\n".join(f"{key}: {in_one_line(value)}" for key, value in record.values.items())
    yield tag("details", tag("summary", f"All values of the configuration{of_run}"), tag("pre", whole))
