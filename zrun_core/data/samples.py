"""Samples read by index and made a batch; where that fails, the error says with which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import Dataset, Subset, default_collate

from zrun_core.distributed import rng
from zrun_core.spine.tracebacks import add_location

Collate: TypeAlias = Callable[[list[Any]], Any]

_PLURAL = {"index": "indices", "sample": "samples"}
_FORGOTTEN = ": does __getitem__ return it on every path?"
_LISTED = 32  # samples, or runs of them, that are named


class SamplePosition(NamedTuple):
    """A sample: its number in the dataset, and its position in the stream."""

    number: int
    position: int


class Batches(Dataset[Any]):
    """Reads the samples at some places of a dataset, and makes a batch of them.

    What is drawn for a sample depends on the seed and its position in the stream alone. Not on
    which process draws, nor on how many samples it has drawn before: a run that goes on draws the
    same, with any number of loader processes and ranks.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitems__(self, places: list[SamplePosition]) -> Any:
        samples = self._read(places)
        return collated(samples, [place.number for place in places], "index", self._collate)

    def _read(self, places: list[SamplePosition]) -> Any:
        if reads_several(self._dataset):  # at once, by its own means
            self._place(places[0])
            numbers = [place.number for place in places]
            with _telling(f"at one of the indices {in_words(numbers)}"):
                return self._dataset.__getitems__(numbers)
        samples = []
        for place in places:
            self._place(place)
            with _telling(f"at index {place.number}"):
                samples.append(self._dataset[place.number])
        return samples

    def _place(self, place: SamplePosition) -> None:
        rng.seed(rng.mix(self._seed, place.position))


def reads_several(dataset: Any) -> bool:
    """Return whether a dataset has `__getitems__`; of torch's Subset, what it is a part of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def collated(samples: list[Any], numbers: Sequence[int], noun: str, collate: Collate | None) -> Any:
    """Make a batch of samples.

    Args:
        numbers: what the samples are called, if this fails.
        collate: None: torch's default.
    """
    try:
        return (collate or default_collate)(samples)
    except Exception as error:
        unlike = "" if collate is not None else _difference(samples, numbers, noun)
        where = f"with a batch of {_PLURAL[noun]} {in_words(numbers)}"
        if unlike.endswith(_FORGOTTEN):
            where = f": {unlike}"
        elif unlike:
            where = f": {unlike}; write a function that makes a batch of such samples, data.collate"
        add_location(error, where)
        raise


def in_words(numbers: Iterable[int]) -> str:
    """Return numbers in their order, runs of them as "4-7", of many the first ones."""
    runs: list[range] = []
    count = 0
    for number in numbers:
        count += 1
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    listed = ", ".join(map(_run_in_words, runs[:_LISTED]))
    if len(runs) > _LISTED:
        return f"{listed}, ... ({count} in all)"
    return listed


def _run_in_words(run: range) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])


@contextmanager
def _telling(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        add_location(error, where)
        raise


class _Side(NamedTuple):
    """A sample, or a part of one, and what the sample is called."""

    value: Any
    name: str

    def part(self, key: Any) -> _Side:
        return _Side(self.value[key], self.name)


def _difference(samples: Sequence[Any], numbers: Sequence[int], noun: str) -> str:
    """Return the first thing for which torch's default collation fails; "": none is known."""
    # A dataset that reads several samples at once may give what it likes.
    pairs = zip(samples, numbers, strict=False)
    sides = [_Side(sample, f"{noun} {number}") for sample, number in pairs]
    return next(filter(None, (_unlike("", sides[0], side) for side in sides)), "")


def _unlike(path: str, one: _Side, other: _Side) -> str:
    """Return how two samples, or their parts at `path`, differ where a batch needs them alike."""
    what = path or "the sample"
    both = one.value, other.value
    if other.value is None:
        return f"{what} is None at {other.name}{_FORGOTTEN}"
    if all(isinstance(value, Mapping) for value in both):
        missing = sorted(map(repr, one.value.keys() ^ other.value.keys()))
        if missing:
            return f"{what} has {missing[0]} at only one of {one.name} and {other.name}"
        keys = list(one.value)
    elif all(isinstance(value, tuple | list) for value in both):
        if len(one.value) != len(other.value):
            return _against(what, "length", one, other, len)
        keys = list(range(len(one.value)))
    else:
        return _unlike_leaf(what, one, other)
    parts = (_unlike(f"{path}[{key!r}]", one.part(key), other.part(key)) for key in keys)
    return next(filter(None, parts), "")


def _unlike_leaf(what: str, one: _Side, other: _Side) -> str:
    shape = _shape(one.value)
    other_shape = _shape(other.value)
    if shape is not None and other_shape is not None:
        return "" if shape == other_shape else _against(what, "shape", one, other, _shape)
    if other_shape is None and not isinstance(other.value, int | float | str | bytes):
        return (
            f"{what} is {type(other.value).__name__} at {other.name}, which cannot become a tensor"
        )
    if type(one.value) is not type(other.value):
        return _against(what, "type", one, other, lambda value: type(value).__name__)
    return ""


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _against(what: str, of: str, one: _Side, other: _Side, ask: Callable[[Any], object]) -> str:
    return f"{what} has {of} {ask(one.value)} at {one.name} and {ask(other.value)} at {other.name}"
