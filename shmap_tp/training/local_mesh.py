"""The mesh of a library call: over emulated devices, some of those that this process has, or those of all processes."""

from contextlib import suppress

import jax
from jax.sharding import Mesh

from shmap_tp.config.schema import AUTO, Config
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from shmap_tp.parallel import mesh as meshes
from shmap_tp.runtime.distributed import MAX_EMULATED_DEVICES, emulate_cpu_devices, joined_processes

EMULATED_DEVICES = 8
"""How many CPU devices are emulated at least, so that one process can use several mesh shapes."""


def make_mesh(config: Config) -> Mesh:
    """The (dp, mp) mesh of `config`.  Initialises JAX's backend.

    On a CPU the devices are emulated if no backend has been used before, and a mesh may use the first dp x mp of them;
    on accelerators it must use all.  Raises UserError if the devices do not make the mesh.
    """
    return resolve(config)[1]


def resolve(config: Config) -> tuple[Config, Mesh]:
    """(`config` with mesh.dp=auto replaced by a number, its mesh)."""
    if config.mesh.processes != 1:
        return _over_processes(config)
    emulate_devices(config.mesh.mp * (1 if config.mesh.dp == AUTO else config.mesh.dp))
    devices = jax.devices()
    config = resolve_auto(config, len(devices))
    wanted = config.mesh.dp * config.mesh.mp
    if devices[0].platform != "cpu":
        return config, meshes.make_mesh(config.mesh)
    if wanted > len(devices):
        raise UserError(
            f"mesh.dp={config.mesh.dp} x mesh.mp={config.mesh.mp} needs {wanted} devices, but JAX already runs with "
            f"{len(devices)};\nrestart Python with JAX_NUM_CPU_DEVICES={wanted}, build this mesh first, or choose a "
            f"smaller one (dp, mp)"
        )
    return config, meshes.make_mesh(config.mesh, devices[:wanted])


def _over_processes(config: Config) -> tuple[Config, Mesh]:
    """The same for several processes, which `initialize_distributed` has joined."""
    if joined_processes() != config.mesh.processes:
        raise UserError(
            f"mesh.processes={config.mesh.processes}: the library is for one process; start several with shmap-tp "
            f"train, generate or evaluate"
        )
    config = resolve_auto(config, len(jax.devices()))
    return config, meshes.make_mesh(config.mesh)


def emulate_devices(wanted: int) -> None:
    """Emulate at least `wanted` CPU devices, unless JAX already runs with some: then their number is fixed."""
    if wanted > MAX_EMULATED_DEVICES:  # make_mesh refuses them
        wanted = EMULATED_DEVICES
    with suppress(UserError):
        emulate_cpu_devices(max(EMULATED_DEVICES, wanted, jax.config.jax_num_cpu_devices))
