"""`python main.py`: bad input is explained in a line or two, and a killed run loses nothing that was saved."""

import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from shmap_tp.errors import shown
from shmap_tp.runtime import distributed
from shmap_tp.training import loop
from tests.helpers.commands import call_main
from tests.helpers.fresh_process import python
from tests.helpers.run_fixtures import (
    FIRST,
    checkpoint_steps,
    killed_at_the_end,
    lines,
    make_runs_quick,
    overrides,
    start,
    state_at,
    tiny,
    values,
    wait_for_step,
    write_tokens,
)

# Bad input


def remove_file(data: Path) -> None:
    (data / "train.bin").unlink()


def truncate_file(data: Path) -> None:
    (data / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-1])


def add_id_beyond_vocabulary(data: Path) -> None:
    np.array([*range(64), 64] * 9, "<u2").tofile(data / "validation.bin")


def shorten_train_file(data: Path) -> None:
    np.zeros(16, "<u2").tofile(data / "train.bin")


BAD = {
    "an unknown key": (["train.stepz=3"], ["unknown key train.stepz", "did you mean train.steps?"]),
    "an unknown option": (["model=nope"], ["model=nope", "use one of", "6_9b"]),
    "a wrong type": (["train.steps=many"], ["train.steps=many", "int"]),
    "a missing value": (["train.steps=???"], ["no value for train.steps", "key=value"]),
    "an added key": (["+train.more=1"], ["+train.more=1", "write key=value"]),
    "a deleted key": (["~train.steps"], ["~train.steps", "write key=value"]),
    "mp and heads": (["mesh.mp=3", "mesh.dp=1"], ["mesh.mp=3", "heads=8", "{1, 2, 4, 8}"]),
    "mp and ffn": (["model.ffn=66"], ["mesh.mp=4", "ffn=66", "use mesh.mp in {1, 2}"]),
    "mp and vocabulary": (["model.vocabulary_multiple=66"], ["mesh.mp=4", "padded vocabulary=66", "use mesh.mp in"]),
    "dp and microbatch": (["train.microbatches=8"], ["mesh.dp=2", "microbatch of 1 sequences", "use mesh.dp in {1}"]),
    "microbatches and batch": (["train.microbatches=3"], ["train.microbatches=3", "train.batch=8", "{1, 2, 4, 8}"]),
    "the mesh and the devices": (["mesh.dp=4"], ["dp=4 x mp=4 needs 16 devices", "has 8", "dp x mp = 8"]),
    "a file of odd length": (truncate_file, ["train.bin: 5999 bytes", "multiple of the 2 bytes", "prepare it again"]),
    "an id beyond the vocabulary": (
        add_id_beyond_vocabulary, ["validation.bin: token 64 is id 64", "ends at 63", "model.vocabulary=65"],
    ),
    "a file shorter than a sequence": (
        shorten_train_file, ["train.bin: 16 tokens", "model.context=16 needs 17", "shorten model.context"],
    ),
    "no token file": (remove_file, ["train.bin does not exist", "python -m shmap_tp.prepare"]),
    "a run directory below a file": (["run.dir=FILE/x"], ["run.dir=", "cannot be written: Not a directory", "choose"]),
    "data in a file": (["data.dir=FILE", "data.source=stdlib"], ["/file is a file", "data.dir must name a directory"]),
    "data below a file": (["data.dir=FILE/x", "data.source=stdlib"], ["/file/x cannot be", "choose another data.dir"]),
    "a checkpoint directory below a file": (["checkpoint.dir=FILE/x"], ["checkpoint.dir=", "cannot be written"]),
    "a cache below a file": (["run.compilation_cache=FILE/x"], ["run.compilation_cache=", "cannot be written"]),
    "nothing to resume": (["--resume"], ["no checkpoint in", "leave it out", "run.dir="]),
}  # fmt: skip


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The message, of one or two lines, with which main.py refuses `arguments`."""
    monkeypatch.setattr(distributed, "emulate_cpu_devices", lambda count: None)  # the tests emulate eight already
    assert call_main(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert 1 <= len(message.splitlines()) <= 2 and "Traceback" not in message, message
    return message


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_explained_in_one_or_two_lines(tmp_path, monkeypatch, capsys, case):
    given, expected = BAD[case]
    write_tokens(tmp_path / "data")
    (tmp_path / "file").write_text("")
    if callable(given):
        given(tmp_path / "data")
        given = [f"data.dir={tmp_path / 'data'}"]
    given = [text.replace("FILE", str(tmp_path / "file")) for text in given]
    arguments = overrides(tmp_path) if "model=nope" not in given else []
    message = refused(monkeypatch, capsys, "--cfg", FIRST, *arguments, *given)
    assert message.startswith("error: ")
    for part in expected:
        assert part in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


NOT_DIRECTORIES = {
    "a file": ("FILE", "run.dir run.compilation_cache"),
    "a name of 300 bytes": ("a" * 300, "run.dir data.dir"),
    "a URL": ("foo://bar", "run.dir checkpoint.dir data.dir"),
    "a place that cannot be written": ("/proc/nothing", "run.dir"),
    "nothing": ("", "run.dir checkpoint.dir run.compilation_cache"),
}
"""What cannot be a directory, and for which keys it is tried; below a file, each key is in `BAD`."""


@pytest.mark.parametrize(
    "key, case", [(key, case) for case, (_, keys) in NOT_DIRECTORIES.items() for key in keys.split()]
)
def test_a_directory_that_cannot_be_used_is_explained(tmp_path, monkeypatch, capsys, key, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    path = NOT_DIRECTORIES[case][0].replace("FILE", str(tmp_path / "file"))
    given = [*overrides(tmp_path), "data.source=stdlib", f"{key}={path}"]
    before = jax.config.jax_compilation_cache_dir
    message = refused(monkeypatch, capsys, "--cfg", FIRST, *given)
    assert jax.config.jax_compilation_cache_dir == before
    assert message.startswith("error: ") and key in message and shown(path) in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and (tmp_path / "file").read_text() == ""


def test_a_run_whose_name_is_too_long_for_its_directory_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, "--cfg", FIRST, f"run.name={'ü' * 150!r}")
    assert "run.dir=runs/üü" in message and "has a name of 300 bytes" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--cfg"], "expected one argument"),
        (["--cfg", ""], "--cfg  is not a file; name a YAML file"),
        (["--cfg", "nope.yaml"], "--cfg nope.yaml: no such file"),
        (["--cfg", FIRST, "--resumee"], "unrecognized arguments: --resumee"),
    ],
)
def test_a_bad_command_line_is_explained_in_one_or_two_lines(monkeypatch, capsys, arguments, expected):
    assert expected in refused(monkeypatch, capsys, *arguments)


def test_overrides_can_stand_before_and_after_the_options(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "train", lambda config, *_: seen.append(config) or 0)
    given = overrides(tmp_path, "run.seed=5", "train.steps=9")
    for split in (0, 3, len(given)):
        assert call_main(monkeypatch, *given[:split], "--cfg", FIRST, *given[split:], "--resume") == 0
    assert call_main(monkeypatch, *given, "--resume") == 0  # without --cfg, the packaged configuration
    assert seen == [tiny(tmp_path, "run.seed=5", "train.steps=9", "checkpoint.resume=must")] * 4


def test_help_explains_the_command_without_importing_jax(tmp_path):
    """In a new process, where nothing has imported JAX before."""
    done = python(
        """
        import sys, time; begin = time.perf_counter(); sys.argv = ['main.py', '--help']
        from shmap_tp import train
        try: train.main()
        except SystemExit as done: assert done.code == 0
        assert 'jax' not in sys.modules and 'matplotlib' not in sys.modules
        print('SECONDS', time.perf_counter() - begin)
        """
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert float(done.stdout.split("SECONDS")[1]) < 5
    for topic in ("--cfg conf/config.yaml", "--resume", "key=value", "mesh.dp", "6_9b", "minipile", "75", "exit codes"):
        assert topic in done.stdout


# A kill


def test_a_process_that_is_killed_then_resumed_then_stopped_trains_as_one_without_interruption(
    tmp_path, monkeypatch, capsys
):
    """What SIGKILL loses are the steps after the newest complete checkpoint.  Nobody reads the output of the resumed
    process any more when Ctrl-C stops it."""
    quiet = ["evaluate.every=0", "checkpoint.keep=3", "checkpoint.every=3"]
    given = ["--cfg", FIRST, *overrides(tmp_path, *quiet), "train.steps=100000"]
    with killed_at_the_end([start(*given)]) as (killed,):
        wait_for_step(killed, tmp_path, 8)
        killed.kill()
        killed.communicate(timeout=60)
    reached = lines(tmp_path)[-1]["step"]
    newest = max(int(path.parent.name) for path in (tmp_path / "run" / "checkpoints").glob("*/sha256.json"))
    assert reached - 6 <= newest <= reached, (newest, reached)

    with killed_at_the_end([start(*given, "--resume")]) as (stopped,):
        while (line := stopped.stdout.readline()) and "resuming from step" not in line:
            pass
        assert f"resuming from step {newest} " in line, stopped.communicate()
        stopped.stdout.close()
        stopped.stderr.close()
        wait_for_step(stopped, tmp_path, reached + 2)
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(60) == 75
    last = lines(tmp_path)[-1]["step"]
    assert checkpoint_steps(tmp_path)[-1] == last

    make_runs_quick(monkeypatch)
    more = f"train.steps={last + 1}"
    assert call_main(monkeypatch, "--cfg", f"{tmp_path}/run/config.yaml", more, "--resume") == 0
    assert f"resuming from step {last}" in capsys.readouterr().out
    assert loop.train(tiny(straight := tmp_path / "straight", *quiet, more)) == 0
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, last + 2)]
    assert values(tmp_path) == values(straight)
    assert state_at(tmp_path, last + 1) == state_at(straight, last + 1)


# --check


def test_check_prints_a_summary_uses_no_device_and_writes_nothing(tmp_path):
    """In a new process, in a directory of its own."""
    done = python(
        """
        from shmap_tp import train
        given = ['model=6_9b', 'mesh.dp=4', 'mesh.mp=8', 'run.name=big', 'train.steps=10']
        assert train.main(['--check', *given]) == train.main(['--check', 'mesh.dp=auto']) == 0
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
        """,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "6_9b: 6,854,676,480 parameters, 32 layers of width 4096",
        "dp=4 x mp=8 = 32 devices; tensor_parallel=all_reduce, zero=none, processes=1",
        "32 sequences x 1024 tokens = 32,768 tokens per step, in 2 microbatches",
        "10, together 327,680 tokens",
        "data/stdlib: not prepared; a run prepares it (data.source=stdlib)",
        "runs/big/checkpoints, checkpoint.resume=never",
        "dp=auto (all devices / mp) x mp=4",
    ):
        assert part in done.stdout
    assert not list(tmp_path.iterdir())


CHECKED = {
    "prepared data": ([], 0, "data: prepared"),
    "experts over the ranks of other tokens": (["model=bytes_moe", "mesh.ep=2"], 0, "processes=1, ep=2\n"),
    "data that no source prepares": (
        ["data.dir=nowhere"],
        0,
        "nowhere: not prepared; python -m shmap_tp.prepare --text FILES --out nowhere; --help lists",
    ),
    "a run directory below a file": (["run.dir=FILE/x"], 2, "/file/x cannot be written: "),
    "a cache in a file": (["run.compilation_cache=FILE"], 2, "/file is a file; choose another"),
    "an invalid value": (["mesh.mp=3"], 2, "error: mesh.mp=3 does not divide heads=8"),
    "a mesh without gradient rings": (
        ["mesh.dp=17", "train.batch=17", "mesh.zero=fsdp", "mesh.fsdp_gradients=ring"],
        2,
        "error: mesh.fsdp_gradients=ring: no number from 2 to 16 divides",
    ),
    "a process without coordinator": (["--process-id", "1"], 2, "error: --coordinator and --process-id must be given"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_check_finds_what_is_wrong_without_devices(tmp_path, monkeypatch, capsys, case):
    given, code, expected = CHECKED[case]
    (tmp_path / "file").write_text("")
    given = [text.replace("FILE", str(tmp_path / "file")) for text in given]
    monkeypatch.setattr(loop, "train", None)
    assert call_main(monkeypatch, "--check", *overrides(tmp_path), *given) == code
    said = capsys.readouterr()
    assert expected in (said.err if code else said.out)
    assert not (tmp_path / "run").exists()
