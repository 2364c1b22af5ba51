"""The time of the compute instructions of a scheduled TPU module.

compiler's estimate   estimated cycles / clock
Pallas kernels        FLOPs / (KERNEL_EFFICIENCY x peak); the FLOPs are those that the kernel declares;
                      splash attention declares none, so its blocks are counted (`splash_flops`)
no estimate           bytes read and written / memory bandwidth
"""

import math
import re

from shmap_tp.hardware.devices import Device
from shmap_tp.plan.hlo_parser import ARRAY, Computation, Instruction, array_bytes

KERNEL_EFFICIENCY = 0.6
"""Fraction of the peak FLOP/s assumed for every Pallas kernel on every generation.  It has not been measured; see
docs/performance-notes.md for where the number comes from."""

KERNEL = "tpu_custom_call"
GPU_LIBRARIES = ("__cublas", "__cudnn")
"""Prefixes of the calls of a library in a module for GPUs; their times are in gpu/costs.py."""

SPLASH_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matmuls per block.  fwd: scores, values.  dq: scores, dp, dq.  dkv: scores, dv, dp, dk; and dq where the kernel also
returns it, one partial sum per block of keys: an array with one dim more than q."""


def compute_seconds(instruction: Instruction, computation: Computation, device: Device) -> tuple[float, float]:
    """(seconds, bytes whose time had to be derived from the memory bandwidth) of one instruction."""
    if instruction.estimated_cycles is not None:
        return instruction.estimated_cycles / device.clock, 0.0
    if KERNEL in instruction.attributes:
        return kernel_flops(instruction) / (KERNEL_EFFICIENCY * device.flops), 0.0
    size = bytes_accessed(instruction, computation)
    return size / device.memory_rate, size


def is_annotation(instruction: Instruction) -> bool:
    """A custom call that is neither estimated nor a kernel takes no time: AllocateBuffer, for example."""
    is_kernel = any(name in instruction.attributes for name in (KERNEL, *GPU_LIBRARIES))
    return instruction.opcode == "custom-call" and instruction.estimated_cycles is None and not is_kernel


def bytes_accessed(instruction: Instruction, computation: Computation) -> float:
    """Bytes read and written.  A gather or slice reads what it returns; an in-place update reads what it writes."""
    word = f"{instruction.opcode} {instruction.name}"
    operands = [sum(array_bytes(computation.instructions[name].shape)) for name in instruction.operands]
    if "update" in word or "scatter" in word:
        return 2.0 * sum(sorted(operands)[:-1])
    if "gather" in word or "slice" in word:
        return 2.0 * sum(array_bytes(instruction.shape))
    return sum(operands) + float(sum(array_bytes(instruction.shape)))


def kernel_flops(instruction: Instruction) -> float:
    """FLOPs that a Pallas kernel declares, or those of splash attention.  Raises ValueError for any other kernel."""
    found = re.search(r'"flops":"?(\d+)', instruction.attributes)
    if found:
        return float(found[1])
    splash = re.search(r"\bsplash_m[hq]a_(fwd|dq|dkv)_", instruction.attributes)
    if splash:
        return splash_flops(splash[1], instruction)
    raise ValueError(f"{instruction.name}: a kernel that does not declare its FLOPs (cost_estimate of pallas_call)")


def splash_flops(phase: str, instruction: Instruction) -> float:
    """FLOPs of a kernel of jax.experimental.pallas.ops.tpu.splash_attention under a causal mask.

    2 x block_q x block_kv x K per matmul, for each block in which any query attends to any key; blocks on the diagonal
    are computed in full.  With blocks of 512 at T = 2048 that is 10 of 16 blocks.  The block sizes are read from the
    kernel's metadata; q[... T K] is its first floating-point operand with at least three dims.
    """
    text = instruction.attributes
    suffix = "" if phase == "fwd" else f"_{phase}"
    found = [re.search(rf'"{side}{suffix}\\": (\d+)', text) for side in ("block_q", "block_kv")]
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", text)
    shapes = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", operands[1] if operands else "")
    if not all(found) or not shapes or shapes[0].count(",") < 2:
        raise ValueError(f"{instruction.name}: the block sizes and the shape of q cannot be read")
    block_q, block_kv = (int(match[1]) for match in found)
    *outer, time, head_dim = (int(size) for size in shapes[0].split(","))
    blocks = sum(-(-end // block_kv) for end in range(block_q, time + 1, block_q))
    partial_dq = [dims for _, _, dims in ARRAY.findall(instruction.shape) if dims.count(",") > shapes[0].count(",")]
    matmuls = SPLASH_MATMULS[phase] + bool(partial_dq)
    return float(2 * math.prod(outer) * blocks * block_q * block_kv * head_dim * matmuls)
