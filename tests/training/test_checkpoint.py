"""Checkpoints: the bits saved are the bits restored on any mesh; what is damaged is never read; one is always whole."""

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
from shmap_tp.errors import StorageError, UserError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import checkpoint
from shmap_tp.training.checkpoint import MANIFEST, Checkpoints
from shmap_tp.training.step import State, StepFunctions, build_step_functions
from tests.helpers.run_fixtures import bits, tiny

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
FACTS = {"mesh": [2, 4], "rate": 0.1}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Of the tiny model, by (dp, mp)."""
    directory = tmp_path_factory.mktemp("programs")

    @cache
    def build(dp: int, mp: int) -> StepFunctions:
        config = tiny(directory, f"mesh.dp={dp}", f"mesh.mp={mp}")
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp]), jnp.float32)

    return build


def random_state(programs: StepFunctions, seed: int) -> State:
    """A state whose every value is its own, as a trained one's are; no two leaves are alike."""
    generator = np.random.default_rng(seed)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = 1e3 * generator.standard_normal(shape.shape)
        return jax.device_put(np.asarray(values, shape.dtype), shape.sharding)

    return jax.tree.map(leaf, programs.shapes)


def settings(directory: Path, *, keep: int = 3, keep_every: int | None = None) -> CheckpointConfig:
    return CheckpointConfig(str(directory), every=1, keep=keep, keep_every=keep_every, resume=Resume.never)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pair(programs, tmp_path_factory) -> tuple[Path, list[State]]:
    """A directory with the checkpoints 1 and 2, and their states."""
    directory = tmp_path_factory.mktemp("pair")
    states = [random_state(programs(2, 4), seed) for seed in (1, 2)]
    with Checkpoints(settings(directory), print) as checkpoints:
        for step, state in enumerate(states, start=1):
            checkpoints.save(step, state, FACTS)
    return directory, states


@pytest.fixture
def copied(pair, tmp_path) -> Path:
    """A copy of `pair`'s directory, to be damaged."""
    return Path(shutil.copytree(pair[0], tmp_path / "copied"))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def newest(directory: Path, said: list[str]) -> int | None:
    with Checkpoints(settings(directory), said.append) as checkpoints:
        return checkpoints.newest_intact()


@pytest.mark.parametrize("source", MESHES)
def test_the_bits_saved_are_the_bits_restored_on_every_mesh(programs, tmp_path, source):
    state = random_state(programs(*source), seed=sum(source))
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        checkpoints.save(7, state, FACTS)
        checkpoints.wait()
        assert checkpoints.facts(7) == FACTS
        for target in MESHES:
            shapes = programs(*target).shapes
            restored = checkpoints.restore(7, shapes)
            assert bits(restored) == bits(state), target
            laid_out = jax.tree.map(lambda leaf, shape: leaf.sharding == shape.sharding, restored, shapes)
            assert all(jax.tree.leaves(laid_out)), target


def test_the_bits_are_the_same_whoever_keeps_them(tmp_path):
    """Saved where dp shares out the optimizer's state, or the weights too, or nothing, and restored on each of them."""

    def made(dp: int, mp: int, zero: str) -> StepFunctions:
        config = tiny(tmp_path, f"mesh.dp={dp}", f"mesh.mp={mp}", f"mesh.zero={zero}")
        return build_step_functions(config, make_mesh(config.mesh, jax.devices()[: dp * mp]), jnp.float32)

    levels = [made(4, 2, "optimizer"), made(2, 4, "none"), made(8, 1, "parameters"), made(2, 2, "parameters")]
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        for step, source in enumerate(levels):
            state = random_state(source, seed=step)
            checkpoints.save(step, state, FACTS)
            checkpoints.wait()
            for target in levels:
                assert bits(checkpoints.restore(step, target.shapes)) == bits(state)


def test_a_state_may_be_donated_while_it_is_being_saved(programs, tmp_path):
    state = random_state(programs(2, 4), seed=3)
    expected = bits(state)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        checkpoints.save(1, state, FACTS)
        jax.block_until_ready(spoil(state))
        checkpoints.wait()
        assert bits(checkpoints.restore(1, programs(2, 4).shapes)) == expected


def test_an_undamaged_newest_checkpoint_is_taken_without_a_word(copied, said):
    assert newest(copied, said) == 2
    assert said == []


def flips(size: int) -> list[tuple[int, int]]:
    """(byte, bit): the first and last byte, and three between."""
    if size == 0:
        return []
    generator = np.random.default_rng(size)
    places = {0, size - 1, *generator.integers(0, size, 3).tolist()}
    return [(place, int(generator.integers(8))) for place in sorted(places)]


def test_a_flipped_bit_in_any_file_is_found_and_the_one_before_is_taken(copied, said, pair, programs):
    cases = 0
    for file in files(copied / "2"):
        whole = file.read_bytes()
        for byte, bit in flips(len(whole)):
            file.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << bit)]) + whole[byte + 1 :])
            said.clear()
            assert newest(copied, said) == 1, (file, byte, bit)
            assert len(said) == 1 and str(copied / "2") in said[0], said
            assert file.name == MANIFEST or str(file.relative_to(copied / "2")) in said[0], said
            cases += 1
        file.write_bytes(whole)
    assert cases > 40
    with Checkpoints(settings(copied), print) as checkpoints:
        assert bits(checkpoints.restore(1, programs(2, 4).shapes)) == bits(pair[1][0])


def test_any_flipped_bit_of_the_hashes_is_found(copied, said):
    """The hashes have no hash of their own: that they still parse and still match is all that vouches for them."""
    manifest = copied / "2" / MANIFEST
    whole = manifest.read_bytes()
    with Checkpoints(settings(copied), said.append) as checkpoints:
        for byte in range(len(whole)):
            flipped = whole[byte] ^ (1 << (byte % 8))
            manifest.write_bytes(whole[:byte] + bytes([flipped]) + whole[byte + 1 :])
            assert checkpoints._fault(2) is not None, (byte, whole[byte : byte + 1], flipped)


def test_hashes_cut_short_anywhere_are_found(copied, said):
    manifest = copied / "2" / MANIFEST
    whole = manifest.read_bytes()
    with Checkpoints(settings(copied), said.append) as checkpoints:
        for size in range(len(whole)):
            manifest.write_bytes(whole[:size])
            assert checkpoints._fault(2) is not None, size
        for other in (b"[]", b"null", b'"all"', b"{}", b"7"):
            manifest.write_bytes(other)
            assert checkpoints._fault(2) is not None, other
        assert checkpoints.newest_intact() == 1


def test_files_that_have_changed_places_or_become_directories_are_found(copied, said):
    one, other = sorted(files(copied / "2"), key=lambda file: file.stat().st_size)[-2:]
    swapped = one.with_name("between")
    for start, end in [(one, swapped), (other, one), (swapped, other)]:
        start.rename(end)
    assert newest(copied, said) == 1
    for start, end in [(one, swapped), (other, one), (swapped, other)]:
        start.rename(end)
    assert newest(copied, said) == 2
    one.unlink()
    one.mkdir()
    assert newest(copied, said) == 1
    assert len(said) == 2 and "is not what was saved" in said[0] and "is missing" in said[1]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing", "added"])
def test_a_file_cut_short_missing_or_added_is_found_and_the_one_before_is_taken(copied, said, damage):
    for file in files(copied / "2"):
        whole, named = file.read_bytes(), str(file.relative_to(copied / "2"))
        if damage == "truncated":
            file.write_bytes(whole[:-1])
        elif damage == "emptied":
            file.write_bytes(b"")
        elif damage == "missing":
            file.unlink()
        else:
            named += ".more"
            file.with_name(f"{file.name}.more").write_bytes(b"x")
        said.clear()
        if damage in ("truncated", "emptied") and not whole:
            assert newest(copied, said) == 2
            continue
        assert newest(copied, said) == 1, file
        assert len(said) == 1 and str(copied / "2") in said[0] and named in said[0], said
        file.with_name(f"{file.name}.more").unlink(missing_ok=True)
        file.write_bytes(whole)


def test_a_save_that_a_kill_cut_short_is_not_taken(copied, said):
    shutil.copytree(copied / "2", copied / "3.orbax-checkpoint-tmp")  # killed while writing
    shutil.copytree(copied / "2", copied / "4")  # killed between the rename and the hashes
    (copied / "4" / MANIFEST).unlink()
    shutil.copytree(copied / "2", copied / "5")  # killed while writing the hashes
    (copied / "5" / MANIFEST).rename(copied / "5" / f"{MANIFEST}.tmp")
    assert newest(copied, said) == 2
    assert len(said) == 2 and all(MANIFEST in line for line in said), said
    assert not (copied / "3.orbax-checkpoint-tmp").exists()


def test_none_is_taken_where_all_are_damaged_and_each_is_named(copied, said):
    for step in "12":
        (copied / step / "_CHECKPOINT_METADATA").unlink()
    assert newest(copied, said) is None
    assert [str(copied / step) in line for step, line in zip("21", said, strict=True)] == [True, True]


def test_a_step_whose_checkpoint_was_damaged_can_be_saved_again(copied, said, programs):
    (copied / "2" / MANIFEST).unlink()
    state = random_state(programs(2, 4), seed=5)
    with Checkpoints(settings(copied), said.append) as checkpoints:
        step = checkpoints.newest_intact()
        checkpoints.discard_after(step)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, state, FACTS)
        checkpoints.wait()
        assert checkpoints.newest_intact() == 2
        assert bits(checkpoints.restore(2, programs(2, 4).shapes)) == bits(state)


@pytest.mark.parametrize("keep, keep_every, left", [(2, None, [8, 9]), (3, 4, [4, 7, 8, 9]), (2, 3, [3, 6, 8, 9])])
def test_the_last_and_every_kth_are_kept(programs, tmp_path, keep, keep_every, left):
    with Checkpoints(settings(tmp_path, keep=keep, keep_every=keep_every), print) as checkpoints:
        for step in range(1, 10):
            checkpoints.save(step, random_state(programs(2, 4), step), FACTS)
        checkpoints.wait()
        assert checkpoints.steps() == left[::-1]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == left


@pytest.mark.parametrize("damaged", [False, True], ids=["from the start", "after a damaged one was passed over"])
def test_there_is_a_complete_checkpoint_at_every_moment(programs, copied, monkeypatch, damaged):
    """The worst moment is when a new one is in place and an old one gone, but the new one has no hashes yet."""
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
            checkpoints.save(later, random_state(programs(2, 4), later), FACTS)
        checkpoints.wait()
    assert len(complete) == 4 and all(complete), complete


def test_leaving_waits_for_the_save_and_its_hashes(programs, tmp_path):
    with Checkpoints(settings(tmp_path), print) as checkpoints:
        checkpoints.save(1, random_state(programs(2, 4), 1), FACTS)
    hashed = json.loads((tmp_path / "1" / MANIFEST).read_text())
    assert {*hashed, MANIFEST} == {str(path.relative_to(tmp_path / "1")) for path in files(tmp_path / "1")}


def test_a_save_that_failed_in_the_background_is_heard_of(programs, tmp_path, monkeypatch):
    def full(directory):
        raise OSError("no space left on device")

    state = random_state(programs(2, 4), 1)
    monkeypatch.setattr(checkpoint, "_hashes", full)
    with (
        pytest.raises(StorageError, match=r"checkpoint .*/1 could not be written: no space left"),
        Checkpoints(settings(tmp_path), print) as checkpoints,
    ):
        checkpoints.save(1, state, FACTS)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"checkpoint\.dir=.*file.*cannot be written"):
            Checkpoints(settings(directory), print)


def test_a_bucket_is_no_directory_of_that_name_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(checkpoint._directory("gs://bucket/run")) == "gs://bucket/run"
    assert str(checkpoint._directory("run")) == str(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"^checkpoint\.dir=gs://bucket/run needs gcsfs: pip install -e '\.\[gcs\]'$"):
        Checkpoints(replace(settings(tmp_path), dir="gs://bucket/run"), print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape, dtype", [((64, 96), "float32"), ((64, 32), "bfloat16")])
def test_a_state_of_another_shape_or_dtype_is_refused_by_the_name_of_the_leaf(pair, programs, shape, dtype):
    """Orbax would cast the dtype; a shape it refuses in two thousand lines."""
    leaf = programs(2, 4).shapes.params.embedding.weight
    other = eqx.tree_at(
        lambda state: state.params.embedding.weight,
        programs(2, 4).shapes,
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=leaf.sharding),
    )
    with Checkpoints(settings(pair[0]), print) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(2, other)
    said = str(caught.value)
    where = f"checkpoint {pair[0]}/2 holds params/embedding/weight"
    assert said.startswith(f"{where} as float32[64, 32], needed is {dtype}{list(shape)};")
    assert len(said.splitlines()) == 2


def test_a_state_with_another_leaf_is_refused_by_its_name(pair, programs):
    shapes = programs(2, 4).shapes
    fewer = eqx.tree_at(lambda state: state.params.head.weight, shapes, None)
    with (
        Checkpoints(settings(pair[0]), print) as checkpoints,
        pytest.raises(UserError, match="params/head/weight as fl"),
    ):
        checkpoints.restore(2, fewer)
