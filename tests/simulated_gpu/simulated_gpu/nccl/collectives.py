"""What kernels of simulated NCCL do, on memory of the host.

[Note: sums in the order of the ranks]
An element is added up rank by rank, in the format that it has, as zrun's exchange between pairs of
CPU ranks does (`zrun_core/distributed/collectives.py`): the same job has the same bits on both. The
sums of NCCL have another order, which changes with its algorithm; no program may count on any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from simulated_gpu.nccl.settings import settings
from simulated_gpu.nccl.wire import Wire


class Kernels:
    """The operations of one rank on its wire. Tensors are contiguous and on the CPU."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._others = [peer for peer in range(wire.size) if peer != wire.rank]

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
        """Reduce `tensor` over ranks, in place."""
        flat = tensor.view(-1)
        slices = _cut(flat, self._wire.size)
        own = self._reduced_slice("all_reduce", slices, op)
        slices[self._wire.rank].copy_(own)
        self._exchange(
            "all_reduce",
            dict.fromkeys(self._others, slices[self._wire.rank]),
            {peer: slices[peer] for peer in self._others},
        )

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: dist.ReduceOp
    ) -> None:
        """Reduce the part of each rank over ranks, that of this one into `out`."""
        out.copy_(self._reduced_slice("reduce_scatter", parts, op).view_as(out))

    def reduce(self, tensor: torch.Tensor, root: int, op: dist.ReduceOp) -> None:
        """Reduce `tensor` over ranks on `root`."""
        if self._wire.rank != root:
            self._send("reduce", tensor, root)
            return
        received = {peer: torch.empty_like(tensor) for peer in self._others}
        for peer in self._others:
            self._receive("reduce", received[peer], peer)
        self._store(self._in_order(tensor.clone(), received), tensor, op)

    def all_gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Fill `parts` with every rank's `own`."""
        own = own.contiguous().view(-1)
        self._exchange(
            "all_gather",
            dict.fromkeys(self._others, own),
            {peer: parts[peer] for peer in self._others},
        )
        if parts[self._wire.rank].data_ptr() != own.data_ptr():
            parts[self._wire.rank].view(-1).copy_(own)

    def all_to_all(self, parts: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Send `own[rank]` to each rank, and receive `parts[rank]` of it."""
        self._exchange(
            "all_to_all",
            {peer: own[peer] for peer in self._others},
            {peer: parts[peer] for peer in self._others},
        )
        parts[self._wire.rank].copy_(own[self._wire.rank])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of `root`."""
        if self._wire.rank == root:
            self._exchange("broadcast", dict.fromkeys(self._others, tensor), {})
            self._await_receivers(tensor, self._others)
        else:
            self._receive("broadcast", tensor, root)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send `tensor`; it is over when the receiver has it, or has room for it."""
        self._send("send", tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Receive what `peer` sends next."""
        self._receive("send", tensor, peer)

    def messages(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receipts: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Exchange messages that were issued together: none of them waits for another one."""
        while sends or receipts:  # the first of each peer, then the next
            outgoing = _first_by_peer(sends)
            incoming = _first_by_peer(receipts)
            self._exchange("send", outgoing, incoming)
            sends, receipts = _rest(sends), _rest(receipts)

    def _send(self, name: str, tensor: torch.Tensor, peer: int) -> None:
        self._exchange(name, {peer: tensor}, {})
        self._await_receivers(tensor, [peer])

    def _receive(self, name: str, tensor: torch.Tensor, peer: int) -> None:
        self._exchange(name, {}, {peer: tensor})
        if tensor.nbytes > settings.buffer:
            self._exchange("has received", {peer: _nothing()}, {})

    def _await_receivers(self, tensor: torch.Tensor, peers: Sequence[int]) -> None:
        """Wait until `peers` have received: where they have no room, their kernels must run."""
        if tensor.nbytes > settings.buffer:
            self._exchange("has received", {}, {peer: _nothing() for peer in peers})

    def _reduced_slice(
        self, name: str, slices: Sequence[torch.Tensor], op: dist.ReduceOp
    ) -> torch.Tensor:
        """Return this rank's slice, reduced over ranks."""
        own = slices[self._wire.rank].clone()
        received = {peer: torch.empty_like(own) for peer in self._others}
        self._exchange(name, {peer: slices[peer] for peer in self._others}, received)
        total = torch.empty_like(own)
        self._store(self._in_order(own, received), total, op)
        return total

    def _in_order(self, own: torch.Tensor, received: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        found = {**received, self._wire.rank: own}
        return [found[rank] for rank in range(self._wire.size)]

    def _store(self, parts: Sequence[torch.Tensor], into: torch.Tensor, op: dist.ReduceOp) -> None:
        kind = getattr(op, "op", op)
        total = parts[0].clone()
        for part in parts[1:]:
            _COMBINE[kind](total, part)
        if kind == dist.ReduceOp.AVG:
            total.div_(self._wire.size)
        into.copy_(total)

    def _exchange(
        self, name: str, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]
    ) -> None:
        self._wire.exchange(
            name,
            {peer: _bytes(tensor) for peer, tensor in outgoing.items()},
            {peer: _bytes(tensor) for peer, tensor in incoming.items()},
            hangs_when_lost=not settings.remote_errors,
        )


def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    if total.dtype == torch.bool:
        total.logical_or_(part)
    else:
        total.add_(part)


_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[[torch.Tensor, torch.Tensor], object]] = {
    dist.ReduceOp.SUM: _add,
    dist.ReduceOp.AVG: _add,
    dist.ReduceOp.PRODUCT: lambda total, part: total.mul_(part),
    dist.ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    dist.ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
}


def can_reduce(op: dist.ReduceOp) -> bool:
    """Whether NCCL reduces by `op`: bits it does not."""
    return getattr(op, "op", op) in _COMBINE


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def _nothing() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _cut(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """A 1-D tensor as `parts` slices, of which the last may be shorter or empty."""
    length = -(-flat.numel() // parts)
    return [flat[number * length : (number + 1) * length] for number in range(parts)]


def _first_by_peer(messages: Sequence[tuple[torch.Tensor, int]]) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for tensor, peer in messages:
        found.setdefault(peer, tensor)
    return found


def _rest(messages: Sequence[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
    """The messages that are not the first of their peers."""
    seen: set[int] = set()
    found = []
    for tensor, peer in messages:
        if peer in seen:
            found.append((tensor, peer))
        seen.add(peer)
    return found
