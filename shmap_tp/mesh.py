"""Devices to a (dp, mp) mesh: the accelerators that are there, or CPU devices that are emulated."""

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shmap_tp.config import InputError, MeshConfig

DP = "dp"
MP = "mp"


def join(config: MeshConfig) -> None:
    """Meet the other processes, where there are any, and emulate this one's share of the mesh's devices on its CPU.

    Must come before JAX's first use of a backend.  Raises InputError where not all of them are there.
    """
    emulate(max(1, config.dp * config.mp // config.processes))
    if config.processes == 1:
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"mesh.processes={config.processes}, but the others were not found: {str(error).splitlines()[0]}\n"
            f"start the same command on every host of a TPU, GKE or Slurm job, or set mesh.processes=1"
        ) from error
    if jax.process_count() != config.processes:
        raise InputError(
            f"mesh.processes={config.processes}, but {jax.process_count()} were started; make the two the same"
        )


def emulate(devices: int) -> None:
    """Make this process's CPU look like `devices` devices.  Must come before JAX's first use of a backend.

    Harmless where there are accelerators: JAX then prefers those, and the CPU devices stay unused.
    """
    jax.config.update("jax_num_cpu_devices", devices)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A (dp, mp) mesh over `devices` (all there are, unless given), mp along the closest neighbours of the torus.

    Raises InputError where dp x mp is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    wanted = config.dp * config.mp
    if wanted != len(devices):
        raise InputError(
            f"mesh dp={config.dp} x mp={config.mp} needs {wanted} devices, this machine has {len(devices)} "
            f"({devices[0].device_kind}); choose mesh.dp and mesh.mp with dp x mp = {len(devices)}"
        )
    grid = mesh_utils.create_device_mesh((config.dp, config.mp), devices, allow_split_physical_axes=True)
    return Mesh(grid, (DP, MP), axis_types=(AxisType.Auto,) * 2)
