"""How long a collective takes on nodes of GPUs: an estimate that has not been compared with a measurement.

V bytes of the full array, n devices of a group in m nodes, g of them in each node:

    all-gather, reduce-scatter    max(V (n - 1) / n / nvlink, V (m - 1) / m / (g x network))
    all-reduce                    a reduce-scatter followed by an all-gather
    all-to-all                    1/n of the time of an all-gather of V
    ppermute                      bytes / nvlink within a node, bytes / network between nodes

NCCL runs as many rings as it has links; a ring through several nodes crosses each node's boundary through the cards of
the group's own GPUs.  Each collective also takes LATENCY for every step of the ring within a node, and NETWORK_LATENCY
for every node.  Rates are those of `targets.Gpu`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shmap_tp.plan.gpu.targets import Nodes

LATENCY = 2e-6
"""Seconds per step within a node: an assumption."""
NETWORK_LATENCY = 1e-5
"""Seconds per step between nodes: an assumption."""
HOST_RATE = 5e10
"""Bytes/s between a GPU and its host's memory: PCIe 5.0 x16, 63 GB/s, of which about 80 % are reached."""


@dataclass(frozen=True)
class GpuLinks:
    """The links between the devices of a program, numbered node by node.  It answers as `link_model.LinkModel` does."""

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
        gather = max(inside, between) + (size - 1) * LATENCY + (nodes - 1) * NETWORK_LATENCY
        return gather * {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1 / size}[kind]

    def permute_seconds(self, size: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Seconds of a ppermute: `size` bytes from source to target of every pair, all at once."""
        node = self.target.per_node
        crosses = any(a // node != b // node for a, b in pairs)
        rate = self.target.gpu.network_rate if crosses else self._nvlink
        return size / rate + (NETWORK_LATENCY if crosses else LATENCY) if pairs else 0.0

    def links_of_permute(self, pairs: Sequence[tuple[int, int]]) -> None:
        """NCCL runs one collective at a time on a stream: a ppermute takes the whole channel."""
        return None

    def inter_slice_seconds(self, kind: str, full_bytes: float, slices: int) -> float:
        """Never asked: between nodes XLA for GPU makes ordinary collectives."""
        raise AssertionError("XLA for GPU has no send and recv between slices")
