"""A disk that is full ends a run in two lines, and costs it nothing that was complete."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmap_tp.config import compose as settings
from shmap_tp.errors import UserError
from shmap_tp.runtime.files import writing
from shmap_tp.training import loop
from shmap_tp.training.metrics import Recorder, read_metrics
from tests.helpers.run_fixtures import lines, tiny


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system with room for the run directory and two checkpoints of the tiny model."""
    disk = tmp_path / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_checkpoint_that_has_no_room_is_told_and_the_run_goes_on_when_there_is(
    small_disk, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(loop, "machine_peak", lambda devices: None)
    with pytest.raises(UserError) as caught:
        loop.train(tiny(tmp_path))
    said = str(caught.value).splitlines()
    assert said[0].startswith(f"checkpoint {small_disk}/checkpoints/6 could not be written: No space left on device")
    assert len(said) == 2 and "checkpoint.resume=if_present" in said[1]
    assert caplog.text == ""  # of the traceback that Orbax logs in each thread

    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    assert loop.train(tiny(tmp_path, "checkpoint.resume=if_present")) == 0
    assert [(line["step"], line["segment"]) for line in lines(tmp_path)] == [
        *[(step, 0) for step in range(1, 5)],
        *[(step, 1) for step in range(5, 9)],
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_line_of_metrics_that_has_no_room_is_told(tmp_path):
    config = tiny(tmp_path)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "metrics.jsonl"
    with (
        pytest.raises(UserError, match=rf"^{file} could not be written: No space left on device"),
        Recorder(config, 0, enabled=True) as recorder,
    ):
        recorder.validation(1, 0.5)
        recorder._stream.close()
        recorder._stream = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115 - the recorder closes it
        recorder.validation(2, 0.5)
    assert [line["step"] for line in read_metrics(file)] == [1]


def test_a_configuration_that_has_no_room_leaves_the_one_before(tmp_path, monkeypatch):
    config, file = tiny(tmp_path), tmp_path / "config.yaml"
    settings.save(config, file)
    before = file.read_text()

    def half(path: Path, text: str) -> None:
        with path.open("w") as stream:
            stream.write(text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(UserError, match="No space left"), writing(file):
        settings.save(config, file)
    assert file.read_text() == before


def test_a_process_that_is_lost_while_all_write_is_no_disk_that_refuses():
    """What Orbax tells of it, a ValueError, goes on as it is; whoever waits for the others then says who it was."""
    lost = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer"
    with pytest.raises(ValueError, match="Gloo") as caught, writing("checkpoint 26"):
        raise ValueError(lost)
    assert type(caught.value) is ValueError, "an InputError would end this process before it is known who was lost"
