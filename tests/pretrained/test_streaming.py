"""An export holds a few chunks of a checkpoint at a time, and one that is killed leaves nothing that looks whole."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shmap_tp
from shmap_tp.config.compose import to_dict
from shmap_tp.errors import StorageError, UserError
from shmap_tp.pretrained.__main__ import main
from shmap_tp.pretrained.tensor_files import pieces_of_array
from shmap_tp.training import checkpoint
from shmap_tp.training.bad_steps import initial_bad_step_state
from shmap_tp.training.checkpoint_files import read_chunks
from shmap_tp.training.step import State
from tests.helpers.fresh_process import python
from tests.helpers.paths import ROOT
from tests.helpers.pretrained_models import assert_same_tensors, read_tensors, write_directory
from tests.helpers.pretrained_processes import full_disk

LARGE = ["vocabulary=32768", "width=1024", "layers=3", "heads=8", "kv_heads=8", "head_dim=128", "ffn=4096"]
LARGE += ["block=sequential", "norm=rmsnorm", "mlp=swiglu", "positions=rotary", "context=64"]


def saved(directory: Path, *overrides: str) -> Path:
    """A checkpoint of step 1 with the parameters of a new model, and no optimizer state."""
    config = shmap_tp.load_config(*overrides, f"checkpoint.dir={directory}", file=ROOT / "conf" / "finetune.yaml")
    model = shmap_tp.Model.initialize(config)
    with checkpoint.Checkpoints(config.checkpoint, print) as checkpoints:
        mesh = jax.tree.leaves(model.parameters)[0].sharding.mesh
        rest = jax.device_put((initial_bad_step_state(), jnp.ones((), jnp.int32)), NamedSharding(mesh, P()))
        checkpoints.save(1, State(model.parameters, (), *rest), {"config": to_dict(config)})
    return directory


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and a checkpoint of it in chunks of 2048 bytes."""
    work = tmp_path_factory.mktemp("work")
    model = write_directory(work / "model", "gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "CHUNK_BYTES", 2048)
        saved(work / "run", f"model.from_pretrained={model}", "mesh.dp=2", "mesh.mp=4", "train.batch=2")
    return work


def test_a_checkpoint_is_stored_in_chunks_and_exported_one_by_one(work, tmp_path):
    shapes = shmap_tp.from_pretrained(work / "model", dp=1, mp=1).functions.shapes
    chunks = list(read_chunks(epath.Path(work / "run" / "1"), shapes))
    assert max(values.nbytes for _, _, values in chunks) <= 2048
    assert sum(values.size for _, _, values in chunks) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert main(["export", str(work / "run"), "--out", str(tmp_path / "out")]) == 0
    assert_same_tensors(tmp_path / "out", work / "model")


def test_an_export_of_a_checkpoint_to_a_full_disk_leaves_nothing(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "pwrite", full_disk)
    assert main(["export", str(work / "run"), "--out", str(tmp_path / "out")]) == StorageError.exit_code
    said = capsys.readouterr().err
    assert "out could not be written: No space left on device" in said and len(said.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_named(work, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(work / "run", tmp_path / "run")
    files = [file for file in (run / "1" / "state").rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    monkeypatch.setattr("shmap_tp.training.checkpoint_files.find_faults", lambda directory: [])
    file.write_bytes(bytes(file.stat().st_size))
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: checkpoint {run / '1'} cannot be read: ") and len(said.splitlines()) < 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_memory_of_an_export_and_of_a_load_is_bounded(tmp_path, monkeypatch):
    """A model of 448 MiB, chunks and pieces of 8 MiB: beside its shards 150 MiB, of which imports and compilation take
    about 90.  Its embedding alone has 128 MiB."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 8 * 2**20)
    saved(tmp_path / "run", *(f"model.{one}" for one in LARGE), "model=test", "mesh.dp=1", "mesh.mp=1", "train.batch=1")
    found = python(
        f"""
        import jax, json
        from pathlib import Path
        from shmap_tp.pretrained import reading, writing
        from shmap_tp.pretrained.__main__ import main
        import shmap_tp
        from tests.helpers.pretrained_processes import measuring

        reading.PIECE_BYTES = writing.PIECE_BYTES = 8 * 2**20
        jax.devices()
        measured = {{}}
        with measuring(measured, "export"):
            assert main(["export", "{tmp_path / "run"}", "--out", "{tmp_path / "out"}"]) == 0
        with measuring(measured, "load"):
            model = shmap_tp.from_pretrained("{tmp_path / "out"}", dp=4, mp=2, zero="fsdp", dtype="bfloat16")
        with measuring(measured, "save"):
            model.save_pretrained("{tmp_path / "again"}")
        print(json.dumps(measured))
        """,
        JAX_NUM_CPU_DEVICES="8",
    )
    assert found.returncode == 0, found.stderr
    measured = json.loads(found.stdout.splitlines()[-1])
    print(measured)
    size = sum(values.nbytes for values in read_tensors(tmp_path / "out").values()) / 2**20
    assert size > 400
    for what, shards in [("export", 0), ("load", size / 2), ("save", 0)]:
        assert measured[f"{what}_peak_mib"] - measured[f"before_{what}_mib"] < shards + 150, (what, measured)


def test_an_export_that_is_killed_leaves_no_directory_and_no_file_that_can_be_read(tmp_path):
    directory = write_directory(tmp_path / "model", "llama")
    killed = python(
        f"""
        import os, signal
        import shmap_tp
        write, calls = os.pwrite, []

        def kill_after_twenty(*arguments):
            calls.append(arguments)
            if len(calls) > 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*arguments)

        model = shmap_tp.from_pretrained("{directory}")
        os.pwrite = kill_after_twenty
        model.save_pretrained("{tmp_path / "out"}")
        """
    )
    assert killed.returncode == -9, killed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.incomplete"]
    with pytest.raises(UserError, match=r"out.incomplete has no config.json"):
        shmap_tp.from_pretrained(tmp_path / "out.incomplete")
    (tmp_path / "out.incomplete" / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"model.safetensors is truncated, or not a safetensors file"):
        shmap_tp.from_pretrained(tmp_path / "out.incomplete")
    shmap_tp.from_pretrained(directory).save_pretrained(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 4, 5)])
@pytest.mark.parametrize("limit", [1, 8, 12, 40, 10_000])
def test_pieces_make_up_the_array_and_are_not_too_large(shape, limit):
    count = np.zeros(shape, int)
    for first, size in pieces_of_array(shape, 4, limit):
        assert np.prod(size) * 4 <= max(4, limit)
        count[tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))] += 1
    assert (count == 1).all()
