"""The rules of --coordinator and --process-id."""

import ipaddress
import re

from shmap_tp.errors import UserError


def validate_process_arguments(coordinator: str | None, process_id: int | None, processes: int) -> None:
    """Check --coordinator and --process-id against mesh.processes.  Raises UserError."""
    if coordinator is None and process_id is None:
        return
    if coordinator is None or process_id is None:
        missing = "--coordinator HOST:PORT" if coordinator is None else "--process-id I"
        raise UserError(f"--coordinator and --process-id must be given together; add {missing}")
    if not _is_address(coordinator):
        raise UserError(
            f"--coordinator {coordinator!r} is not HOST:PORT; use for example --coordinator 10.0.0.2:8476, or "
            f"[fd00::2]:8476 with IPv6; a port is from 1 to 65535"
        )
    if processes == 1:
        raise UserError("--coordinator needs several processes, but mesh.processes=1; add --processes N")
    if not 0 <= process_id < processes:
        raise UserError(
            f"--process-id {process_id} is out of range for --processes {processes}; use 0 to {processes - 1}"
        )


def _is_address(text: str) -> bool:
    """Whether `text` is HOST:PORT; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        return False
    if host.startswith("[") and host.endswith("]"):
        try:
            return bool(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            return False
    return bool(re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?", host))
