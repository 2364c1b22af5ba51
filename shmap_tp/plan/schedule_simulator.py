"""The time of a scheduled TPU module: its instructions walked in their order, compute by the compiler's own estimate.

    compute       estimated cycles / clock; without an estimate, bytes in and out / memory rate
    collectives   plan/links.py, whichever cores make them; each begins when those before it on the same links have
                  ended; a sync one stops the clock until it is done, for an async one its -done does; ppermutes to a
                  neighbour share links only with those that send between the same chips: both directions of a ring
                  flow at once
    copies        between memory and the cores' own: async, bytes / memory rate, one after the other; to and from the
                  host's memory: bytes / host rate, one after the other each way
    loops         the body's time x its true trip count, from the start, step and limit in the text
    kernels       Pallas: the FLOPs that the kernel declares, at KERNEL_EFFICIENCY of the peak; splash attention, which
                  declares none: those of the blocks that it computes (`splash_flops`)

What compute is not estimated, how the compiler's estimate differs from a chip, contention between copies and compute,
and waiting for slower devices are not in it.  benchmarks/RESULTS.md says how far off it is where a figure is published.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from shmap_tp.hardware.devices import DEVICES
from shmap_tp.plan.communication.from_hlo import replica_groups
from shmap_tp.plan.hlo_parser import ARRAY, Computation, Instruction, Module, array_bytes
from shmap_tp.plan.link_model import Lanes, Links, Traffic

KERNEL_EFFICIENCY = 0.6
"""Of the peak, for a Pallas kernel: an assumption, for all of them and all generations.

No measured figure was found for splash attention on v4, v5e or v5p.  What the compiler says of its own schedule
(libtpu 0.0.42, v5e, K = 128, blocks of 512; LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true") is an
upper bound, since memory may be waited for: forward, 1179 instructions for a block whose products take 1024 cycles at
peak, and for each step of the grid and each row of blocks some 200 and 500 more, which is 0.61 of the peak at
T = 2048; backward, 2371 for a block of 2560 cycles and 230 and 200 more, at most 0.85.
"""

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("add-dependency", "opt-barrier", "domain"),
}


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


HOST = "S(5)"
"""The memory space that is the host's, in a layout."""


KERNEL = "tpu_custom_call"


FLAG = 8
"""Bytes of the flags and counters that an async tuple carries beside its arrays, at most."""


TENSOR_PARALLEL = ("links", "network")
"""What collectives run over, those that the sparse cores make too; the rest that is async is copies, and their work."""


COLLECTIVES_WAITED = "waiting for collectives"


@dataclass
class SimulatedSchedule:
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
        for source_scope, seconds in other.places.items():
            self.places[source_scope] += times * seconds

    def spend(self, source_scope: str, seconds: float) -> None:
        self.seconds += seconds
        self.places[source_scope] += seconds


def simulate(module: Module, links: Links) -> SimulatedSchedule:
    """Walk the whole program.  Raises ValueError at a loop whose trips, or an operation whose cost, it cannot tell."""
    return _Walk(module, links).computation(list(module.computations.values())[-1])


SCOPES = {"cross_entropy": "loss", "embedding": "embedding", "attention": "attention", "mlp": "mlp", "head": "head"}


def source_scope(instruction: Instruction) -> str:
    """Where in the model an instruction comes from: the named scopes of transformer.py, loss.py and step.py."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    source = found[1] if found else ""
    for scope, name in SCOPES.items():
        if re.search(rf"\b{scope}\b", source):
            return name
    if "/update/" in source or "dp_gradient_reduction" in source:
        return "update"
    return "blocks, the rest" if "blocks" in source else "other"


class _Walk:
    def __init__(self, module: Module, links: Links):
        self._module = module
        self._links = links
        self._device = DEVICES[links.generation.kind]

    def computation(self, computation: Computation) -> SimulatedSchedule:
        """One run through a computation, its async operations started and awaited."""
        spent = SimulatedSchedule()
        ends: dict[str, tuple[float, str]] = {}  # by name of the start: (when it ends, on which wire)
        wires = Traffic()
        for instruction in computation.instructions.values():
            kind, start = instruction.opcode, self._async_start(instruction, computation)
            if start is not None:
                wire, seconds = start
                end = wires.end(wire, self._lanes(instruction), spent.seconds, seconds)
                ends[self._transfer(instruction, computation)] = end, wire
                spent.comm_seconds += seconds if wire in TENSOR_PARALLEL else 0.0
            elif kind.endswith("-done") or (kind == "fusion" and "async-collective-done" in instruction.name):
                self._wait(spent, ends.get(self._transfer(instruction, computation)))
            elif kind == "while":
                self._loop(spent, instruction, computation)
            elif kind in ("call", "conditional"):
                runs = [self.computation(self._module.computations[name]) for _, name in instruction.called]
                spent.add(max(runs, key=lambda run: run.seconds))
            elif (collective := self._collective(instruction)) and not _chain(collective[0]):
                seconds = self._collective_seconds(*collective)
                spent.comm_seconds += seconds
                self._wait(spent, (wires.end("links", self._lanes(instruction), spent.seconds, seconds), "links"))
            elif kind not in FREE:
                self._compute(spent, instruction, computation)
        return spent

    def _loop(self, spent: SimulatedSchedule, instruction: Instruction, computation: Computation) -> None:
        trips = self._module.trips(computation, instruction)
        if math.isnan(trips):
            raise ValueError(f"how often the loop {instruction.name} runs cannot be read")
        spent.add(self.computation(self._module.computations[dict(instruction.called)["body"]]), int(trips))

    def _wait(self, spent: SimulatedSchedule, end: tuple[float, str] | None) -> None:
        """For something started in this computation; what an earlier trip of the loop started is over by now."""
        if end is None:
            return
        seconds, wire = max(0.0, end[0] - spent.seconds), end[1]
        spent.exposed_comm_seconds += seconds if wire in TENSOR_PARALLEL else 0.0
        spent.spend(COLLECTIVES_WAITED if wire in TENSOR_PARALLEL else f"waiting for {wire}", seconds)

    def _compute(self, spent: SimulatedSchedule, instruction: Instruction, computation: Computation) -> None:
        where = source_scope(instruction)
        if instruction.cycles is not None:
            spent.spend(where, instruction.cycles / self._device.clock)
        elif KERNEL in instruction.attributes:
            spent.spend(where, kernel_flops(instruction) / (KERNEL_EFFICIENCY * self._device.flops))
        elif instruction.opcode != "custom-call":  # those that are not kernels only mark something
            moved = _moved_bytes(instruction, computation)
            spent.unestimated_bytes += moved
            spent.spend(where, moved / self._device.memory_rate)

    # Async operations come as X-start / X-done, as async-start / async-done around a computation, and as custom
    # fusions called async-collective-start / -done, with fusions between them that compute while carrying it along: all
    # of them hold the same collective, of one chain_id.

    def _transfer(self, instruction: Instruction, computation: Computation) -> str:
        """What a start and its -done have in common: the chain, or the name of the start."""
        if instruction.opcode == "fusion":
            return f"chain {_chain(self._collective(instruction)[0])}"
        return _started(instruction, computation) if instruction.opcode.endswith("-done") else instruction.name

    def _async_start(self, instruction: Instruction, computation: Computation) -> tuple[str, float] | None:
        """(the wire it takes, its seconds), where the instruction starts something and goes on."""
        kind = instruction.opcode
        if kind == "send":
            return "network", self._network_seconds(instruction)
        if kind == "recv":
            return "network", 0.0
        if kind in COPIES:
            parts = [size for size in array_bytes(instruction.shape) if size > FLAG]
            size = min(parts, default=FLAG)  # of a slice, what is taken
            if HOST in instruction.shape:
                return f"the host, {_way(instruction)}", size / self._links.host_rate
            return "copies", size / self._device.memory_rate
        if not (kind.endswith("-start") or (kind == "fusion" and "async-collective-start" in instruction.name)):
            return None
        collective = self._collective(instruction)
        if collective is None and kind == "call-start":  # a lookup by the sparse cores, whose estimates are no cycles
            return "sparse cores", _moved_bytes(instruction, computation) / self._device.memory_rate
        if collective is None:
            raise ValueError(f"{instruction.name}: {kind} starts nothing that is known here")
        return "links", self._collective_seconds(*collective)

    def _collective(self, instruction: Instruction) -> tuple[Instruction, Computation | None] | None:
        """The collective that an instruction is; or one that its fused computation holds, with that computation."""
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return instruction, None
        if instruction.opcode not in ("fusion", "async-start", "call-start"):
            return None
        found = []
        for _, name in instruction.called:
            inside = self._module.computations[name]
            deeper = [one for each in inside.instructions.values() if (one := self._collective(each))]
            found += [(collective, within or inside) for collective, within in deeper]
        if len(found) > 1 and instruction.opcode == "call-start":
            raise ValueError(f"{instruction.name}: more than one collective in a call")
        return found[0] if found else None

    def _lanes(self, instruction: Instruction) -> Lanes | None:
        """The links that a collective takes; None for all that there are."""
        collective = self._collective(instruction)
        pairs = _pairs(collective[0].attributes) if collective else []
        return self._links.lanes(pairs) if pairs else None

    def _collective_seconds(self, instruction: Instruction, inside: Computation | None) -> float:
        kind = instruction.opcode.removesuffix("-start")
        if inside is not None and inside.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter of a whole"
        size = _result_bytes(instruction)
        if kind == "collective-permute":
            return self._links.permute(size, _pairs(instruction.attributes))
        group = sorted(min(replica_groups(instruction.attributes, len(self._links.coordinates)), key=min))
        whole = size * len(group) if kind == "reduce-scatter" else size
        one_ring = '"strategy":"StrategyRing"' in instruction.attributes or "1DRing" in instruction.attributes
        return self._links.collective(kind.removesuffix(" of a whole"), whole, group, one_ring=one_ring)

    def _network_seconds(self, instruction: Instruction) -> float:
        kind = "all-reduce" if '"ALL_REDUCE"' in instruction.attributes else "all-gather"
        slices = re.search(r'_xla_megascale_target=(?:"|\{)\{([\d,]+)\}', instruction.attributes)
        if not slices:
            raise ValueError(f"{instruction.name}: how many slices meet cannot be read")
        return self._links.network(kind, float(sum(array_bytes(instruction.shape))), len(slices[1].split(",")))


def _chain(collective: Instruction) -> str | None:
    """The number that the parts of an async collective share which fusions carry along."""
    found = re.search(r'chain_id="(\d+)"', collective.attributes)
    return found[1] if found else None


def _started(instruction: Instruction, computation: Computation) -> str:
    """The name of the start that a -done waits for, through tuples and what only renames."""
    found = computation.instructions[instruction.operands[0]]
    while found.opcode in ("get-tuple-element", "bitcast", "tuple") and found.operands:
        found = computation.instructions[found.operands[0]]
    return found.name


def _way(instruction: Instruction) -> str:
    """Of a copy between a device's memory and its host's."""
    result = instruction.shape.split("}")[0]
    writes = HOST in result if instruction.opcode == "copy-start" else "update" in instruction.opcode
    return "writes" if writes else "reads"


def _result_bytes(instruction: Instruction) -> float:
    """Of a collective's result: the tuple of a -start holds the operands before it, but for an all-reduce's."""
    sizes = array_bytes(instruction.shape)
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return float(sum(sizes))
    flags = [size for size in sizes if size > FLAG]
    return float(sum(flags[len(flags) // 2 :]))


def _moved_bytes(instruction: Instruction, computation: Computation) -> float:
    """In and out of memory.  Who gathers or slices reads what it returns; who updates in place writes what it reads."""
    word = f"{instruction.opcode} {instruction.name}"
    operands = [sum(array_bytes(computation.instructions[name].shape)) for name in instruction.operands]
    if "update" in word or "scatter" in word:
        return 2.0 * sum(sorted(operands)[:-1])
    if "gather" in word or "slice" in word:
        return 2.0 * sum(array_bytes(instruction.shape))
    return sum(operands) + float(sum(array_bytes(instruction.shape)))


def kernel_flops(instruction: Instruction) -> float:
    """Those that the kernel declares, or splash attention's.  Raises ValueError where neither tells."""
    found = re.search(r'"flops":"?(\d+)', instruction.attributes)
    if found:
        return float(found[1])
    splash = re.search(r"\bsplash_m[hq]a_(fwd|dq|dkv)_", instruction.attributes)
    if splash:
        return splash_flops(splash[1], instruction)
    raise ValueError(f"{instruction.name}: a kernel that does not declare its FLOPs (cost_estimate of pallas_call)")


SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matrix products of a block.  fwd: scores, values.  dq: scores, dp, dq.  dkv: scores, dv, dp, dk; and dq, where it
returns that as well, one part for each block of keys: an array of one dim more than q."""


def splash_flops(phase: str, instruction: Instruction) -> float:
    """FLOPs of a kernel of jax.experimental.pallas.ops.tpu.splash_attention under a causal mask, of what it computes.

    2 x block_q x block_kv x K for each product of each block in which any query sees any key, those on the diagonal
    whole: with blocks of 512 at T = 2048 that is 10 of 16, where the mask lets through just over 8 of them.  Its own
    words tell the block sizes, its first operand of three dims or more and of floats is q[... T K].
    """
    said = instruction.attributes
    of_phase = "" if phase == "fwd" else f"_{phase}"
    found = [re.search(rf'"{side}{of_phase}\\": (\d+)', said) for side in ("block_q", "block_kv")]
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", said)
    shapes = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", operands[1] if operands else "")
    if not all(found) or not shapes or shapes[0].count(",") < 2:
        raise ValueError(f"{instruction.name}: the block sizes and the shape of q cannot be read")
    block_q, block_kv = (int(match[1]) for match in found)
    *outer, time, head_dim = (int(size) for size in shapes[0].split(","))
    computed = sum(-(-end // block_kv) for end in range(block_q, time + 1, block_q))
    parts_of_dq = [dims for _, _, dims in ARRAY.findall(instruction.shape) if dims.count(",") > shapes[0].count(",")]
    products = SPLASH_PRODUCTS[phase] + bool(parts_of_dq)
    return float(2 * math.prod(outer) * computed * block_q * block_kv * head_dim * products)


def _pairs(attributes: str) -> list[tuple[int, int]]:
    """(from, to) of a ppermute."""
    found = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", found[1])] if found else []
