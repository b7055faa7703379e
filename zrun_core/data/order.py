"""The order of samples: which of them make up which optimizer step on which rank.

It is pure, and simple enough for a plain loop to reproduce. The contract, for a global batch of G
samples on N ranks and D samples in the dataset:

- The stream is epoch after epoch; epoch e is `range(D)`, or with `shuffle: true`
  `permutation(D, seed, e)`.
- Optimizer step k (from 0) consumes stream positions [kG, (k+1)G). A step may straddle two epochs.
- Rank r takes the contiguous r-th N-th of them, divided into micro-batches in order.
- A stream that ends leaves a last step of g < G samples. They are split as evenly as they go,
  contiguously, the first g mod N ranks taking one more, and every rank runs the number of
  micro-batches that the largest part needs.

For D = 10, G = 8, N = 2 and micro-batches of 2, without shuffling, one epoch:

    step 0    rank 0: [0 1] [2 3]    rank 1: [4 5] [6 7]
    step 1    rank 0: [8]            rank 1: [9]

The only state is a position in the stream, in samples, so a run resumes exactly, also on another
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zrun_core.distributed.rng import mix
from zrun_core.spine.spec import BatchPlan


def permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of one shuffled epoch, int64 [num_samples], from (seed, epoch) alone:

    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    torch.randperm(num_samples, generator=generator)
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def steps(start: int, global_size: int, total: int | None) -> Iterator[range]:
    """Yield the stream positions of each optimizer step.

    Args:
        total: samples in the stream; None: it has no end.
    """
    while total is None or start < total:
        stop = start + global_size
        if total is not None:
            stop = min(stop, total)
        yield range(start, stop)
        start = stop


def split(count: int, parts: int, index: int) -> range:
    """Return one of the contiguous parts of `range(count)`: split(8, 3, 0) is range(0, 3).

    Args:
        parts: how many; the first ones are longer by one if need be.
    """
    size, num_longer = divmod(count, parts)
    start = index * size + min(index, num_longer)
    if index < num_longer:
        size += 1
    return range(start, start + size)


def micro_batches(count: int, batch: BatchPlan, rank: int) -> list[range]:
    """Return the micro-batches of a rank in a step, as offsets within the step.

    Every rank gets equally many. An empty one means that the rank has no sample left for it: it
    runs any sample at weight 0, so that its collectives match those of the others.

    Args:
        rank: data-parallel.
    """
    own = split(count, batch.ranks, rank)
    longest = len(split(count, batch.ranks, 0))
    return [own[start : start + batch.micro] for start in range(0, longest, batch.micro)]


def shifts(position: int, before: int | None, now: int | None, *, shuffle: bool) -> bool:
    """Return whether a position is another place in the data once the dataset's length changes.

    Args:
        before, now: samples in the dataset; None: it has no length, and its stream is one epoch.
    """
    if before == now or not position:
        return False
    if shuffle:
        return True
    # In its first epoch, in order, a dataset may grow behind the position.
    return position > min(length for length in (before, now) if length is not None)


class EpochOrder:
    """Stream position -> index in a dataset of `num_samples` samples."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        # By epoch, the latest two: a step may straddle them.
        self._permutations: dict[int, torch.Tensor] = {}

    def index(self, position: int) -> int:
        """Return the dataset index of the sample at `position` of the stream."""
        epoch, offset = divmod(position, self.num_samples)
        if not self.shuffle:
            return offset
        return int(self._permutation(epoch)[offset])

    def _permutation(self, epoch: int) -> torch.Tensor:
        found = self._permutations.get(epoch)
        if found is None:
            found = permutation(self.num_samples, self.seed, epoch)
            self._permutations[epoch] = found
            for old in sorted(self._permutations)[:-2]:
                del self._permutations[old]
        return found
