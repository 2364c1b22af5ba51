"""NVIDIA GPUs that are not attached: their figures, and their devices as XLA for GPU describes them.

XLA compiles for a GPU from a description of it (GpuTargetConfigProto), which is written here from public figures:

DATA SHEET   NVIDIA's data sheets: memory, memory bandwidth, NVLink
TABLES       CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads, registers, shared
             memory
TUNING       the tuning guides of Ampere, Hopper and Blackwell: multiprocessors, L2 cache, shared memory per block

Needs `pip install -e '.[plan-gpu]'`, on any Linux machine.
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, Device

COMPILER = "jax-cuda12-pjrt"
"""The package that holds XLA for CUDA."""
GPUS_PER_NODE = 8
"""GPUs of the systems that NVIDIA sells as HGX and DGX."""
CUDNN = (9, 8, 0)
"""The version whose attention is compiled."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: what its compiler asks, and its links.  Rates are bytes/s in one direction."""

    kind: str
    """jax.Device.device_kind, the key of DEVICES."""
    capability: tuple[int, int]
    cores: int
    """Multiprocessors (TUNING)."""
    clock_ghz: float
    """Largest clock (DATA SHEET)."""
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int
    """What a block may opt in to (TABLES)."""
    nvlink_rate: float
    """Rate of all NVLinks of a GPU (DATA SHEET)."""
    nvlink_efficiency: float
    """Bus bandwidth of a large NCCL all-gather in a node / nvlink_rate."""
    network_rate: float = 50e9
    """Rate of a GPU's network card: 400 Gbit/s."""

    @property
    def device(self) -> Device:
        return DEVICES[self.kind]

    @property
    def target_config(self) -> str:
        """The description, as a text proto."""
        major, minor = self.capability
        return f"""gpu_device_info {{
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_per_block}
            shared_memory_per_core: {self.shared_per_core} l2_cache_size: {self.l2_bytes}
            core_count: {self.cores} fpus_per_core: {64 if self.capability == (8, 0) else 128}
            clock_rate_ghz: {self.clock_ghz}
            memory_bandwidth: {int(self.device.memory_rate)} device_memory_size: {int(self.device.memory)}
            cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
        runtime_version {{ major: 12 minor: 8 patch: 0 }}
        device_description_str: "{self.kind}"
        """


GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 40 << 20, 164 << 10, 163 << 10, 300e9, 0.78, network_rate=25e9
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 50 << 20, 228 << 10, 227 << 10, 450e9, 0.82),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 1.98, 50 << 20, 228 << 10, 227 << 10, 450e9, 0.82),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 1.965, 126 << 20, 228 << 10, 227 << 10, 900e9, 0.82),
}
"""By the name that `--version` takes.  nvlink_efficiency: 370 of 450 GB/s on 8 H100 (github.com/NVIDIA/nccl-tests,
issue 212); about as much is assumed for the others."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of GPUs of one kind, joined by a network."""

    version: str
    nodes: int

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.version]

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def per_node(self) -> int:
        return GPUS_PER_NODE

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node} {self.gpu.kind}"


@dataclass(frozen=True)
class PartOfNode(Nodes):
    """Fewer GPUs than a node has."""

    used: int = 1

    @property
    def per_node(self) -> int:
        return self.used


def find_nodes(version: str, devices: int) -> Nodes:
    """The nodes of these devices; less than a node for fewer than GPUS_PER_NODE.  Raises UserError."""
    if version not in GPUS:
        raise UserError(f"--version {version}: unknown GPU; use one of {', '.join(GPUS)}")
    if devices <= GPUS_PER_NODE:
        return PartOfNode(version, 1, devices)
    if devices % GPUS_PER_NODE:
        raise UserError(f"{devices} GPUs do not fill nodes of {GPUS_PER_NODE}; use a multiple of that")
    return Nodes(version, devices // GPUS_PER_NODE)


def is_installed() -> bool:
    """Whether XLA for CUDA is installed.  Its module is a plugin of JAX and has another name than the package."""
    try:
        importlib.metadata.version(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def node_devices(target: Nodes) -> list[jax.Device]:
    """The devices, as a target for compilation, those of a node one after the other.

    Raises UserError where the compiler is not installed.
    """
    if not is_installed():
        raise UserError(
            f"planning for GPUs needs XLA for CUDA ({COMPILER}), which is not installed: pip install -e '.[plan-gpu]'"
        )
    jax.config.update("jax_platforms", "cpu")  # otherwise the plugin looks for a driver, and is not registered
    shape = f"1x{target.nodes}x{target.per_node}"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=target.gpu.target_config, topology=shape
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, RuntimeError) as error:
        raise UserError(f"XLA for CUDA does not describe {target}: {str(error).splitlines()[0]}") from error
    return sorted(described.devices, key=lambda device: device.id)


@contextmanager
def attention_of(gpu: Gpu) -> Iterator[None]:
    """A context in which JAX traces cuDNN's attention for `gpu`.

    Tracing asks the GPU of this machine for its compute capability and for the version of cuDNN
    (jax._src.cudnn.fused_attention_stablehlo); here there is none, and the target's own are answered.
    """
    from jax._src.cudnn import fused_attention_stablehlo as asks

    answers: dict[str, Any] = {
        "check_compute_capability": lambda wanted: gpu.capability >= tuple(map(int, wanted.split("."))),
        "is_cuda_compute_capability_equal": lambda wanted: gpu.capability == tuple(map(int, wanted.split("."))),
        "check_cudnn_version": lambda: CUDNN[0] * 10000 + CUDNN[1] * 100 + CUDNN[2],
    }
    saved = {name: getattr(asks, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(asks, name, answer)
        yield
    finally:
        for name, function in saved.items():
            setattr(asks, name, function)
