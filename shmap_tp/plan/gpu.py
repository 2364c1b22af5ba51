"""NVIDIA GPUs that are not attached: their devices, and how long a collective or an instruction takes there.

XLA compiles for a GPU from a description of it (GpuTargetConfigProto), which is written here from public figures:

DATA SHEET   NVIDIA's data sheets: memory, memory bandwidth, NVLink
TABLES       CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads, registers, shared
             memory
TUNING       the tuning guides of Ampere, Hopper and Blackwell: multiprocessors, L2 cache, shared memory per block

That needs `pip install -e '.[plan-gpu]'`, on any Linux machine.  The times are estimates that no GPU has confirmed.

Collectives, of V bytes of the full array, n devices of a group in m nodes, g of them in each node:

    all-gather, reduce-scatter    max(V (n - 1) / n / nvlink, V (m - 1) / m / (g x network))
    all-reduce                    a reduce-scatter followed by an all-gather
    all-to-all                    max(V (n - 1) / n^2 / nvlink, V (m - 1) / m^2 / (g x network))
    ppermute                      bytes / nvlink within a node, bytes / network between nodes

NCCL runs as many rings as it has links; a ring through several nodes crosses each node's boundary through the cards of
the group's own GPUs.  Each collective also takes LATENCY for every step of the ring within a node, and NETWORK_LATENCY
for every node.

Instructions:

    matmuls (cuBLAS)      2 M N K / (GEMM_EFFICIENCY x peak of the operands' dtype), rounded up to whole waves of tiles;
                          at least its bytes
    attention (cuDNN)     FLOPs of the causal half / (ATTENTION_EFFICIENCY x peak)
    all else              bytes read and written / (MEMORY_EFFICIENCY x memory bandwidth)

XLA's own estimates (exec_time_us) are not used: with jax 0.10.2 those of bfloat16 matmuls with a float32 result are 64
times too long, and those of fused norms overflow, to minus or plus several minutes.
Not modelled: the power limit, gaps between kernels, and the multiprocessors that NCCL occupies.
"""

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GIB, DeviceFigures
from shmap_tp.plan.hlo_parser import ARRAY, Computation, Instruction, Module, bytes_accessed

# Devices

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
    def device(self) -> DeviceFigures:
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


UNCOUNTED = 3 * GIB
"""Memory of a GPU that XLA does not count: NCCL's buffers (1 to 2 GiB), CUDA's context, cuDNN's workspace."""
POOL = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def usable_bytes(gpu: Gpu) -> float:
    """What a program can use: JAX's memory pool, by default 75 % of the memory, and never what is UNCOUNTED.

    Raises UserError where POOL is set to no fraction.
    """
    given = os.environ.get(POOL, "0.75")
    try:
        fraction = float(given)
    except ValueError:
        raise UserError(f"{POOL}={given} is no number; give a fraction such as 0.9, or unset it") from None
    return min(fraction * gpu.device.memory, gpu.device.memory - UNCOUNTED)


# Collectives

LATENCY = 2e-6
"""Seconds per step within a node: an assumption."""
NETWORK_LATENCY = 1e-5
"""Seconds per step between nodes: an assumption."""
HOST_RATE = 5e10
"""Bytes/s between a GPU and its host's memory: PCIe 5.0 x16, 63 GB/s, of which about 80 % are reached."""


@dataclass(frozen=True)
class GpuLinks:
    """The links between the devices of a program, numbered node by node.  It answers as `tpu.LinkModel` does."""

    target: Nodes

    host_rate = HOST_RATE

    @property
    def devices(self) -> int:
        return self.target.devices

    @property
    def memory_rate(self) -> float:
        return self.target.gpu.device.memory_rate

    @property
    def _nvlink(self) -> float:
        return self.target.gpu.nvlink_rate * self.target.gpu.nvlink_efficiency

    def collective_seconds(
        self, kind: str, full_bytes: float, group: Sequence[int], *, one_ring: bool = False
    ) -> float:
        """Seconds of a collective within one group of devices; `full_bytes` is the size of the full array."""
        size = len(group)
        if size == 1:
            return 0.0
        nodes = len({device // self.target.per_node for device in group})
        inside = full_bytes * (size - 1) / size / self._nvlink if size > nodes else 0.0
        each = self.target.gpu.network_rate * size / nodes
        between = full_bytes * (nodes - 1) / nodes / each
        latency = (size - 1) * LATENCY + (nodes - 1) * NETWORK_LATENCY
        if kind == "all-to-all":
            return max(inside / size, between / nodes) + latency
        return (max(inside, between) + latency) * {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}[kind]

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Seconds of a ppermute: `size` bytes from source to target of every pair, all at once."""
        node = self.target.per_node
        crosses = any(a // node != b // node for a, b in pairs)
        rate = self.target.gpu.network_rate if crosses else self._nvlink
        return size / rate + (NETWORK_LATENCY if crosses else LATENCY) if pairs else 0.0

    def neighbour_seconds(self, size: float, group: Sequence[int]) -> float:
        """Seconds of one step of a ring: `size` bytes from each device of a group to the next."""
        return self.permute_seconds(size, [(group[0], group[-1])])

    def links_of_permute(self, pairs: Sequence[tuple[int, int]]) -> None:
        """NCCL runs one collective at a time on a stream: a ppermute takes the whole channel."""
        return None

    def inter_slice_seconds(self, kind: str, full_bytes: float, slices: int) -> float:
        """Never asked: between nodes XLA for GPU makes ordinary collectives."""
        raise AssertionError("XLA for GPU has no send and recv between slices")


# Instructions

GEMM_EFFICIENCY = 0.79
"""Fraction of the peak, in full waves: XLA's table for H100 has 176 us for a bfloat16 product of 4096 cubed, which is
780 TFLOP/s.  The same is assumed of eight bits."""
TILE = (128, 256)
"""Rows and columns of a matmul that a multiprocessor computes at a time: cuBLAS's largest tile for bfloat16."""
MAX_WAVES = 8
"""With more waves the last one, not full, matters little: cuBLAS splits it."""
ATTENTION_EFFICIENCY = {"forward": 0.55, "backward": 0.45}
"""Fraction of the peak: about what Shah et al. 2024, FlashAttention-3, figures 5 and 6,
https://arxiv.org/abs/2407.08608, report for cuDNN on H100 with a causal mask, heads of 128 and sequences of 4096 to
8192."""
ATTENTION_MATMULS = {"forward": 2, "backward": 5}
MEMORY_EFFICIENCY = 0.9
"""Fraction of the bandwidth of the data sheet: an assumption."""
LIBRARY_CALL = re.compile(r'custom_call_target="(__cublas[^"]*|__cudnn\$fmha[^"]*)"')


@dataclass(frozen=True)
class GpuCosts:
    """The time of each compute instruction of a module on one kind of GPU."""

    module: Module
    gpu: Gpu

    def __call__(self, instruction: Instruction, computation: Computation) -> tuple[float, float]:
        """(seconds, bytes whose time had to be derived from the memory bandwidth) of one instruction.

        A fusion may hold a matmul, whose operands it slices out of an array of all layers.
        """
        size = bytes_accessed(instruction, computation)
        seconds = size / (MEMORY_EFFICIENCY * self.gpu.device.memory_rate)
        calls = list(self._library_calls(instruction, computation))
        if not calls:
            return seconds, size
        return sum(library_seconds(call, within, self.gpu) for call, within in calls), 0.0

    def _library_calls(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """The calls of cuBLAS and cuDNN that an instruction is, or contains."""
        if LIBRARY_CALL.search(instruction.attributes):
            yield instruction, computation
        elif instruction.opcode == "fusion":
            for _, name in instruction.called:
                inner = self.module.computations[name]
                for one in inner.instructions.values():
                    yield from self._library_calls(one, inner)


def library_seconds(instruction: Instruction, computation: Computation, gpu: Gpu) -> float:
    """Seconds of a matmul or of attention: by its FLOPs, and not less than its bytes take."""
    least = bytes_accessed(instruction, computation) / (MEMORY_EFFICIENCY * gpu.device.memory_rate)
    target = LIBRARY_CALL.search(instruction.attributes)[1]
    if "matmul" in target:
        return max(least, gemm_seconds(instruction, computation, gpu))
    kind = "backward" if "Backward" in target else "forward"
    rate = ATTENTION_EFFICIENCY[kind] * gpu.device.flops
    return max(least, attention_flops(instruction, computation, kind) / rate)


def gemm_seconds(instruction: Instruction, computation: Computation, gpu: Gpu) -> float:
    """Seconds of a cuBLAS matmul, from the shapes of its operands and its result."""
    batch, rows, columns, inner = gemm_sizes(instruction, computation)
    tiles = batch * math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    waves = math.ceil(tiles / gpu.cores)
    flops_of_wave = 2 * gpu.cores * TILE[0] * TILE[1] * inner
    whole = 2 * batch * rows * columns * inner
    dtype, eight_bit = _array(computation, instruction.operands[0])[0], gpu.device.eight_bit
    peaks = {"f32": gpu.device.flops / 2, "s8": eight_bit.get("int8"), "f8e4m3fn": eight_bit.get("fp8")}  # f32: TF32
    peak = GEMM_EFFICIENCY * peaks.get(dtype, gpu.device.flops)
    return max(whole, waves * flops_of_wave if waves <= MAX_WAVES else whole) / peak


def gemm_sizes(instruction: Instruction, computation: Computation) -> tuple[int, int, int, int]:
    """(batch, rows, columns, summed dim) of a matmul.  Raises ValueError where its dims cannot be read."""
    left, right = (_array(computation, name)[1] for name in instruction.operands[:2])
    stated = re.findall(r'"((?:lhs|rhs)_(?:contracting|batch)_dimensions)":\[([^\]]*)\]', instruction.attributes)
    found = {name: [int(n) for n in re.findall(r"\d+", values)] for name, values in stated}
    if "lhs_contracting_dimensions" not in found:
        raise ValueError(f"{instruction.name}: the dims of a matmul cannot be read")
    inner = math.prod(left[i] for i in found["lhs_contracting_dimensions"])
    batch = math.prod(left[i] for i in found.get("lhs_batch_dimensions", []))
    rows, columns = (math.prod(dims) // inner // batch for dims in (left, right))
    return batch, rows, columns, inner


def attention_flops(instruction: Instruction, computation: Computation, kind: str) -> int:
    """FLOPs of the causal half of attention: 2 B H T S K / 2 for each matmul.  The scores [B H T S] are stated by the
    call, and K is the last dim of its first operand.  Raises ValueError where they cannot be read."""
    scores = re.search(r'"intermediate_tensor_shape": ?{.*?"dimensions": ?\[([^\]]*)\]', instruction.attributes)
    if scores is None or not re.search(r'"mask_type": ?"CAUSAL"', instruction.attributes):
        raise ValueError(f"{instruction.name}: the shapes of causal attention cannot be read")
    head_dim = _array(computation, instruction.operands[0])[1][-1]
    return ATTENTION_MATMULS[kind] * math.prod(int(n) for n in re.findall(r"\d+", scores[1])) * head_dim


def _array(computation: Computation, name: str) -> tuple[str, list[int]]:
    """(dtype, dims) of an operand."""
    dtype, _, dims = ARRAY.findall(computation.instructions[name].shape)[0]
    return dtype, [int(n) for n in dims.split(",") if n]
