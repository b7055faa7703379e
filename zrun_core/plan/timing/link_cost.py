"""The cost of collectives on a hierarchy of links.

Each level costs a latency and bytes over a bandwidth; a group that spans nodes goes level by level.
"""

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
        """Return the cost of so many of them, one after the other."""
        return TransferCost(self.seconds * count, self.node * count, self.network * count)


NOTHING = TransferCost()


@dataclass(frozen=True)
class LinkedGroup:
    """A group of ranks whose numbers are `stride` apart; the numbers fill node after node.

    Attributes:
        local: of them on one node.
        nodes: over which they spread.
        is_waited_for: all of them need the result at once.
    """

    hardware: Hardware
    ranks: int
    stride: int = 1
    is_waited_for: bool = False

    @property
    def local(self) -> int:
        return min(self.ranks, math.ceil(self.hardware.devices_per_node / self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)

    def gather(self, num_bytes: float) -> TransferCost:
        """Return the cost of an all-gather to, or a reduce-scatter of, `num_bytes` in all.

        A ring through a node enters and leaves it once, and all adapters of the group's members
        share that: each member sends (local - 1) / local of everything inside, and its part of
        (nodes - 1) / nodes across, at the same time.
        """
        if self.ranks == 1 or not num_bytes:
            return TransferCost()
        intra = self.hardware.intra
        inter = self.hardware.inter
        inside = num_bytes * (self.local - 1) / self.local
        across = num_bytes * (1 - 1 / self.ranks) - inside
        latency = intra.latency * math.ceil(math.log2(self.local))
        latency += inter.latency * math.ceil(math.log2(self.nodes))
        if self.is_waited_for:
            latency += self.hardware.wait_s
        seconds = max(inside / intra.bandwidth, across / inter.bandwidth) + latency
        return TransferCost(seconds, inside, across)

    def all_reduce(self, num_bytes: float) -> TransferCost:
        """Return the cost of a reduce-scatter and an all-gather."""
        return self.gather(num_bytes).times(2)

    def through_first(self, pushed: float, pulled: float) -> TransferCost:
        """Return the cost of messages of each other rank to the first, and of its answers.

        They share its link. What counts as sent is what it sends.

        Args:
            pushed, pulled: bytes of a message to it, and of one from it.
        """
        inside, across = self.local - 1, self.ranks - self.local
        intra = self.hardware.intra
        inter = self.hardware.inter
        seconds = max(inside / intra.bandwidth, across / inter.bandwidth) * (pushed + pulled)
        seconds += 2 * (intra.latency * (inside > 0) + inter.latency * (across > 0))
        return TransferCost(seconds, inside * pulled, across * pulled)

    def send(self, num_bytes: float) -> TransferCost:
        """Return the cost of a message from one member to the next."""
        if self.ranks == 1:
            return TransferCost()
        if self.ranks * self.stride <= self.hardware.devices_per_node:
            link = self.hardware.intra
            return TransferCost(num_bytes / link.bandwidth + link.latency, node=num_bytes)
        link = self.hardware.inter
        return TransferCost(num_bytes / link.bandwidth + link.latency, network=num_bytes)
