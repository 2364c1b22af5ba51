"""Devices to a (dp, mp) mesh: real ones where there are accelerators, emulated ones on a machine that has only a
CPU."""

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shmap_tp.config import InputError, MeshConfig

DP = "dp"
MP = "mp"


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
