"""What a collective takes on a hierarchy of links: alpha-beta by level, hierarchical where a group spans nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from zrun_core.hardware.hardware import Hardware


class TransferCost(NamedTuple):
    """Seconds of a transfer, and the bytes that one rank sends for it by class of link."""

    seconds: float = 0.0
    node: float = 0.0  # between devices of a node
    network: float = 0.0  # between nodes

    def __add__(self, other: object) -> TransferCost:
        assert isinstance(other, TransferCost)
        return TransferCost(
            self.seconds + other.seconds, self.node + other.node, self.network + other.network
        )

    def times(self, count: float) -> TransferCost:
        """So many of them, one after the other."""
        return TransferCost(self.seconds * count, self.node * count, self.network * count)


NOTHING = TransferCost()


@dataclass(frozen=True)
class LinkedGroup:
    """A group of ranks whose numbers are `stride` apart, on nodes that are filled in the order of the numbers.

    Attributes:
        local: of them on one node.
        nodes: over which they spread.
    """

    hardware: Hardware
    ranks: int
    stride: int = 1

    @property
    def local(self) -> int:
        return max(1, min(self.ranks, self.hardware.devices_per_node // self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)

    def gather(self, num_bytes: float) -> TransferCost:
        """All-gather to, or reduce-scatter of, `num_bytes` in all.

        A ring through a node enters and leaves it once, and all adapters of the group's members share that: each member
        sends (local - 1) / local of everything inside, and its part of (nodes - 1) / nodes across, at the same time.
        """
        if self.ranks == 1 or not num_bytes:
            return TransferCost()
        local, nodes = self.local, self.nodes
        inside = num_bytes * (local - 1) / local
        across = num_bytes * (1 - 1 / self.ranks) - inside
        intra, inter = self.hardware.intra, self.hardware.inter
        latency = intra.latency * math.ceil(math.log2(local)) + inter.latency * math.ceil(
            math.log2(nodes)
        )
        return TransferCost(
            max(inside / intra.bandwidth, across / inter.bandwidth) + latency, inside, across
        )

    def all_reduce(self, num_bytes: float) -> TransferCost:
        """A reduce-scatter and an all-gather."""
        return self.gather(num_bytes).times(2)

    def send(self, num_bytes: float) -> TransferCost:
        """From one member to the next."""
        if self.ranks == 1:
            return TransferCost()
        if self.ranks * self.stride <= self.hardware.devices_per_node:
            link = self.hardware.intra
            return TransferCost(num_bytes / link.bandwidth + link.latency, node=num_bytes)
        link = self.hardware.inter
        return TransferCost(num_bytes / link.bandwidth + link.latency, network=num_bytes)
