"""`python -m shmap_tp.plan search`: what a search prints and writes, and short errors for mistakes."""

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
from shmap_tp.plan.flags import check_outputs
from shmap_tp.plan.report import Row
from shmap_tp.plan.search import command
from shmap_tp.plan.search.candidates import Result
from shmap_tp.runtime.command_line import run_command
from shmap_tp.runtime.exit_codes import INTERRUPTED, STOPPED
from tests.helpers.fresh_process import ctrl_c_of_a_terminal
from tests.helpers.paths import ROOT

SEARCH = "search --version v5e --devices 4 --model test --batch 16"
BOTH = "search --version v5e,v6e --devices 4 --model test --batch 16"
FEW = "mesh.mp=1 model.remat=full model.offload=[]"
"""Keys that make a search small."""


@pytest.fixture(autouse=True)
def place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # xdist has 80
    monkeypatch.chdir(ROOT)


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(command, "compiler_missing", lambda target: "the compiler is not installed")


@pytest.fixture
def compile_by(monkeypatch):
    """compile_by(CLASS) sets what stands in for a child process that compiles."""
    monkeypatch.setattr(command, "compiler_missing", lambda target: None)
    return lambda made: monkeypatch.setattr(command, "ChildProcess", made)


class CompiledAtOnce:
    """Stands in for a compilation of any candidate: a recorded row, at once."""

    def __init__(self, estimated, config, target):
        self.estimated = estimated
        self.row = Row(**next(row for row in read_rows("tpu") if row["kind"] == "predicted"))

    def poll(self) -> Result:
        return replace(self.estimated, row=self.row, compile_seconds=1.0)

    def stop(self) -> None:
        pass

    def too_large(self, size: float) -> Result:
        row = replace(self.row, fits=False, step_seconds=None, peak_bytes_per_device=int(size))
        return replace(self.estimated, row=row, compile_seconds=1.0)


def plan(flags: str) -> None:
    planner.main(planner.parse(flags.split()))


def words_of(printed: str) -> list[str]:
    """The words of the command that a search ends with, after --cfg FILE."""
    lines = printed.replace(" \\\n", " ").splitlines()
    line = next(line for line in lines if line.startswith("  python main.py --cfg "))
    return shlex.split(line)[4:]


def summary_of(printed: str) -> list[str]:
    return printed.split("the fastest of each, its speed as predicted\n")[1].splitlines()


def test_without_a_compiler_the_formulas_rank_and_it_is_said_once(without_compiler, capsys, tmp_path):
    plan(f"{SEARCH} {FEW} --recipe {tmp_path / 'fastest.yaml'}")
    printed = capsys.readouterr().out
    assert printed.count("the compiler is not installed: candidates are ranked by formulas only") == 1
    assert "  formulas  " in printed and "  compiled  " not in printed
    assert "fastest (formulas): (" in printed and "by formulas only: on models that were left out" in printed
    chosen = load("conf/base.yaml", words_of(printed))
    assert load(str(tmp_path / "fastest.yaml"), []) == chosen
    assert chosen.train.batch == 16 and chosen.mesh.dp * chosen.mesh.mp == 4


def test_the_fastest_is_the_smallest_of_equally_fast_candidates(without_compiler, capsys):
    """GPT-2: the formulas do not charge the recomputation of all_matmuls, and `none` saves more."""
    plan("search --version v5e --devices 8 --model gpt2 mesh.mp=1 mesh.zero=zero1 model.offload=[]")
    printed = capsys.readouterr().out
    first = printed.split("candidate\n")[1].splitlines()[0]
    assert first.startswith("*") and first.endswith(printed.split("fastest (formulas): ")[1].splitlines()[0])


def test_what_is_given_as_a_key_or_a_flag_is_kept(without_compiler, capsys):
    keys = "train.batch=8 mesh.mp=2 model.remat=full train.precision=bfloat16"
    plan(f"search --version v5e --devices 4 --model test --context 32 {keys}")
    printed = capsys.readouterr().out
    words = words_of(printed)
    chosen = load("conf/base.yaml", words)
    assert "8 sequences of 32 = 256 tokens a step" in printed
    assert (chosen.train.batch, chosen.mesh.mp, chosen.model.context) == (8, 2, 32)
    assert (chosen.model.remat, chosen.train.precision) == ("full", "bfloat16")
    assert words.count("train.batch=8") == words.count("model.context=32") == 1
    assert len(words) == len({word.split("=")[0] for word in words})


def test_a_file_is_searched_with_its_own_batch(without_compiler, capsys):
    plan(f"search --version v5e --devices 16 --cfg conf/recipes/gpt2_124m_v5e-8.yaml {FEW}")
    words = words_of(capsys.readouterr().out)
    batch = load("conf/recipes/gpt2_124m_v5e-8.yaml", []).train.batch
    assert f"train.batch={batch}" in words
    assert load("conf/recipes/gpt2_124m_v5e-8.yaml", words).mesh.dp == 16


def test_gpu_nodes_of_one_kind_and_of_several_are_searched(without_compiler, capsys):
    plan(f"search --version h100 --nodes 1 --model test --batch 16 {FEW}")
    printed = capsys.readouterr().out
    assert "test on 1 x 8 NVIDIA H100 80GB HBM3: 16 sequences" in printed
    assert load("conf/base.yaml", words_of(printed)).mesh.processes == 1
    plan(f"search --version h100,b200 --nodes 1 --model test --batch 16 train.microbatches=1 {FEW}")
    names = [line.split(":")[0] for line in summary_of(capsys.readouterr().out)[::2]]
    assert names == ["  1 x 8 NVIDIA H100 80GB HBM3", "  1 x 8 NVIDIA B200"]


def test_time_and_cost_are_given_for_every_slice(without_compiler, capsys):
    plan(f"{BOTH} --devices 4,16 --tokens 1T --price v5e=1.2,v6e=2.7 {FEW}")
    printed = capsys.readouterr().out
    summary = summary_of(printed)
    assert [line.split(" (")[0] for line in summary[::3]] == ["  v5e 2x2", "  v5e 4x4", "  v6e 2x2", "  v6e 4x4"]
    constants = ["at 1.24 (1.18 to 1.30) times the step"] * 2 + ["at 1.12 (1.05 to 1.18) times the step"] * 2
    assert all(constant in line for constant, line in zip(constants, summary[2::3], strict=True))
    days, dollars = (summary[5].split(f" {name}")[0].split()[-1].replace(",", "") for name in ("days", "dollars"))
    assert float(dollars) == pytest.approx(float(days) * 24 * 16 * 1.2, rel=0.02)
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("why", ["the time is up", "stopped"])
def test_of_several_slices_those_that_were_not_compiled_are_named_and_the_cheapest_is_first(why, compile_by, capsys):
    class Endless(CompiledAtOnce):
        def poll(self) -> None:
            if why == "stopped":
                raise KeyboardInterrupt

    compile_by(Endless)
    with pytest.raises(SystemExit) if why == "stopped" else nullcontext():
        plan(f"{BOTH} --minutes 0.01 --tokens 1T --price v5e=9,v6e=1 {FEW}")
    printed = capsys.readouterr().out
    assert printed.count(f"(formulas: {why})") == 2
    order = ["\ntest on v6e 2x2 (4 chips, 4 devices)\n", "s until one fits", "\ntest on v5e 2x2 (4 chips, 4 devices)\n"]
    assert sorted(order, key=printed.index) == order


def test_a_model_that_fits_nowhere_is_said_to_need_more_for_one_slice_and_for_each_of_several(without_compiler, capsys):
    large = "--devices 4 --model llama3_70b --batch 4 mesh.mp=4 mesh.zero=none model.remat=full model.offload=[]"
    with pytest.raises(UserError) as caught:
        plan(f"search --version v5e {large}")
    message = str(caught.value)
    assert "needs about" in message and "of 15.8 GiB per device" in message and "use more devices" in message
    assert len(message.splitlines()) == 2
    capsys.readouterr()
    with pytest.raises(UserError, match="nothing that was searched fits"):
        plan(f"search --version v5e,v6e {large}")
    during, summary = capsys.readouterr().out.split("\nthe fastest of each")
    assert during.count("GiB per device") == during.count("use more devices") == 2
    assert summary.count(": nothing: the smallest, ") == 2, "no target goes without a line"


OF_TEST = "search --model test train.microbatches=1"
OF_MESH = "--dp 2 --mp 2 --model test"
MISTAKES = {
    f"{SEARCH} --price 1": "--price needs --tokens",
    f"{SEARCH} --tokens 1e9 --price free": "--price free is no price",
    f"{SEARCH} --tokens 1e9 --price v5e=1,v6e": "--price v5e=1,v6e is no price",
    f"{SEARCH} --tokens 1e9 --price v6e=1": "--price v6e=1 has no price of 0 or more for v5e",
    f"{SEARCH} --tokens 1e9 --price v5e=1,v9=2": "v9 is not searched",
    f"{SEARCH} --tokens -1": "--tokens -1 must be above 0",
    f"{SEARCH} --slices 0": "--slices 0 is too small; it must be 1 or more",
    f"{SEARCH} mesh.slices=2": "mesh.slices follows from the devices that are searched; omit it",
    f"{SEARCH} --minutes 0": "--minutes 0 must be above 0",
    f"{SEARCH} {FEW} mesh.dp=3": "trains test with train.batch=16 and mesh.dp=3 and mesh.mp=1 and model.remat=full and",
    f"{SEARCH} {FEW} train.microbatches=0": "mesh.mp=1 and train.microbatches=0",
    f"{SEARCH} --recipe nowhere/x.yaml": "--recipe nowhere/x.yaml cannot be written: ",
    f"{SEARCH} --json x.yaml --recipe x.yaml": "--json and --recipe are both x.yaml; choose another file for one of",
    f"{SEARCH} --recipe README.md": "--recipe README.md exists; delete it, or choose another file",
    f"{SEARCH} --devices 4,16 --recipe x.yaml": "--recipe x.yaml holds one configuration, and 2 slices are searched",
    f"{SEARCH} --json nowhere/x.jsonl": "--json nowhere/x.jsonl cannot be written: ",
    f"{SEARCH} --json /proc/x.jsonl": "--json /proc/x.jsonl cannot be written: ",
    f"{SEARCH} model.remat=most": "model.remat=most: most is none of none, full",
    f"{SEARCH} model.row_major=maybe": "model.row_major=maybe: maybe is none of false, true",
    f"{SEARCH} model.offload=[gate,all]": "model.offload=[gate,all]: all is none of input, sublayer_output",
    f"{SEARCH} mesh.dp=two": "mesh.dp=two is no whole number",
    f"{SEARCH} {FEW} --json new.jsonl": "--json new.jsonl takes compiled steps, and the compiler is not installed;",
    f"{OF_TEST} --version v5e,v9 --devices 4": "--version v9: unknown; use some of v2, v3",
    f"{OF_TEST} --version h100,v5e --nodes 1": "--nodes 1 is for GPUs (a100, h100, h200, b200); give --devices for",
    f"{OF_TEST} --version v5e --devices many": "--devices many is no number of devices",
    f"{OF_TEST} --devices 5 --version v5e": "there is no v5e slice of 5 devices;",
    "step --model test --dp 2": "give --dp and --mp, or --cfg FILE, which contains them",
    f"step {OF_MESH} --plot /proc/x.png": "--plot /proc/x.png cannot be written: ",
    f"decode {OF_MESH} --version v5e --batch 3": "--batch 3 is not divisible by --dp 2",
    f"decode {OF_MESH} --version v5e --prompt-tokens 500": "tokens, above model.context=",
    f"decode {OF_MESH} --version v5e --new-tokens 0": "--new-tokens 0 is too small",
    f"decode {OF_MESH} --version h100 --dp 4": "generation is planned for TPUs only",
    f"decode {OF_MESH} --version v5e --slices 2 --dp 4": "generation is planned on one slice",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_explained_before_anything_is_compiled(flags, without_compiler, monkeypatch, capsys):
    monkeypatch.setattr(planner, "predict", lambda *given, **more: pytest.fail("it compiles"))
    assert run_command(lambda: plan(flags)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and MISTAKES[flags] in printed and len(printed.splitlines()) <= 2


WRONG_FLAGS = {
    "step --version v9": "argument --version: ",
    "search --devices 4 --tokens lots": "argument --tokens: ",
    "search --devices": "argument --devices: ",
    "search --model test": "one of the arguments --devices --nodes is required",
    "search --nodes 1 --devices 16": "argument --devices: not allowed with argument --nodes",
    "search --devices 4 --mp 2": "unrecognized arguments: --mp",
    "step --dp 2 --mp 2 --minutes 3": "unrecognized arguments: --minutes",
    "decode --dp 2 --mp 2 --plot x.png": "unrecognized arguments: --plot",
    "ledger --dp 2 --mp 2 --json x": "unrecognized arguments: --json",
}


@pytest.mark.parametrize("mistake", WRONG_FLAGS)
def test_a_flag_of_another_mode_or_one_that_cannot_be_read_takes_two_lines(mistake, capsys):
    with pytest.raises(SystemExit) as caught:
        planner.parse(mistake.split())
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(lines) == 2
    assert lines[0].startswith(f"error: {WRONG_FLAGS[mistake]}") and lines[1] == "--help lists the flags"


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("--dp 2 --mp 2 --ledger", "ledger"), ("--decode --dp 2 --mp 2", "decode"),
        ("--versions v5e,v6e --devices 4", "search"), ("--version h100 --nodes=1", "search"),
        ("--dp 2 --mp 2 --version v5e", "step"),
    ],
)  # fmt: skip
def test_the_flags_of_the_release_before_say_the_mode_and_how_to_name_it(flags, mode, capsys):
    arguments = planner.parse(["--model", "test", *flags.split()])
    assert (arguments.mode, arguments.model) == (mode, "test")
    assert capsys.readouterr().err == f"say python -m shmap_tp.plan {mode} ...; the next release asks for the mode\n"


def test_an_output_that_is_checked_is_not_touched(tmp_path):
    new, old, pipe = (tmp_path / name for name in ("new", "old", "pipe"))
    old.write_text("rows")
    os.mkfifo(pipe)
    for file in (new, old, pipe):
        check_outputs(planner.parse(["step", "--json", str(file)]))
    assert not new.exists() and old.read_text() == "rows"


def test_a_file_that_cannot_be_written_any_more_keeps_what_was_found(compile_by, capsys):
    compile_by(CompiledAtOnce)
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device"):
        plan(f"{SEARCH} {FEW} --json /dev/full")
    printed = capsys.readouterr().out
    assert "1 compiled, 1 of them fit" in printed and "fastest (compiled): (4, 1)" in printed


def test_where_no_compiled_step_fits_the_smallest_of_them_is_named(compile_by, capsys):
    class TooLarge(CompiledAtOnce):
        def poll(self) -> Result:
            return self.too_large(20 * 2**30)

    compile_by(TooLarge)
    with pytest.raises(UserError, match="nothing that was searched fits"):
        plan(f"{SEARCH} {FEW} mesh.zero=fsdp train.microbatches=1")
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing that was compiled fits; the smallest, (4, 1) fsdp" in printed
    assert "needs about 20.0 of 15.8 GiB per device" in printed


def test_after_a_near_miss_the_formulas_give_an_answer_that_is_marked_so(compile_by, capsys, tmp_path):
    class NearMiss(CompiledAtOnce):
        """The first compilation does not fit, and no other ends."""

        ended = False

        def poll(self) -> Result | None:
            if NearMiss.ended:
                return None
            NearMiss.ended = True
            return self.too_large(self.estimated.peak_bytes)

    compile_by(NearMiss)
    plan(f"{SEARCH} {FEW} --minutes 0.01 --recipe {(recipe := tmp_path / 'fastest.yaml')}")
    printed = capsys.readouterr().out
    assert "nothing that was compiled fits; by formulas others do, of which this is the fastest" in printed
    assert "fastest (formulas): (4, 1)" in printed and "by formulas only: on models that were left out" in printed
    assert load(str(recipe), []) == load("conf/base.yaml", words_of(printed))
    assert ", formulas: python" in recipe.read_text().splitlines()[0]


def test_ctrl_c_before_anything_is_compiled_has_no_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(planner.MODES, "search", interrupted)
    assert run_command(lambda: plan(SEARCH)) == INTERRUPTED
    assert capsys.readouterr().err == ""


@ctrl_c_of_a_terminal()
def test_the_search_compiles_and_keeps_what_was_found_when_it_is_stopped(tmp_path):
    pytest.importorskip("libtpu")
    rows = tmp_path / "rows.jsonl"
    flags = f"-m shmap_tp.plan {SEARCH} mesh.mp=1 model.remat=full --json {rows} --jobs 1"
    process = subprocess.Popen(
        [sys.executable, *flags.split()], env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    end = time.monotonic() + 120
    while not rows.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, STOPPED), err
    assert json.loads(rows.read_text().splitlines()[0])["kind"] == "predicted"
    assert "fastest (compiled): (4, 1)" in out and "calibration: 8 published runs" in out
    assert re.search(r" of them fit; .* were not compiled \(", out.replace("\n", " "))
