"""`python main.py`: bad input is explained in a line or two, and a killed run loses nothing that was saved."""

import signal

import jax
import numpy as np
import pytest

from shmap_tp.config.compose import CONF, load
from shmap_tp.runtime import distributed
from shmap_tp.training import loop
from tests.helpers import run_fixtures as runs
from tests.helpers.commands import call_main
from tests.helpers.fresh_process import ctrl_c_of_a_terminal, python

# Bad input


BAD = {
    "train.stepz=3": ["unknown key train.stepz", "did you mean train.steps?"],
    "mesh.dp=4": ["dp=4 x mp=4 needs 16 devices", "has 8", "dp x mp = 8"],
    "run.dir=FILE/x": ["run.dir=", "cannot be written: Not a directory", "choose"],
    "data.dir=FILE data.source=stdlib": ["/file is a file", "data.dir must name a directory"],
    "data.dir=FILE/x data.source=stdlib": ["data.dir ", "/file/x cannot be written: ", "or choose another"],
    "checkpoint.dir=FILE/x": ["checkpoint.dir=", "cannot be written"],
    "run.compilation_cache=FILE/x": ["run.compilation_cache=", "cannot be written"],
    "--resume": ["no checkpoint in", "leave it out", "run.dir="],
    "an odd train.bin": ["train.bin: 5999 bytes", "multiple of the 2 bytes", "prepare it again"],
    "a short train.bin": ["train.bin: 16 tokens", "model.context=16 needs 17", "shorten model.context"],
    "another validation.bin": ["validation.bin: ids go up to 64", "model.vocabulary=64", "model.vocabulary=65"],
    "no train.bin": ["train.bin does not exist", "python -m shmap_tp.prepare"],
}
FILES = {"odd": b"_" * 5999, "short": b"_" * 32, "another": np.array([*range(64), 64] * 9, "<u2").tobytes()}
"""The contents of the files in BAD.  What is wrong in a configuration by itself: tests/config."""


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The message, of one or two lines, with which main.py refuses `arguments`."""
    monkeypatch.setattr(distributed, "emulate_cpu_devices", lambda count: None)  # the tests emulate eight already
    assert call_main(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert 1 <= len(message.splitlines()) <= 2 and "Traceback" not in message, message
    return message


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_explained_in_one_or_two_lines(tmp_path, monkeypatch, capsys, given):
    arguments = runs.overrides(tmp_path)
    (tmp_path / "file").write_text("")
    if given.endswith(".bin"):
        file = tmp_path / "data" / given.split()[-1]
        file.unlink() if given.startswith("no ") else file.write_bytes(FILES[given.split()[-2]])
    else:
        arguments += given.replace("FILE", str(tmp_path / "file")).split()
    message = refused(monkeypatch, capsys, "--cfg", runs.FIRST, *arguments)
    assert message.startswith("error: ")
    for part in BAD[given]:
        assert part in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


NOT_DIRECTORIES = {
    "a file": ("FILE", "run.dir run.compilation_cache"),
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
    given = [*runs.overrides(tmp_path), "data.source=stdlib", f"{key}={path}"]
    before = jax.config.jax_compilation_cache_dir
    message = refused(monkeypatch, capsys, "--cfg", runs.FIRST, *given)
    assert jax.config.jax_compilation_cache_dir == before
    assert message.startswith("error: ") and key in message and path in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and (tmp_path / "file").read_text() == ""


def test_a_run_whose_name_is_too_long_for_its_directory_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = refused(monkeypatch, capsys, "--cfg", runs.FIRST, f"run.name={'ü' * 150!r}")
    assert "run.dir=runs/üü" in message and "cannot be written: File name too long" in message
    assert not list(tmp_path.glob("runs/*"))


BAD_LINES = {
    "--cfg": "expected one argument",
    "--cfg=": "--cfg : there is no such file that ends in .yaml",
    "--cfg=nope.yaml": "--cfg nope.yaml: there is no such file",
    "--resumee": "unrecognized arguments: --resumee",
}


@pytest.mark.parametrize("argument", BAD_LINES)
def test_a_bad_command_line_is_explained_in_one_or_two_lines(monkeypatch, capsys, argument):
    assert BAD_LINES[argument] in refused(monkeypatch, capsys, argument)


def test_overrides_can_stand_before_and_after_the_options(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "train", lambda config, *_: seen.append(config) or 0)
    given = runs.overrides(tmp_path, "run.seed=5", "train.steps=9")
    for split in (0, 3, len(given)):
        assert call_main(monkeypatch, *given[:split], "--cfg", runs.FIRST, *given[split:], "--resume") == 0
    assert call_main(monkeypatch, *given, "--resume") == 0  # without --cfg, the packaged configuration
    assert seen[:3] == [runs.tiny(tmp_path, "run.seed=5", "train.steps=9", "checkpoint.resume=must")] * 3
    assert seen[3:] == [load(CONF / "config.yaml", [*given, "checkpoint.resume=must"])]


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


@ctrl_c_of_a_terminal()
def test_a_process_that_is_killed_then_resumed_then_stopped_trains_as_one_uninterrupted(tmp_path, monkeypatch, capsys):
    """What SIGKILL loses are the steps after the newest complete checkpoint.  Nobody reads the output of the resumed
    process any more when Ctrl-C stops it."""
    quiet = ["evaluate.every=0", "checkpoint.keep=3", "checkpoint.every=3"]
    given = ["--cfg", runs.FIRST, *runs.overrides(tmp_path, *quiet), "train.steps=100000"]
    with runs.killed_at_the_end([runs.start(*given)]) as (killed,):
        runs.wait_for_step(killed, tmp_path, 8)
        killed.kill()
        killed.communicate(timeout=60)
    reached = runs.lines(tmp_path)[-1]["step"]
    newest = max(int(path.parent.name) for path in (tmp_path / "run" / "checkpoints").glob("*/sha256.json"))
    assert reached - 6 <= newest <= reached, (newest, reached)

    with runs.killed_at_the_end([runs.start(*given, "--resume")]) as (stopped,):
        while (line := stopped.stdout.readline()) and "resuming from step" not in line:
            pass
        assert f"resuming from step {newest} " in line, stopped.communicate()
        stopped.stdout.close()
        stopped.stderr.close()
        runs.wait_for_step(stopped, tmp_path, reached + 2)
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(60) == 75
    last = runs.lines(tmp_path)[-1]["step"]
    assert runs.checkpoint_steps(tmp_path)[-1] == last

    runs.make_runs_quick(monkeypatch)
    more = f"train.steps={last + 1}"
    assert call_main(monkeypatch, "--cfg", f"{tmp_path}/run/config.yaml", more, "--resume") == 0
    assert f"resuming from step {last}" in capsys.readouterr().out
    assert loop.train(runs.tiny(straight := tmp_path / "straight", *quiet, more)) == 0
    assert [line["step"] for line in runs.lines(tmp_path)] == [*range(1, last + 2)]
    assert runs.values(tmp_path) == runs.values(straight)
    assert runs.state_at(tmp_path, last + 1) == runs.state_at(straight, last + 1)


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
    assert not list(tmp_path.iterdir())
    for part in (
        "6_9b: 6,854,676,480 parameters, 32 layers of width 4096",
        "dp=4 x mp=8 = 32 devices; tensor_parallel=all_reduce, zero=none, processes=1",
        "8 sequences x 1024 tokens = 8,192 tokens per step, in 1 microbatches",
        "10, together 81,920 tokens",
        "data/stdlib_bpe: not prepared; a run prepares it (data.source=--source stdlib --train-tokenizer 4096)",
        "runs/big/checkpoints, checkpoint.resume=never",
        "dp=auto (all devices / mp) x mp=4",
    ):
        assert part in done.stdout


CHECKED = {
    "log.every=1": "data: prepared",
    "model=bytes_moe mesh.ep=2": "processes=1, ep=2\n",
    "data.dir=nowhere": "nowhere: not prepared; python -m shmap_tp.prepare --text FILES --out nowhere; --help lists",
    "run.dir=BLOCKED/x": "error: run.dir=BLOCKED/x cannot be written: ",
    "run.compilation_cache=BLOCKED": "error: run.compilation_cache=BLOCKED cannot be written: BLOCKED is a file",
    "mesh.mp=3": "error: mesh.mp=3 does not divide heads=8",
    "mesh.dp=17 train.batch=17 mesh.zero=fsdp mesh.fsdp_gradients=ring":
        "error: mesh.fsdp_gradients=ring: no number from 2 to 16 divides",
    "--process-id 1": "error: --coordinator and --process-id must be given",
}  # fmt: skip


@pytest.mark.parametrize("given", CHECKED)
def test_check_finds_what_is_wrong_without_devices(tmp_path, monkeypatch, capsys, given):
    (file := tmp_path / "file").write_text("")
    arguments, expected = (text.replace("BLOCKED", str(file)) for text in (given, CHECKED[given]))
    monkeypatch.setattr(loop, "train", None)
    code = call_main(monkeypatch, "--check", *runs.overrides(tmp_path), *arguments.split())
    said = capsys.readouterr()
    assert expected in (said.err if code else said.out) and code == 2 * expected.startswith("error")
    assert not (tmp_path / "run").exists()
