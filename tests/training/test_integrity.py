"""A damaged or incomplete checkpoint is found, and the newest intact one is chosen.  Replicas that differ are found,
with the name of the array and the device, for every array on every device."""

import errno
import json
import os
import shutil
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from shmap_tp.errors import HardwareError
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.runtime import agreement
from shmap_tp.runtime.agreement import divided
from shmap_tp.training import integrity, loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.integrity import MANIFEST, ReplicaCheck, find_faults, fingerprint, hashes, shares
from shmap_tp.training.step import build_step_functions
from tests.helpers.checkpoint_fixtures import checkpoint_config, files, random_state
from tests.helpers.in_processes import in_processes
from tests.helpers.run_fixtures import bits, flip_bit, tiny


def newest(directory: Path, messages: list[str]) -> int | None:
    """The newest intact checkpoint in `directory`; what is reported is appended to `messages`."""
    with Checkpoints(checkpoint_config(directory), messages.append) as checkpoints:
        return checkpoints.newest_intact()


def flips(size: int) -> list[tuple[int, int]]:
    """Positions (byte, bit) to flip: the first and last byte, and three between."""
    if size == 0:
        return []
    generator = np.random.default_rng(size)
    positions = {0, size - 1, *generator.integers(0, size, 3).tolist()}
    return [(position, int(generator.integers(8))) for position in sorted(positions)]


def test_a_flipped_bit_in_any_file_is_found_and_the_previous_checkpoint_is_chosen(pair_copy, messages, pair, functions):
    cases = 0
    assert newest(pair_copy, messages) == 2 and messages == [], "an intact newest one is chosen without a message"
    for file in files(pair_copy / "2"):
        original = file.read_bytes()
        for byte, bit in flips(len(original)):
            file.write_bytes(original[:byte] + bytes([original[byte] ^ (1 << bit)]) + original[byte + 1 :])
            messages.clear()
            assert newest(pair_copy, messages) == 1, (file, byte, bit)
            assert len(messages) == 1 and str(pair_copy / "2") in messages[0], messages
            assert file.name == MANIFEST or str(file.relative_to(pair_copy / "2")) in messages[0], messages
            cases += 1
        file.write_bytes(original)
    assert cases > 40
    with Checkpoints(checkpoint_config(pair_copy), print) as checkpoints:
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == bits(pair[1][0])


def test_any_flipped_bit_of_the_hashes_and_truncated_ones_are_found(pair_copy, messages, monkeypatch):
    """The hashes have no hash of their own: they are intact if they parse and match the files."""
    monkeypatch.setattr(integrity, "hashes", cache(hashes))  # the files stay as they are
    manifest = pair_copy / "2" / MANIFEST
    original = manifest.read_bytes()
    flipped = [
        original[:byte] + bytes([original[byte] ^ (1 << (byte % 8))]) + original[byte + 1 :]
        for byte in range(len(original))
    ]
    others = [original[:size] for size in range(len(original))] + [b"[]", b"null", b'"all"', b"{}", b"7"]
    with Checkpoints(checkpoint_config(pair_copy), messages.append) as checkpoints:
        for content in flipped + others:
            manifest.write_bytes(content)
            assert checkpoints._fault(2) is not None, content
        assert checkpoints.newest_intact() == 1


def test_swapped_files_and_files_replaced_by_directories_are_found(pair_copy, messages):
    one, other = sorted(files(pair_copy / "2"), key=lambda file: file.stat().st_size)[-2:]
    swapped = one.with_name("between")
    for start, end in [(one, swapped), (other, one), (swapped, other)]:
        start.rename(end)
    assert newest(pair_copy, messages) == 1
    for start, end in [(one, swapped), (other, one), (swapped, other)]:
        start.rename(end)
    assert newest(pair_copy, messages) == 2
    one.unlink()
    one.mkdir()
    assert newest(pair_copy, messages) == 1
    assert len(messages) == 2 and "is damaged" in messages[0] and "is missing" in messages[1]


def test_a_truncated_missing_or_added_file_is_found_and_the_previous_checkpoint_is_chosen(pair_copy, messages):
    for file in files(pair_copy / "2"):
        original, named = file.read_bytes(), str(file.relative_to(pair_copy / "2"))
        for damage in ("truncated", "emptied", "missing", "added"):
            more = file.with_name(f"{file.name}.more")
            if damage == "missing":
                file.unlink()
            elif damage == "added":
                more.write_bytes(b"x")
            else:
                file.write_bytes(original[:-1] if damage == "truncated" else b"")
            messages.clear()
            if damage in ("truncated", "emptied") and not original:
                assert newest(pair_copy, messages) == 2
            else:
                assert newest(pair_copy, messages) == 1, (damage, file)
                assert len(messages) == 1 and str(pair_copy / "2") in messages[0] and named in messages[0], messages
            more.unlink(missing_ok=True)
            file.write_bytes(original)


def test_a_save_interrupted_by_a_kill_is_not_chosen(pair_copy, messages):
    shutil.copytree(pair_copy / "2", pair_copy / "3.orbax-checkpoint-tmp")  # killed while writing
    shutil.copytree(pair_copy / "2", pair_copy / "4")  # killed between the rename and the hashes
    (pair_copy / "4" / MANIFEST).unlink()
    shutil.copytree(pair_copy / "2", pair_copy / "5")  # killed while writing the hashes
    (pair_copy / "5" / MANIFEST).rename(pair_copy / "5" / f"{MANIFEST}.tmp")
    assert newest(pair_copy, messages) == 2
    assert len(messages) == 2 and all(MANIFEST in line for line in messages), messages
    assert not (pair_copy / "3.orbax-checkpoint-tmp").exists()


def test_no_checkpoint_is_chosen_if_all_are_damaged_and_each_is_reported(pair_copy, messages):
    for step in "12":
        (pair_copy / step / "_CHECKPOINT_METADATA").unlink()
    assert newest(pair_copy, messages) is None
    assert [str(pair_copy / step) in line for step, line in zip("21", messages, strict=True)] == [True, True]


@pytest.fixture
def of_eight(tmp_path) -> Path:
    """A checkpoint as eight processes write it: a large file of each, one more of the first, and small ones of all."""
    sizes = {f"state/ocdbt.process_{process}/d/{process}": 10_000 + process for process in range(8)}
    sizes |= {"state/ocdbt.process_0/d/more": 8_000, "state/d/index": 3_000, "_CHECKPOINT_METADATA": 70}
    for name, size in sizes.items():
        (file := tmp_path / "7" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(np.random.default_rng(size).bytes(size))
    (tmp_path / "7" / MANIFEST).write_text(json.dumps(hashes(epath.Path(tmp_path / "7"))))
    return tmp_path / "7"


def test_each_of_eight_processes_hashes_its_share_of_the_files_and_all_find_what_one_of_them_finds(
    of_eight, monkeypatch
):
    hashed, found = dict[int, dict[str, bool]](), dict[int, list[str]]()

    def watched(name: str, plan: Any, work: Any) -> list[Any]:
        def recorded(names: dict[str, bool]) -> Any:
            return hashed.update({agreement.global_state.process_id: names}) or work(names)

        return divided(name, plan, recorded)

    def check(process: int) -> None:
        found[process] = find_faults(epath.Path(of_eight))

    monkeypatch.setattr(integrity, "divided", watched)
    assert in_processes(monkeypatch, 8, check) == [None] * 8 and [*found.values()] == [[]] * 8
    sizes = [sum((of_eight / name).stat().st_size for name in hashed[process]) for process in range(8)]
    assert sorted(chain(*hashed.values())) == sorted(json.loads((of_eight / MANIFEST).read_text()))
    assert max(sizes) <= sum(sizes) / 8 + 10_007
    assert all(f"state/ocdbt.process_{process}/d/{process}" in hashed[process] for process in range(8)), "its own"

    (victim := of_eight / "state/ocdbt.process_5/d/5").write_bytes(b"x" + victim.read_bytes()[1:])
    assert in_processes(monkeypatch, 8, check) == [None] * 8
    assert {fault for (fault,) in found.values()} == {
        f"file {victim.relative_to(of_eight)} is damaged: its sha256 differs from the one in {MANIFEST}"
    }


def test_a_file_that_one_of_several_processes_cannot_read_is_an_error_of_all(of_eight, monkeypatch):
    def unreadable(file: epath.Path) -> str:
        if "process_3" in str(file):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return ""

    monkeypatch.setattr(integrity, "file_hash", unreadable)
    raised = in_processes(monkeypatch, 4, lambda process: find_faults(epath.Path(of_eight)))
    assert [str(error) for error in raised] == [str(raised[0])] * 4
    assert "/7 cannot be read: Permission denied; nothing was changed" in str(raised[0])


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 64])
def test_no_process_hashes_more_than_its_share_and_one_file_whatever_processes_saved(processes):
    for writers in (1, 2, 8, 64):
        sizes = {f"ocdbt.process_{i % writers}/d/{i}": 1 + i * i % 97 for i in range(200)} | {"a FIFO": None}
        found = shares(sizes, processes)
        assert sorted(chain(*found)) == sorted(sizes)
        loads = [sum(sizes[name] or 0 for name in names) for names in found]
        assert max(loads) <= sum(loads) / processes + 97


@pytest.mark.parametrize("mesh", ["mesh.dp=2 mesh.mp=4", "mesh.dp=4 mesh.mp=2 mesh.zero=fsdp"])
def test_a_flipped_bit_is_found_in_every_replicated_array_on_every_device(tmp_path, mesh):
    config = tiny(tmp_path, *mesh.split())
    functions = build_step_functions(config, make_mesh(config.mesh), jnp.float32)
    check, state = ReplicaCheck(functions.shapes), random_state(functions, 0)
    assert check.differences(state) == []
    for number, (name, leaf) in list(enumerate(leaves_by_path(state).items()))[::3]:
        device = number % 8
        index = leaf.sharding.devices_indices_map(leaf.shape)
        mine = index[jax.devices()[device]]
        replicas = sum(one == mine for one in index.values())
        found = check.differences(flip_bit(state, name, device))
        if replicas == 1:
            assert found == []
        elif replicas == 2:  # which of the two is wrong is unknown
            assert len(found) == 1 and found[0].startswith(f"{name} on device "), found
        else:
            assert found == [f"{name} on device {device} (process 0) differs from its {replicas - 1} other replicas"]


def test_a_run_with_differing_replicas_stops_before_it_saves_them(tmp_path, monkeypatch):
    check = ReplicaCheck.check
    monkeypatch.setattr(
        ReplicaCheck,
        "check",
        lambda self, state, step: check(self, flip_bit(state, "params/norm/scale", 5) if step == 4 else state, step),
    )
    with pytest.raises(HardwareError) as caught:
        loop.train(tiny(tmp_path, "train.check_replicas_every=2"))
    message = str(caught.value).splitlines()
    differs = "after step 4 params/norm/scale on device 5 (process 0) differs from its 7 other replicas"
    assert message[0].startswith(differs)
    assert len(message) == 2 and "checkpoint.resume=must" in message[1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float64"])
def test_one_changed_element_always_changes_the_fingerprint(dtype):
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        of = jax.jit(fingerprint)
        x = np.asarray(generator.integers(0, 2, (5, 7)), dtype=jnp.dtype(dtype))
        seen = {int(of(x))}
        for position in range(x.size):
            other = x.copy()
            other.reshape(-1)[position] = 1 - other.reshape(-1)[position]
            seen.add(int(of(other)))
        seen.add(int(of(x.T)))
        seen.add(int(of(x[::-1])))
    assert len(seen) == x.size + 3


def test_zeros_of_different_sign_have_different_fingerprints():
    assert int(fingerprint(jnp.float32([0.0]))) != int(fingerprint(jnp.float32([-0.0])))
