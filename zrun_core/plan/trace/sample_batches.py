"""Batches for a trace: of the longest of the samples that were looked at.

A dataset may be slow, or have no end: so many samples are read, for so long, and a note says which
they were. A job that knows its longest sample says so (`data.longest`), and the one that was read
is stretched to it.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from zrun_core.data.batch import count_tokens, map_tensors
from zrun_core.data.source import is_map_style, length_of
from zrun_core.errors import JobError, UserCodeError, ZrunError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.user_code import user

# What has a shape without being read, with its default seq_len.
_TEXT = {"zrun_core.data.text:text": 256, "zrun_core.data.text:masked_text": 128}
_LOOK_AT = 64  # samples
_LOOK_FOR_S = 5.0
# Where samples come one after the other, neighbours are often alike: more of them are looked at, as
# long as that takes hardly any time and memory.
_LOOK_AT_STREAM = 1024
_LOOK_ON_S = 0.5  # to read them, and to make a batch of each
_LOOK_ON_BYTES = 8 << 20

Collate = Callable[[list[Any]], Any]
Growing = tuple[tuple[int, ...], ...]  # dimensions of each tensor of a batch


@dataclass(frozen=True)
class SampleBatches:
    """The samples that were looked at, and batches of the longest of them.

    Attributes:
        first: the samples.
        largest: the longest one.
        collate: makes a batch of samples.
        note: what a reader of the plan should know; "" if there is nothing to say.
        is_ragged: whether they differ in size, so that most batches take less.
        growing: which dimensions are longer in a longer sample.
        stretch: how much longer the longest sample is than the longest that was read.
        num_samples: of an epoch; None: the data does not say, or was not opened.
        sample_s: seconds of a core that a usual sample takes to be read; 0: none was read.
        dealt: the samples in an order in which ranks are given some like them; (): as in `first`.
    """

    first: Sequence[Any]
    largest: Any
    collate: Collate
    note: str = ""
    is_ragged: bool = False
    growing: Growing = ()
    stretch: float = 1.0
    num_samples: int | None = None
    sample_s: float = 0.0
    dealt: Sequence[Any] = ()

    def batch(self, micro: int) -> Any:
        """Return `micro` times the longest sample."""
        return self._stretched(self.collate([self.largest] * micro))

    def real_batch(self, micro: int) -> Any:
        """Return the longest sample and others, for models in which values matter."""
        others = itertools.islice(itertools.cycle(self.first), micro - 1)
        return self._stretched(self.collate([self.largest, *others]))

    def usual_share(self, micro: int) -> float:
        """Return the bytes of usual batches as a share of those of the longest sample's.

        Batches are made of the samples in the order in which they come: where that groups samples
        of one length, or sorts them, most batches have no long one.
        """
        dealt = self.dealt or self.first
        starts = range(0, len(dealt) - micro + 1, micro)
        if not self.is_ragged or not starts:
            return 1.0
        try:
            usual = [bytes_of(self.collate(list(dealt[at : at + micro]))) for at in starts]
        except Exception:  # of the user's function, which such a batch is the first to reach
            return 1.0
        return min(1.0, statistics.fmean(usual) / bytes_of(self.batch(micro)))

    def _stretched(self, batch: Any) -> Any:
        if self.stretch == 1.0:
            return batch
        dims = iter(self.growing)

        def longer(tensor: torch.Tensor) -> torch.Tensor:
            for dim in next(dims, ()):
                size = tensor.shape[dim]
                places = torch.arange(round(size * self.stretch)) % size
                tensor = tensor.index_select(dim, places)
            return tensor

        return map_tensors(longer, batch)


def samples_of(job: JobConfig, job_dir: Path, *, values: bool = False) -> SampleBatches:
    """Read a few samples of the job's data, or none where their shape is known without that.

    Args:
        values: whether it is not enough to know their shape.

    Raises:
        JobError: there is no such data.
        UserCodeError: reading it failed, and its shapes are not known otherwise.
    """
    collate: Collate = default_collate
    if job.data.collate is not None:
        collate = user.function(job.data.collate, job_dir, user.TAKES["data.collate"])
    if job.data.call in _TEXT and not values:
        return _stretched(_blank_text(job, collate), job.data.longest, "")
    try:
        dataset = user.call(Ref(call=job.data.call, args=job.data.args), job_dir)
        with user.user_code("reading the training data failed"):
            samples, sample_s, which = _look(dataset)
    except ZrunError as error:
        if job.data.call not in _TEXT:
            raise
        reason = str(error).splitlines()[0]
        note = f"the data was not read ({reason}): its seq_len says its shape"
        return _stretched(replace(_blank_text(job, collate), note=note), job.data.longest, "")
    if not samples:
        raise UserCodeError(f"the dataset is empty: {type(dataset).__name__}")
    sizes = _sizes(samples, collate)
    samples = samples[: len(sizes)]
    largest = samples[sizes.index(max(sizes))]
    smallest = samples[sizes.index(min(sizes))]
    is_ragged = min(sizes) < max(sizes)
    found = SampleBatches(
        samples,
        largest,
        collate,
        is_ragged=is_ragged,
        num_samples=length_of(dataset),
        sample_s=sample_s,
    )
    if is_map_style(dataset) and job.data.shuffle:  # they were read in the order of their numbers
        found = replace(found, dealt=random.Random(1).sample(samples, len(samples)))
    if found.is_ragged:
        found = replace(found, growing=_growing(collate, smallest, largest))
    return _stretched(found, job.data.longest, which.format(len(samples)))


def _blank_text(job: JobConfig, collate: Collate) -> SampleBatches:
    """Return a blank sample of text, which has the shape of all of them."""
    seq_len = int(job.data.args.get("seq_len", _TEXT[job.data.call]))
    tokens = torch.zeros(seq_len, dtype=torch.int64)
    sample = {"input_ids": tokens, "labels": tokens}
    return SampleBatches([sample], sample, collate)


def _look(dataset: Any) -> tuple[list[Any], float, str]:
    """Read some samples, for a while.

    Returns:
        The samples, the seconds of a core that a usual one took, and which they were, in words that
        lack their number.
    """
    words = "the first {} samples"
    if is_map_style(dataset):
        count = len(dataset)
        places: Sequence[int] = range(count)
        words = "all {}"
        if count > _LOOK_AT:  # not at even distances: neighbours may follow a pattern
            drawn = random.Random(0).sample(range(1, count - 1), _LOOK_AT - 2)
            places = [0, *sorted(drawn), count - 1]
            words = f"{{}} samples from all over the {count:,}"
        read: Iterator[Any] = (dataset[place] for place in places)
    else:
        read = itertools.islice(iter(dataset), _LOOK_AT_STREAM)
    samples: list[Any] = []
    held = 0
    took = []
    start, begun = time.monotonic(), time.process_time()
    for sample in read:
        samples.append(sample)
        took.append(time.process_time() - begun)
        begun = time.process_time()
        if time.monotonic() - start > _LOOK_FOR_S:
            words = f"the first {{}} samples, which took {_LOOK_FOR_S:g} s"
            break
        held += bytes_of(sample)
        is_over = time.monotonic() - start > _LOOK_ON_S or held > _LOOK_ON_BYTES
        if len(samples) >= _LOOK_AT and is_over:
            break
    return samples, statistics.median(took) if took else 0.0, words


def _sizes(samples: Sequence[Any], collate: Collate) -> list[int]:
    """Return the bytes of each sample in a batch, of fewer where that takes long."""
    start = time.monotonic()
    sizes: list[int] = []
    for sample in samples:
        if len(sizes) >= _LOOK_AT and time.monotonic() - start > _LOOK_ON_S:
            break
        sizes.append(_size(sample, collate))
    return sizes


def _size(sample: Any, collate: Collate) -> int:
    """Return the bytes of a sample in a batch: it may be a list of numbers until it is collated."""
    try:
        return bytes_of(collate([sample]))
    except Exception:  # one that needs several samples, say
        return bytes_of(sample)


def _growing(collate: Collate, smallest: Any, largest: Any) -> Growing:
    """Return which dimensions of a batch's tensors are longer for a longer sample."""

    def longer_dims(small: torch.Tensor, large: torch.Tensor) -> tuple[int, ...]:
        if small.dim() != large.dim():
            return ()
        return tuple(dim for dim, size in enumerate(large.shape) if small.shape[dim] < size)

    pairs = zip(
        tensors_of(collate([smallest])),
        tensors_of(collate([largest])),
        strict=False,
    )
    return tuple(longer_dims(small, large) for small, large in pairs)


def _stretched(samples: SampleBatches, longest: int | None, which: str) -> SampleBatches:
    """Return `samples` with one as long as the job says the longest is, and with a note.

    A `longest` of None is that of the longest sample that was read. `which` says in words what
    samples were read.

    Raises:
        JobError: nothing tells in which dimension samples are long.
    """
    if longest is None and not samples.is_ragged:
        return samples
    one = samples.collate([samples.largest])
    tensors = tensors_of(one)
    tokens = count_tokens(one)
    growing = samples.growing
    if not any(growing):  # all that were read are equally long
        growing = tuple(_dims_of(tensor, tokens) for tensor in tensors)
    pairs = zip(tensors, growing, strict=False)
    lengths = [tensor.shape[dim] for tensor, dims in pairs for dim in dims]
    unit = "tokens" if tokens else "elements"
    if longest is None:
        length = f": {max(lengths):,} {unit}" if lengths else ""
        note = (
            f"samples differ in size: planned with the longest of {which}{length}; data.longest "
            "says how long they can be"
        )
        return replace(samples, note=note)
    if not lengths:
        raise JobError(
            f"data.longest: {longest}: all samples that were read have the same size, "
            "and none has tokens: leave it out"
        )
    stretch = longest / max(lengths)
    note = f"planned with samples of {longest:,} {unit} (data.longest)"
    return replace(samples, growing=growing, stretch=stretch, is_ragged=True, note=note)


def _dims_of(tensor: torch.Tensor, size: int) -> tuple[int, ...]:
    """Return the dimensions of a batch's tensor, but for the first, that have this size."""
    return tuple(dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == size)


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a batch, in order."""
    found: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(add, value)
    return found
