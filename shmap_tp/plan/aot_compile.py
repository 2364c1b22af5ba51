"""Compile a program for devices that are not here, and keep what came out.

A program is kept by the hash of all that it is made from: its StableHLO, the devices' kind and coordinates in mesh
order, the compiler's options (LIBTPU_INIT_ARGS among them) and version.  The second time it is read, not compiled.
"""

import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GIB
from shmap_tp.hardware.xla_options import compile_with

REPORT = "memory-usage-report.txt"
"""How the name of the file ends in which the compiler says what memory it gave to what."""


@dataclass(frozen=True)
class Compiled:
    """A program for one device of a mesh, as the compiler left it."""

    text: str | None
    """The scheduled module; None where it does not fit."""
    peak_bytes: int | float
    """Most memory in use at a time; where it does not fit, what the compiler says that it needs.  Where the host keeps
    nothing it is the compiler's own figure, which for a TPU counts up to 128 MiB of vector memory, too."""
    limit_bytes: int | float
    argument_bytes: int | None
    seconds: float
    """The compiler took, when it was asked."""
    host_bytes: int = 0
    """What is kept in the host's memory; no part of `peak_bytes`."""

    @property
    def fits(self) -> bool:
        return self.text is not None


def coordinates(mesh: Mesh) -> list[list[int]]:
    """[x, y, z, core] of each device of a TPU mesh, row by row; of several slices of those of one, which is whose
    module a compiler makes, and numbers so."""
    first = getattr(mesh.devices.flat[0], "slice_index", 0)
    return [_place(device) for device in mesh.devices.flat if getattr(device, "slice_index", 0) == first]


def _place(device: jax.Device) -> list[int]:
    return [*device.coords, device.core_on_chip]


def compile_ahead(lowered: jax.stages.Lowered, mesh: Mesh, cache: Path | None, options: dict | None = None) -> Compiled:
    """Compile, or read from `cache` (a directory; None keeps nothing)."""
    kind = mesh.devices.flat[0].device_kind
    slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    versions = [importlib.metadata.version(name) for name in ("jax", "libtpu")]
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    places = [_place(device) for device in mesh.devices.flat]
    made_from = [lowered.as_text(), kind, places, slices, versions, options or {}, flags, REPORT]
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:24]
    kept = cache / f"{key}.json.gz" if cache else None
    if kept and kept.exists():
        return Compiled(**json.loads(gzip.decompress(kept.read_bytes())))
    compiled = _compile(lowered, DEVICES[kind].memory, options)
    if kept:
        cache.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")  # another process may keep the same
        part.write_bytes(gzip.compress(json.dumps(asdict(compiled)).encode(), 3))
        part.replace(kept)
    return compiled


_NEEDS = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


def needed(error: jax.errors.JaxRuntimeError) -> tuple[float, float] | None:
    """(bytes that a program needs, bytes that there are), where that is what the compiler's error says."""
    found = next((match for form in _NEEDS if (match := form.search(str(error)))), None)
    return (float(found[1]) * _UNITS[found[2]], float(found[3]) * _UNITS[found[4]]) if found else None


def _compile(lowered: jax.stages.Lowered, limit: float, options: dict | None) -> Compiled:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as reports:
        try:
            program = compile_with(lowered, (options or {}) | {"xla_dump_to": reports})
        except jax.errors.JaxRuntimeError as error:
            if (figures := needed(error)) is None:
                raise
            return Compiled(None, *figures, None, time.perf_counter() - start)
        seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        host = memory.host_temp_size_in_bytes
        peak = _allocated(Path(reports)) if host else memory.peak_memory_in_bytes
    return Compiled(program.as_text(), peak, limit, memory.argument_size_in_bytes, seconds, host)


def _allocated(reports: Path) -> int:
    """Bytes of the device's memory that a program was given, by what the compiler wrote of it.  Where the host keeps
    some, memory_analysis counts that as the device's (libtpu 0.0.42).  Raises InputError where it wrote nothing."""
    text = "".join(report.read_text() for report in reports.glob(f"*{REPORT}"))
    found = re.search(r"Memory Space: default .*\nTotal bytes: (\d+)", text)
    if found is None:
        version = importlib.metadata.version("libtpu")
        raise UserError(f"libtpu {version} does not report the memory of a step with model.offload; 0.0.42 does")
    return int(found[1])
