"""Which samples make up which optimizer step on which rank: pure, and simple enough for a plain loop to reproduce.

The contract, for a global batch of G samples on N ranks and D samples in the dataset:

- The stream is epoch after epoch; epoch e is `range(D)`, or with `shuffle: true` `permutation(D, seed, e)`.
- Optimizer step k (from 0) consumes stream positions [kG, (k+1)G). A step may straddle two epochs.
- Rank r takes the contiguous r-th N-th of them, cut into micro-batches in order.
- A stream that ends leaves a last step of g < G samples. They are split as evenly as they go, contiguously, the first
  g mod N ranks taking one more, and every rank runs the number of micro-batches that the largest part needs.

The only state is a position in the stream, in samples, so a run resumes exactly, also on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zrun_core.distributed.rng import mix
from zrun_core.spine.spec import BatchPlan


def permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of one shuffled epoch, int64 [num_samples], from (seed, epoch) alone:

    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    torch.randperm(num_samples, generator=generator)
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def steps(start: int, global_size: int, total: int | None) -> Iterator[range]:
    """The stream positions of each optimizer step from position `start` on; `total=None` is an endless stream."""
    while total is None or start < total:
        stop = start + global_size if total is None else min(start + global_size, total)
        yield range(start, stop)
        start = stop


def split(count: int, parts: int, index: int) -> range:
    """The contiguous part `index` of `range(count)` cut into `parts`; the first ones are longer by one if need be."""
    size, longer = divmod(count, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def micro_batches(count: int, batch: BatchPlan, rank: int) -> list[range]:
    """The micro-batches of `rank` in a step of `count` samples, as offsets within the step.

    Every rank gets equally many. An empty one means that the rank has no sample left for it: it runs any sample at
    weight 0, so that its collectives match those of the others.
    """
    own = split(count, batch.ranks, rank)
    longest = len(split(count, batch.ranks, 0))
    return [own[start : start + batch.micro] for start in range(0, longest, batch.micro)]


def shifts(position: int, before: int | None, now: int | None, *, shuffle: bool) -> bool:
    """Whether `position` of the stream is another place in the data once the dataset has another length.

    Args:
        before, now: samples in the dataset; None: it has no length, and its stream is one epoch.
    """
    if before == now or not position:
        return False
    # In its first epoch, in order, a dataset may grow behind the position.
    return shuffle or position > min(length for length in (before, now) if length is not None)


class EpochOrder:
    """Stream position -> index in a dataset of `num_samples` samples."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self._permutations: dict[
            int, torch.Tensor
        ] = {}  # the latest two epochs: a step may straddle them

    def index(self, position: int) -> int:
        """The dataset index of the sample at `position` of the stream."""
        epoch, offset = divmod(position, self.num_samples)
        return int(self._permutation(epoch)[offset]) if self.shuffle else offset

    def _permutation(self, epoch: int) -> torch.Tensor:
        found = self._permutations.get(epoch)
        if found is None:
            found = self._permutations[epoch] = permutation(self.num_samples, self.seed, epoch)
            for old in sorted(self._permutations)[:-2]:
                del self._permutations[old]
        return found
