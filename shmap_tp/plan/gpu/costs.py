"""The time of the compute instructions of a module compiled for an NVIDIA GPU: an estimate, not calibrated.

matmuls (cuBLAS)      2 M N K / (GEMM_EFFICIENCY x peak), rounded up to whole waves of tiles; at least its bytes
attention (cuDNN)     FLOPs of the causal half / (ATTENTION_EFFICIENCY x peak)
all else              bytes read and written / (MEMORY_EFFICIENCY x memory bandwidth)

XLA's own estimates (exec_time_us) are not used: with jax 0.10.2 those of bfloat16 matmuls with a float32 result are 64
times too long, and those of fused norms overflow, to minus or plus several minutes.
Not modelled: the power limit, gaps between kernels, and the multiprocessors that NCCL occupies.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shmap_tp.plan.gpu.targets import Gpu
from shmap_tp.plan.hlo_parser import ARRAY, Computation, Instruction, Module
from shmap_tp.plan.instruction_costs import bytes_accessed

GEMM_EFFICIENCY = 0.79
"""Fraction of the peak, in full waves: XLA's table for H100 has 176 us for a bfloat16 product of 4096 cubed, which is
780 TFLOP/s."""
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
    is_wide = computation.instructions[instruction.operands[0]].shape.startswith("f32")
    peak = GEMM_EFFICIENCY * gpu.device.flops * (0.5 if is_wide else 1)  # TF32 has half the rate of bfloat16
    return max(whole, waves * flops_of_wave if waves <= MAX_WAVES else whole) / peak


def gemm_sizes(instruction: Instruction, computation: Computation) -> tuple[int, int, int, int]:
    """(batch, rows, columns, summed dim) of a matmul.  Raises ValueError where its dims cannot be read."""
    left, right = (_dims(computation.instructions[name].shape) for name in instruction.operands[:2])
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
    head_dim = _dims(computation.instructions[instruction.operands[0]].shape)[-1]
    return ATTENTION_MATMULS[kind] * math.prod(int(n) for n in re.findall(r"\d+", scores[1])) * head_dim


def _dims(shape: str) -> list[int]:
    (found, *_) = ARRAY.findall(shape)
    return [int(n) for n in found[2].split(",") if n]
