"""Devices to a (dp, mp) mesh: the accelerators that are there, or CPU devices that are emulated."""

import socket
import threading
from dataclasses import dataclass

import jax
from jax._src.distributed import global_state

from shmap_tp.config.schema import AUTO, Config
from shmap_tp.errors import UserError
from shmap_tp.runtime.exit_codes import LOST, leave


def emulate(devices: int) -> None:
    """Make this process's CPU look like `devices` devices.  Must come before JAX's first use of a backend.

    No effect on a machine with accelerators: JAX prefers those, and the CPU devices stay unused.
    Raises UserError if JAX already runs on the CPU with another number of devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:  # a backend has been used
        there = jax.devices()
        if there[0].platform == "cpu" and len(there) != devices:
            raise UserError(
                f"the mesh needs {devices} emulated devices, but JAX already runs with {len(there)} in this process;\n"
                f"restart Python and start with this mesh, or use one of dp x mp = {len(there)}"
            ) from error


@dataclass(frozen=True)
class Coordinator:
    """Where this process stands among the others, where no TPU, GKE or Slurm environment says so."""

    coordinator: str
    """HOST:PORT of process 0, as all reach it."""
    process: int


def initialize_distributed(config: Config, place: Coordinator | None = None) -> None:
    """Meet the other processes, where there are any, and emulate this one's share of the mesh's devices on its CPU.

    Must come before JAX's first use of a backend.  Raises InputError where this process cannot take part; leaves with
    LOST where the others are not there within run.join_timeout_seconds.
    """
    processes, dp = config.mesh.processes, config.mesh.dp
    if dp != AUTO:
        emulate(max(1, dp * config.mesh.mp // processes))
    elif jax.config.jax_num_cpu_devices < 1:  # JAX_NUM_CPU_DEVICES says how many to emulate; else as few as will do
        emulate(max(1, config.mesh.mp // processes))
    if processes == 1:
        return
    _initialize(config, place)
    if jax.process_count() != processes:
        raise UserError(f"mesh.processes={processes}, but {jax.process_count()} were started; make the two the same")


def _initialize(config: Config, place: Coordinator | None) -> None:
    """jax.distributed.initialize with a limit: where that passes, JAX would abort the process without a word on why."""
    processes, seconds = config.mesh.processes, config.run.join_timeout_seconds
    given = {}
    if place:
        given = {"coordinator_address": place.coordinator, "num_processes": processes, "process_id": place.process}
        given |= {"cluster_detection_method": "deactivate"}
    late = threading.Timer(seconds, lambda: leave(LOST, _why_late(processes, seconds)))
    late.daemon = True
    late.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from StopRequest
    try:
        jax.distributed.initialize(
            **given, initialization_timeout=seconds + 60, heartbeat_timeout_seconds=config.run.lost_timeout_seconds + 30
        )
    except (ValueError, RuntimeError) as error:
        where, said = global_state.coordinator_address, str(error).splitlines()[0]
        if "RPC server" in said:
            raise UserError(
                f"process 0 cannot listen at port {where.rpartition(':')[2]} of {where}: another program does, perhaps "
                f"an earlier run;\nend that one, or choose another port on every process"
            ) from error
        raise UserError(
            f"mesh.processes={processes}, but the others were not found: {said}\nstart the same command on every host "
            f"of a TPU, GKE or Slurm job, give --coordinator and --process-id, or set mesh.processes=1"
        ) from error
    finally:
        late.cancel()


def _why_late(processes: int, seconds: int) -> str:
    """What most likely keeps the processes apart, as far as it can be seen from here."""
    where, me = global_state.coordinator_address, global_state.process_id
    who = f"process {me} of {processes}, after {seconds} s (run.join_timeout_seconds)"
    if where is None:
        return f"{who}: the environment of this TPU, GKE or Slurm job does not say where process 0 is"
    host, _, port = where.rpartition(":")
    there = "start it there with the same --coordinator" if me else "name an address of this host"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except socket.gaierror:
        return f"{who}: no host is known by the name of {host}, where process 0 should be; mend the name or use its IP"
    except ConnectionRefusedError:
        return f"{who}: nothing listens at {host} port {port}, where process 0 should be; {there}"
    except OSError as error:
        return (
            f"{who}: {host} port {port}, where process 0 should be, does not answer ({error});\n"
            f"open the port between the hosts (a firewall?), or {there}"
        )
    return (
        f"{who}: process 0 listens at {host} port {port}, but not all {processes} processes came;\n"
        f"start each with a --process-id of its own, 0 to {processes - 1}, and open the port to all of their hosts"
    )
