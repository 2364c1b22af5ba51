"""The time of a scheduled TPU module: its instructions walked in their order, compute by the compiler's own estimate.

    compute       estimated cycles / clock; without an estimate, bytes in and out / memory rate
    collectives   plan/links.py; a sync one stops the clock until it is done, an async one ends at its start plus its
                  time (after those before it on the same wires), and its -done waits for that
    copies        between memory and the cores' own: async, bytes / memory rate, one after the other
    loops         the body's time x its true trip count, from the start, step and limit in the text
    kernels       Pallas: the FLOPs that the kernel declares, at KERNEL_EFFICIENCY of the peak

What compute is not estimated, how the compiler's estimate differs from a chip, contention between copies and compute,
and waiting for slower devices are not in it.  benchmarks/RESULTS.md says how far off it is where a figure is published.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from shmap_tp.hardware import DEVICES
from shmap_tp.plan.groups import replica_groups, source_target_pairs
from shmap_tp.plan.hlo import Computation, Instruction, Module, shape_bytes
from shmap_tp.plan.links import Links
from shmap_tp.plan.trips import Frame, trip_count

KERNEL_EFFICIENCY = 0.6
"""Of the peak, for a Pallas kernel: an assumption."""

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("add-dependency", "opt-barrier", "send-done", "domain"),
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
KERNEL = "tpu_custom_call"


@dataclass
class Replay:
    """Seconds of a program on one device, and what they are spent on."""

    seconds: float = 0.0
    comm_seconds: float = 0.0
    """All collectives, hidden or not."""
    exposed_comm_seconds: float = 0.0
    """The part of it that the device waits for."""
    places: Counter[str] = field(default_factory=Counter)
    """Seconds by place in the source (`place`), waits for collectives and copies on their own."""
    unestimated_bytes: float = 0.0
    """Moved by instructions that the compiler gives no estimate for, all trips together."""

    def add(self, other: "Replay", times: int = 1) -> None:
        self.seconds += times * other.seconds
        self.comm_seconds += times * other.comm_seconds
        self.exposed_comm_seconds += times * other.exposed_comm_seconds
        self.unestimated_bytes += times * other.unestimated_bytes
        for place, seconds in other.places.items():
            self.places[place] += times * seconds

    def spend(self, place: str, seconds: float) -> None:
        self.seconds += seconds
        self.places[place] += seconds


def replay(module: Module, links: Links) -> Replay:
    """Walk the whole program.  Raises ValueError at a loop whose trips, or an operation whose cost, it cannot tell."""
    return _Walk(module, links).computation(Frame(module[module.entry], None, None, None))


PLACES = {"cross_entropy": "loss", "embedding": "embedding", "attention": "attention", "mlp": "mlp", "head": "head"}


def place(source: str) -> str:
    """Where in the model an instruction comes from: the named scopes of transformer.py, loss.py and step.py."""
    for scope, name in PLACES.items():
        if re.search(rf"\b{scope}\b", source):
            return name
    if "/update/" in source or "dp_meets" in source:
        return "update"
    return "blocks, the rest" if "blocks" in source else "other"


class _Walk:
    def __init__(self, module: Module, links: Links):
        self._module = module
        self._links = links
        self._device = DEVICES[links.generation.kind]

    def computation(self, frame: Frame) -> Replay:
        """One run through a computation, its async operations started and awaited."""
        spent = Replay()
        ends: dict[str, tuple[float, bool]] = {}  # by name of the start: (when it ends, whether it is a collective)
        free: Counter[str] = Counter()  # by kind of wire: when the last transfer on it ends
        for instruction in frame.computation.instructions:
            kind, start = instruction.opcode, self._async_start(instruction)
            if start is not None:
                wire, seconds = start
                free[wire] = max(free[wire], spent.seconds) + seconds
                ends[instruction.name] = free[wire], wire != "copies"
                spent.comm_seconds += seconds if wire != "copies" else 0.0
            elif self._is_done(instruction):
                self._wait(spent, ends.get(self._started(instruction, frame.computation)))
            elif kind == "while":
                self._loop(spent, instruction, frame)
            elif kind in ("call", "conditional"):
                self._branch(spent, instruction, frame)
            elif collective := self._collective(instruction):
                seconds = self._collective_seconds(collective)
                spent.comm_seconds += seconds
                spent.exposed_comm_seconds += seconds
                spent.spend("collectives", seconds)
            elif kind not in FREE:
                self._compute(spent, instruction, frame.computation)
        return spent

    def _loop(self, spent: Replay, instruction: Instruction, frame: Frame) -> None:
        condition = self._module[instruction.attribute("condition")]
        body = self._module[instruction.attribute("body")]
        inside = Frame(body, frame, instruction, body)
        spent.add(self.computation(inside), trip_count(condition, inside))

    def _branch(self, spent: Replay, instruction: Instruction, frame: Frame) -> None:
        """A call, or the longest of the branches of a conditional."""
        names = re.findall(
            r"(?:to_apply|branch_computations|true_computation|false_computation)=\{?([^,}]+(?:, %[^,}]+)*)",
            instruction.attributes,
        )
        names = [name.strip().lstrip("%") for found in names for name in found.split(",")]
        runs = [self.computation(Frame(self._module[name], frame, instruction, None)) for name in names]
        spent.add(max(runs, key=lambda run: run.seconds))

    def _wait(self, spent: Replay, end: tuple[float, bool] | None) -> None:
        """For something started in this computation; what an earlier trip of the loop started is over by now."""
        if end is None:
            return
        seconds, is_collective = max(0.0, end[0] - spent.seconds), end[1]
        spent.exposed_comm_seconds += seconds if is_collective else 0.0
        spent.spend("collectives" if is_collective else "copies", seconds)

    def _compute(self, spent: Replay, instruction: Instruction, computation: Computation) -> None:
        where = place(instruction.source)
        if instruction.cycles is not None:
            spent.spend(where, instruction.cycles / self._device.clock)
        elif KERNEL in instruction.attributes:
            spent.spend(where, self._kernel_flops(instruction) / (KERNEL_EFFICIENCY * self._device.flops))
        elif instruction.opcode != "custom-call":  # those that are not kernels only mark something
            moved = instruction.bytes + self._operand_bytes(instruction, computation)
            spent.unestimated_bytes += moved
            spent.spend(where, moved / self._device.memory_rate)

    def _kernel_flops(self, instruction: Instruction) -> float:
        found = re.search(r'"flops":"?(\d+)', instruction.attributes)
        if not found:
            raise ValueError(
                f"{instruction.name}: a kernel that does not declare its FLOPs (pallas_call cost_estimate)"
            )
        return float(found[1])

    def _operand_bytes(self, instruction: Instruction, computation: Computation) -> int:
        """Of what is read; a slice or gather reads no more than it returns."""
        if any(word in instruction.opcode + instruction.name for word in ("gather", "dynamic", "slice", "scatter")):
            return instruction.bytes if "update" not in instruction.name and "scatter" not in instruction.name else 0
        return sum(computation.by_name[name].bytes for name in instruction.operands if name in computation.by_name)

    # Async operations come as X-start / X-done, as async-start / async-done around a computation, and as custom
    # fusions called async-collective-start / -done.

    def _async_start(self, instruction: Instruction) -> tuple[str, float] | None:
        """(the wire it takes, its seconds), where the instruction starts something and goes on."""
        kind = instruction.opcode
        if kind == "send":
            return "network", self._network_seconds(instruction)
        if kind == "recv":
            return "network", 0.0
        if kind.removesuffix("-start") in COPIES and kind.endswith("-start"):
            moved = shape_bytes(instruction.shape) / 2  # what is read and what is written
            return "copies", min(moved, self._smaller_side(instruction)) / self._device.memory_rate
        if not (kind.endswith("-start") or (kind == "fusion" and "async-collective-start" in instruction.name)):
            return None
        collective = self._collective(instruction)
        if collective is None:
            raise ValueError(f"{instruction.name}: {kind} starts nothing that is known here")
        return "links", self._collective_seconds(collective)

    def _is_done(self, instruction: Instruction) -> bool:
        name, kind = instruction.name, instruction.opcode
        return kind.endswith("-done") or (kind == "fusion" and "async-collective-done" in name)

    def _started(self, instruction: Instruction, computation: Computation) -> str:
        """The name of the start that a -done waits for, through tuples and the fusions it passes by."""
        name = instruction.operands[0]
        while name in computation.by_name:
            found = computation.by_name[name]
            if found.opcode not in ("get-tuple-element", "bitcast", "tuple") or not found.operands:
                return name
            name = found.operands[0]
        return name

    def _smaller_side(self, instruction: Instruction) -> float:
        """The least of the arrays of a copy's tuple that is not a flag: of a slice, what is taken."""
        parts = [shape_bytes(part) for part in re.findall(r"[a-z]+\d+\[[\d,]*\]", instruction.shape)]
        return float(min(part for part in parts if part > 4)) if any(part > 4 for part in parts) else 4.0

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """The collective that an instruction is, or that its fused computation holds."""
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return instruction
        if instruction.opcode in ("fusion", "async-start") and instruction.calls:
            inside = self._module.within(instruction.calls)
            return next((found for found in inside if found.opcode.removesuffix("-start") in COLLECTIVES), None)
        return None

    def _collective_seconds(self, instruction: Instruction) -> float:
        kind = instruction.opcode.removesuffix("-start")
        if kind == "collective-permute":
            return self._links.permute(self._result_bytes(instruction), source_target_pairs(instruction))
        group = replica_groups(instruction, len(self._links.coordinates))[0]
        whole = self._result_bytes(instruction) * (len(group) if kind == "reduce-scatter" else 1)
        return self._links.collective(kind, whole, group)

    def _result_bytes(self, instruction: Instruction) -> float:
        """Of the result: a -start's tuple holds the operands before it."""
        if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
            return instruction.bytes
        inner = instruction.shape[1:]
        halves = inner.split("), (") if inner.startswith("(") else inner.split(", ", 1)
        parts = [shape_bytes(part) for part in re.findall(r"[a-z]+\d+\[[\d,]*\]", inner)]
        return shape_bytes(halves[1]) if inner.startswith("(") else max(parts)

    def _network_seconds(self, instruction: Instruction) -> float:
        kind = "all-reduce" if '"ALL_REDUCE"' in instruction.attributes else "all-gather"
        targets = re.search(r"_xla_megascale_target=\{\{([\d,]+)\}", instruction.attributes)
        slices = len(targets[1].split(",")) if targets else 2
        return self._links.network(kind, shape_bytes(instruction.shape), slices)
