"""What a model writes while it is trained: recorded once for each step, the same in every layout, and nothing else of
the run changes.  Bits per byte are those of the text of the validation batches.
"""

import json
import math
import signal
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.data.token_files import open_token_file
from shmap_tp.errors import UserError
from shmap_tp.inference.text import TrainingSampler, make_training_sampler
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.training import loop
from shmap_tp.training.goodput import TimeCategory
from shmap_tp.training.metrics import format_samples
from tests.helpers import run_fixtures as runs

PROMPTS = ["1+1=", "(0)"]
SAMPLED = ["sample.every=3", "sample.prompts=['1+1=','(0)']", "sample.max_new_tokens=6", "sample.temperature=0"]


def bytes_run(directory, *more):
    """The tiny run on data of bytes, all below 64."""
    runs.write_tokens(directory / "data")
    (directory / "data" / "tokenizer.json").unlink()
    (directory / "data" / "meta.json").write_text('{"dtype": "uint16", "tokenizer": "bytes", "end_of_text": 0}')
    return runs.tiny(directory, *SAMPLED, *more)


def train(config):
    return loop.train(config, make_sampler=make_training_sampler)


def samples(directory):
    """The last line of each step and prompt."""
    found = {}
    for line in (directory / "run" / "samples.jsonl").read_text().splitlines():
        with suppress(ValueError):
            one = json.loads(line)
            found[one["step"], one["prompt"]] = one
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """(directory, what was printed) of a run with samples after steps 3, 6 and 8."""
    directory = tmp_path_factory.mktemp("sampled")
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("shmap_tp.training.run.print_on_process_0", printed.append)
        runs.make_runs_quick(patch)
        assert train(bytes_run(directory)) == 0
    return directory, printed


def test_every_prompt_has_a_line_for_each_step_of_samples(sampled):
    directory, printed = sampled
    found = samples(directory)
    assert [(one["step"], one["prompt"]) for one in found] == [(n, p) for n in (3, 6, 8) for p in PROMPTS]
    assert {len(one["text"]) for one in found} <= set(range(7)) and any(one["text"] for one in found)
    assert printed[-1] == format_samples(8, {one["prompt"]: one["text"] for one in found[-2:]})


def test_the_run_is_the_same_without_samples(sampled, tmp_path):
    assert loop.train(bytes_run(tmp_path)) == 0
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    for split in ("train", "validation"):
        assert runs.values(tmp_path, split) == runs.values(sampled[0], split)


def test_a_resumed_run_has_each_sample_once(sampled, tmp_path):
    assert train(bytes_run(tmp_path, "train.steps=4")) == 0
    assert [one["step"] for one in samples(tmp_path)] == [3, 3, 4, 4]
    with (tmp_path / "run" / "samples.jsonl").open("a") as stream:
        stream.write('{"step": 6, "prompt": "1+1=", "text": "lost"}\n{"st')
    assert train(bytes_run(tmp_path, "checkpoint.resume=must")) == 0
    kept = [one for one in samples(tmp_path) if one["step"] != 4]
    assert kept == samples(sampled[0])


def test_a_stop_during_a_sample_saves_and_leaves(tmp_path, monkeypatch):
    runs.signal_during(monkeypatch, TrainingSampler, "__call__", signal.SIGTERM, lambda *_: True)
    assert train(bytes_run(tmp_path, "sample.max_new_tokens=12")) == STOPPED
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_logits_that_are_not_finite_give_a_line_in_place_of_samples_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    whole = TrainingSampler.__call__

    def broken(self, params, stopped):
        return whole(self, jax.tree.map(lambda x: x * jnp.nan, params), stopped)

    monkeypatch.setattr(TrainingSampler, "__call__", broken)
    assert train(bytes_run(tmp_path, "train.steps=3")) == 0
    assert "no samples: a new token has logits that are infinite or NaN" in capsys.readouterr().out
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_bits_per_byte_are_those_of_the_validation_text(sampled):
    """Byte 0 ends a document and is no text; what follows it is not predicted."""
    directory, _ = sampled
    file = open_token_file(directory / "data", "validation", context=runs.CONTEXT, vocabulary=64)
    rows = file.read(np.arange(2 * runs.BATCH))
    targets = rows[:, 1:][rows[:, :-1] != 0]
    for line in runs.lines(directory, "validation"):
        bits = line["loss"] * targets.size / math.log(2)
        assert line["bits_per_byte"] == pytest.approx(bits / np.count_nonzero(targets), rel=1e-12)


def test_the_time_of_samples_has_a_category_of_its_own(sampled):
    causes = [json.loads(line)["cause"] for line in (sampled[0] / "run" / "time.jsonl").read_text().splitlines()]
    assert causes.count(TimeCategory.samples) == 3


def test_without_a_known_tokenizer_there_are_none_and_the_run_says_so(tmp_path, capsys):
    runs.write_tokens(tmp_path / "data")
    (tmp_path / "data" / "meta.json").write_text('{"dtype": "uint16", "end_of_text": 0}')
    assert train(runs.tiny(tmp_path, *SAMPLED, "train.steps=1")) == 0
    printed = capsys.readouterr().out
    assert f"no samples and no bits per byte: {tmp_path}/data has no tokenizer.json" in printed
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert "bits_per_byte" not in runs.lines(tmp_path, "validation")[-1]


def test_a_prompt_that_does_not_suit_the_model_is_refused_before_training(tmp_path):
    for prompt, message in [
        ("abc", "prompt 0 has token id 97, but model.vocabulary=64"),
        ("1" * 16, "no room in model.context=16"),
    ]:
        with pytest.raises(UserError, match=message):
            train(bytes_run(tmp_path, f"sample.prompts=['{prompt}']"))
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(UserError, match=r"sample\.prompts has an empty text"):
        runs.tiny(tmp_path, "sample.prompts=['']")


def test_samples_are_the_same_on_another_mesh_with_fsdp(sampled, tmp_path):
    """Greedy: the two likeliest tokens of this run are further apart than the rounding of another order of sums."""
    layout = ["mesh.dp=2", "mesh.mp=2", "mesh.zero=fsdp", "mesh.tensor_parallel=sequence", "train.steps=3"]
    assert train(bytes_run(tmp_path, *layout)) == 0
    assert samples(tmp_path) == samples(sampled[0])[:2]


@pytest.mark.slow
def test_two_processes_on_another_mesh_with_fsdp_write_the_samples_of_one(sampled, tmp_path):
    bytes_run(tmp_path)
    layout = ["mesh.dp=2", "mesh.mp=1", "mesh.zero=fsdp", "train.steps=3", "evaluate.batches=1"]
    with runs.together(2, *runs.overrides(tmp_path, *SAMPLED, *layout)) as processes:
        output = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], output
    assert samples(tmp_path) == samples(sampled[0])[:2]
    assert "step 3  the model writes:" in output[0][0] and not any(out for out, _ in output[1:])
