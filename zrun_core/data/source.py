"""The sources of a rank's micro-batches: a dataset with indices, or one that can only be walked.

Both kinds turn a start position in the stream into an iterator of optimizer steps, by the contract
of `data.order`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset

from zrun_core.data.batch import MicroBatch
from zrun_core.data.order import EpochOrder, micro_batches, split, steps
from zrun_core.data.samples import Batches, Collate, SamplePosition, collated
from zrun_core.distributed import rng
from zrun_core.errors import JobError, UserCodeError
from zrun_core.spine.spec import BatchPlan
from zrun_core.spine.tracebacks import add_location
from zrun_core.user_code.user import user_code

# Samples in the global batch, this rank's micro-batches of it.
Step: TypeAlias = tuple[int, list[MicroBatch]]


class Source(Protocol):
    """A stream of optimizer steps for one rank."""

    def steps(self, start: int) -> Iterator[Step]:
        """Yield the steps from stream position `start` on; they end on all ranks at once."""
        ...

    def numbers(self, positions: Sequence[int]) -> list[int]:
        """Return the numbers of the samples at these positions; none where only walking tells."""
        ...


def is_map_style(dataset: object) -> bool:
    """Return whether samples are read by index."""
    if isinstance(dataset, IterableDataset):
        return False  # though torch's base class gives every dataset a `__getitem__`
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def length_of(dataset: object) -> int | None:
    """Return the samples of an epoch, if the dataset says so; an iterable one may, too."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # torch's own iterables raise one or the other
        return None


class MapSource:
    """Reads samples by index, through torch's DataLoader; its `workers` processes read ahead."""

    def __init__(
        self,
        dataset: Any,
        batch: BatchPlan,
        rank: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
        epochs: int | None = None,
        limit: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        with user_code(f"len() of the dataset failed: {type(dataset).__name__}"):
            num_samples = len(dataset)
        if num_samples == 0:
            raise UserCodeError(f"the dataset is empty: {type(dataset).__name__} has length 0")
        self._total = limit
        if epochs is not None:
            self._total = _smaller(num_samples * epochs, limit)
        self._dataset = dataset
        self._batch = batch
        self._rank = rank
        self._order = EpochOrder(num_samples, shuffle=shuffle, seed=seed)
        self._seed = seed
        self._workers = workers
        self._collate = collate
        self._pin_memory = pin_memory

    def steps(self, start: int) -> Iterator[Step]:
        """Yield the steps from stream position `start` on."""
        # An own generator: DataLoader draws its workers' seeds from it instead of from the rank's
        # global stream.
        generator = torch.Generator().manual_seed(rng.mix(self._seed, self._rank))
        loader: DataLoader[Any] = DataLoader(
            Batches(self._dataset, self._collate, self._seed),
            batch_sampler=_Indices(self, start),
            num_workers=self._workers,
            collate_fn=_as_is,
            pin_memory=self._pin_memory,
            generator=generator,
        )
        batches = iter(loader)
        for positions in steps(start, self._batch.global_size, self._total):
            parts = micro_batches(len(positions), self._batch, self._rank)
            yield len(positions), [MicroBatch.of(next(batches), len(part)) for part in parts]

    def numbers(self, positions: Sequence[int]) -> list[int]:
        """Return the numbers of the samples at these positions of the stream."""
        return [self._order.index(position) for position in positions]

    def coming(self, start: int) -> Iterator[range]:
        """Yield the stream positions of each step from position `start` on."""
        return steps(start, self._batch.global_size, self._total)

    def share(self, positions: range, part: int) -> list[MicroBatch]:
        """Read the micro-batches of a step that are the rank's of number `part`, at once.

        Args:
            positions: of the step in the stream.
        """
        batches = Batches(self._dataset, self._collate, self._seed)
        return [
            MicroBatch.of(batches.__getitems__(self._places(positions, offsets)), len(offsets))
            for offsets in micro_batches(len(positions), self._batch, part)
        ]

    def micro_batch_places(self, start: int) -> Iterator[list[SamplePosition]]:
        """Yield the samples of every micro-batch of this rank from position `start` on."""
        for positions in steps(start, self._batch.global_size, self._total):
            for part in micro_batches(len(positions), self._batch, self._rank):
                yield self._places(positions, part)

    def _places(self, positions: range, part: range) -> list[SamplePosition]:
        """Return the samples at some offsets in a step; if there are none, its first stands in."""
        places = [positions[offset] for offset in part or (0,)]
        return [SamplePosition(self._order.index(position), position) for position in places]


class _Indices:
    """A batch sampler; DataLoader's processes run ahead of the step being consumed."""

    def __init__(self, source: MapSource, start: int) -> None:
        self._source = source
        self._start = start

    def __iter__(self) -> Iterator[list[SamplePosition]]:
        yield from self._source.micro_batch_places(self._start)


class IterableSource:
    """Walks a dataset that has no indices. Every rank walks all of it and keeps its own part.

    The dataset must yield the same samples in the same order on every rank. `set_epoch(epoch)`,
    where it has one, is called before each pass.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchPlan,
        rank: int,
        draws: rng.ScopedStream,
        *,
        seed: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
        epochs: int | None = None,
        limit: int | None = None,
    ) -> None:
        """
        Args:
            draws: in force while `steps` is walked; batches are made with it.
        """
        if workers > 1:
            raise JobError(
                f"data.workers: {workers} processes would each yield the whole stream of "
                f"{type(dataset).__name__}, "
                "an iterable dataset: write workers: 0 or 1, or give it __getitem__ and __len__"
            )
        self._dataset = dataset
        self._batch = batch
        self._rank = rank
        self._draws = draws
        self._seed = seed
        self._workers = workers
        self._collate = collate
        self._epochs = epochs
        self._limit = limit

    def steps(self, start: int) -> Iterator[Step]:
        """Walk past everything before `start` at once, and return the steps from there on."""
        stream = self._stream()
        for _ in islice(stream, start):
            pass
        stop = None if self._limit is None else max(0, self._limit - start)
        return self._steps(islice(stream, stop), start)

    def numbers(self, positions: Sequence[int]) -> list[int]:
        """Return none: only walking tells."""
        return []

    def _steps(self, stream: Iterator[Any], start: int) -> Iterator[Step]:
        global_size = self._batch.global_size
        # In a full step a rank needs its own part. In a short last one that part moves to the
        # front, and how far is known only at its end, so all samples of the step are kept where the
        # stream can end.
        can_end = self._epochs is not None or self._limit is not None
        wanted = range(global_size)
        if not can_end:
            wanted = split(global_size, self._batch.ranks, self._rank)
        while True:
            size = 0
            samples: dict[int, Any] = {}  # by offset in the step
            for offset, sample in enumerate(islice(stream, global_size)):
                size = offset + 1
                if offset in wanted:
                    samples[offset] = sample
            if size == 0:
                return
            parts = micro_batches(size, self._batch, self._rank)
            self._draws.begin(start)  # what walking has drawn is the same on every rank
            yield size, [self._collated(samples, part, start) for part in parts]
            start += size

    def _collated(self, samples: dict[int, Any], part: range, start: int) -> MicroBatch:
        offsets = part or (0,)  # nothing left for this rank: the step's first sample stands in
        numbers = [start + offset for offset in offsets]
        batch = collated([samples[each] for each in offsets], numbers, "sample", self._collate)
        return MicroBatch.of(batch, len(part))

    def _stream(self) -> Iterator[Any]:
        """Yield sample by sample, epoch after epoch."""
        epochs = count() if self._epochs is None else range(self._epochs)
        for epoch in epochs:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            num_read = 0
            try:
                for sample in self._pass(epoch):
                    num_read += 1
                    yield sample
            except Exception as error:
                add_location(error, f"after {num_read} samples of pass {epoch + 1}")
                raise
            if not num_read:
                why = " in its second pass: it can be iterated only once" if epoch else ""
                raise UserCodeError(
                    f"the dataset is empty: {type(self._dataset).__name__} yielded no sample{why}"
                )

    def _pass(self, epoch: int) -> Iterator[Any]:
        walk = _Walk(self._dataset, rng.mix(self._seed, epoch))
        if self._workers == 0:
            return iter(walk)
        generator = torch.Generator()  # else the loader draws a seed from the stream in force
        loader: DataLoader[Any] = DataLoader(
            walk, batch_size=None, num_workers=1, collate_fn=_as_is, generator=generator
        )
        return iter(loader)


class _Walk(IterableDataset[Any]):
    """One pass over an iterable, as torch's DataLoader knows it.

    What is drawn for a sample depends on the seed of the pass and its place in it alone, as in
    `samples.Batches`.
    """

    def __init__(self, samples: Iterable[Any], seed: int) -> None:
        self._samples = samples
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        rng.seed(rng.mix(self._seed, 0))
        for place, sample in enumerate(self._samples, start=1):
            yield sample
            rng.seed(rng.mix(self._seed, place))


def _as_is(sample: Any) -> Any:
    return sample


def _smaller(size: int, limit: int | None) -> int:
    return size if limit is None else min(size, limit)
