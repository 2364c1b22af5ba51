"""Emulated CPU devices, and jax.distributed with a time limit and messages for the user."""

import ipaddress
import os
import socket
from dataclasses import dataclass, replace

import jax

from shmap_tp.config.schema import AUTO, Config
from shmap_tp.errors import LostProcessError, UserError
from shmap_tp.runtime.agreement import global_state, launch_facts, require_agreement
from shmap_tp.runtime.exit_codes import exit_with_error
from shmap_tp.runtime.workers import in_background

MAX_EMULATED_DEVICES = 1024
"""The most devices of one process: each has threads of its own, and no process has as many accelerators."""


def emulate_cpu_devices(count: int) -> None:
    """Make this process's CPU appear as `count` JAX devices.  Must be called before JAX first uses a backend.

    It does no harm on a machine with accelerators: JAX prefers those, and the CPU devices stay unused.
    Raises UserError if that are more than MAX_EMULATED_DEVICES, or JAX already uses the CPU with fewer devices.
    """
    if count > MAX_EMULATED_DEVICES:
        raise UserError(
            f"mesh.dp x mesh.mp / mesh.processes is {count} devices for one process; at most {MAX_EMULATED_DEVICES} "
            f"are possible, use a smaller mesh or more processes"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # a backend has been initialised
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) < count:
            raise UserError(
                f"the mesh needs {count} emulated devices, but JAX already runs with {len(devices)} in this process;\n"
                f"restart Python and start with this mesh, or use a mesh of at most {len(devices)} (dp x mp)"
            ) from error


@dataclass(frozen=True)
class Coordinator:
    """How this process joins the others where no TPU, GKE or Slurm environment provides that."""

    address: str
    """HOST:PORT of process 0, under which all processes reach it."""
    process_id: int
    """Number of this process."""


def initialize_distributed(config: Config, coordinator: Coordinator | None = None) -> None:
    """Join the other processes of the run, if there are any, and emulate this process's share of the devices on CPU.

    Must be called before JAX first uses a backend.  Raises UserError if this process cannot take part.  Exits with
    LostProcessError.exit_code if the others do not join within run.join_timeout_seconds.
    """
    mesh, processes = config.mesh, config.mesh.processes
    if mesh.dp != AUTO:
        emulate_cpu_devices(max(1, mesh.devices // processes))
    elif jax.config.jax_num_cpu_devices < 1:  # JAX_NUM_CPU_DEVICES is not set: emulate one dp rank over all processes
        emulate_cpu_devices(max(1, replace(mesh, dp=1).devices // processes))
    if processes == 1:
        return
    _initialize(config, coordinator)
    if (started := global_state.num_processes) != processes:
        raise UserError(f"mesh.processes={processes}, but {started} processes were started; make the two numbers equal")
    require_agreement("configuration", launch_facts(config), config.run.join_timeout_seconds)


def joined_processes() -> int:
    """How many processes `initialize_distributed` has joined; 1 where it has not been called."""
    return 1 if global_state.client is None else global_state.num_processes


def _initialize(config: Config, coordinator: Coordinator | None) -> None:
    """jax.distributed.initialize with our own time limit, interruptible by signals.

    It runs in another thread, because no signal handler runs while it waits.  On its own time-out JAX aborts without an
    explanation, so its limit is set a minute later.
    """
    processes, seconds = config.mesh.processes, config.run.join_timeout_seconds
    arguments = {"initialization_timeout": seconds + 60}
    arguments["heartbeat_timeout_seconds"] = config.run.lost_timeout_seconds + 30
    if coordinator:
        bound = None if coordinator.process_id else _bind_address(coordinator.address)
        arguments |= {"coordinator_address": coordinator.address, "coordinator_bind_address": bound}
        arguments |= {"num_processes": processes, "process_id": coordinator.process_id}
        arguments["cluster_detection_method"] = "deactivate"
    jax.config.update("jax_enable_preemption_service", False)  # it would replace the SIGTERM handler of StopRequest
    joining = in_background(lambda: jax.distributed.initialize(**arguments))
    try:
        joining.result(seconds)
    except TimeoutError:
        number = global_state.process_id
        waited = f"process {number} of {processes} waited {seconds} s (run.join_timeout_seconds) for the others"
        reason = _why_not_joined(global_state.coordinator_address, number, processes)
        exit_with_error(LostProcessError(f"{waited}: {reason}"))
    except (ValueError, RuntimeError) as error:
        raise _explain_failure(error, processes) from error


def _bind_address(address: str) -> str:
    """Where process 0 listens: at the address by which the others reach it, not at all addresses of its host.

    If its name resolves only to loopback addresses, as that of a host does on Debian, it listens at all: other hosts
    resolve the name to another address.  JAX_COORDINATOR_BIND_ADDRESS, which JAX defines, overrides this.
    Raises UserError if the name cannot be resolved, on which JAX would crash.
    """
    if given := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return given
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise UserError(f"--coordinator {address}: {host} cannot be resolved; correct it or use its IP") from error
    is_name = host != "localhost" and host not in found
    return f"[::]:{port}" if is_name and all(ipaddress.ip_address(each).is_loopback for each in found) else address


def _explain_failure(error: Exception, processes: int) -> UserError:
    """The error for the user if jax.distributed.initialize raised `error`."""
    address, reason = global_state.coordinator_address, str(error).splitlines()[0]
    if "RPC server" in reason:
        return UserError(
            f"process 0 cannot listen at {address}: another program uses the port, perhaps an earlier run, or the "
            f"address is of another host;\nend that program, choose another port on every process, or set "
            f"JAX_COORDINATOR_BIND_ADDRESS here"
        )
    return UserError(
        f"mesh.processes={processes}, but the other processes were not found: {reason}\n"
        f"start the same command on every host of a TPU, GKE or Slurm job, add --coordinator and --process-id, or set "
        f"mesh.processes=1"
    )


def _why_not_joined(address: str | None, process_id: int, processes: int) -> str:
    """The most likely reason as seen from this process."""
    if address is None:
        return "the environment of this TPU, GKE or Slurm job does not give the address of process 0"
    host, _, port = address.rpartition(":")
    advice = "start process 0 there with the same --coordinator" if process_id else "use an address of this host"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except socket.gaierror:
        return f"the host name of process 0, {host}, cannot be resolved; correct it or use the IP address"
    except ConnectionRefusedError:
        return f"nothing listens at {host} port {port}, the address of process 0; {advice}"
    except OSError as error:
        return (
            f"{host} port {port}, the address of process 0, does not answer ({error});\n"
            f"open the port between the hosts (a firewall?), or {advice}"
        )
    return (
        f"process 0 listens at {host} port {port}, but not all {processes} processes joined;\n"
        f"start all of them, beside --coordinator each with another --process-id, 0 to {processes - 1}, and open the "
        f"port for all of their hosts"
    )
