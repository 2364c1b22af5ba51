"""Verification of a machine: does a resumed run continue exactly, and do all replicas stay equal?

`verify_resume` and `verify_replicas` print their findings and return whether all is well.  See `shmap_tp.verify` for
the command.
"""

from dataclasses import replace

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from shmap_tp.config.schema import Config
from shmap_tp.config.validate import mesh_shape, named_sizes, validate
from shmap_tp.config.values import SCHEMES, check_path
from shmap_tp.data.batches import Batches, isolating_token
from shmap_tp.data.location import bucket_messages, open_file_system
from shmap_tp.data.metadata import DTYPES, META, SPLITS, parse_meta
from shmap_tp.data.token_files import scan
from shmap_tp.errors import UserError
from shmap_tp.layers.context import document_segments
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import reading
from shmap_tp.trainer import Trainer
from shmap_tp.training.checkpoint_files import absolute, checkpoint_steps, directory_of_checkpoints, is_in_progress
from shmap_tp.training.integrity import ReplicaCheck, find_faults
from shmap_tp.training.step import State


def train_on(trainer: Trainer, batches: Batches, isolated: int | None, steps: int) -> list[float]:
    """Train `steps` more steps on the data of the run, whose documents the id `isolated` ends if they are isolated;
    return the loss of each."""
    losses = []
    for _ in range(steps):
        tokens = batches.training(int(trainer.state.step))
        segments = [] if isolated is None else [jax.device_put(document_segments(tokens, isolated), tokens.sharding)]
        losses.append(float(trainer.step_on(tokens, *segments)["loss"]))
    return losses


def verify_resume(config: Config, other_mesh: tuple[int, ...], steps: int) -> bool:
    """Train `steps` steps, save, restore on the same mesh and on `other_mesh`, and train as many again; the other is
    (dp, mp) or (dp, cp, mp).

    Returns True if the restored state is bitwise equal to the saved one on both meshes, and if the run that was resumed
    on the same mesh is bitwise equal to the uninterrupted run.
    """
    dp, *cp, mp = other_mesh
    other = replace(config, mesh=replace(config.mesh, dp=dp, cp=cp[0] if cp else 1, ep=1, mp=mp, tile=None))
    validate(other)
    directory = config.checkpoint.dir.rstrip("/") + "-verify"
    if absolute(directory).exists():
        raise UserError(f"{directory} exists already, from a `verify` that was killed: remove it, then run this again")
    trainer, isolated = Trainer(config), isolating_token(config.data, config.model)
    batches = Batches(config, trainer.functions.tokens)
    try:
        train_on(trainer, batches, isolated, steps)
        saved = _to_host(trainer.state)
        trainer.save(directory)
        expected_losses = train_on(trainer, batches, isolated, steps)
        uninterrupted, all_well = _to_host(trainer.state), True
        for given in (config, other):
            if given is other:
                del trainer  # frees device memory
                trainer = Trainer(other)
                batches = Batches(other, trainer.functions.tokens)
            trainer.restore(directory, step=steps)
            wrong = bits_differ(_to_host(trainer.state), saved)
            losses = train_on(trainer, batches, isolated, steps)
            mesh = ", ".join(named_sizes(mesh_shape(given.mesh)))
            verdict = f"DIFFERS from the saved state: {wrong[0]}" if wrong else "is bitwise equal to the saved state"
            print_on_process_0(f"on {mesh}: the restored state {verdict}")
            differing = _compare(_to_host(trainer.state), uninterrupted, steps)
            relative = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
            print_on_process_0(f"  losses differ by at most {relative:.1e}, relative to those of the uninterrupted run")
            all_well = all_well and not wrong and (given is other or not differing)
    finally:
        if jax.process_index() == 0 and absolute(directory).exists():
            absolute(directory).rmtree()
    print_on_process_0("on another mesh sums have another order and may differ by rounding; on the same one, not")
    return all_well


def verify_replicas(config: Config, steps: int) -> bool:
    """Whether all replicas of every array are equal before and after each of `steps` steps.

    Starts from the newest intact checkpoint, or from new parameters if there is no checkpoint.
    """
    trainer, isolated = Trainer(config), isolating_token(config.data, config.model)
    batches, replica_check = Batches(config, trainer.functions.tokens), ReplicaCheck(trainer.functions.shapes)
    if checkpoint_steps(absolute(config.checkpoint.dir)):
        trainer.restore(config.checkpoint.dir)
    all_well = True
    for number in range(steps + 1):
        train_on(trainer, batches, isolated, min(number, 1))
        found = replica_check.differences(trainer.state)
        verdict = "REPLICAS DIFFER" if found else "all replicas of every array are equal"
        print_on_process_0(f"step {int(trainer.state.step)}: {verdict}")
        for line in found:
            print_on_process_0(f"  {line}")
        all_well = all_well and not found
    return all_well


def verify_checkpoints(directory: str) -> bool:
    """Whether every checkpoint in `directory`, a run or its checkpoint.dir, is intact.

    Only reads, so it can be used while a run writes there.
    """
    check_path("DIRECTORY", directory, SCHEMES["checkpoint.dir"])
    with reading(directory):
        path = directory_of_checkpoints(epath.Path(directory))
        steps = checkpoint_steps(path)
    if not steps:
        raise UserError(f"{directory} has no checkpoint; name a run.dir or checkpoint.dir with some")
    all_well = True
    for step in steps:
        faults = find_faults(path / str(step))
        if faults and is_in_progress(path / str(step)):
            print_on_process_0(f"{step}: being saved or deleted by a run that is under way")
            continue
        print_on_process_0(f"{step}: " + ("intact" if not faults else "DAMAGED"))
        for fault in faults:
            print_on_process_0(f"  {fault}")
        all_well = all_well and not faults
    return all_well


def verify_data(directory: str) -> bool:
    """Whether the token files in `directory`, local or a bucket, have the hashes and ids that meta.json states.

    Reads all of them; a start reads only files that it does not know (`token_files.scan_once`).
    """
    check_path("DIRECTORY", directory, SCHEMES["data.dir"])
    system, root = open_file_system("DIRECTORY", directory)
    all_well = True
    with bucket_messages("DIRECTORY", directory):
        meta = parse_meta(system.cat_file(f"{root}/{META}"), f"{directory}/{META}")
        files = [(split, "bin", DTYPES[meta.dtype], meta.sha256) for split in SPLITS]
        files += [(split, "counted", np.dtype(np.uint8), meta.counted) for split in SPLITS if meta.counted]
        for split, ending, dtype, stated in files:
            with system.open(f"{root}/{split}.{ending}", "rb") as stream:
                found = scan(stream, dtype)
            is_known = ending == "counted" or meta.vocabulary is None or found.largest < meta.vocabulary
            well = is_known and stated.get(split) in (None, found.sha256)
            verdict = "as meta.json says" if well and stated else "meta.json has no hash" if well else "DAMAGED"
            scanned = f"sha256 {found.sha256[:12]}, largest value {found.largest}"
            print_on_process_0(f"{split}.{ending}: {scanned}: {verdict}")
            all_well = all_well and well
    return all_well


def _compare(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], steps: int) -> list[str]:
    """Print how far each array is from its expected value after `steps` more steps.

    Returns the names of the arrays that are not bitwise equal, the farthest first.
    """
    scales = {name: np.max(np.abs(array.astype(np.float64)), initial=0.0) for name, array in expected.items()}
    scales["guard/variance"] = scales["guard/mean"] ** 2  # the variance of nearly equal losses has no scale of its own
    differing = bits_differ(actual, expected)
    distances = {name: _relative_distance(actual[name], expected[name], scales[name]) for name in differing}
    worst = sorted(distances, key=lambda name: -np.nan_to_num(distances[name], nan=np.inf))
    equal = len(actual) - len(distances)
    what = f"{equal} of {len(actual)} arrays are bitwise equal to those of the uninterrupted run"
    print_on_process_0(f"  {steps} steps later {what}")
    for name in worst[:8]:
        scale = "the squared mean" if name == "guard/variance" else "its largest value"
        print_on_process_0(f"    {distances[name]:8.1e} of {scale}  {name}")
    if len(worst) > 8:
        print_on_process_0(f"    less       in {len(worst) - 8} more")
    return worst


def _relative_distance(actual: np.ndarray, expected: np.ndarray, scale: float) -> float:
    """max|actual - expected| / scale; the maximum itself if the scale is 0."""
    largest = np.max(np.abs(actual.astype(np.float64) - expected.astype(np.float64)), initial=0.0)
    return float(largest / scale) if scale else float(largest)


def bits_differ(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that are not bitwise equal."""
    return [name for name in expected if actual[name].tobytes() != expected[name].tobytes()]


def _to_host(state: State) -> dict[str, np.ndarray]:
    """Every full array on this host, by path.  Takes as much host memory as the whole state."""
    return {
        name: np.array(multihost_utils.process_allgather(leaf, tiled=True) if jax.process_count() > 1 else leaf)
        for name, leaf in leaves_by_path(state).items()
    }
