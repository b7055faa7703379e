"""A vocabulary over ranks: which of its entries each one has. Pure.

    10 entries on 4 ranks      0 1 2 | 3 4 5 | 6 7 8 | 9 - -      `length` is 3 everywhere

What follows the last entry is padding: it is computed, and nobody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zrun_core.tensor_parallel.tensor_comm import TensorComm


@dataclass(frozen=True)
class Vocabulary:
    """The entries of an embedding or a head that a rank has.

    Attributes:
        size: entries on all ranks together.
        comm: of the ranks, which have them in order.
        name: of the embedding or the head, for messages.
    """

    size: int
    comm: TensorComm
    name: str

    @property
    def length(self) -> int:
        """Return the entries of each rank, with padding."""
        return -(-self.size // self.comm.size)

    @property
    def start(self) -> int:
        """Return the first entry of this rank."""
        return min(self.size, self.comm.index * self.length)

    @property
    def num_own(self) -> int:
        """Return the entries of this rank, without padding."""
        return min(self.size, self.start + self.length) - self.start

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor that has an index for each entry.

        Args:
            whole: the same on all ranks.
            dim: along which they are, counted from the end.
        """
        part = whole.narrow(dim, self.start, self.num_own)
        padding = self.length - self.num_own
        if not padding:
            return part
        return F.pad(part, [0, 0] * (-dim - 1) + [0, padding])

    def check(self, ids: torch.Tensor, ignored: int | None = None) -> None:
        """Refuse ids that no rank has: where they are looked up they would be silent zeros.

        Args:
            ignored: one that is none of the vocabulary, and no mistake.
        """
        known = (ids >= 0) & (ids < self.size)
        if ignored is not None:
            known |= ids == ignored
        words = f"{self.name}: an id is none of the vocabulary's, 0 to {self.size - 1}"
        torch._assert_async(known.all(), words)
