"""How long a compute instruction of a compiled module takes on a TPU that is not attached.

compiler's estimate   estimated cycles / clock
Pallas kernels        FLOPs / (KERNEL_EFFICIENCY x peak), or bytes / memory bandwidth if that is longer, as the kernel
                      declares them; splash attention declares none, so its blocks are counted (`splash_flops`)
grouped matmuls       also Pallas kernels: FLOPs / (GROUPED_EFFICIENCY x peak), of the dtype of their operands, or
                      bytes / memory bandwidth, for the tiles that are computed (`grouped_tiles`)
no estimate           bytes read and written / memory bandwidth
"""

import math
import re
from typing import NamedTuple

import numpy as np

from shmap_tp.hardware.devices import DeviceFigures
from shmap_tp.layers.grouped_matmul import contracted_tile, output_tile
from shmap_tp.plan.hlo_parser import ARRAY, KERNEL, Computation, Instruction, bytes_accessed

KERNEL_EFFICIENCY = 0.6
"""Fraction of the peak FLOP/s assumed for every Pallas kernel on every generation.  It has not been measured; see
docs/performance-notes.md for where the number comes from."""

GROUPED_EFFICIENCY = 0.7
"""The same of grouped matmuls, whose waiting for memory is counted besides."""
GROUPED_EFFICIENCY_EIGHT_BIT = 0.6
"""The same where the operands have eight bits, of that peak."""
EIGHT_BIT = {"s8": "int8", "f8e4m3fn": "fp8"}
"""Formats by their names in a module."""

SPLASH_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matmuls per block.  fwd: scores, values.  dq: scores, dp, dq.  dkv: scores, dv, dp, dk; and dq where the kernel also
returns it, one partial sum per block of keys: an array with one dim more than q."""


def compute_seconds(
    instruction: Instruction, computation: Computation, device: DeviceFigures, chosen_share: float = 1.0
) -> tuple[float, float]:
    """(seconds, bytes whose time had to be derived from the memory bandwidth) of one instruction.  `chosen_share`: that
    of the rows of grouped matmuls which belong to any group."""
    if instruction.estimated_cycles is not None:
        return instruction.estimated_cycles / device.clock, 0.0
    if KERNEL in instruction.attributes:
        return kernel_seconds(instruction, device, chosen_share), 0.0
    size = bytes_accessed(instruction, computation)
    return size / device.memory_rate, size


def kernel_seconds(instruction: Instruction, device: DeviceFigures, chosen_share: float) -> float:
    """Seconds of a Pallas kernel.  Raises ValueError where its FLOPs are not known."""
    flops, tiles = kernel_flops(instruction), grouped_tiles(instruction, chosen_share)
    found = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
    declared = float(found[1]) if found else 0.0
    if tiles is None:
        return max(flops / (KERNEL_EFFICIENCY * device.flops), declared / device.memory_rate)
    size = (declared - tiles.declared) * tiles.of_visits + tiles.read
    peak = grouped_peak(device.flops, device.eight_bit.get(EIGHT_BIT.get(tiles.dtype, "")))
    return max(flops * tiles.of_shapes / peak, size / device.memory_rate)


def grouped_peak(flops: float, eight_bit: float | None) -> float:
    """FLOP/s assumed of a grouped matmul, by the device's peak, and by that of eight bits if it multiplies these."""
    return GROUPED_EFFICIENCY * flops if eight_bit is None else GROUPED_EFFICIENCY_EIGHT_BIT * eight_bit


def kernel_flops(instruction: Instruction) -> float:
    """FLOPs that a Pallas kernel declares, or those of splash attention.  Raises ValueError for any other kernel."""
    found = re.search(r'"flops":"?(\d+)', instruction.attributes)
    if found:
        return float(found[1])
    splash = re.search(r"\bsplash_m[hq]a_(fwd|dq|dkv)_", instruction.attributes)
    if splash:
        return splash_flops(splash[1], instruction)
    raise ValueError(f"{instruction.name}: a kernel that does not declare its FLOPs (cost_estimate of pallas_call)")


class GroupedTiles(NamedTuple):
    """The tiles that a grouped matmul computes, relative to two others, and what it reads of the matrices."""

    of_shapes: float
    """Tiles computed, relative to the tiles of its shapes, whose FLOPs it declares."""
    of_visits: float
    """Tiles computed, relative to the most that it could compute, whose bytes it declares."""
    declared: float = 0.0
    """Bytes that it declares for matrices which stay in vector memory: one for each tile of rows."""
    read: float = 0.0
    """Bytes that it reads of these matrices: one for each group."""
    dtype: str = "bf16"
    """The dtype of its operands, as XLA prints it."""


def grouped_tiles(instruction: Instruction, chosen_share: float) -> GroupedTiles | None:
    """The tiles of a kernel of `layers/grouped_matmul.py`; None for any other kernel.

    A tile of rows is computed once for each group that has rows in it, and not at all beyond the last group: of E
    groups E - 1 end within a tile.  The kernel receives the ends of the groups, and the group and number of every tile:
    s32[E + 1], s32[tiles + E - 1] and again.  Tiles of features may exceed the matrix.
    """
    kernel = re.search(r"[/(](t?gmm)\)*/pallas_call", instruction.attributes)
    if kernel is None:
        return None
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", instruction.attributes)[1]
    ends, visits, *_ = (int(size) for size in re.findall(r"s32\[(\d+)\]", operands))
    arrays = [found for found in ARRAY.findall(operands) if "," in found[2]]
    (dtype, bits, _), out_bits = arrays[0], ARRAY.search(instruction.shape)[2]
    products = len(arrays) // 2  # of as many matrices
    x, other = ([int(n) for n in dims.split(",")] for *_, dims in (arrays[0], arrays[products]))
    itemsize, has_matrices = int(bits) // 8, kernel[1] == "gmm"
    out = math.prod(other[1:]) // x[1] if has_matrices else other[1]
    contracted = contracted_tile(x[1], itemsize, products) if has_matrices else output_tile(x[1], itemsize)
    sizes = (x[1], contracted), (out, output_tile(out, int(out_bits) // 8))
    exceeding = math.prod((n + -n % tile) / n for n, tile in sizes)
    boundaries = ends - 2
    computed = chosen_share * (visits - boundaries) + boundaries
    of_shapes, of_visits = exceeding * computed / (visits - boundaries), computed / visits
    if not has_matrices or contracted < x[1]:
        return GroupedTiles(of_shapes, of_visits, dtype=dtype)
    matrix = products * x[1] * out * itemsize
    return GroupedTiles(of_shapes, of_visits, visits * matrix, (ends - 1) * matrix, dtype)


def splash_flops(phase: str, instruction: Instruction) -> float:
    """FLOPs of a kernel of jax.experimental.pallas.ops.tpu.splash_attention under a causal mask.

    2 x block_q x block_kv x K per matmul, for each block in which any query attends to any key; blocks on the diagonal
    are computed in full.  With blocks of 512 at T = 2048 that is 10 of 16 blocks.  The block sizes are read from the
    kernel's metadata, and a window from its scope; q[... T K] is its first floating-point operand with at least three
    dims, and k[... S K] the next.  With more keys than queries these are the first and the last T / 2 of the row: what
    one of S / T devices has; or, as the scope says, chunks of T behind as many keys.
    """
    text = instruction.attributes
    suffix = "" if phase == "fwd" else f"_{phase}"
    found = [re.search(rf'"{side}{suffix}\\": (\d+)', text) for side in ("block_q", "block_kv")]
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", text)
    shapes = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", operands[1] if operands else "")
    if not all(found) or len(shapes) < 2 or shapes[0].count(",") < 2:
        raise ValueError(f"{instruction.name}: the block sizes and the shapes of q and k cannot be read")
    block_q, block_kv = (int(match[1]) for match in found)
    (*outer, time, head_dim), (*_, keys, _) = ([int(size) for size in dims.split(",")] for dims in shapes[:2])
    scope = re.search(r"\battend_window_(\d+)(_of_chunks)?\b", text)
    window, are_last = (int(scope[1]), bool(scope[2])) if scope else (keys, False)
    ends = np.arange(block_q, time + 1, block_q)  # of the blocks of queries
    ends[ends > (0 if are_last else time / 2)] += keys - time
    hidden = np.maximum(0, ends - block_q - window + 1) // block_kv
    blocks = int(np.sum(-(-ends // block_kv) - hidden))
    partial_dq = [dims for _, _, dims in ARRAY.findall(instruction.shape) if dims.count(",") > shapes[0].count(",")]
    matmuls = SPLASH_MATMULS[phase] + bool(partial_dq)
    return float(2 * math.prod(outer) * blocks * block_q * block_kv * head_dim * matmuls)
