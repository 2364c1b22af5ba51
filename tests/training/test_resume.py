"""What can be resumed, and which starts are refused without changing anything."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from shmap_tp.data.metadata import META, TOKENIZER
from shmap_tp.errors import ShmapTpError, UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import ORBAX_METADATA
from shmap_tp.training.integrity import MANIFEST
from shmap_tp.training.resume import MAY_CHANGE, _fixed_settings
from shmap_tp.training.step import State
from tests.helpers import run_fixtures as runs
from tests.helpers.assertions import assert_close, by_path
from tests.helpers.paths import ROOT


def refused(directory: Path, *overrides: str) -> str:
    """The message with which this start is refused; asserts that the run in `directory` is unchanged."""
    before = runs.file_contents(directory)
    with pytest.raises(ShmapTpError) as caught:
        loop.train(runs.tiny(directory, *overrides))
    message = str(caught.value)
    assert len(message.splitlines()) <= 2, message
    assert runs.file_contents(directory) == before
    return message


REFUSED = {
    "a new run in the directory of another": (
        [[]], "{run}/checkpoints has checkpoints of this run up to step 8", "--resume", "run.dir=",
    ),
    "fewer steps than the checkpoint has": (
        [["train.steps=7", "checkpoint.resume=must"], ["train.steps=7", "checkpoint.resume=if_present"]],
        "train.steps=7 is below step 8, which the checkpoint in {run}/checkpoints has done",
        "Give train.steps=8 or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_that_would_lose_what_a_run_has_is_refused(copied, case):
    starts, *expected = REFUSED[case]
    for start in starts:
        message = refused(copied, *(override.format(run=copied / "run") for override in start))
        for part in expected:
            assert part.format(run=copied / "run") in message, (start, message)


@pytest.mark.parametrize("resume", ["if_present", "never"])
def test_a_run_killed_before_its_first_checkpoint_starts_anew_and_its_metrics_stay(uninterrupted, tmp_path, resume):
    assert loop.train(runs.tiny(tmp_path, "train.steps=2")) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert loop.train(runs.tiny(tmp_path, f"checkpoint.resume={resume}")) == 0
    runs.assert_same_run(tmp_path, uninterrupted)
    assert [line["segment"] for line in runs.lines(tmp_path)] == [1] * runs.STEPS
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().startswith(before)


def test_a_checkpoint_from_before_documents_were_isolated_is_one_of_joined_documents():
    splits = {key: {"tokens": 1, "sha256": "0" * 64} for key in ("train", "validation")}
    assert _fixed_settings({}, splits | {"seed": 0, "batch": 1})["data.documents"] == "joined"


def test_a_run_of_a_version_that_shuffled_otherwise_continues_and_says_so_once(copied, capsys):
    """The epoch under way is not read exactly once; another order of the same name's place is refused."""
    directory = copied / "run" / "checkpoints" / "8"
    metadata = json.loads((directory / ORBAX_METADATA).read_text())
    order = metadata["custom_metadata"]["data"].pop("order")
    reseal(directory, json.dumps(metadata))
    said = f"checkpoint {directory} was saved by a version that shuffled otherwise: in the epoch of that step some"
    for steps in (9, 10):
        assert loop.train(runs.tiny(copied, "checkpoint.resume=must", f"train.steps={steps}")) == 0
        assert (said in capsys.readouterr().out) == (steps == 9)
    metadata["custom_metadata"]["data"]["order"] = f"{order}0"
    shutil.rmtree(directory.with_name("9"))
    shutil.rmtree(directory.with_name("10"))
    reseal(directory, json.dumps(metadata))
    assert f"the data order was {order}0, is {order}" in refused(copied, "checkpoint.resume=must")


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    runs.write_tokens(tmp_path / "data")
    with pytest.raises(UserError, match=r"no checkpoint in .*/run/checkpoints; leave it out .* or name the run"):
        loop.train(runs.tiny(tmp_path, "checkpoint.resume=must"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_model_batch_or_seed_is_refused_with_both_values(copied):
    of_another_run = f"checkpoint {copied}/run/checkpoints/8 is of another run"
    for override, was, now in [
        ("model.layers=3", "model.layers was 2", "is 3"),
        ("model.ffn=128", "model.ffn was 64", "is 128"),
        ("model.positions=rotary", "model.positions was alibi", "is rotary"),
        ("model.vocabulary=60", "ids go up to 63", "model.vocabulary=60"),  # refused because of the token ids
        ("model.tie_embeddings=true", "model.tie_embeddings was False", "is True"),
        ("model.context=8", "model.context was 16", "is 8"),
        ("train.batch=16", "train.batch was 8", "is 16"),
        ("run.seed=1", "run.seed was 0", "is 1"),
        ("optimizer.name=muon", "optimizer.name was adamw", "is muon"),
        ("optimizer.momentum_dtype=bfloat16", "optimizer.momentum_dtype was float32", "is bfloat16"),
        ("data.documents=joined", "data.documents was isolated (id 0 ends them)", "is joined"),
    ]:
        message = refused(copied, "checkpoint.resume=must", override)
        assert was in message and now in message, (override, message)
        assert "was" not in was or (of_another_run in message and "run.dir=" in message), (override, message)


def test_other_data_is_refused_with_its_file_and_length(copied):
    for resume in ("must", "if_present"):
        runs.write_tokens(copied / "data", train=2999)
        message = refused(copied, f"checkpoint.resume={resume}")
        assert "data.dir (train.bin) was 3000 tokens of sha256" in message and "is 2999 tokens of sha256" in message
        runs.write_tokens(copied / "data", seed=1)
        assert "data.dir (train.bin) was 3000 tokens of sha256" in refused(copied, f"checkpoint.resume={resume}")


def test_another_tokenizer_of_the_same_name_is_refused(copied):
    """The run directory and the checkpoint have the tokenizer, the data has another now."""
    assert (copied / "run" / TOKENIZER).read_bytes() == (copied / "data" / TOKENIZER).read_bytes() == b"{}"
    (copied / "data" / TOKENIZER).write_bytes(b"[]")
    assert "tokenizer.json: sha256 is 4f53cda18c2b..., meta.json says 44136fa355b3" in refused(copied)
    meta = json.loads((copied / "data" / META).read_text())
    meta["tokenizer_sha256"] = hashlib.sha256(b"[]").hexdigest()
    (copied / "data" / META).write_text(json.dumps(meta))
    message = refused(copied, "checkpoint.resume=must")
    assert "data.dir (sha256 of tokenizer.json) was 44136fa355b3" in message and "is 4f53cda18c2b" in message
    assert (copied / "run" / TOKENIZER).read_bytes() == b"{}"


def test_settings_that_do_not_change_the_steps_before_may_change_and_the_next_update_has_them(copied):
    """So may data that states no hash of its tokenizer, which was prepared before the hash was recorded."""
    (copied / "data" / META).write_text('{"dtype": "uint16", "end_of_text": 0}')
    free = ["model.name=other", "model.remat=full", "model.offload=[input]", "model.attention_chunk=8"]
    free += ["train.microbatches=2", "train.steps=10", "checkpoint.every=1", "guard.max_norm_change=3"]
    free += ["optimizer.schedule=linear", "optimizer.warmup_steps=9", "optimizer.learning_rate=3e-2"]
    free += ["optimizer.final_learning_rate=1e-2", "optimizer.weight_decay=0.5", "optimizer.epsilon=1e-4"]
    config = runs.tiny(copied, "checkpoint.resume=must", *free, "optimizer.beta1=0.8", "optimizer.beta2=0.9")
    assert loop.train(config) == 0
    rates = {9: 3e-2, 10: 3e-2 - 2e-2 / 11}  # the last step of the warm-up, and the first of a decay until step 20
    assert [line["learning_rate"] for line in runs.lines(copied)[8:]] == pytest.approx([*rates.values()], rel=1e-6)
    with Checkpoints(config.checkpoint, print) as checkpoints:
        shapes = runs.shared_step_functions(config, make_mesh(config.mesh), jnp.float32).shapes
        before, *after = (checkpoints.restore(step, shapes) for step in (8, 9, 10))
    for state, (step, rate) in zip(after, rates.items(), strict=True):
        assert_update_of_adamw(before, state, step, rate)
        before = state


def assert_update_of_adamw(before: State, after: State, step: int, rate: float) -> None:
    """Asserts that the parameters are those of algorithm 2 of Loshchilov and Hutter, with beta1 0.8, beta2 0.9, epsilon
    1e-4 and weight decay 0.5, from the moments in both states, which say the gradient."""
    old, new = ([by_path(tree) for tree in (s.params, s.optimizer[0].mu, s.optimizer[0].nu)] for s in (before, after))
    for path, w in old[0].items():
        gradient = (new[1][path] - 0.8 * old[1][path]) / 0.2
        assert_close(new[2][path], 0.9 * old[2][path] + 0.1 * gradient**2, 1e-5)
        mean, square = new[1][path] / (1 - 0.8**step), new[2][path] / (1 - 0.9**step)
        decay = 0.0 if "norm" in path else 0.5
        assert_close(new[0][path], w - rate * (mean / (square**0.5 + 1e-4) + decay * w), 1e-6)


def test_the_table_of_the_documents_names_what_of_a_model_may_change():
    (row,) = re.findall(r"^\| `model` .*$", (ROOT / "docs" / "checkpoints.md").read_text(), re.M)
    assert set(re.findall(r"`model\.(\w+)", row)) == MAY_CHANGE


def test_a_renamed_checkpoint_is_refused(copied):
    """Every file is intact, but the following steps would read other data."""
    directory = copied / "run" / "checkpoints"
    (directory / "6").rename(directory / "10")
    message = refused(copied, "checkpoint.resume=must", "train.steps=12")
    assert message == f"checkpoint {directory}/10 contains the state after step 6: rename the directory to that number"


def test_a_run_without_an_intact_checkpoint_is_refused_with_their_steps(copied, capsys):
    for manifest in (copied / "run" / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest.unlink()
    for resume in ("must", "if_present"):
        message = refused(copied, f"checkpoint.resume={resume}")
        assert f"no checkpoint in {copied}/run/checkpoints is intact (found: 8, 6, 4)" in message
        listed = capsys.readouterr().out
        assert all(f"checkpoints/{step} is skipped: {MANIFEST} is missing" in listed for step in (8, 6, 4))
        assert "run.dir=" in message


def test_resume_if_present_starts_resumes_and_survives_a_killed_first_save(uninterrupted, tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    assert loop.train(runs.tiny(tmp_path, "checkpoint.resume=if_present", "train.steps=2")) == 0  # it starts
    (directory / "2" / MANIFEST).unlink()  # as if the first save had been killed before its hashes
    assert loop.train(runs.tiny(tmp_path, "checkpoint.resume=if_present", "train.steps=4")) == 0  # it starts again
    assert loop.train(runs.tiny(tmp_path, "checkpoint.resume=if_present")) == 0  # it resumes
    runs.assert_same_run(tmp_path, uninterrupted)
    assert [line["segment"] for line in runs.lines(tmp_path)] == [1] * 4 + [2] * 4


FOREIGN = (
    b'\0\0\0\0\n{}\n[1, 2]\n\xff\xfe\n{"step": 1' + b"0" * 5000 + b', "split": "train"}\n{"step": "4", "cause": 3}\n'
)


def test_damaged_checkpoints_are_skipped_and_foreign_lines_in_the_metrics_are_not_lost(uninterrupted, copied, capsys):
    """The steps after an intact one are trained again, and no line is removed."""
    run, directory = copied / "run", copied / "run" / "checkpoints"
    (directory / "6" / "_CHECKPOINT_METADATA").write_bytes(b"")
    data = max((directory / "8").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    damaged = {}
    for name, found in [("metrics.jsonl", b'"step": 3'), ("time.jsonl", b'"cause": "compile"')]:
        *before, last = (run / name).read_bytes().splitlines(keepends=True)
        place = next(i for i, line in enumerate(before) if found in line)
        (run / name).write_bytes(b"".join([*before[:place], FOREIGN, *before[place:], FOREIGN, last, last[:9]]))
        damaged[name] = (run / name).read_bytes()
    assert loop.train(runs.tiny(copied, "checkpoint.resume=must")) == 0
    message = capsys.readouterr().out
    assert f"{directory}/8 is skipped: file {data.relative_to(directory / '8')} is damaged" in message
    assert f"{directory}/6 is skipped: file _CHECKPOINT_METADATA is damaged" in message
    assert "resuming from step 4" in message
    runs.assert_same_run(copied, uninterrupted)
    assert all((run / name).read_bytes().startswith(content + b"\n") for name, content in damaged.items())


EDITS: dict[str, Callable[[dict], Any]] = {
    "a list": lambda facts: [],
    "null": lambda facts: None,
    "no mesh": lambda facts: facts.pop("mesh") and facts,
}


def test_edited_metadata_with_new_hashes_is_refused(copied):
    directory = copied / "run" / "checkpoints" / "8"
    text = (directory / ORBAX_METADATA).read_text()
    edited = {name: edit(json.loads(text)["custom_metadata"]) for name, edit in EDITS.items()}
    texts = [json.dumps(json.loads(text) | {"custom_metadata": facts}) for facts in edited.values()]
    for text in [*texts, "", "[]", "null", '{"custom_metadata": 7}', "{", "\0"]:
        reseal(directory, text)
        assert f"checkpoint {directory}" in refused(copied, "checkpoint.resume=must"), text


def reseal(directory: Path, metadata: str) -> None:
    """Replace the metadata of a checkpoint, and the hash of it."""
    (directory / ORBAX_METADATA).write_text(metadata)
    hashes = json.loads((directory / MANIFEST).read_text())
    hashes[ORBAX_METADATA] = hashlib.sha256(metadata.encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(hashes))
