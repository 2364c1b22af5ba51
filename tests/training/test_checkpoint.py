"""Checkpoints: restored bit for bit on any mesh; a damaged one is never read; a complete one always exists."""

import json
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.schema import CheckpointConfig, Resume
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import checkpoint
from shmap_tp.training.checkpoint import MANIFEST, Checkpoints
from shmap_tp.training.step import State, StepFunctions, build_step_functions
from tests.helpers.run_fixtures import bits, tiny

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
FACTS = {"mesh": [2, 4], "rate": 0.1}


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """The step functions of the tiny model, by (dp, mp)."""
    directory = tmp_path_factory.mktemp("functions")

    @cache
    def build(dp: int, mp: int) -> StepFunctions:
        config = tiny(directory, f"mesh.dp={dp}", f"mesh.mp={mp}")
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp]), jnp.float32)

    return build


def random_state(functions: StepFunctions, seed: int) -> State:
    """A state of random values: no two leaves are equal, as in a trained state."""
    generator = np.random.default_rng(seed)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = 1e3 * generator.standard_normal(shape.shape)
        return jax.device_put(np.asarray(values, shape.dtype), shape.sharding)

    return jax.tree.map(leaf, functions.shapes)


def settings(directory: Path, *, keep: int = 3, keep_every: int | None = None) -> CheckpointConfig:
    return CheckpointConfig(str(directory), every=1, keep=keep, keep_every=keep_every, resume=Resume.never)


@pytest.fixture
def messages() -> list[str]:
    """Collects what Checkpoints reports."""
    return []


@pytest.fixture(scope="module")
def pair(functions, tmp_path_factory) -> tuple[Path, list[State]]:
    """A directory with checkpoints of steps 1 and 2, and their states."""
    directory = tmp_path_factory.mktemp("pair")
    states = [random_state(functions(2, 4), seed) for seed in (1, 2)]
    with Checkpoints(settings(directory), print) as checkpoints:
        for step, state in enumerate(states, start=1):
            checkpoints.save(step, state, FACTS)
    return directory, states


@pytest.fixture
def copied(pair, tmp_path) -> Path:
    """A copy of the directory of `pair`, to be damaged."""
    return Path(shutil.copytree(pair[0], tmp_path / "copied"))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def newest(directory: Path, messages: list[str]) -> int | None:
    """The newest intact checkpoint in `directory`; what is reported is appended to `messages`."""
    with Checkpoints(settings(directory), messages.append) as checkpoints:
        return checkpoints.newest_intact()


@pytest.mark.parametrize("source", MESHES)
def test_a_state_is_restored_bit_for_bit_on_every_mesh(functions, tmp_path, source):
    state = random_state(functions(*source), seed=sum(source))
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        checkpoints.save(7, state, FACTS)
        checkpoints.wait()
        assert checkpoints.facts(7) == FACTS
        for target in MESHES:
            shapes = functions(*target).shapes
            restored = checkpoints.restore(7, shapes)
            assert bits(restored) == bits(state), target
            laid_out = jax.tree.map(lambda leaf, shape: leaf.sharding == shape.sharding, restored, shapes)
            assert all(jax.tree.leaves(laid_out)), target


def test_a_state_is_restored_bit_for_bit_with_every_zero_setting(tmp_path):
    """Saved without ZeRO, with ZeRO-1 or with FSDP, and restored with each of them."""

    def made(dp: int, mp: int, zero: str) -> StepFunctions:
        config = tiny(tmp_path, f"mesh.dp={dp}", f"mesh.mp={mp}", f"mesh.zero={zero}")
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp]), jnp.float32)

    levels = [made(4, 2, "zero1"), made(2, 4, "none"), made(8, 1, "fsdp"), made(2, 2, "fsdp")]
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        for step, source in enumerate(levels):
            state = random_state(source, seed=step)
            checkpoints.save(step, state, FACTS)
            checkpoints.wait()
            for target in levels:
                assert bits(checkpoints.restore(step, target.shapes)) == bits(state)


def test_a_state_can_be_donated_while_it_is_being_saved(functions, tmp_path):
    state = random_state(functions(2, 4), seed=3)
    expected = bits(state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        checkpoints.save(1, state, FACTS)
        jax.block_until_ready(overwrite(state))
        checkpoints.wait()
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == expected


def test_an_intact_newest_checkpoint_is_chosen_without_a_message(copied, messages):
    assert newest(copied, messages) == 2
    assert messages == []


def flips(size: int) -> list[tuple[int, int]]:
    """Positions (byte, bit) to flip: the first and last byte, and three between."""
    if size == 0:
        return []
    generator = np.random.default_rng(size)
    positions = {0, size - 1, *generator.integers(0, size, 3).tolist()}
    return [(position, int(generator.integers(8))) for position in sorted(positions)]


def test_a_flipped_bit_in_any_file_is_found_and_the_previous_checkpoint_is_chosen(copied, messages, pair, functions):
    cases = 0
    for file in files(copied / "2"):
        original = file.read_bytes()
        for byte, bit in flips(len(original)):
            file.write_bytes(original[:byte] + bytes([original[byte] ^ (1 << bit)]) + original[byte + 1 :])
            messages.clear()
            assert newest(copied, messages) == 1, (file, byte, bit)
            assert len(messages) == 1 and str(copied / "2") in messages[0], messages
            assert file.name == MANIFEST or str(file.relative_to(copied / "2")) in messages[0], messages
            cases += 1
        file.write_bytes(original)
    assert cases > 40
    with Checkpoints(settings(copied), print) as checkpoints:
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == bits(pair[1][0])


def test_any_flipped_bit_of_the_hashes_is_found(copied, messages):
    """The hashes have no hash of their own: they are intact if they parse and match the files."""
    manifest = copied / "2" / MANIFEST
    original = manifest.read_bytes()
    with Checkpoints(settings(copied), messages.append) as checkpoints:
        for byte in range(len(original)):
            flipped = original[byte] ^ (1 << (byte % 8))
            manifest.write_bytes(original[:byte] + bytes([flipped]) + original[byte + 1 :])
            assert checkpoints._fault(2) is not None, (byte, original[byte : byte + 1], flipped)


def test_truncated_hashes_are_found(copied, messages):
    manifest = copied / "2" / MANIFEST
    original = manifest.read_bytes()
    with Checkpoints(settings(copied), messages.append) as checkpoints:
        for size in range(len(original)):
            manifest.write_bytes(original[:size])
            assert checkpoints._fault(2) is not None, size
        for other in (b"[]", b"null", b'"all"', b"{}", b"7"):
            manifest.write_bytes(other)
            assert checkpoints._fault(2) is not None, other
        assert checkpoints.newest_intact() == 1


def test_swapped_files_and_files_replaced_by_directories_are_found(copied, messages):
    one, other = sorted(files(copied / "2"), key=lambda file: file.stat().st_size)[-2:]
    swapped = one.with_name("between")
    for start, end in [(one, swapped), (other, one), (swapped, other)]:
        start.rename(end)
    assert newest(copied, messages) == 1
    for start, end in [(one, swapped), (other, one), (swapped, other)]:
        start.rename(end)
    assert newest(copied, messages) == 2
    one.unlink()
    one.mkdir()
    assert newest(copied, messages) == 1
    assert len(messages) == 2 and "is damaged" in messages[0] and "is missing" in messages[1]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing", "added"])
def test_a_truncated_missing_or_added_file_is_found_and_the_previous_checkpoint_is_chosen(copied, messages, damage):
    for file in files(copied / "2"):
        original, named = file.read_bytes(), str(file.relative_to(copied / "2"))
        if damage == "truncated":
            file.write_bytes(original[:-1])
        elif damage == "emptied":
            file.write_bytes(b"")
        elif damage == "missing":
            file.unlink()
        else:
            named += ".more"
            file.with_name(f"{file.name}.more").write_bytes(b"x")
        messages.clear()
        if damage in ("truncated", "emptied") and not original:
            assert newest(copied, messages) == 2
            continue
        assert newest(copied, messages) == 1, file
        assert len(messages) == 1 and str(copied / "2") in messages[0] and named in messages[0], messages
        file.with_name(f"{file.name}.more").unlink(missing_ok=True)
        file.write_bytes(original)


def test_a_save_interrupted_by_a_kill_is_not_chosen(copied, messages):
    shutil.copytree(copied / "2", copied / "3.orbax-checkpoint-tmp")  # killed while writing
    shutil.copytree(copied / "2", copied / "4")  # killed between the rename and the hashes
    (copied / "4" / MANIFEST).unlink()
    shutil.copytree(copied / "2", copied / "5")  # killed while writing the hashes
    (copied / "5" / MANIFEST).rename(copied / "5" / f"{MANIFEST}.tmp")
    assert newest(copied, messages) == 2
    assert len(messages) == 2 and all(MANIFEST in line for line in messages), messages
    assert not (copied / "3.orbax-checkpoint-tmp").exists()


def test_no_checkpoint_is_chosen_if_all_are_damaged_and_each_is_reported(copied, messages):
    for step in "12":
        (copied / step / "_CHECKPOINT_METADATA").unlink()
    assert newest(copied, messages) is None
    assert [str(copied / step) in line for step, line in zip("21", messages, strict=True)] == [True, True]


def test_a_step_whose_checkpoint_was_damaged_can_be_saved_again(copied, messages, functions):
    (copied / "2" / MANIFEST).unlink()
    state = random_state(functions(2, 4), seed=5)
    with Checkpoints(settings(copied), messages.append) as checkpoints:
        step = checkpoints.newest_intact()
        checkpoints.discard_after(step)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, state, FACTS)
        checkpoints.wait()
        assert checkpoints.newest_intact() == 2
        assert bits(checkpoints.restore(2, functions(2, 4).shapes)) == bits(state)


@pytest.mark.parametrize("keep, keep_every, left", [(2, None, [8, 9]), (3, 4, [4, 7, 8, 9]), (2, 3, [3, 6, 8, 9])])
def test_the_newest_and_every_kth_checkpoint_are_kept(functions, tmp_path, keep, keep_every, left):
    with Checkpoints(settings(tmp_path, keep=keep, keep_every=keep_every), print) as checkpoints:
        for step in range(1, 10):
            checkpoints.save(step, random_state(functions(2, 4), step), FACTS)
        checkpoints.wait()
        assert checkpoints.steps() == left[::-1]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == left


@pytest.mark.parametrize("damaged", [False, True], ids=["from the start", "after a damaged one was skipped"])
def test_a_complete_checkpoint_exists_at_every_moment(functions, copied, monkeypatch, damaged):
    """The critical moment is when a new checkpoint is in place but has no hashes yet."""
    if damaged:
        (copied / "2" / MANIFEST).unlink()
    complete = []
    hashes = checkpoint._hashes

    def watched(directory):
        complete.append([path.parent.name for path in copied.glob(f"*/{MANIFEST}")])
        return hashes(directory)

    with Checkpoints(settings(copied, keep=2), print) as checkpoints:
        step = checkpoints.newest_intact()
        checkpoints.discard_after(step)
        monkeypatch.setattr(checkpoint, "_hashes", watched)
        for later in range(step + 1, step + 5):
            checkpoints.save(later, random_state(functions(2, 4), later), FACTS)
        checkpoints.wait()
    assert len(complete) == 4 and all(complete), complete


def test_leaving_the_context_waits_for_the_save_and_its_hashes(functions, tmp_path):
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        checkpoints.save(1, random_state(functions(2, 4), 1), FACTS)
    hashed = json.loads((tmp_path / "1" / MANIFEST).read_text())
    assert {*hashed, MANIFEST} == {str(path.relative_to(tmp_path / "1")) for path in files(tmp_path / "1")}


def test_an_error_of_a_background_save_is_raised(functions, tmp_path, monkeypatch):
    def full(directory):
        raise OSError("no space left on device")

    state = random_state(functions(2, 4), 1)
    monkeypatch.setattr(checkpoint, "_hashes", full)
    with (
        pytest.raises(UserError, match=r"checkpoint .*/1 could not be written: no space left"),
        Checkpoints(settings(tmp_path), print) as checkpoints,
    ):
        checkpoints.save(1, state, FACTS)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"checkpoint\.dir=.*file.*cannot be written"):
            Checkpoints(settings(directory), print)


def test_a_bucket_url_does_not_create_a_local_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(checkpoint._directory("gs://bucket/run")) == "gs://bucket/run"
    assert str(checkpoint._directory("run")) == str(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"^checkpoint\.dir=gs://bucket/run needs gcsfs: pip install -e '\.\[gcs\]'$"):
        Checkpoints(replace(settings(tmp_path), dir="gs://bucket/run"), print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape, dtype", [((64, 96), "float32"), ((64, 32), "bfloat16")])
def test_a_state_of_another_shape_or_dtype_is_refused_with_the_name_of_the_leaf(pair, functions, shape, dtype):
    """Orbax would cast the dtype, and would refuse the shape in two thousand lines."""
    leaf = functions(2, 4).shapes.params.embedding.weight
    other = eqx.tree_at(
        lambda state: state.params.embedding.weight,
        functions(2, 4).shapes,
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=leaf.sharding),
    )
    with Checkpoints(settings(pair[0]), print) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(2, other)
    message = str(caught.value)
    where = f"checkpoint {pair[0]}/2 has params/embedding/weight"
    assert message.startswith(f"{where} as float32[64, 32], this run needs {dtype}{list(shape)};")
    assert len(message.splitlines()) == 2


def test_a_state_with_a_missing_leaf_is_refused_with_its_name(pair, functions):
    shapes = functions(2, 4).shapes
    fewer = eqx.tree_at(lambda state: state.params.head.weight, shapes, None)
    with (
        Checkpoints(settings(pair[0]), print) as checkpoints,
        pytest.raises(UserError, match="params/head/weight as fl"),
    ):
        checkpoints.restore(2, fewer)
