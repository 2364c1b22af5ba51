"""The machine of a run or of a library call: directories, data and compilation cache, dtype, mesh and memory.

The devices of a library call are emulated CPU devices, or the devices of this process or of all processes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shmap_tp.config.choices import HeldIn, MatmulPrecision, Precision
from shmap_tp.config.schema import AUTO, Config
from shmap_tp.config.validate import product_in_words, resolve_auto
from shmap_tp.data.preparation import prepare_missing
from shmap_tp.errors import UserError, shown
from shmap_tp.hardware.devices import DEVICES
from shmap_tp.parallel import mesh as meshes
from shmap_tp.parallel.partitioning import shard_bytes
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.distributed import MAX_EMULATED_DEVICES, emulate_cpu_devices, joined_processes
from shmap_tp.runtime.files import make_directory

EMULATED_DEVICES = 8
"""How many CPU devices are emulated at least, so that one process can use several mesh shapes."""

EMULATED_PER_CORE = 8
"""How many emulated devices for each core of this machine are usual."""


def prepare_environment(config: Config) -> None:
    """Create the run directory, prepare the data if data.source names a local source, and set up the compilation cache.

    Raises `UserError` if a directory cannot be written.
    """
    make_directory("run.dir", config.run.dir)
    prepare_missing(config.data)
    if cache := config.run.compilation_cache:
        make_directory("run.compilation_cache", cache)
        jax.config.update("jax_compilation_cache_dir", cache if "://" in cache else str(Path(cache).resolve()))


def compute_dtype(precision: Precision) -> DTypeLike:
    """The dtype of activations and matmuls: `auto` is float32 on CPU and bfloat16 elsewhere."""
    if precision == Precision.auto:
        precision = Precision.float32 if jax.devices()[0].platform == "cpu" else Precision.bfloat16
    return jnp.dtype(str(precision))


def precision_of(held: str) -> Precision:
    """The precision in which a model computes whose matrices are held in `held`, a `HeldIn`.  Raises UserError."""
    if held not in list(HeldIn):
        raise UserError(f"dtype={shown(held)} must be one of {', '.join(HeldIn)}")
    return Precision.auto if held == HeldIn.int8 else Precision(held)


def precision_note(dtype: DTypeLike, eight_bit: MatmulPrecision = MatmulPrecision.bfloat16) -> str | None:
    """What a run in `dtype` should know of the precision of its matmuls on these devices; None: they are of `dtype`."""
    if eight_bit != MatmulPrecision.bfloat16 and (kind := jax.devices()[0].device_kind) not in DEVICES:
        return f"{eight_bit} matmuls are emulated ({kind}): operands are rounded so, which takes longer than bfloat16"
    default = {"tpu": "bfloat16 passes", "gpu": "TF32"}.get(jax.devices()[0].platform)
    if default is None or dtype != jnp.float32 or jax.config.jax_default_matmul_precision is not None:
        return None
    return (
        f"float32 matmuls have the default precision of these devices, {default}; "
        f"JAX_DEFAULT_MATMUL_PRECISION=highest in the environment makes them float32, and slower"
    )


def make_mesh(config: Config) -> Mesh:
    """The (dp, mp) mesh of `config`.  Initialises JAX's backend.

    On a CPU the devices are emulated if no backend has been used before, and a mesh may use the first of them;
    on accelerators it must use all.  Raises UserError if the devices do not make the mesh.
    """
    return resolve(config)[1]


def resolve(config: Config) -> tuple[Config, Mesh]:
    """(`config` with mesh.dp=auto replaced by a number, its mesh)."""
    if config.mesh.processes != 1:
        return _over_processes(config)
    emulate_devices((replace(config.mesh, dp=1) if config.mesh.dp == AUTO else config.mesh).devices)
    devices = jax.devices()
    config = resolve_auto(config, len(devices))
    wanted = config.mesh.devices
    if devices[0].platform == "cpu" and wanted > len(devices):
        raise UserError(
            f"mesh {product_in_words(config.mesh)} needs {wanted} devices, but JAX already runs with "
            f"{len(devices)};\nrestart Python with JAX_NUM_CPU_DEVICES={wanted}, build this mesh first, or choose a "
            f"smaller one (dp, mp)"
        )
    return config, mesh_of_devices(config)


def mesh_of_devices(config: Config) -> Mesh:
    """The mesh of `config`, whose mesh.dp is a number, on all devices, or on the first of one process's emulated ones.

    Raises UserError if the devices do not make the mesh.
    """
    devices, wanted = jax.devices(), config.mesh.devices
    some = config.mesh.processes == 1 and devices[0].platform == "cpu" and wanted < len(devices)
    return meshes.make_mesh(config.mesh, devices[:wanted] if some else devices)


def _over_processes(config: Config) -> tuple[Config, Mesh]:
    """The same for several processes, which `initialize_distributed` has joined."""
    if joined_processes() != config.mesh.processes:
        raise UserError(
            f"mesh.processes={config.mesh.processes}: the library is for one process; start several with "
            f"shmap-tp train, generate or evaluate"
        )
    config = resolve_auto(config, len(jax.devices()))
    return config, meshes.make_mesh(config.mesh)


def emulate_devices(wanted: int) -> None:
    """Emulate at least `wanted` CPU devices, unless JAX already runs with some: then their number is fixed."""
    if wanted > MAX_EMULATED_DEVICES:  # make_mesh refuses them
        wanted = EMULATED_DEVICES
    with suppress(UserError):
        emulate_cpu_devices(max(EMULATED_DEVICES, wanted, jax.config.jax_num_cpu_devices))


def warn_of_many_emulated_devices() -> None:
    """Print a line if this process emulates so many CPU devices that a step takes long on the cores of this machine."""
    devices, cores = jax.local_device_count(), os.cpu_count() or 1
    if jax.devices()[0].platform == "cpu" and devices > EMULATED_PER_CORE * cores:
        print_on_process_0(
            f"warning: {devices} devices are emulated on {cores} core{'s' * (cores > 1)}, so compiling and every step "
            f"take long; a smaller mesh.dp x mesh.mp trains the same"
        )


@dataclass(frozen=True)
class Purpose:
    """What the memory is for, and what needs less of it."""

    arrays: str
    way_out: str


TRAINING = Purpose(
    "parameters and optimizer state",
    "choose a smaller model or more devices, or shard and recompute more: mesh.zero=fsdp, model.remat=full, more "
    "train.microbatches; python -m shmap_tp.plan predicts the memory",
)
USE = Purpose(
    "parameters",
    "choose a smaller model, more devices (mp shards the weights), bfloat16 (dtype), or fewer or shorter texts",
)
"""Generation, scores and evaluation."""


def require_host_memory(shapes: Any, purpose: Purpose = TRAINING) -> None:
    """Raise UserError if the arrays of `shapes`, which have shardings, do not fit into the memory of this machine.

    Only for the CPU, whose emulated devices share that memory: Linux would end the process without a word.
    """
    if jax.devices()[0].platform != "cpu":
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = sum(shard_bytes(leaf) * len(leaf.sharding.addressable_devices) for leaf in jax.tree.leaves(shapes))
    if needed > there:
        raise UserError(
            f"{purpose.arrays} take {needed / 1e9:,.1f} GB on the emulated devices, but this machine has "
            f"{there / 1e9:,.1f} GB;\n{purpose.way_out}"
        )


@contextmanager
def explained_memory_errors(purpose: Purpose = TRAINING) -> Iterator[None]:
    """Context in which a device without enough memory is a UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).strip().splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in first_line:
            raise
        raise UserError(f"a device has not enough memory: {first_line};\n{purpose.way_out}") from error
