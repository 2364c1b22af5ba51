"""`python -m shmap_tp.plan --devices N`: what a search prints and writes, and short errors for mistakes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from result_format import read_rows

from shmap_tp.config.compose import load
from shmap_tp.errors import UserError
from shmap_tp.plan import __main__ as planner
from shmap_tp.plan.benchmark import check_outputs
from shmap_tp.plan.report import Row
from shmap_tp.plan.search import command
from shmap_tp.plan.search.candidates import Result
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.exit_codes import INTERRUPTED, STOPPED
from tests.helpers.paths import ROOT

SEARCH = ["--version", "v5e", "--devices", "4", "--model", "test", "--batch", "16"]
FEW = ["mesh.mp=1", "model.offload=[]"]
"""Keys that make a search small."""


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # xdist has 80


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(command, "compiler_missing", lambda target: "the compiler is not installed")
    monkeypatch.chdir(ROOT)


class CompiledAtOnce:
    """Stands in for a compilation of any candidate: a recorded row, at once."""

    def __init__(self, estimated, config, target):
        self.estimated = estimated
        self.row = Row(**next(row for row in read_rows("tpu") if row["kind"] == "predicted"))

    def poll(self) -> Result:
        return replace(self.estimated, row=self.row, compile_seconds=1.0)

    def stop(self) -> None:
        pass


def plan(*arguments: str) -> None:
    planner.main(planner.make_parser().parse_args(arguments))


def words_of(printed: str) -> list[str]:
    """The words of the command that a search ends with, after --cfg FILE."""
    lines = printed.replace(" \\\n", " ").splitlines()
    line = next(line for line in lines if line.startswith("  python main.py --cfg "))
    return shlex.split(line)[4:]


def test_without_a_compiler_the_formulas_rank_and_it_is_said_once(without_compiler, capsys, tmp_path):
    plan(*SEARCH, *FEW[1:], "--recipe", str(recipe := tmp_path / "fastest.yaml"))
    printed = capsys.readouterr().out
    assert printed.count("the compiler is not installed: candidates are ranked by formulas only") == 1
    assert "  formulas  " in printed and "  compiled  " not in printed
    assert "fastest (formulas): (" in printed and "by formulas only: on models that were left out" in printed
    chosen = load("conf/config.yaml", words_of(printed))
    assert load(str(recipe), []) == chosen and chosen.train.batch == 16 and chosen.mesh.dp * chosen.mesh.mp == 4


def test_the_fastest_is_the_smallest_of_equally_fast_candidates(without_compiler, capsys):
    """GPT-2: the formulas do not charge the recomputation of all_matmuls, and `none` saves more."""
    plan("--version", "v5e", "--devices", "8", "--model", "gpt2", "mesh.mp=1", "mesh.zero=zero1", *FEW[1:])
    printed = capsys.readouterr().out
    first = printed.split("candidate\n")[1].splitlines()[0]
    assert first.startswith("*") and first.endswith(printed.split("fastest (formulas): ")[1].splitlines()[0])


def test_keys_on_the_command_line_are_kept(without_compiler, capsys):
    without_batch = SEARCH[: SEARCH.index("--batch")]
    plan(
        *without_batch, "train.batch=8", "mesh.mp=2", "model.remat=full", "train.precision=bfloat16", "--context", "32"
    )
    chosen = load("conf/config.yaml", words_of(capsys.readouterr().out))
    assert chosen.train.batch == 8
    assert (chosen.mesh.mp, chosen.model.remat, chosen.train.precision) == (2, "full", "bfloat16")
    assert chosen.model.context == 32


def test_batch_and_context_can_be_given_as_keys(without_compiler, capsys):
    plan("--version", "v5e", "--devices", "4", "--model", "test", "train.batch=8", "model.context=16", *FEW)
    printed = capsys.readouterr().out
    words = words_of(printed)
    assert "8 sequences of 16 = 128 tokens a step" in printed
    assert words.count("train.batch=8") == words.count("model.context=16") == 1
    assert len(words) == len({word.split("=")[0] for word in words})


def test_a_file_is_searched_with_its_own_batch(without_compiler, capsys):
    plan("--version", "v5e", "--devices", "16", "--cfg", "conf/recipes/gpt2_124m_v5e-8.yaml", *FEW)
    words = words_of(capsys.readouterr().out)
    batch = load("conf/recipes/gpt2_124m_v5e-8.yaml", []).train.batch
    assert f"train.batch={batch}" in words
    assert load("conf/recipes/gpt2_124m_v5e-8.yaml", words).mesh.dp == 16


def test_gpu_nodes_are_searched(without_compiler, capsys):
    plan("--version", "h100", "--nodes", "1", "--model", "test", "--batch", "16", *FEW)
    printed = capsys.readouterr().out
    assert "test on 1 x 8 NVIDIA H100 80GB HBM3: 16 sequences" in printed
    assert load("conf/config.yaml", words_of(printed)).mesh.processes == 1


def test_nodes_of_several_kinds_of_gpu_are_searched(without_compiler, capsys):
    plan("--versions", "h100,b200", "--nodes", "1", "--model", "test", "--batch", "16", "train.microbatches=1", *FEW)
    summary = capsys.readouterr().out.split("the fastest of each, its speed as predicted\n")[1].splitlines()
    assert [line.split(":")[0] for line in summary[::2]] == ["  1 x 8 NVIDIA H100 80GB HBM3", "  1 x 8 NVIDIA B200"]


def test_time_and_cost_are_given_for_every_slice(without_compiler, capsys):
    plan(
        "--versions", "v5e,v6e", "--devices", "4,16", "--model", "test", "--batch", "16",
        "--tokens", "1T", "--price", "v5e=1.2,v6e=2.7", *FEW,
    )  # fmt: skip
    printed = capsys.readouterr().out
    summary = printed.split("the fastest of each, its speed as predicted\n")[1].splitlines()
    assert [line.split(" (")[0] for line in summary[::3]] == ["  v5e 2x2", "  v5e 4x4", "  v6e 2x2", "  v6e 4x4"]
    constants = ["at 1.24 (1.18 to 1.30) times the step"] * 2 + ["at 1.12 (1.05 to 1.18) times the step"] * 2
    assert all(constant in line for constant, line in zip(constants, summary[2::3], strict=True))
    days, dollars = (summary[5].split(f" {name}")[0].split()[-1].replace(",", "") for name in ("days", "dollars"))
    assert float(dollars) == pytest.approx(float(days) * 24 * 16 * 1.2, rel=0.02)
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("why", ["the time is up", "stopped"])
def test_of_several_slices_those_that_were_not_compiled_are_named_and_the_cheapest_is_first(why, monkeypatch, capsys):
    class Endless(CompiledAtOnce):
        def poll(self) -> None:
            if why == "stopped":
                raise KeyboardInterrupt

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "compiler_missing", lambda target: None)
    monkeypatch.setattr(command, "ChildProcess", Endless)
    flags = "--versions v5e,v6e --devices 4 --model test --batch 16 --minutes 0.01 --tokens 1T --price v5e=9,v6e=1"
    with pytest.raises(SystemExit) if why == "stopped" else nullcontext():
        plan(*flags.split(), *FEW)
    printed = capsys.readouterr().out
    assert printed.count(f"(formulas: {why})") == 2
    order = ["\ntest on v6e 2x2 (4 chips, 4 devices)\n", "s until one fits", "\ntest on v5e 2x2 (4 chips, 4 devices)\n"]
    assert sorted(order, key=printed.index) == order


def test_a_model_that_fits_nowhere_is_said_to_need_more(without_compiler):
    with pytest.raises(UserError) as caught:
        plan(
            "--version", "v5e", "--devices", "4", "--model", "llama3_70b", "--batch", "4", "mesh.mp=4", "mesh.zero=none"
        )
    message = str(caught.value)
    assert "needs about" in message and "of 15.8 GiB per device" in message and "use more devices" in message
    assert len(message.splitlines()) == 2


MISTAKES = {
    "--price 1": "--price needs --tokens",
    "--tokens 1e9 --price free": "--price free is no price",
    "--tokens 1e9 --price v5e=1,v6e": "--price v5e=1,v6e is no price",
    "--tokens 1e9 --price v6e=1": "--price v6e=1 has no price of 0 or more for v5e",
    "--tokens 1e9 --price v5e=1,v9=2": "v9 is not searched",
    "--tokens -1": "--tokens -1 must be above 0",
    "--slices 0": "--slices 0 is too small; it must be 1 or more",
    "mesh.slices=2": "mesh.slices follows from the devices that are searched; omit it",
    "--minutes 0": "--minutes 0 must be above 0",
    "mesh.dp=3": "trains test with train.batch=16 and mesh.dp=3 and mesh.mp=1 and model.offload=[];",
    "train.microbatches=0": "mesh.mp=1 and train.microbatches=0",
    "--recipe nowhere/x.yaml": "--recipe nowhere/x.yaml: cannot be written",
    "--json x.yaml --recipe x.yaml": "--json and --recipe are both x.yaml; choose another file for one of them",
    "--recipe /proc/x.yaml": "--recipe /proc/x.yaml: cannot be written",
    "--json /proc/x.jsonl": "--json /proc/x.jsonl: cannot be written",
    "--recipe README.md": "--recipe README.md exists; delete it, or choose another file",
    "--devices 4,16 --recipe x.yaml": "--recipe x.yaml holds one configuration, and 2 slices are searched",
    "--json nowhere/x.jsonl": "--json nowhere/x.jsonl: cannot be written",
    "model.remat=most": "model.remat=most: most is none of none, full",
    "model.row_major=maybe": "model.row_major=maybe: maybe is none of false, true",
    "model.offload=[gate,all]": "model.offload=[gate,all]: all is none of input, sublayer_output",
    "mesh.dp=two": "mesh.dp=two is no whole number",
    "--json new.jsonl": "--json new.jsonl takes compiled steps, and the compiler is not installed;",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(mistake, without_compiler):
    with pytest.raises(UserError) as caught:
        plan(*SEARCH, *FEW, *mistake.split())
    assert MISTAKES[mistake] in str(caught.value) and len(str(caught.value).splitlines()) <= 2


def test_an_output_is_checked_before_anything_is_compiled_and_is_not_touched(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "predict", lambda *given, **more: pytest.fail("it compiles"))
    with pytest.raises(UserError, match=r"--plot /proc/x\.png: cannot be written"):
        plan("--dp", "2", "--mp", "2", "--version", "v5e", "--model", "test", "--plot", "/proc/x.png")
    new, old, pipe = (tmp_path / name for name in ("new", "old", "pipe"))
    old.write_text("rows")
    os.mkfifo(pipe)
    for file in (new, old, pipe):
        check_outputs(planner.make_parser().parse_args(["--json", str(file)]))
    assert not new.exists() and old.read_text() == "rows"


def test_of_several_slices_each_says_what_it_lacks_and_how_it_would_fit(without_compiler, capsys):
    sizes = ["--versions", "v5e,v6e", "--devices", "4", "--model", "llama3_70b", "--batch", "4", "mesh.mp=4"]
    with pytest.raises(UserError, match="nothing that was searched fits"):
        plan(*sizes, "mesh.zero=none")
    printed = capsys.readouterr().out
    during, summary = printed.split("\nthe fastest of each")
    assert during.count("GiB per device") == during.count("use more devices") == 2
    assert summary.count(": nothing: the smallest, ") == 2, "no target goes without a line"


def test_a_file_that_cannot_be_written_any_more_keeps_what_was_found(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "compiler_missing", lambda target: None)
    monkeypatch.setattr(command, "ChildProcess", CompiledAtOnce)
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device"):
        plan(*SEARCH, *FEW, "--json", "/dev/full")
    printed = capsys.readouterr().out
    assert "1 compiled, 1 of them fit" in printed and "fastest (compiled): (4, 1)" in printed


def test_where_no_compiled_step_fits_the_smallest_of_them_is_named(monkeypatch, capsys):
    class TooLarge(CompiledAtOnce):
        def __init__(self, estimated, config, target):
            super().__init__(estimated, config, target)
            self.row = replace(self.row, fits=False, step_seconds=None, peak_bytes_per_device=20 * 2**30)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "compiler_missing", lambda target: None)
    monkeypatch.setattr(command, "ChildProcess", TooLarge)
    with pytest.raises(UserError, match="nothing that was searched fits"):
        plan(*SEARCH, *FEW, "mesh.zero=fsdp", "train.microbatches=1")
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing that was compiled fits; the smallest, (4, 1) fsdp" in printed
    assert "needs about 20.0 of 15.8 GiB per device" in printed


def test_after_a_near_miss_the_formulas_give_an_answer_that_is_marked_so(monkeypatch, capsys, tmp_path):
    class NearMiss(CompiledAtOnce):
        """The first compilation does not fit, and no other ends."""

        ended = False

        def poll(self) -> Result | None:
            if NearMiss.ended:
                return None
            NearMiss.ended = True
            row = replace(self.row, fits=False, step_seconds=None, peak_bytes_per_device=int(self.estimated.peak_bytes))
            return replace(self.estimated, row=row, compile_seconds=1.0)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "compiler_missing", lambda target: None)
    monkeypatch.setattr(command, "ChildProcess", NearMiss)
    plan(*SEARCH, *FEW, "--minutes", "0.01", "--recipe", str(recipe := tmp_path / "fastest.yaml"))
    printed = capsys.readouterr().out
    assert "nothing that was compiled fits; by formulas others do, of which this is the fastest" in printed
    assert "fastest (formulas): (4, 1)" in printed and "by formulas only: on models that were left out" in printed
    assert load(str(recipe), []) == load("conf/config.yaml", words_of(printed))
    assert ", formulas: python" in recipe.read_text().splitlines()[0]


def test_ctrl_c_before_anything_is_compiled_has_no_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "search_command", interrupted)
    assert run_command(lambda: plan(*SEARCH)) == INTERRUPTED
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mistake", ["--version v9", "--tokens lots", "--devices"])
def test_a_flag_that_cannot_be_read_takes_two_lines(mistake, capsys):
    with pytest.raises(SystemExit) as caught:
        planner.make_parser().parse_intermixed_args(mistake.split())
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(lines) == 2
    assert lines[0].startswith(f"error: argument {mistake.split()[0]}: ") and lines[1] == "--help lists the flags"


@pytest.mark.parametrize(
    ("flags", "explained"),
    [
        ("--versions v5e,v9 --devices 4", "--versions v9: unknown; use some of v2, v3"),
        ("--version v5e --versions v6e --devices 4", "--version and --versions both name the devices; give one"),
        ("--version h100 --nodes 1 --devices 16", "--nodes and --devices both give the number of devices; give one"),
        ("--versions h100,v5e --nodes 1", "--nodes 1 is for GPUs (a100, h100, h200, b200); give --devices for v5e"),
    ],
)
def test_devices_that_are_named_twice_or_by_the_wrong_flag_are_refused(flags, explained, without_compiler):
    with pytest.raises(UserError, match=re.escape(explained)):
        plan(*flags.split(), "--model", "test", "train.microbatches=1", *FEW)


@pytest.mark.parametrize(
    ("flags", "explained"),
    [
        ("--dp 2", "--dp 2 is half a mesh; give --dp and --mp for one mesh, or --devices to search it"),
        ("--devices 4 --mp 2", "--mp 2: a search chooses the mesh; fix it as mesh.dp=N or mesh.mp=N,"),
        ("--devices 4 --decode", "--decode plans generation; omit --devices, and give --dp and --mp"),
        ("--dp 2 --mp 2 --decode --plot x.png", "--decode plans generation; omit --plot"),
        ("--devices 4 --version v5e --slices 0", "--slices 0 is too small; it must be 1 or more"),
    ],
)
def test_flags_that_name_no_mesh_say_what_to_give(flags, explained, without_compiler):
    with pytest.raises(UserError, match=re.escape(explained)):
        plan(*flags.split(), "--model", "test")


def test_flags_of_the_search_are_refused_for_one_mesh():
    with pytest.raises(UserError, match="--minutes applies to the search; give --devices"):
        plan("--dp", "2", "--mp", "2", "--minutes", "3")


def test_devices_that_are_no_number_are_refused(without_compiler):
    with pytest.raises(UserError, match="--devices many is no number of devices"):
        plan("--version", "v5e", "--devices", "many")


def start(*arguments: str) -> subprocess.Popen:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "shmap_tp.plan", *SEARCH, "mesh.mp=1", "model.remat=full", *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_search_compiles_and_keeps_what_was_found_when_it_is_stopped(tmp_path):
    pytest.importorskip("libtpu")
    process = start("--json", str(rows := tmp_path / "rows.jsonl"), "--jobs", "1")
    end = time.monotonic() + 120
    while not rows.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, STOPPED), err
    assert json.loads(rows.read_text().splitlines()[0])["kind"] == "predicted"
    assert "fastest (compiled): (4, 1)" in out and "calibration: 8 published runs" in out
    assert " of them fit; " in out and " were not compiled (" in out
