"""The training data of one rank, step by step: `BatchLoader.next_step()` until it returns None.

`loader.cursor` is the position in the stream in samples over all ranks; `loader.seek(cursor)` goes
on from there, also on another number of ranks. Evaluation walks held-out data once, by the same
rules: `eval_batches`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader

from zrun_core.data.batch import MicroBatch
from zrun_core.data.marks import Marks, marks_of
from zrun_core.data.order import micro_batches
from zrun_core.data.samples import Collate, in_words
from zrun_core.data.source import IterableSource, MapSource, Source, Step, is_map_style, length_of
from zrun_core.distributed.rng import CPU, ScopedStream, Streams
from zrun_core.errors import JobError, UserCodeError
from zrun_core.hardware.accelerator import is_accelerator
from zrun_core.spine.sections.data import DataConfig
from zrun_core.spine.spec import BatchPlan
from zrun_core.user_code.user import user_code

_LOOKED_AT = 64  # samples to come, by which ranks compare their order


class BatchLoader:
    """Micro-batches of the data-parallel rank `rank`, in the order that `data.order` documents.

    Batches stay in host memory, pinned when `device` is a GPU: moving each one right before its
    forward (`MicroBatch.to`) keeps a single one on the device.
    """

    def __init__(
        self,
        dataset: object,
        data: DataConfig,
        batch: BatchPlan,
        rank: int,
        seed: int,
        device: torch.device = CPU,
        *,
        epochs: int | None = None,
        collate: Collate | None = None,
        draws: ScopedStream | None = None,
    ) -> None:
        """
        Args:
            dataset: map-style (`__getitem__` and `__len__`) or iterable.
            rank: data-parallel.
            epochs: passes over the data before it ends; None: it never does.
            collate: list of samples -> batch; None: torch's default.
            draws: the random stream while reading; None: that of `rank` in a job of this seed.

        Raises:
            JobError: `data` asks for what an iterable dataset cannot do.
            UserCodeError: the dataset is empty, or it is no dataset.
        """
        self._draws = draws or Streams(seed, device, dp=rank).data
        self._source = _open(
            dataset,
            batch,
            rank,
            self._draws,
            shuffle=data.shuffle,
            seed=seed,
            workers=data.workers,
            collate=collate,
            epochs=epochs,
            pin_memory=is_accelerator(device),
        )
        self.num_samples = len(dataset) if is_map_style(dataset) else None  # type: ignore[arg-type]
        self._batch = batch
        self._epochs = epochs
        self._length = length_of(dataset)
        self._dataset = dataset
        self._workers = data.workers
        self.marks: Marks = {}  # of the dataset, once `mark` was called
        self.cursor = 0  # in the stream, in samples over all ranks
        self.last_step = range(0)  # positions in the stream that were read last, over all ranks
        self._steps: Iterator[Step] = self._source.steps(0)
        self._peeked: Step | None = None  # read ahead

    @property
    def epoch(self) -> float | None:
        """Passes over the data up to the cursor; None for an iterable dataset, without length."""
        return self.epoch_at(self.cursor)

    def mark(self, before: Marks) -> None:
        """Read the marks of the dataset, also of the samples that had some `before`."""
        self.marks = marks_of(self._dataset, self._workers, before)

    def total_steps(self, steps: int = 0, cursor: int = 0) -> int | None:
        """Return the optimizer steps of all epochs; None where the data has no end or no length.

        Args:
            steps: those that are made already, perhaps with another global batch.
            cursor: where they ended in the stream, in samples.
        """
        if self._epochs is None or self._length is None:
            return None
        return steps + self._batch.num_steps(self._length * self._epochs - cursor)

    def shared(self) -> dict[str, float]:
        """Return what must be the same on every rank, by name: the stream that all of them follow.

        Its samples that come next stand for the seed and the epoch's permutation.
        """
        coming = self._source.numbers(range(self.cursor, self.cursor + _LOOKED_AT))
        packed = struct.pack(f"<{len(coming)}q", *coming)
        digest = xxhash.xxh3_64_intdigest(packed) % 2**53  # exact as a float
        length = -1 if self.num_samples is None else self.num_samples
        return {
            "position in the data": self.cursor,
            "dataset length": length,
            "order of samples": digest,
        }

    def seek(self, cursor: int) -> None:
        """Continue from this position of the stream, in samples over all ranks."""
        self.cursor = cursor
        self._peeked = None
        with self._draws.at(cursor), _reading("training"):
            self._steps = self._source.steps(cursor)

    def peek(self) -> MicroBatch | None:
        """Return the first micro-batch of the next step, which comes next all the same.

        Raises:
            UserCodeError: the dataset or the collate function raised.
        """
        self._peeked = self._next_step()
        return None if self._peeked is None else self._peeked[1][0]

    def _next_step(self) -> Step | None:
        if self._peeked is not None:
            return self._peeked
        with self._draws.at(self.cursor), _reading("training"):
            return next(self._steps, None)

    def next_step(self) -> list[MicroBatch] | None:
        """Return this rank's micro-batches of the next step; None, on all ranks, at the end.

        Raises:
            UserCodeError: the dataset or the collate function raised.
        """
        step = self._next_step()
        self._peeked = None
        if step is None:
            return None
        num_samples, own = step
        self.last_step = range(self.cursor, self.cursor + num_samples)
        self.cursor += num_samples
        return own

    # Steps whose shares are dealt out to ranks as they come

    def coming(self, count: int) -> list[range]:
        """Return the positions of the next steps in the stream, which are not read yet.

        Args:
            count: of them; fewer are left at the end.

        Raises:
            JobError: the dataset has no indices.
        """
        return list(islice(self._by_index().coming(self.cursor), count))

    def share(self, positions: range, part: int) -> list[MicroBatch]:
        """Return the micro-batches that the rank of number `part` has of a step by the contract.

        Args:
            positions: of the step in the stream.

        Raises:
            UserCodeError: the dataset or the collate function raised.
        """
        with self._draws.at(positions.start), _reading("training"):
            return self._by_index().share(positions, part)

    def epoch_at(self, position: int) -> float | None:
        """Return passes over the data up to a position; None for an iterable dataset."""
        return position / self.num_samples if self.num_samples else None

    def _by_index(self) -> MapSource:
        if not isinstance(self._source, MapSource):
            raise JobError(
                f"data: {type(self._dataset).__name__} is an iterable dataset, of which no rank "
                "can read the samples of another one; give it __getitem__ and __len__, or write "
                "sync: server"
            )
        return self._source

    def samples_of(self, step: range, rank: int, micro: int | None = None) -> str:
        """Return in words which samples a rank read in a step.

        Args:
            step: its positions in the stream, as `last_step` has them.
            rank: data-parallel.
            micro: only in this micro-batch of the rank; None: in all of them.
        """
        parts = micro_batches(len(step), self._batch, rank)
        chosen = parts if micro is None else parts[micro : micro + 1]
        positions = [step[offset] for part in chosen for offset in part]
        indices = self._source.numbers(positions)
        if indices:
            return f"indices {in_words(indices)} of the dataset"
        return f"samples {in_words(positions)} of the stream"


def eval_batches(
    dataset: object,
    micro: int,
    rank: int,
    num_ranks: int,
    limit: int | None = None,
    collate: Collate | None = None,
    seed: int = 0,
    device: torch.device = CPU,
) -> Iterator[MicroBatch]:
    """Yield every sample of held-out data once, in equally many batches on each rank.

    What samples and batches draw depends on `seed` and their place alone: it is the same each time.

    Args:
        rank: data-parallel.
        num_ranks: data-parallel ones.
        limit: samples at most, over all ranks; None: all.
        collate: list of samples -> batch; None: torch's default.

    Raises:
        UserCodeError: the dataset is empty or no dataset, or it or the collate function raised.
    """
    batch = BatchPlan(global_size=micro * num_ranks, micro=micro, accumulation=1, ranks=num_ranks)
    draws = Streams(seed, device, dp=rank).data
    options: dict[str, Any] = {"seed": seed, "collate": collate, "epochs": 1, "limit": limit}
    steps = _open(dataset, batch, rank, draws, **options).steps(0)
    num_read = 0
    while True:
        with draws.at(num_read), _reading("evaluation"):
            step = next(steps, None)
        if step is None:
            return
        num_samples, micro_batches = step
        num_read += num_samples
        yield from micro_batches


@contextmanager
def _reading(which: str) -> Iterator[None]:
    with user_code(f"reading the {which} data failed"):
        yield


def _open(
    dataset: Any,
    batch: BatchPlan,
    rank: int,
    draws: ScopedStream,
    *,
    shuffle: bool = False,
    pin_memory: bool = False,
    **options: Any,
) -> Source:
    if is_map_style(dataset):
        return MapSource(dataset, batch, rank, shuffle=shuffle, pin_memory=pin_memory, **options)
    name = type(dataset).__name__
    if dataset is None:
        raise UserCodeError("data must return a dataset, and returned None: does it lack a return?")
    if isinstance(dataset, DataLoader):
        raise UserCodeError(
            "data must return a dataset, and returned a DataLoader: zrun makes the batches "
            "(batch, data.workers, data.collate); return its .dataset"
        )
    if not hasattr(dataset, "__iter__"):
        raise UserCodeError(
            f"data must return a dataset: {name} has neither __getitem__ and __len__ nor __iter__"
        )
    if shuffle:
        raise JobError(
            f"data.shuffle: {name} is an iterable dataset, without indices to permute: "
            "shuffle inside it"
        )
    return IterableSource(dataset, batch, rank, draws, **options)
