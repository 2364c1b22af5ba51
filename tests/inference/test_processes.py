"""`shmap_tp.generate` and `shmap_tp.evaluate` by several processes: they print what one does, and end together."""

import json
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen

import pytest

import shmap_tp
from shmap_tp import evaluate, generate
from tests.helpers.harness_task import write_task
from tests.helpers.run_fixtures import free_port, killed_at_the_end, start_python, trained_on_bytes

MESH = ["mesh.dp=2", "mesh.mp=4"]
SAMPLED = ["--prompt", "12+", "--prompt", "é", "--temperature", "1.2", "--samples", "2", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on bytes."""
    return trained_on_bytes(tmp_path_factory.mktemp("bytes"))


def together(
    count: int, module: str, *arguments: str, last: tuple[str, ...] = (), **environment: str
) -> AbstractContextManager:
    """`module` as `count` processes; `last` are more arguments of the last one."""
    common = [*arguments, "--processes", str(count), "--coordinator", f"localhost:{free_port()}"]
    each = [[*common, "--process-id", str(number)] for number in range(count)]
    each[-1] += last
    return killed_at_the_end(start_python("-m", module, *given, JAX_PLATFORMS="cpu", **environment) for given in each)


GLOO = re.compile(r"\[Gloo\]|peer ranks|^[ :0-9]+$")
"""A line of Gloo's own: those of several threads may be torn apart."""


def finished(processes: list[Popen]) -> list[tuple[int, str, str]]:
    """(exit code, stdout without the lines of Gloo, stderr) of each."""
    found = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, without_gloo(out), err) for process, (out, err) in zip(processes, found, strict=True)]


def without_gloo(out: str) -> str:
    """`out` without Gloo's lines, and without empty lines after one: the ends of several that were written at once."""
    kept, is_after = [], False
    for line in out.splitlines(keepends=True):
        if not (GLOO.search(line) or (is_after and not line.strip())):
            kept.append(line)
            is_after = False
        else:
            is_after = True
    return "".join(kept)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_print_and_write_what_one_does(run, capsys, tmp_path, count):
    given = ["--checkpoint", str(run), *SAMPLED, *MESH]
    assert generate.main(given) == 0
    alone = capsys.readouterr().out
    with together(count, "shmap_tp.generate", *given) as processes:
        found = finished(processes)
    assert [code for code, _, _ in found] == [0] * count, found
    assert [out for _, out, _ in found] == [alone] + [""] * (count - 1)

    given = ["--checkpoint", str(run), "--json", *MESH]
    assert evaluate.main(given) == 0
    alone = json.loads(capsys.readouterr().out)
    with together(count, "shmap_tp.evaluate", *given) as processes:
        found = finished(processes)
    assert [code for code, _, _ in found] == [0] * count, found
    together_found = json.loads(found[0][1])
    by_position = [grades.pop("loss_by_position") for grades in (together_found, alone)]
    assert together_found == pytest.approx(alone, rel=1e-6)
    assert by_position[0] == [pytest.approx(each, rel=1e-6) for each in by_position[1]]
    assert not any(out.strip() for _, out, _ in found[1:]), found


def test_two_processes_grade_a_task_as_one_does(run, capsys, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="pip install -e '.[evaluate]'")
    write_task(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    given = ["--checkpoint", str(run), "--tasks", "sums", "--tasks-dir", str(tmp_path), "--json", *MESH]
    with together(2, "shmap_tp.evaluate", *given) as processes:
        found = finished(processes)
    assert [code for code, _, _ in found] == [0, 0], found
    assert evaluate.main(given) == 0
    assert json.loads(found[0][1]) == json.loads(capsys.readouterr().out) and not found[1][1]


def test_an_error_of_one_process_ends_all(run):
    with together(
        2, "shmap_tp.generate", "--checkpoint", str(run), *SAMPLED, *MESH, "--out", "/nowhere/x"
    ) as processes:
        found = finished(processes)
    reason = "--out /nowhere/x cannot be written: No such file or directory"
    assert [code for code, _, _ in found] == [2, 2]
    assert found[0][2].endswith(f"error: {reason}\n") and f"error: process 0 exited: {reason}" in found[1][2]


def test_processes_with_other_arguments_are_refused(run):
    with together(2, "shmap_tp.generate", "--checkpoint", str(run), *SAMPLED, *MESH, last=("--seed", "3")) as processes:
        found = finished(processes)
    for code, _, err in found:
        assert code == 2
        assert "the processes were started differently: seed is 0 on process 0, 3 on process 1;" in err


def test_an_interrupt_of_one_ends_all(run):
    given = ["--checkpoint", str(run), "--prompt", "XYZ", *MESH]
    with together(2, "shmap_tp.generate", *given, JAX_ENABLE_COMPILATION_CACHE="false") as processes:
        printed = ""
        while not printed.endswith("XYZ"):  # it compiles next
            printed += processes[0].stdout.read(1)
        processes[0].send_signal(signal.SIGINT)
        codes = [process.wait(timeout=60) for process in processes]
    assert codes == [130, 130]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes 0 must be at least 1"),
        (["--processes", "2", "--coordinator", "host:1"], "must be given together; add --process-id I"),
        (["--processes", "3", "--coordinator", "host:1", "--process-id", "0", *MESH], "8 devices are not divisible by"),
    ],
    ids=["none", "without its number", "mesh"],
)
def test_arguments_that_do_not_suit_each_other_are_refused(run, capsys, arguments, message):
    assert generate.main(["--checkpoint", str(run), "--prompt", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_library_says_who_can_start_several_processes():
    config = shmap_tp.load_config("model=test", "mesh.dp=2", "mesh.mp=1", "mesh.processes=2")
    with pytest.raises(shmap_tp.UserError, match="start several with shmap-tp train, generate or evaluate"):
        shmap_tp.Model.initialize(config)
    with pytest.raises(shmap_tp.UserError, match="Trainer is for one process"):
        shmap_tp.Trainer(config)
