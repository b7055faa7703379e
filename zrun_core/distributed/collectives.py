"""Collectives over the ranks of a group, in one of two ways.

    PairwiseCollectives     each pair of ranks exchanges exactly what it owes: CPUs, few ranks
    BackendCollectives      gloo's or NCCL's own

[Note: direct exchange]
gloo's reduce-scatter is an all-reduce whose surplus is thrown away, and its all-gather copies
twice. Up to `comm.DIRECT_MAX_RANKS` ranks, each pair exchanges exactly what it owes instead
(`benchmarks/comm.py` compares them). Contributions are always added in rank order, so the sum of
an element does not depend on which rank owns it: that is what makes the ZeRO stages bit-equal on
any number of ranks. An all-reduce of [x0 x1 x2] over 3 ranks, seen from rank 1:

    send x0 to rank 0, x2 to rank 2         receive x1 of both into `recv_buffer`
    x1 = (x1 of rank 0) + x1 + (x1 of rank 2)
    send x1 to both                         receive the sums x0 and x2
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zrun_core.distributed.handle import Handle, Waiter
from zrun_core.distributed.transport import SMALL_TAG, Group, Transport, Work, as_bytes, issued


class Router(Waiter, Protocol):
    """The part of `Comm` that pairwise collectives need."""

    def transport(self, ranks: tuple[int, ...], tag: int) -> Transport: ...


class Collectives(ABC):
    """Collectives over groups of two and more ranks. Tensors are contiguous."""

    @abstractmethod
    def num_recv_shards(self, group: Group) -> int:
        """Return how many shards of scratch a reduction needs for what arrives."""

    @abstractmethod
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Group, tag: int) -> Handle:
        """Fill `full` with every rank's `shard`.

        Args:
            full: [size * n].
            shard: [n], or the own slice of `full`, which is filled too.
            tag: see [Note: tags].
        """

    @abstractmethod
    def reduce_scatter(
        self,
        full: torch.Tensor,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
        group: Group,
        *,
        accumulate: bool,
        tag: int,
    ) -> Handle:
        """Sum `full` over ranks, and store this rank's slice, or add it, `into` a tensor.

        Args:
            full: [size * n], scratch afterwards.
            recv_buffer: [num_recv_shards * n or more], scratch.
            into: [n].
            accumulate: add to `into`.
            tag: see [Note: tags].
        """

    @abstractmethod
    def all_reduce(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, tag: int
    ) -> Handle:
        """Sum `full` over ranks, in place.

        Args:
            full: [any length].
            recv_buffer: [num_recv_shards * length of a slice, or more], scratch.
            tag: see [Note: tags].
        """

    @abstractmethod
    def all_reduce_small(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the sum of a short vector [n] over ranks, and wait for it."""

    @abstractmethod
    def all_gather_rows(self, rows: torch.Tensor, group: Group) -> None:
        """Fill `rows` [size, n], of which each rank has its own one, and wait for it."""


class PairwiseCollectives(Collectives):
    """Collectives as messages between each two ranks. See [Note: direct exchange].

    Attributes:
        unread: sends of finished gathers that other ranks may still be reading.
    """

    def __init__(self, comm: Router) -> None:
        self._comm = comm
        self.unread: list[Work] = []

    def num_recv_shards(self, group: Group) -> int:
        return group.size - 1

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Group, tag: int) -> Handle:
        slices = full.view(group.size, -1).unbind()
        if shard.data_ptr() != slices[group.index].data_ptr():
            slices[group.index].copy_(shard)
        others = _without(group.index, slices)
        transport = self._comm.transport(group.ranks, tag)
        receipts, sends = _exchange([shard] * len(others), others, group, tag, transport)
        if transport.completes_sends:
            return Handle(self._comm, [*receipts, *sends])
        # Nobody waits here for the others to read: see `Comm.settle`.
        self.unread = [*(work for work in self.unread if not work.is_completed()), *sends]
        return Handle(self._comm, receipts)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
        group: Group,
        *,
        accumulate: bool,
        tag: int,
    ) -> Handle:
        slices = full.view(group.size, -1).unbind()
        own = slices[group.index]
        received = _rows(recv_buffer, group, own.numel())
        parts = _in_rank_order(own, received, group)
        transport = self._comm.transport(group.ranks, tag)
        outgoing = _without(group.index, slices)
        works = _exchange_all(outgoing, received, group, tag, transport)
        return Handle(self._comm, works, lambda: store_sum(parts, into, accumulate))

    def all_reduce(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, tag: int
    ) -> Handle:
        slices = _cut(full, group.size)
        own = slices[group.index]
        others = _without(group.index, slices)
        received = _rows(recv_buffer, group, own.numel())
        parts = _in_rank_order(own, received, group)

        transport = self._comm.transport(group.ranks, tag)

        def spread() -> Handle:
            store_sum(parts, own, accumulate=False)
            works = _exchange_all([own] * len(others), others, group, tag, transport)
            return Handle(self._comm, works)

        works = _exchange_all(others, received, group, tag, transport)
        return Handle(self._comm, works).then(spread, group)

    def all_reduce_small(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        rows = torch.empty(group.size, values.numel(), dtype=values.dtype)
        rows[group.index] = values
        self.all_gather_rows(rows, group)
        return rows.sum(0)

    def all_gather_rows(self, rows: torch.Tensor, group: Group) -> None:
        received = list(rows.unbind())
        own = received.pop(group.index)
        transport = self._comm.transport(group.ranks, SMALL_TAG)
        outgoing = [own] * len(received)
        self._comm.wait_for(_exchange_all(outgoing, received, group, SMALL_TAG, transport))


class BackendCollectives(Collectives):
    """Collectives of the process group's own backend.

    The sum of an element is whatever the backend makes of it, the same on every rank.
    """

    def __init__(self, comm: Waiter) -> None:
        self._comm = comm

    def num_recv_shards(self, group: Group) -> int:
        return 1

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Group, tag: int) -> Handle:
        return Handle(self._comm, [_all_gather_single(full, shard, group)])

    def reduce_scatter(
        self,
        full: torch.Tensor,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
        group: Group,
        *,
        accumulate: bool,
        tag: int,
    ) -> Handle:
        if not accumulate:
            return Handle(self._comm, [_reduce_scatter_single(into, full, group)])
        total = recv_buffer[: full.numel() // group.size]
        work = _reduce_scatter_single(total, full, group)
        return Handle(self._comm, [work], lambda: store_sum([total], into, accumulate=True))

    def all_reduce(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, tag: int
    ) -> Handle:
        work = dist.all_reduce(full, group=group.process_group, async_op=True)
        return Handle(self._comm, [issued(work)])

    def all_reduce_small(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        total = values.clone()
        work = dist.all_reduce(total, group=group.process_group, async_op=True)
        self._comm.wait_for([issued(work)])
        return total

    def all_gather_rows(self, rows: torch.Tensor, group: Group) -> None:
        own = rows[group.index].clone()
        self._comm.wait_for([_all_gather_single(rows.view(-1), own, group)])

    def broadcast(self, tensor: torch.Tensor, source: int, group: Group) -> None:
        """Overwrite a tensor with that of one rank, and wait for it.

        Args:
            tensor: contiguous, of any dtype.
            source: place of the sender in the group.
        """
        raw = as_bytes(tensor)  # gloo has no bool and few integers; bytes need no arithmetic
        root = group.ranks[source]
        work = dist.broadcast(raw, root, group=group.process_group, async_op=True)
        self._comm.wait_for([issued(work)])


def _exchange(
    outgoing: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    group: Group,
    tag: int,
    transport: Transport,
) -> tuple[list[Work], list[Work]]:
    """Exchange messages with the other ranks of `group`.

    Both lists have an entry for each other rank, in the order of the group.

    Returns:
        Receipts and sends.
    """
    others = [peer for peer in range(group.size) if peer != group.index]
    receipts = [
        transport.receive(tensor, group, peer, tag)
        for peer, tensor in zip(others, incoming, strict=True)
    ]
    sends = [
        transport.send(tensor, group, peer, tag)
        for peer, tensor in zip(others, outgoing, strict=True)
    ]
    return receipts, sends


def _exchange_all(
    outgoing: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    group: Group,
    tag: int,
    transport: Transport,
) -> list[Work]:
    """Exchange messages as `_exchange`; once all works are over, what was sent may change."""
    receipts, sends = _exchange(outgoing, incoming, group, tag, transport)
    return [*receipts, *sends]


def _without(index: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of all ranks but the one at `index`."""
    return [*tensors[:index], *tensors[index + 1 :]]


def _in_rank_order(
    own: torch.Tensor, received: Sequence[torch.Tensor], group: Group
) -> list[torch.Tensor]:
    """Return what all ranks contribute to this rank's sum, in the order in which it is added."""
    return [*received[: group.index], own, *received[group.index :]]


def _rows(recv_buffer: torch.Tensor, group: Group, numel: int) -> tuple[torch.Tensor, ...]:
    """Return the beginning of the scratch as [numel] for each other rank."""
    num_others = group.size - 1
    return recv_buffer[: num_others * numel].view(num_others, -1).unbind()


def slice_start(numel: int, parts: int, index: int) -> int:
    """Return where a part begins of elements that are cut into parts.

    The last parts may be shorter, or empty: 7 elements in 3 parts are [0, 3), [3, 6) and [6, 7).

    Args:
        numel: elements.
    """
    part_numel = -(-numel // parts)
    return min(numel, index * part_numel)


def _cut(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return a 1-D tensor as `parts` slices, which begin where `slice_start` says."""
    slices = list(tensor.split(-(-tensor.numel() // parts)))
    while len(slices) < parts:
        slices.append(tensor[tensor.numel() :])
    return slices


def store_sum(parts: list[torch.Tensor], into: torch.Tensor, accumulate: bool) -> None:
    """Store the sum of `parts` from left to right `into` a tensor, or add it.

    Args:
        parts: [n] each, scratch afterwards. One of them may be `into` itself.
        into: [n].
        accumulate: add the sum to what is there.
    """
    total = parts[0]
    for part in parts[1:-1]:
        total.add_(part)
    if accumulate:
        if len(parts) > 1:
            total.add_(parts[-1])
        into.add_(total)
    elif len(parts) > 1:
        torch.add(total, parts[-1], out=into)
    elif total.data_ptr() != into.data_ptr():
        into.copy_(total)


def _all_gather_single(full: torch.Tensor, shard: torch.Tensor, group: Group) -> Work:
    # Renamed in torch 2.13.
    collective = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return issued(collective(full, shard, group=group.process_group, async_op=True))


def _reduce_scatter_single(out: torch.Tensor, full: torch.Tensor, group: Group) -> Work:
    collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return issued(collective(out, full, group=group.process_group, async_op=True))
