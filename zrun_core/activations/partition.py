"""Activations that all ranks of a group have alike, kept as a slice on each (P_a).

Rajbhandari et al. 2020, "ZeRO", section 6.1. The elements are taken in the order of their memory,
whatever the shape, and padded to equal slices:

    x of 7 elements, 2 ranks      rank 0  x0 x1 x2 x3      rank 1  x4 x5 x6 -
"""

from __future__ import annotations

from typing import Protocol

import torch


class GroupComm(Protocol):
    """The ranks of a group, and how they gather."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_gather(self, tensor: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        """Return the tensors of all ranks, one after the other along a dimension."""


class Partition:
    """Divides tensors that all ranks of a group have alike."""

    def __init__(self, comm: GroupComm) -> None:
        """Take the group of this rank."""
        self._comm = comm

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's slice, [ceil(numel / size)].

        Args:
            tensor: without gaps, the same on all ranks.
        """
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        numel = -(-flat.numel() // self._comm.size)
        own = flat[self._comm.index * numel :][:numel]
        found = flat.new_zeros(numel)
        found[: own.numel()] = own
        return found

    def gather(
        self, own: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], name: str
    ) -> torch.Tensor:
        """Return the whole tensor. All ranks of the group ask for the same one.

        Args:
            own: what `slice_of` returned on this rank.
            name: what it is about, the same on all ranks.
        """
        return self._comm.all_gather(own, 0, name).as_strided(shape, stride)
