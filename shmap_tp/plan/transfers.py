"""Collectives and copies of a scheduled TPU module: which channel each of them uses, and for how long.

XLA for TPU writes an asynchronous operation in three ways: X-start and X-done; async-start and async-done around a
computation; or fusions named async-collective-start and -done, with compute fusions between them that carry the
collective along.  In the last case every one of these fusions contains the same collective, with the same chain_id.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shmap_tp.plan.communication.from_hlo import replica_groups
from shmap_tp.plan.hlo_parser import Computation, Instruction, Module, array_bytes
from shmap_tp.plan.instruction_costs import bytes_accessed
from shmap_tp.plan.link_model import DirectedLinks

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")

HOST_MEMORY = "S(5)"
"""The memory space of the host, in a layout."""

FLAG_BYTES = 8
"""Largest size of the flags and counters that an async tuple contains besides its arrays."""

LINKS, NETWORK, LOCAL_COPIES, SPARSE_CORES = "links", "network", "copies", "sparse cores"

COLLECTIVE_CHANNELS = (LINKS, NETWORK)
"""Channels of collectives, including those that the SparseCores execute.  All other channels carry copies."""


@runtime_checkable
class Links(Protocol):
    """How long transfers take: `link_model.LinkModel` of a TPU slice, `gpu.links.GpuLinks` of GPU nodes."""

    @property
    def devices(self) -> int: ...

    @property
    def memory_rate(self) -> float: ...

    @property
    def host_rate(self) -> float: ...

    def collective_seconds(
        self, kind: str, full_bytes: float, group: Sequence[int], *, one_ring: bool = False
    ) -> float: ...

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float: ...

    def links_of_permute(self, pairs: Sequence[tuple[int, int]]) -> DirectedLinks | None: ...

    def inter_slice_seconds(self, kind: str, full_bytes: float, slices: int) -> float: ...


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
        full_bytes = size * len(group) if kind == "reduce-scatter" else size
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
