"""The report of a run: what it shows is what the files of the run record, and it is a page by itself."""

import json
import math
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from shmap_tp import report
from shmap_tp.config.compose import CONF, load, to_yaml
from shmap_tp.config.yaml_files import flat_values
from shmap_tp.training import metrics, run_report
from shmap_tp.training.goodput import LABELS, TimeCategory
from shmap_tp.training.run_record import read_run
from shmap_tp.training.run_report import MOST_POINTS, nearest_packaged, thinned, write_report
from tests.helpers.run_fixtures import STEPS, lines

CONFIG = {
    "run": {"name": "own", "dir": "DIR"},
    "model": {"name": "bytes", "vocabulary": 256},
    "train": {"steps": 6},
    "optimizer": {"warmup_steps": 2, "decay_steps": 6, "learning_rate": 0.003},
    "checkpoint": {"dir": "DIR/checkpoints"},
}


class Page(HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, file: Path):
        super().__init__()
        self.tags, self.attributes, self.text = list[str](), list[tuple[str, str]](), ""
        self.html = file.read_text()
        self.feed(self.html)
        self.words = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes), f"<{tag}> has an attribute twice"
        self.tags.append(tag)
        self.attributes += attributes
        self.text += " "

    def handle_data(self, data):
        self.text += data

    def rows(self) -> list[list[str]]:
        """The cells of each row of its tables."""
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in self.html.split("<tr>")[1:]]
        return [[re.sub("<[^>]*>", "", cell) for cell in row] for row in cells]


def page(*directories: Path) -> Page:
    return Page(write_report(directories, directories[0] / "report.html"))


def write_run(directory: Path, steps: list[dict], *more: dict, **config) -> Path:
    """A run directory of training `steps` (each with what differs from an ordinary line), and `more` lines."""
    directory.mkdir(parents=True)
    values = {section: keys | config.get(section, {}) for section, keys in CONFIG.items()}
    text = json.dumps(values).replace("DIR", str(directory))
    (directory / "config.yaml").write_text(text)
    common = {"split": "train", "loss": 1.0, "mesh": [2, 4], "segment": 0, "mfu": None, "tokens_per_second": 10.0}
    found = [common | {"step": number} | step for number, step in enumerate(steps, 1)] + [*more]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return directory


def validation(step: int, loss: float | None, **more) -> dict:
    return {"split": "validation", "step": step, "loss": loss, "mesh": [2, 4], "segment": 0} | more


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that reports draw."""
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or save(figure, *a, **k))
    return drawn


def curves(figure) -> list[tuple[list, list]]:
    """(steps, values) of each solid or dashed line of a chart."""
    found = [line for line in figure.axes[0].lines if line.get_linewidth() == 1.2]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in found]


def test_a_report_shows_what_the_files_of_a_run_record(uninterrupted, tmp_path, figures):
    run = uninterrupted / "run"
    shown = Page(write_report([run], tmp_path / "report.html"))
    rows = {row[0]: row[1:] for row in shown.rows()}
    steps, evaluated = lines(uninterrupted), lines(uninterrupted, "validation")
    assert rows["steps"] == [f"{STEPS} of {STEPS}"] and rows["skipped steps"] == ["0"]
    assert rows["loss"] == [f"{steps[-1]['loss']:.4f}"]
    assert rows["validation loss"] == [f"{evaluated[-1]['loss']:.4f}"]
    spent = Counter[str]()
    for span in map(json.loads, (run / "time.jsonl").read_text().splitlines()):
        spent[span["cause"]] += span["seconds"]
    for category, seconds in ((TimeCategory(cause), seconds) for cause, seconds in spent.items() if seconds >= 0.1):
        assert rows[LABELS[category]][:2] == [f"{seconds:,.1f}", f"{seconds / spent.total():.1%}"]
    speed = median(line["tokens_per_second"] for line in steps)
    assert rows[str(run)] == ["dp=2, mp=4", f"1 to {STEPS}", f"{speed:,.0f}", ""]
    assert rows["model.width"] == ["32", "128"] and "optimizer.name" not in rows
    assert f"{run}/checkpoints: 8, 6, 4" in shown.words
    assert f"--cfg {run}/config.yaml train.steps={2 * STEPS} --resume" in shown.words
    names = ["loss", "tokens_per_second", "learning_rate", "grad_norm"]
    assert [curves(figure) for figure in figures] == [
        [([line["step"] for line in steps], [line[name] for line in steps])] for name in names
    ]
    rates = [line["learning_rate"] for line in steps]
    assert f"{rates[0]:,.4g} at step 1, to {rates[-1]:,.4g} at step {STEPS}" in shown.words


def test_a_run_that_was_killed_and_resumed_on_another_mesh_shows_each_start(tmp_path, figures):
    """Nothing is left of the lost steps 4 and 5, nor of their sample."""
    resumed = [{"segment": 1, "mesh": [8, 1], "step": step, "loss": 1 - step / 10} for step in (4, 5, 6)]
    third = {"segment": 2, "mesh": [2, 4], "step": 6, "loss": 0.3}
    run = write_run(tmp_path / "run", [{"loss": 1 - step / 10} for step in range(1, 6)] + resumed + [third])
    samples = [{"step": 3, "prompt": "a", "text": "A kept sample"}, {"step": 7, "prompt": "a", "text": "A lost sample"}]
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    shown = page(run)
    assert [row[1:3] for row in shown.rows() if row[0] == str(run)] == [
        ["dp=2, mp=4", "1 to 3"], ["dp=8, mp=1", "4 to 5"], ["dp=2, mp=4", "6 to 6"]
    ]  # fmt: skip
    assert "A kept sample" in shown.words and "A lost sample" not in shown.words
    assert [steps for steps, _ in curves(figures[0])] == [[1, 2, 3], [4, 5], [6]]
    first, second, third = (line.get_color() for line in figures[0].axes[0].lines if line.get_linewidth() == 1.2)
    assert first == third != second
    assert {"mesh dp=2, mp=4", "mesh dp=8, mp=1"} == {t.get_text() for t in figures[0].axes[0].get_legend().get_texts()}
    assert [line.get_xdata()[0] for line in figures[0].axes[0].lines if line.get_linestyle() == ":"] == [3.5, 5.5]


def test_the_nearest_packaged_configuration_is_the_recipe_that_a_run_started_from(tmp_path):
    recipe = CONF / "recipes" / "gpt2_124m_1gpu.yaml"
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(recipe, ["train.steps=7", "optimizer.decay_steps=7", "mesh.zero=none"])))
    name, values = nearest_packaged(flat_values(file))
    assert name == "conf/recipes/gpt2_124m_1gpu.yaml" and values["train.steps"] == load(recipe, []).train.steps


def test_runs_side_by_side_have_a_curve_each_and_a_table_of_what_differs(tmp_path, figures):
    one = write_run(tmp_path / "one", [{}, {}], validation(2, 0.5))
    other = write_run(tmp_path / "other", [{}], model={"name": "gpt2", "vocabulary": 50304}, train={"steps": 1})
    shown = page(one, other)
    assert [len(steps) for steps, _ in curves(figures[0])] == [2, 1]
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert labels[:2] == [str(one), str(other)]
    rows = {row[0]: row[1:] for row in shown.rows()}
    assert rows["model"] == ["bytes", "gpt2"] and rows["steps"] == ["2 of 6", "1 of 1"]
    assert rows["train.steps"] == ["6", "1"] and "optimizer.learning_rate" not in rows
    assert "Their vocabularies differ: bits per byte can be compared" in shown.words
    assert f"To continue of {one}" in shown.words and f"To continue of {other}" in shown.words


def test_a_directory_whose_name_begins_with_a_dash_or_an_underscore_is_shown(tmp_path, monkeypatch, figures):
    monkeypatch.chdir(tmp_path)
    shown = page(write_run(Path("-one"), [{}]), write_run(Path("_other"), [{}]))
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()][:2] == ["./-one", "./_other"]
    assert "--cfg ./-one/config.yaml --resume" in shown.words


def test_values_that_are_not_finite_and_skipped_steps_are_counted(tmp_path, figures):
    steps = [{"loss": None, "why_skipped": "loss nan"}, {"loss": 2.0, "tokens_per_second": 98765.4}, {"loss": 1.5}]
    shown = page(write_run(tmp_path / "run", steps, validation(3, None), validation(3, 1.25, source="code")))
    words = "2 at step 2, to 1.5 at step 3, lowest 1.5 at step 3, highest 2 at step 2. 1 of 3 values are not"
    assert words in shown.words
    assert "highest 98,765 at step 2" in shown.words
    assert "Validation nan at step 3, code 1.2500" in shown.words
    assert ["1", "loss nan"] in shown.rows() and {row[0]: row[1:] for row in shown.rows()}["skipped steps"] == ["1"]
    (marks,) = [line for line in figures[0].axes[0].lines if line.get_marker() == "|"]
    assert list(marks.get_xdata()) == [1]
    nothing = page(write_run(tmp_path / "nothing", [{"loss": None}] * 2))
    assert "2 of 2 values are not finite" in nothing.words


def test_a_run_without_a_step_and_one_that_is_being_written_have_a_report(tmp_path):
    empty = write_run(tmp_path / "empty", [])
    assert ["steps", "0 of 6"] in page(empty).rows() and "figure" not in page(empty).tags
    (empty / "metrics.jsonl").unlink()
    assert "--resume" in page(empty).words and "train.steps=12" not in page(empty).words
    under_way = write_run(tmp_path / "under way", [{"time": "1970-01-01T00:00:40+00:00", "skipped_in_a_row": 0}])
    with (under_way / "metrics.jsonl").open("a") as stream:
        stream.write('{"split": "train", "st')
    start = {"cause": "start", "begin": 0.0, "seconds": 30.0, "first": 0, "new": True}
    (under_way / "time.jsonl").write_text(json.dumps(start) + "\n")
    rows = page(under_way).rows()
    assert ["steps", "1 of 6"] in rows and ["goodput", "25.0%"] in rows, "10 s of 40 since the start, not yet written"
    assert f"--cfg '{under_way}/config.yaml' --resume" in page(under_way).words, "quoted for the shell"


def test_a_damaged_value_of_a_line_ends_neither_a_report_nor_a_start(tmp_path):
    """Each value of each file is of another type, or is missing, in a line before and one after the good lines."""
    at = {"time": "1970-01-01T00:00:40+00:00", "skipped_in_a_row": 0, "why_skipped": "spike"}
    run = write_run(tmp_path / "run", [at, at], validation(2, 1.0, source="code"))
    start = {"cause": "start", "begin": 0.0, "seconds": 30.0, "first": 0, "new": True}
    steps = {"cause": "steps", "begin": 30.0, "seconds": 5.0, "first": 0, "last": 1, "skipped": 0}
    more = {"time.jsonl": [start, steps], "samples.jsonl": [{"step": 2, "prompt": "1+", "text": "1=2"}]}
    more["metrics.jsonl"] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, good in more.items():
        bad = [line | {key: value} for line in good for key in line for value in ("x", None, [], [1], {"a": 1})]
        bad += [{other: line[other] for other in line if other != key} for line in good for key in line]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in [*bad, *good, *bad]))
    rows = page(run).rows()
    assert ["steps", "2 of 6"] in rows and ["1", "spike"] in rows
    config = load(str(CONF / "base.yaml"), [f"run.dir={run}"])
    with metrics.Recorder(config, 2, enabled=True) as recorder:
        assert recorder.has_validation


def test_no_text_of_a_file_is_markup_and_nothing_is_fetched(tmp_path):
    evil = '<script src="http://x">\ud800\x1b'
    steps = [{"loss": 2.0, "why_skipped": evil}, {}]
    run = write_run(tmp_path / r"<script>$\no$", steps, validation(2, 1.0, source=evil), run={"name": evil})
    sample = {"step": 1, "prompt": evil, "text": "</pre><img src=x onerror=y> & http://x"}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    shown = page(run, write_run(tmp_path / "other", [{}], validation(1, 3.0)))
    assert not {"script", "img", "link", "iframe", "image", "use"} & {tag for tag in shown.tags if tag != "use"}
    assert "</pre><img src=x onerror=y> & http://x" in shown.text
    assert '<script src="http://x">\\xd800\\x1b' in shown.text
    fetching = {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}
    assert all(value.startswith("#") for name, value in shown.attributes if name in fetching)
    style = " ".join(re.findall(r"<style.*?</style>", shown.html, re.DOTALL) + [v for n, v in shown.attributes if v])
    assert "@import" not in style and set(re.findall(r"url\((.)", style)) <= {"#"}


def test_every_chart_has_its_numbers_in_words(uninterrupted, tmp_path):
    shown = Page(write_report([uninterrupted / "run"], tmp_path / "report.html"))
    pattern = r"<figure><h3>(.+?)</h3><svg role=\"img\".*?</svg><figcaption>(.*?)</figcaption>"
    charts = re.findall(pattern, shown.html, re.S)
    assert len(charts) == shown.tags.count("svg") == 4
    assert all(re.search(r"\d at step 1, to .*\d at step 8, lowest .* highest ", words) for _, words in charts)
    assert not {*run_report.COLOURS, run_report.INK, run_report.FAINT} & {*re.findall("#[0-9a-f]{6}", shown.html)}


def test_a_long_curve_is_means_of_neighbours_with_their_range():
    steps = np.arange(1, 3 * MOST_POINTS)  # one step is missing in the last group
    points = np.stack([steps, steps % 3], 1).astype(float)
    points[1, 1] = points[6:9, 1] = math.nan
    where, means, low, high = thinned(points)
    assert len(where) == MOST_POINTS and list(where[:2]) == [2, 5] and where[-1] == 3 * MOST_POINTS - 1.5
    assert list(zip(means, low, high, strict=True))[:2] == [(0.5, 0, 1), (1, 0, 2)]
    assert np.isnan(means[2]) and means[-1] == 1.5


def test_a_path_without_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("run: 3")
    for name in ("missing", "other"):
        assert report.main([str(tmp_path / name)]) == 2
        assert f"{name} has no config.yaml of a run; name a run.dir, such as runs/first" in capsys.readouterr().err
    run = write_run(tmp_path / "run", [{}])
    assert report.main([str(run)]) == 0 and capsys.readouterr().out == f"{run}/report.html\n"
    assert report.main([str(run), "--out", f"{run}/no/such"]) == 2 and "could not be written" in capsys.readouterr().err


def test_an_evaluation_renews_the_report_in_another_process(tmp_path, monkeypatch, capsys):
    """Which is not waited for; one at a time; and one that fails or cannot start is reported."""
    run = write_run(tmp_path / "run", [{}])
    monkeypatch.setenv("PYTHONPATH", "")
    renewal = metrics.ReportRenewal(run)
    renewal.write(validation(1, 1.0))
    assert renewal._process is None, "it has just started"
    monkeypatch.setattr(metrics, "RENEWAL_SECONDS", 0)
    renewal.write({"split": "train"})
    assert renewal._process is None
    renewal.write(validation(1, 1.0))
    first = renewal._process
    renewal.write(validation(1, 1.0))
    assert renewal._process is first
    assert first.wait() == 0 and ["steps", "1 of 6"] in Page(run / "report.html").rows()
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho error: no run >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(metrics.sys, "executable", str(program))
    renewal.write(validation(1, 1.0))
    assert renewal._process is not first and not capsys.readouterr().out
    renewal._process.wait()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    renewal.write(validation(1, 1.0))
    assert "the report was not renewed: error: no run" in capsys.readouterr().out
    last = renewal._process
    renewal.close()
    assert last.returncode == -9
    program.unlink()
    renewal.write(validation(1, 1.0))
    assert "the report was not renewed: No such file" in capsys.readouterr().out, "and the run goes on"


@pytest.mark.slow
def test_a_browser_shows_a_report_on_a_phone_without_scrolling_sideways(uninterrupted, tmp_path):
    if not (browser := shutil.which("chromium")):
        pytest.skip("no chromium")
    shown = Page(write_report([uninterrupted / "run"], tmp_path / "report.html"))
    measured = tmp_path / "measured.html"
    script = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></html>"
    measured.write_text(shown.html.replace("</html>", script))
    given = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,900", "--dump-dom"]
    done = subprocess.run([browser, *given, f"file://{measured}"], capture_output=True, text=True, timeout=120)
    width, inner = map(int, re.search(r"<title>(\d+) of (\d+)</title>", done.stdout).groups())
    assert width <= inner < 600 and done.stdout.count("<svg") == shown.tags.count("svg")


def test_reading_a_run_leaves_it_as_it_is(uninterrupted):
    before = {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*")}
    assert read_run(uninterrupted / "run").finished
    assert before == {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*")}
