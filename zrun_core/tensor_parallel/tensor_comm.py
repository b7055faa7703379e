"""Collectives of activations, among ranks that have parts of the same layers.

Whoever asks waits: what follows in the forward, or in the backward, needs the result, but for what
`begin_...` begins. All ranks of the group ask for the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import ACTIVATION_TAG, Group


class TensorComm:
    """The collectives of one rank along the axis `tensor`.

    Attributes:
        size: ranks of the group.
        index: of this one.
        ranks: of the world, in the order of the group.
        device_type: of what computes on them, "cpu" or "cuda". Where a job for GPUs is planned,
            tensors are on the CPU.
    """

    def __init__(self, comm: Comm, group: Group) -> None:
        self._comm = comm
        self._group = group
        self.size = group.size
        self.index = group.index
        self.ranks = group.ranks
        self.device_type = comm.device.type

    def all_reduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum over ranks, the same bits on each of them.

        Args:
            tensor: of any shape, alike on all ranks.
            name: what it is about, the same on all ranks.
        """
        return self.begin_all_reduce(tensor, name)()

    def begin_all_reduce(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        """Begin `all_reduce`, and return what waits for it: other work may come between."""
        if self.size == 1:
            return lambda: tensor
        total = tensor.clone(memory_format=torch.contiguous_format)
        flat = total.view(-1)
        numel = -(-flat.numel() // self.size) * self._comm.num_recv_shards(self._group)
        received = flat.new_empty(numel)
        sent = self._comm.all_reduce(flat, received, self._group, tag=ACTIVATION_TAG, name=name)

        def wait() -> torch.Tensor:
            sent.wait()
            return total

        return wait

    def all_reduce_max(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the largest over ranks of each element.

        Args:
            tensor: of any shape, alike on all ranks.
            name: as of `all_reduce`.
        """
        if self.size == 1:
            return tensor
        return self.gather_rows(tensor, name).amax(0)

    def all_gather(self, tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        """Return the tensors of all ranks, one after the other along a dimension.

        Args:
            tensor: of one shape on all ranks.
            name: as of `all_reduce`.
        """
        if self.size == 1:
            return tensor
        rows = self.gather_rows(tensor, name)
        return rows.flatten(0, 1) if dim == 0 else torch.cat(rows.unbind(), dim)

    def all_gather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """Return what all ranks give: see `Comm.all_gather_bytes`."""
        return self._comm.all_gather_bytes(payload, self._group, name=name)

    def gather_rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensors of all ranks, [size, *shape].

        Args:
            tensor, name: as of `all_gather`.
        """
        rows = tensor.new_empty((self.size, *tensor.shape))
        own = rows[self.index].copy_(tensor)
        self._comm.all_gather(
            rows.view(-1), own.view(-1), self._group, tag=ACTIVATION_TAG, name=name
        ).wait()
        self._comm.settle()  # the rows go when they were used: before that, others have read them
        return rows

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        """Return this rank's part along a dimension of the sum over ranks.

        Args:
            tensor: of one shape on all ranks; `size` divides its length along `dim`.
            dim: along which the sum is divided.
            name: as of `all_reduce`.
        """
        return self.begin_reduce_scatter(tensor, dim, name)()

    def begin_reduce_scatter(
        self, tensor: torch.Tensor, dim: int, name: str
    ) -> Callable[[], torch.Tensor]:
        """Begin `reduce_scatter`, and return what waits for it: other work may come between."""
        if self.size == 1:
            return lambda: tensor
        rows = torch.stack(tensor.chunk(self.size, dim))
        part = torch.empty_like(rows[0])
        received = part.new_empty(part.numel() * self._comm.num_recv_shards(self._group))
        sent = self._comm.reduce_scatter(
            rows.view(-1),
            received,
            part.view(-1),
            self._group,
            accumulate=False,
            tag=ACTIVATION_TAG,
            name=name,
        )

        def wait() -> torch.Tensor:
            sent.wait()
            return part

        return wait
