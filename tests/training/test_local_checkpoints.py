"""Checkpoints on the disks of the hosts: which are restored, what a lost host is sent, and bad directories."""

import errno
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import DP_SLICE, MP
from shmap_tp.training import checkpoint, exchange, local_checkpoints, loop
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.integrity import MANIFEST
from shmap_tp.training.local_checkpoints import LocalCheckpoints, Save
from shmap_tp.training.step import State
from tests.helpers.checkpoint_fixtures import FACTS, checkpoint_config, random_state
from tests.helpers.run_fixtures import (
    FIRST,
    assert_same_run,
    bits,
    free_port,
    killed_at_the_end,
    lines,
    overrides,
    start,
    tiny,
    wait_for_step,
)


@pytest.fixture
def opened(functions, tmp_path, messages):
    """Opens the checkpoints in tmp_path, of which local ones are in tmp_path/local, as a start of the run does."""

    @contextmanager
    def open_checkpoints(dp: int = 2, mp: int = 4, *, shapes: Any = None, run: str = "ck") -> Iterator[Checkpoints]:
        config = checkpoint_config(tmp_path / run, local_dir=str(tmp_path / "local"))
        (tmp_path / run).mkdir(exist_ok=True)
        local = LocalCheckpoints(config, shapes or functions(dp, mp).shapes, messages.append)
        with Checkpoints(config, messages.append, local=local) as checkpoints:
            yield checkpoints

    return open_checkpoints


def save_locally(checkpoints: Checkpoints, step: int, state: State) -> None:
    assert checkpoints.is_due_locally(step)
    checkpoints.save_locally(step, state, FACTS)
    checkpoints.wait()


def local_saves(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "local").glob("run-*/*"))


def test_a_local_checkpoint_is_restored_bit_for_bit_on_another_mesh_with_its_facts(opened, functions, tmp_path):
    """Only the newest one is kept, and the state may be donated as soon as the save has begun."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    state = random_state(functions(2, 4), seed=2)
    expected = bits(state)
    with opened() as checkpoints:
        save_locally(checkpoints, 1, random_state(functions(2, 4), seed=1))
        checkpoints.save_locally(2, state, FACTS)
        jax.block_until_ready(overwrite(state))
    assert [file.name[:2] for file in local_saves(tmp_path)] == ["2-"]
    with opened(8, 1) as checkpoints:
        assert checkpoints.newest_intact() == 2 and checkpoints.facts(2) == FACTS
        assert bits(checkpoints.restore(2, functions(8, 1).shapes)) == expected


def test_an_unfinished_checkpoint_of_the_step_that_is_restored_locally_is_set_aside(opened, functions, tmp_path):
    """It would count among those that are kept."""
    with opened() as checkpoints:
        checkpoints.save(1, random_state(functions(2, 4), seed=1), FACTS)
        checkpoints.wait()
        (tmp_path / "ck" / "1" / MANIFEST).unlink()
    with opened() as checkpoints:
        checkpoints.set_aside_after(checkpoints.newest_intact())
        assert checkpoints.steps() == [] and (tmp_path / "ck" / "1.damaged-1").exists()


@pytest.mark.parametrize("has_room", [True, False], ids=["copied on the devices", "copied to the host"])
def test_one_copy_of_the_state_serves_both_saves_of_a_step(opened, functions, tmp_path, monkeypatch, has_room):
    monkeypatch.setattr(Checkpoints, "_has_room", lambda self, state: has_room)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    state = random_state(functions(2, 4), seed=1)
    expected = bits(state)
    with opened() as checkpoints:
        checkpoints.save(1, state, FACTS)
        jax.block_until_ready(overwrite(state))
    with opened() as checkpoints:
        assert checkpoints.newest_intact() == 1
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == expected
        shutil.rmtree(tmp_path / "local")
    with opened() as checkpoints:
        assert checkpoints.newest_intact() == 1 and checkpoints.place(1) == str(tmp_path / "ck")
        assert bits(checkpoints.restore(1, functions(2, 4).shapes)) == expected


def test_a_device_needs_room_for_each_copy_that_saves_may_have_at_the_same_time(
    opened, functions, tmp_path, monkeypatch
):
    """An array cut over two slices, which local saves copy with its replicas and once more to the other slice, and one
    that all eight devices have.  For checkpoint.dir each device copies a part of both."""
    monkeypatch.setattr(checkpoint, "SPLIT_BYTES", 1)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), (DP_SLICE, MP))
    cut = jax.device_put(np.zeros((16, 1024), np.float32), NamedSharding(mesh, P(DP_SLICE)))
    replicated = jax.device_put(np.zeros(1024, np.float32), NamedSharding(mesh, P()))
    whole = functions(2, 4).shapes
    state = eqx.tree_at(lambda s: (s.params, s.optimizer, s.guard, s.step), whole, (cut, replicated, (), ()))
    parts, local = (cut.nbytes + replicated.nbytes) // 8, 2 * cut.nbytes // 2 + replicated.nbytes
    used = {"peak_bytes_in_use": 1000}
    device = type("Device", (), {"memory_stats": lambda self: used})()
    with Checkpoints(checkpoint_config(tmp_path / "alone"), print) as alone, opened() as with_local:
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        for checkpoints, needed in ((alone, parts), (with_local, parts + local)):
            for missing in (0, 1):
                used["bytes_limit"] = 1000 + needed - missing
                assert checkpoints._has_room(state) == (not missing), (needed, missing)


def test_a_damaged_local_checkpoint_is_named_and_the_next_best_is_taken(opened, functions, tmp_path, messages):
    with opened() as checkpoints:
        checkpoints.save(1, random_state(functions(2, 4), seed=1), FACTS)
        checkpoints.wait()
        save_locally(checkpoints, 2, random_state(functions(2, 4), seed=2))
    file = max(local_saves(tmp_path)[0].iterdir(), key=lambda file: int(file.name) if file.name.isdecimal() else -1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with opened() as checkpoints:
        assert checkpoints.newest_intact() == 1 and checkpoints.place(1) == str(tmp_path / "ck")
    assert messages[0] == f"a local checkpoint is damaged: {file} (step) differs from its hash"
    assert messages[1].startswith("the local checkpoint of step 2 is skipped: it has 0 of 1 elements of step on the")
    assert len(messages) == 2


def test_shards_of_two_starts_are_never_mixed(opened, functions, tmp_path, monkeypatch, messages):
    """Each of two processes has one half of a step; the halves are of one state only if one start has saved both."""
    given = local_checkpoints.types_by_path(state := random_state(functions(2, 4), seed=1))
    shards = {
        (name, exchange.ranges_of(shard.index, leaf.shape)): shard.data
        for name, leaf in local_checkpoints.leaves_by_path(state).items()
        for shard in leaf.addressable_shards
    }
    lists = {"types": given, "facts": FACTS}

    def write(process: int, step: int, start: str, part: slice) -> None:
        monkeypatch.setattr(jax, "process_index", lambda: process)
        assert not checkpoints._local._write_shards(Save(step, start), lists, [*shards.items()][part])

    with opened() as checkpoints:
        monkeypatch.setattr(LocalCheckpoints, "_prune", lambda self: None)
        write(0, 4, "aaaaaaaa", slice(0, None, 2))
        write(1, 4, "aaaaaaaa", slice(1, None, 2))
        write(0, 5, "aaaaaaaa", slice(0, None, 2))
        write(1, 5, "bbbbbbbb", slice(1, None, 2))
        monkeypatch.undo()
    with opened() as checkpoints:
        assert checkpoints.newest_intact() == 4
        assert bits(checkpoints.restore(4, functions(2, 4).shapes)) == bits(state)
    assert sum("the local checkpoint of step 5 is skipped: it has " in line for line in messages) == 2


class Device(NamedTuple):
    id: int
    process_index: int


@pytest.mark.parametrize("same_mesh", [True, False])
def test_a_process_takes_what_it_has_and_gets_each_other_part_once_from_one_that_has_it(same_mesh):
    """Processes 0 and 1 are replicas of 2 and 3; 2 has lost its directory."""
    upper, lower = ((0, 4), (0, 6)), ((4, 8), (0, 6))
    holders = {upper: [0], lower: [1, 3]}
    left, right = ((0, 8), (0, 3)), ((0, 8), (3, 6))
    wanted = [upper, lower, upper, lower] if same_mesh else [left, left, right, right]
    indices = {Device(n, n): tuple(slice(*each) for each in ranges) for n, ranges in enumerate(wanted)}
    got = [np.zeros((8, 6), int) for _ in wanted]
    for (source, target), pieces in exchange.pieces_of((8, 6), indices, holders).items():
        for shard, block, part in pieces:
            assert shard == wanted[target] and source in holders[block]
            assert source == target or target not in holders[block]
            got[target][exchange._within(part, ((0, 8), (0, 6)))] += 1
    for index, found in zip(indices.values(), got, strict=True):
        assert (found[index] == 1).all() and found.sum() == found[index].size


def test_two_slices_have_each_shard_of_an_array_that_is_sharded_over_them():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("dp", "dp_slice", "mp"))
    values = np.arange(32).reshape(8, 4)
    array = jax.device_put(values, NamedSharding(mesh, P(("dp", "dp_slice"), "mp")))
    (other,) = local_checkpoints.of_another_slice(array)
    for number in range(2):
        found, devices = np.full_like(values, -1), {*mesh.devices[:, number].flat}
        for shard in (*array.addressable_shards, *other.addressable_shards):
            if shard.device in devices:
                found[shard.index] = shard.data
        assert (found == values).all()
    assert local_checkpoints.of_another_slice(jax.device_put(values, NamedSharding(mesh, P("dp", "mp")))) == []


def test_a_full_disk_leaves_a_local_checkpoint_out_and_the_run_goes_on(
    opened, functions, tmp_path, monkeypatch, messages
):
    """The one before it stays, until there is one again."""
    state, number = random_state(functions(2, 4), seed=1), errno.ENOSPC

    def full(*_):
        raise OSError(number, os.strerror(number))

    with opened() as checkpoints:
        save_locally(checkpoints, 1, state)
        (started,) = local_saves(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            save_locally(checkpoints, 2, state)
            save_locally(checkpoints, 3, state)
        assert [file.name[:2] for file in local_saves(tmp_path)] == ["1-"]
        save_locally(checkpoints, 4, state)
        assert [file.name[:2] for file in local_saves(tmp_path)] == ["4-"]
    assert messages == [
        "no local checkpoint of step 2, the newest stays that of step 1: "
        f"{started.parent / started.name.replace('1-', '2-', 1)} could not be written: {os.strerror(number)}"
    ]


def test_a_directory_that_cannot_be_written_is_named_and_the_run_goes_on(opened, tmp_path, monkeypatch, messages):
    monkeypatch.setattr(os, "access", lambda path, mode: "local" not in str(path))  # root writes everywhere
    with opened() as checkpoints:
        assert not checkpoints.is_due_locally(1) and checkpoints.newest_local is None
    assert len(messages) == 1 and "no local checkpoints are written: checkpoint.local_dir=" in messages[0]
    assert "cannot be written: no permission" in messages[0]


def test_two_runs_that_share_a_directory_do_not_see_or_delete_each_others_checkpoints(
    opened, functions, tmp_path, messages
):
    """A run directory that was removed, or copied elsewhere, is another run."""
    states = [random_state(functions(2, 4), seed) for seed in range(2)]
    with opened(run="first") as first, opened(run="second") as second:
        save_locally(first, 7, states[0])
        save_locally(second, 3, states[1])
    assert len(messages) == 1 and "of another run, which stays; remove it if it is not needed" in messages[0]
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    for run, step in (("first", 7), ("second", 3), ("copy", None)):
        with opened(run=run) as checkpoints:
            assert checkpoints.newest_intact() == step
    shutil.rmtree(tmp_path / "first")
    with opened(run="first") as checkpoints:
        assert checkpoints.newest_intact() is None
    assert len(local_saves(tmp_path)) == 2


def test_a_local_checkpoint_of_other_shapes_is_named_and_skipped(opened, functions, messages):
    state = random_state(functions(2, 4), seed=1)
    with opened() as checkpoints:
        save_locally(checkpoints, 1, state)
    wider = jax.ShapeDtypeStruct((2,), np.int32, sharding=state.step.sharding)
    other = eqx.tree_at(lambda shapes: shapes.step, functions(2, 4).shapes, wider)
    with opened(shapes=other) as checkpoints:
        assert checkpoints.newest_intact() is None
    assert messages == [
        "the local checkpoint of step 1 is skipped: it has step as int32[], needed is int32[2]",
    ]


def test_a_local_checkpoint_that_is_older_is_named_and_the_newer_one_is_taken(opened, functions, tmp_path, messages):
    state = random_state(functions(2, 4), seed=1)
    with opened() as checkpoints:
        save_locally(checkpoints, 1, state)
        checkpoints._local._every = 2
        checkpoints.save(3, state, FACTS)
    with opened() as checkpoints:
        assert checkpoints.newest_intact() == 3 and checkpoints.place(3) == str(tmp_path / "ck")
    assert messages == [f"the local checkpoint of step 1 is older than {tmp_path / 'ck'}/3"]


def test_a_save_that_takes_longer_than_its_interval_is_followed_by_the_next_that_is_due(
    opened, functions, monkeypatch, messages
):
    release, write = threading.Event(), LocalCheckpoints._write_shards
    monkeypatch.setattr(LocalCheckpoints, "_write_shards", lambda *given: release.wait() and write(*given))
    with opened() as checkpoints:
        assert checkpoints.is_due_locally(1)
        checkpoints.save_locally(1, random_state(functions(2, 4), seed=1), FACTS)
        due_meanwhile = [checkpoints.is_due_locally(step) for step in (2, 3)]
        release.set()
        checkpoints.wait()
        assert due_meanwhile == [False, False] and checkpoints.is_due_locally(4)
    assert messages == ["no local checkpoint of step 2: the one before it is still being written"]


def test_a_run_continues_from_its_local_checkpoint_as_if_it_had_not_been_killed(
    uninterrupted, tmp_path, capsys, monkeypatch
):
    """Also its metrics: what was trained after that step is trained again, and counts once."""
    is_due = LocalCheckpoints.is_due  # it is not, while a busy machine still writes the one before
    monkeypatch.setattr(LocalCheckpoints, "is_due", lambda local, step: (local.wait(), is_due(local, step))[1])
    given = [f"checkpoint.local_dir={tmp_path / 'local'}", "checkpoint.local_every=3", "checkpoint.every=0"]
    assert loop.train(tiny(tmp_path, *given)) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    with pytest.raises(UserError, match="has checkpoints of this run up to step 6; resume it with --resume"):
        loop.train(tiny(tmp_path, *given))
    capsys.readouterr()
    assert loop.train(tiny(tmp_path, *given, "checkpoint.resume=must")) == 0
    assert (
        "resuming from step 6 of checkpoint.local_dir of the hosts, saved on mesh dp=2, mp=4" in capsys.readouterr().out
    )
    assert_same_run(tmp_path, uninterrupted)


@contextmanager
def four_processes(directory: Path, *given: str) -> Iterator[list[subprocess.Popen]]:
    """Start main.py in four processes, each with a local directory of its own."""
    address, processes = f"localhost:{free_port()}", []
    for number in range(4):
        place = ["--coordinator", address, "--processes", "4", "--process-id", str(number)]
        local = f"checkpoint.local_dir={directory / f'host-{number}'}"
        processes.append(start("--cfg", FIRST, *overrides(directory, *given), local, *place, JAX_PLATFORMS="cpu"))
    with killed_at_the_end(processes):
        yield processes


KILLS = {
    "one host of four": (["mesh.dp=2", "mesh.mp=4"], [2]),
    "one slice of two": (["mesh.dp=4", "mesh.mp=2", "mesh.slices=2", "mesh.zero=fsdp"], [2, 3]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "lost"), KILLS.values(), ids=KILLS)
def test_a_lost_host_or_slice_gets_its_shards_from_the_replicas_on_others(tmp_path, mesh, lost):
    """Its processes are killed, and their directories removed; the run directory has no checkpoint yet."""
    given = ["checkpoint.local_every=2", "checkpoint.every=0", "run.lost_timeout_seconds=10", *mesh]
    with four_processes(tmp_path, *given, "train.steps=100000") as processes:
        wait_for_step(processes[0], tmp_path, 5)
        for number in lost:
            processes[number].kill()
        for process in processes:
            process.communicate(timeout=60)
    for number in lost:
        shutil.rmtree(tmp_path / f"host-{number}")
    kept = min(int(file.parent.name.partition("-")[0]) for file in tmp_path.glob(f"host-*/run-*/*/{MANIFEST}"))
    with four_processes(tmp_path, *given, f"train.steps={kept + 3}", "checkpoint.resume=if_present") as processes:
        (output, _), *_ = answers = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, answers
    resumed = re.search(r"resuming from step (\d+) of checkpoint.local_dir", output)
    assert resumed and int(resumed[1]) >= kept, answers
    assert float(re.search(r"([0-9.]+) MB of local checkpoints were sent", output)[1]) > 0, answers
    assert loop.train(tiny(tmp_path / "whole", "checkpoint.every=0", f"train.steps={kept + 3}")) == 0
    found, wanted = lines(tmp_path), lines(tmp_path / "whole")
    assert [line["step"] for line in found] == list(range(1, kept + 4))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-6, abs=0)
