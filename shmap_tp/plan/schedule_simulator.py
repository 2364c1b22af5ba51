"""Simulate the schedule of a compiled module: its instructions in order, with asynchronous transfers in flight.

The costs of a module for TPUs (for GPUs see gpu.py):

    compute       `tpu_instructions.py`: the compiler's own estimate of cycles where there is one
    collectives   `tpu.LinkModel`: each begins when earlier ones on the same links have ended.  A synchronous collective
                  stops the clock until it ends; for an asynchronous one its -done does.  ppermutes between neighbours
                  conflict only if they use the same links in the same direction, so both directions of a ring overlap
    copies        between HBM and on-chip memory: asynchronous, one after the other at memory bandwidth; to and from
                  host memory: at the host bandwidth, one after the other in each direction
    loops         time of the body x trip count (`hlo_parser`)
    branches      the longest branch

XLA for TPU writes an asynchronous operation in three ways: X-start and X-done; async-start and async-done around a
computation; or fusions named async-collective-start and -done, with compute fusions between them that carry the
collective along.  In the last case every one of these fusions contains the same collective, with the same chain_id.

Not modelled: contention between copies and compute, and waiting for slower devices."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from shmap_tp.hardware.devices import DEVICES
from shmap_tp.plan.compiled_communication import replica_groups
from shmap_tp.plan.gpu import GpuCosts, GpuLinks
from shmap_tp.plan.hlo_parser import (
    GPU_LIBRARIES,
    KERNEL,
    Computation,
    Instruction,
    Module,
    array_bytes,
    bytes_accessed,
)
from shmap_tp.plan.targets import Links
from shmap_tp.plan.tpu import DirectedLinks
from shmap_tp.plan.tpu_instructions import compute_seconds

# Transfers: which channel each uses, and for how long

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")

HOST_MEMORY = "S(5)"
"""The memory space of the host, in a layout."""

FLAG_BYTES = 8
"""Largest size of the flags and counters that an async tuple contains besides its arrays."""

LINKS, NETWORK, LOCAL_COPIES, SPARSE_CORES = "links", "network", "copies", "sparse cores"

COLLECTIVE_CHANNELS = (LINKS, NETWORK)
"""Channels of collectives, including those that the SparseCores execute.  All other channels carry copies."""


class TransferQueue:
    """Transfers in flight on each channel of a device.  A transfer begins when all conflicting transfers have ended."""

    def __init__(self):
        self._in_flight: list[tuple[str, DirectedLinks | None, float]] = []

    def schedule(self, channel: str, links: DirectedLinks | None, now: float, seconds: float) -> tuple[float, float]:
        """(begin, end) of a transfer requested at `now` that uses these links of a channel, or all of it if None."""
        self._in_flight = [transfer for transfer in self._in_flight if transfer[2] > now]
        begin = now
        for other, used, end in self._in_flight:
            if other == channel and (links is None or used is None or links & used):
                begin = max(begin, end)
        self._in_flight.append((channel, links, begin + seconds))
        return begin, begin + seconds


@dataclass(frozen=True)
class Transfer:
    """An operation that occupies a channel for some time while the cores continue."""

    channel: str
    seconds: float
    links: DirectedLinks | None
    """The links that it uses; None for all links of the channel."""
    key: str
    """Identifies the start and the matching -done."""
    collective: Instruction | None = None

    @property
    def is_collective(self) -> bool:
        return self.channel in COLLECTIVE_CHANNELS


class TransferCosts:
    """Recognises the transfers of a module and computes their durations."""

    def __init__(self, module: Module, link_model: Links):
        self._module = module
        self._link_model = link_model
        self._memory_rate = link_model.memory_rate

    def started(self, instruction: Instruction, computation: Computation) -> Transfer | None:
        """The transfer that this instruction starts asynchronously; None for any other instruction."""
        found = self._channel_and_seconds(instruction, computation)
        if found is None:
            return None
        collective = self._find_collective(instruction)
        links = self._links(collective[0]) if collective else None
        return Transfer(*found, links, self.key(instruction, computation), collective and collective[0])

    def synchronous(self, instruction: Instruction) -> Transfer | None:
        """The collective that this instruction runs and waits for; None for any other instruction."""
        collective = self._find_collective(instruction)
        if collective is None or _chain_id(collective[0]):
            return None
        seconds = self._collective_seconds(*collective)
        return Transfer(LINKS, seconds, self._links(collective[0]), instruction.name, collective[0])

    def key(self, instruction: Instruction, computation: Computation) -> str:
        """What a start and its -done have in common: the chain id, or the name of the start."""
        if instruction.opcode == "fusion":
            return f"chain {_chain_id(self._find_collective(instruction)[0])}"
        return _matching_start(instruction, computation) if instruction.opcode.endswith("-done") else instruction.name

    def _channel_and_seconds(self, instruction: Instruction, computation: Computation) -> tuple[str, float] | None:
        kind = instruction.opcode
        if kind == "send":
            return NETWORK, self._network_seconds(instruction)
        if kind == "recv":
            return NETWORK, 0.0
        if kind in COPIES:
            arrays = [size for size in array_bytes(instruction.shape) if size > FLAG_BYTES]
            size = min(arrays, default=FLAG_BYTES)  # of a slice: the part that is copied
            if HOST_MEMORY in instruction.shape:
                return f"the host, {_host_direction(instruction)}", size / self._link_model.host_rate
            return LOCAL_COPIES, size / self._memory_rate
        if not (kind.endswith("-start") or (kind == "fusion" and "async-collective-start" in instruction.name)):
            return None
        collective = self._find_collective(instruction)
        if collective is None and kind == "fusion-start":  # XLA for GPU: on another stream; counted where it starts
            return None
        if collective is None and kind == "call-start":  # a lookup by the SparseCores; its estimate is not in cycles
            return SPARSE_CORES, bytes_accessed(instruction, computation) / self._memory_rate
        if collective is None:
            raise ValueError(f"{instruction.name}: {kind} is an unknown kind of asynchronous operation")
        return LINKS, self._collective_seconds(*collective)

    def _find_collective(self, instruction: Instruction) -> tuple[Instruction, Computation | None] | None:
        """The collective that an instruction is, or that its called computation contains, with that computation."""
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return instruction, None
        if instruction.opcode not in ("fusion", "async-start", "call-start"):
            return None
        found = []
        for _, name in instruction.called:
            inner = self._module.computations[name]
            nested = [one for each in inner.instructions.values() if (one := self._find_collective(each))]
            found += [(collective, within or inner) for collective, within in nested]
        if len(found) > 1 and instruction.opcode == "call-start":
            raise ValueError(f"{instruction.name}: more than one collective in a call")
        return found[0] if found else None

    def _links(self, collective: Instruction) -> DirectedLinks | None:
        pairs = _source_target_pairs(collective.attributes)
        return self._link_model.links_of_permute(pairs) if pairs else None

    def _collective_seconds(self, collective: Instruction, within: Computation | None) -> float:
        kind = collective.opcode.removesuffix("-start")
        size = _result_bytes(collective)
        if kind == "collective-permute":
            return self._link_model.permute_seconds(size, _source_target_pairs(collective.attributes))
        group = sorted(min(replica_groups(collective.attributes, self._link_model.devices), key=min))
        full_bytes = size * len(group) if kind in ("reduce-scatter", "all-to-all") else size
        if within is not None and within.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # an all-reduce of the full array, of which each device keeps its shard
        one_ring = '"strategy":"StrategyRing"' in collective.attributes or "1DRing" in collective.attributes
        return self._link_model.collective_seconds(kind, full_bytes, group, one_ring=one_ring)

    def _network_seconds(self, instruction: Instruction) -> float:
        kind = "all-reduce" if '"ALL_REDUCE"' in instruction.attributes else "all-gather"
        is_gather = '"ALL_GATHER"' in instruction.attributes  # what is sent is one shard
        slices = re.search(r'_xla_megascale_target=(?:"|\{)\{([\d,]+)\}', instruction.attributes)
        if not slices:
            raise ValueError(f"{instruction.name}: the number of slices that communicate cannot be read")
        count = len(slices[1].split(","))
        size = float(sum(array_bytes(instruction.shape))) * (count if is_gather else 1)
        return self._link_model.inter_slice_seconds(kind, size, count)


def _chain_id(collective: Instruction) -> str | None:
    """The number shared by the fusions that carry one asynchronous collective along."""
    found = re.search(r'chain_id="(\d+)"', collective.attributes)
    return found[1] if found else None


def _matching_start(instruction: Instruction, computation: Computation) -> str:
    """The name of the start that a -done waits for, looking through tuples and bitcasts."""
    found = computation.instructions[instruction.operands[0]]
    while found.opcode in ("get-tuple-element", "bitcast", "tuple") and found.operands:
        found = computation.instructions[found.operands[0]]
    return found.name


def _host_direction(instruction: Instruction) -> str:
    """Whether a copy writes to host memory or reads from it."""
    result = instruction.shape.split("}")[0]
    writes = HOST_MEMORY in result if instruction.opcode == "copy-start" else "update" in instruction.opcode
    return "writes" if writes else "reads"


def _result_bytes(collective: Instruction) -> float:
    """Bytes of the result.  The tuple of a -start lists the operands before the results, except for an all-reduce."""
    sizes = array_bytes(collective.shape)
    if not collective.opcode.endswith("-start") or collective.opcode == "all-reduce-start":
        return float(sum(sizes))
    arrays = [size for size in sizes if size > FLAG_BYTES]
    return float(sum(arrays[len(arrays) // 2 :]))


def _source_target_pairs(attributes: str) -> list[tuple[int, int]]:
    """(source, target) of a ppermute."""
    found = re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes)
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", found[1])] if found else []


# The schedule

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("add-dependency", "opt-barrier", "domain"),
}
"""Opcodes that take no time."""

WAITING_FOR_COLLECTIVES = "waiting for collectives"

SCOPES = {
    "cross_entropy": "loss", "embedding": "embedding", "attention": "attention", "router": "router",
    "dispatch": "rows to experts", "combine": "rows from experts", "experts": "experts", "mlp": "mlp", "head": "head",
}  # fmt: skip
"""named_scope -> name in a report, where one is within another the inner one first."""


@dataclass(frozen=True)
class Interval:
    """A stretch of the simulated step."""

    kind: str
    """compute, waiting, or the channel of a transfer; `repeats` for loop iterations that are not recorded."""
    label: str
    begin: float
    end: float
    collective: Instruction | None = None


@dataclass
class SimulatedSchedule:
    """Seconds of a program on one device, and what they are spent on."""

    seconds: float = 0.0
    comm_seconds: float = 0.0
    """All collectives, overlapped or exposed."""
    exposed_comm_seconds: float = 0.0
    """The part of `comm_seconds` during which the device waits."""
    scopes: Counter[str] = field(default_factory=Counter)
    """Seconds by scope of the model (`source_scope`); waiting for collectives and copies has scopes of its own."""
    unestimated_bytes: float = 0.0
    """Bytes accessed by instructions for which the compiler gives no estimate, over all iterations."""
    timeline: list[Interval] | None = None
    """In order of their start; None unless recording was requested.  A loop has its first iterations."""

    def add(self, other: "SimulatedSchedule", times: int = 1) -> None:
        """Append `times` repetitions of another schedule."""
        self.seconds += times * other.seconds
        self.comm_seconds += times * other.comm_seconds
        self.exposed_comm_seconds += times * other.exposed_comm_seconds
        self.unestimated_bytes += times * other.unestimated_bytes
        for scope, seconds in other.scopes.items():
            self.scopes[scope] += times * seconds

    def spend(self, scope: str, seconds: float) -> None:
        """Advance the clock."""
        self.seconds += seconds
        self.scopes[scope] += seconds

    def record(self, kind: str, label: str, begin: float, end: float, collective: Instruction | None = None) -> None:
        """Add an interval to the timeline, if there is one."""
        if self.timeline is not None and end > begin:
            self.timeline.append(Interval(kind, label, begin, end, collective))


Compute = Callable[[Instruction, Computation], tuple[float, float]]
"""(seconds, bytes whose time had to be derived from the memory bandwidth) of an instruction that is no transfer."""


def simulate(module: Module, links: Links, *, record: bool = False, chosen_share: float = 1.0) -> SimulatedSchedule:
    """Simulate one run of a module on devices with these links; with `record`, keep a timeline of it.

    `chosen_share` is that of the rows of experts which are chosen (`experts.even_share`).

    Raises ValueError where the trip count of a loop or the cost of an operation is unknown.
    """
    if isinstance(links, GpuLinks):
        compute: Compute = GpuCosts(module, links.target.gpu)
    else:
        compute = partial(compute_seconds, device=DEVICES[links.generation.kind], chosen_share=chosen_share)
    return _Simulator(module, TransferCosts(module, links), compute, record).run(module.entry)


def source_scope(instruction: Instruction) -> str:
    """The part of the model that an instruction belongs to, by its `jax.named_scope`."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    source = found[1] if found else ""
    for scope, name in SCOPES.items():
        if re.search(rf"\b{scope}\b", source):
            return name
    if "/update/" in source or "dp_gradient_reduction" in source:
        return "update"
    return "blocks, the rest" if "blocks" in source else "other"


def is_annotation(instruction: Instruction) -> bool:
    """A custom call that is neither estimated nor a kernel takes no time: AllocateBuffer, for example."""
    is_kernel = any(name in instruction.attributes for name in (KERNEL, *GPU_LIBRARIES))
    return instruction.opcode == "custom-call" and instruction.estimated_cycles is None and not is_kernel


class _Simulator:
    def __init__(self, module: Module, transfers: TransferCosts, compute: Compute, record: bool):
        self._module, self._transfers, self._seconds, self._record = module, transfers, compute, record

    def run(self, computation: Computation) -> SimulatedSchedule:
        """One run of a computation; every asynchronous operation that it starts is scheduled within it."""
        schedule = SimulatedSchedule(timeline=[] if self._record else None)
        in_flight: dict[str, tuple[Transfer, float]] = {}  # by key: (transfer, when it ends)
        queue = TransferQueue()
        for instruction in computation.instructions.values():
            kind = instruction.opcode
            if (transfer := self._transfers.started(instruction, computation)) is not None:
                in_flight[transfer.key] = transfer, self._start(schedule, queue, transfer)
            elif kind.endswith("-done") or (kind == "fusion" and "async-collective-done" in instruction.name):
                key = self._transfers.key(instruction, computation)
                if key in in_flight:  # a transfer started by an earlier iteration of a loop has ended by now
                    self._wait(schedule, *in_flight[key])
            elif kind == "while":
                self._loop(schedule, instruction, computation)
            elif kind in ("call", "conditional"):
                branches = [self.run(self._module.computations[name]) for _, name in instruction.called]
                self._append(schedule, max(branches, key=lambda branch: branch.seconds))
            elif (transfer := self._transfers.synchronous(instruction)) is not None:
                self._wait(schedule, transfer, self._start(schedule, queue, transfer))
            elif kind not in FREE and not is_annotation(instruction):
                self._compute(schedule, instruction, computation)
        return schedule

    def _start(self, schedule: SimulatedSchedule, queue: TransferQueue, transfer: Transfer) -> float:
        """Queue a transfer now; returns when it ends."""
        begin, end = queue.schedule(transfer.channel, transfer.links, schedule.seconds, transfer.seconds)
        if transfer.is_collective:
            schedule.comm_seconds += transfer.seconds
        schedule.record(transfer.channel, transfer.key, begin, end, transfer.collective)
        return end

    def _wait(self, schedule: SimulatedSchedule, transfer: Transfer, end: float) -> None:
        seconds = max(0.0, end - schedule.seconds)
        scope = WAITING_FOR_COLLECTIVES if transfer.is_collective else f"waiting for {transfer.channel}"
        if transfer.is_collective:
            schedule.exposed_comm_seconds += seconds
        schedule.record("waiting", scope, schedule.seconds, schedule.seconds + seconds)
        schedule.spend(scope, seconds)

    def _compute(self, schedule: SimulatedSchedule, instruction: Instruction, computation: Computation) -> None:
        seconds, unestimated = self._seconds(instruction, computation)
        scope = source_scope(instruction)
        schedule.unestimated_bytes += unestimated
        schedule.record("compute", scope, schedule.seconds, schedule.seconds + seconds)
        schedule.spend(scope, seconds)

    def _loop(self, schedule: SimulatedSchedule, loop: Instruction, computation: Computation) -> None:
        trips = self._module.trip_count(computation, loop)
        if math.isnan(trips):
            raise ValueError(f"the trip count of the loop {loop.name} cannot be determined")
        self._append(schedule, self.run(self._module.computations[dict(loop.called)["body"]]), int(trips))

    def _append(self, schedule: SimulatedSchedule, other: SimulatedSchedule, times: int = 1) -> None:
        """Append `times` repetitions; the timeline gets one or two of them, and one interval for the others."""
        begin = schedule.seconds
        schedule.add(other, times)
        if schedule.timeline is None:
            return
        has_inner_loop = any(interval.kind == "repeats" for interval in other.timeline)
        shown = min(times, 1 if has_inner_loop else 2)
        for number in range(shown):
            offset = begin + number * other.seconds
            schedule.timeline += [
                replace(interval, begin=interval.begin + offset, end=interval.end + offset)
                for interval in other.timeline
            ]
        if times > shown:
            schedule.record("repeats", f"{times - shown}", begin + shown * other.seconds, schedule.seconds)
