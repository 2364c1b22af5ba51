"""A profile contains exactly the requested steps, and the scope names of the source."""

import gzip
import json
import signal
from pathlib import Path

import jax
import pytest

from shmap_tp.data.batches import Batches
from shmap_tp.errors import StorageError
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training import loop
from tests.helpers.run_fixtures import checkpoint_steps, lines, signal_during, tiny

DEVICES = 8


def traced(run: Path) -> tuple[list[int], bytes]:
    """(step numbers in the only profile of a run, its bytes); asserts that each step ran on every device."""
    (directory,) = (run / "profile" / "plugins" / "profile").iterdir()
    (file,), (trace,) = directory.glob("*.trace.json.gz"), directory.glob("*.xplane.pb")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]
    operations = [event for event in events if event.get("args", {}).get("hlo_module") == "jit_step"]
    once = {event["name"] for event in operations if event["name"].startswith("psum_invariant")}
    times = {name: sum(event["name"] == name for event in operations) for name in once}
    assert once and min(times.values()) == len(steps) * DEVICES, times
    return steps, trace.read_bytes()


def test_a_profile_interrupted_by_a_stop_is_written_and_not_restarted(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        signal_during(patch, Batches, "training", signal.SIGTERM, lambda step: step == 3)
        assert loop.train(tiny(tmp_path, "train.profile=[3,5]", "evaluate.every=0")) == STOPPED
    assert traced(tmp_path / "run")[0] == [3, 4]
    assert loop.train(tiny(tmp_path, "train.profile=[3,5]", "evaluate.every=0", "checkpoint.resume=must")) == 0
    assert (
        "no profile: train.profile=[3, 5] begins before step 5, the first step of this process"
        in capsys.readouterr().out
    )
    assert traced(tmp_path / "run")[0] == [3, 4] and len(lines(tmp_path)) == 8


@pytest.mark.parametrize("name", ["start_trace", "stop_trace"])
def test_a_profile_has_complete_steps_and_the_scope_names_and_on_a_full_disk_loses_no_step(
    tmp_path, monkeypatch, capsys, name
):
    """XLA reports a full disk as a JaxRuntimeError.  All steps are trained and saved, then the run ends with 2."""
    original = getattr(jax.profiler, name)

    def full(*arguments: str) -> None:
        if name == "stop_trace":
            original()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, name, full)
    refused = pytest.raises(StorageError, match=r"profile .*/run/profile could not be written: .*No space left")
    with refused as error:
        loop.train(tiny(tmp_path, "train.profile=[3,5]", "evaluate.every=0", "checkpoint.every=0"))
    assert error.value.exit_code == 2 and len(str(error.value).splitlines()) == 2
    assert "No space left" in capsys.readouterr().out
    assert len(lines(tmp_path)) == 8 and checkpoint_steps(tmp_path) == [8]
    if name == "stop_trace":  # the profile was written before it failed
        steps, trace = traced(tmp_path / "run")
        assert steps == [3, 4, 5]
        assert all(scope + b"/" in trace for scope in (b"attention", b"mlp", b"dp_gradient_reduction", b"update"))
        spans = [json.loads(line) for line in (tmp_path / "run" / "time.jsonl").read_text().splitlines()]
        assert [span["cause"] for span in spans].count("profile") == 2  # before the first and after the last
