"""Simulate the schedule of a compiled module: its instructions in order, with asynchronous transfers in flight.

Of a module for TPUs (for GPUs see gpu/costs.py and gpu/links.py):

    compute       `instruction_costs`: the compiler's own estimate of cycles where there is one
    collectives   `link_model`: each begins when earlier ones on the same links have ended.  A synchronous collective
                  stops the clock until it ends; for an asynchronous one its -done does.  ppermutes between neighbours
                  conflict only if they use the same links in the same direction, so both directions of a ring overlap
    copies        between HBM and on-chip memory: asynchronous, one after the other at memory bandwidth; to and from
                  host memory: at the host bandwidth, one after the other in each direction
    loops         time of the body x trip count (`hlo_parser`)
    branches      the longest branch

Not modelled: errors of the compiler's estimates, contention between copies and compute, and waiting for slower
devices.  benchmarks/RESULTS.md compares predictions with published measurements.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from shmap_tp.hardware.devices import DEVICES
from shmap_tp.plan.hlo_parser import Computation, Instruction, Module
from shmap_tp.plan.instruction_costs import compute_seconds, is_annotation
from shmap_tp.plan.link_model import LinkModel, TransferQueue
from shmap_tp.plan.transfers import Transfer, TransferCosts

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("add-dependency", "opt-barrier", "domain"),
}
"""Opcodes that take no time."""

WAITING_FOR_COLLECTIVES = "waiting for collectives"

SCOPES = {"cross_entropy": "loss", "embedding": "embedding", "attention": "attention", "mlp": "mlp", "head": "head"}
"""named_scope -> name in a report."""


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
    """In order of their start; None unless recording was requested.  Of a loop the first iterations."""

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


def simulate(module: Module, link_model: LinkModel, *, record: bool = False) -> SimulatedSchedule:
    """Simulate one run of a module; with `record`, keep a timeline of it.

    Raises ValueError where the trip count of a loop or the cost of an operation is unknown.
    """
    device = DEVICES[link_model.generation.kind]
    return simulate_with(module, TransferCosts(module, link_model), partial(compute_seconds, device=device), record)


def simulate_with(
    module: Module, transfers: TransferCosts, compute: Compute, record: bool = False
) -> SimulatedSchedule:
    """Simulate one run of a module with these costs.  Raises ValueError as `simulate` does."""
    return _Simulator(module, transfers, compute, record).run(module.entry)


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
