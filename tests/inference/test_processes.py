"""`shmap_tp.generate` and `shmap_tp.evaluate` by several processes: they print what one does, and end together.

tests/runtime/test_peers.py has how they notice errors and losses of one another.
"""

import json
import re
import signal
from contextlib import AbstractContextManager
from subprocess import Popen

import pytest

import shmap_tp
from shmap_tp import evaluate, generate
from tests.helpers.fresh_process import ctrl_c_of_a_terminal
from tests.helpers.harness_task import write_task
from tests.helpers.run_fixtures import free_port, killed_at_the_end, start_python

MESH = ["mesh.dp=2", "mesh.mp=2"]
SAMPLED = [*("--prompt", "12+", "--prompt", "é", "--prompt", "7", "--max-new-tokens", "6")]
SAMPLED += ["--temperature", "1.2", "--samples", "2"]


def together(count: int, module: str, *arguments: str, **environment: str) -> AbstractContextManager:
    """`module` as `count` processes."""
    common = ["-m", module, *arguments, "--processes", str(count), "--coordinator", f"localhost:{free_port()}"]
    each = [[*common, "--process-id", str(number)] for number in range(count)]
    return killed_at_the_end(start_python(*given, JAX_PLATFORMS="cpu", **environment) for given in each)


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


@ctrl_c_of_a_terminal()
def test_two_processes_print_the_answers_of_one_and_an_interrupt_of_one_ends_both(run, capsys):
    """The first answers are whole; then there is another prompt, for which they compile without a cache."""
    given = ["--checkpoint", str(run), *SAMPLED, *MESH]
    assert generate.main(given) == 0
    alone = capsys.readouterr().out.replace("\r", "\n")  # as pipes are read
    more = ["--prompt", "of its own", "--batch", "3"]  # in 2 rows, not 4
    with together(2, "shmap_tp.generate", *given, *more, JAX_ENABLE_COMPILATION_CACHE="false") as processes:
        printed = ""
        while len(without_gloo(printed)) < len(alone) and (piece := processes[0].stdout.read(1)):
            printed += piece
        assert without_gloo(printed) == alone, processes[0].stderr.read()
        processes[0].send_signal(signal.SIGINT)
        codes = [process.wait(timeout=60) for process in processes]
        assert not without_gloo(processes[1].stdout.read())
    assert codes == [130, 130]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_grade_as_one_does(run, capsys, count):
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


def test_processes_must_have_the_same_arguments_and_prompts_but_not_the_same_number_and_file(monkeypatch):
    """tests/runtime/test_agreement.py has what follows where they differ."""
    compared = {}

    def compare(name: str, facts: dict, seconds: int) -> None:
        compared.update(facts)
        raise shmap_tp.UserError("the processes were started differently")

    monkeypatch.setattr("shmap_tp.runtime.distributed.initialize_distributed", lambda config, coordinator: None)
    monkeypatch.setattr("shmap_tp.runtime.agreement.require_agreement", compare)
    monkeypatch.setattr("shmap_tp.runtime.exit_codes.exit_with_error", lambda error: (_ for _ in ()).throw(error))
    given = ["--checkpoint", "run", *SAMPLED, *MESH, "--seed", "3", "--out", "here"]
    assert generate.main([*given, "--processes", "2", "--process-id", "1", "--coordinator", "localhost:1"]) == 2
    values = {"seed": 3, "checkpoint": "run", "prompts": ["12+", "é", "7"], "mesh": MESH, "temperature": 1.2}
    assert values.items() <= compared.items() and not {"process_id", "out"} & compared.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes 0 must be at least 1"),
        (["--processes", "2", "--coordinator", "host:1"], "must be given together; add --process-id I"),
        (
            ["--processes", "3", "--coordinator", "host:1", "--process-id", "0", *MESH],
            "3 does not divide mesh.dp x mesh.mp = 4 devices",
        ),
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
    with pytest.raises(shmap_tp.UserError, match="the library is for one process"):
        shmap_tp.Trainer(config)
