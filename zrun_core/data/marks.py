"""Marks of a dataset, by which a resumed run notices that it reads another one.

A mark is the digest of one sample. A few samples are read several times: where that draws random
numbers, or the reads differ, as with augmentation, there are no marks, and nothing is compared.
Reading changes nothing for the training: the rank's random streams are put back, and a dataset that
holds generators of its own is not read at all.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset

from zrun_core.data.source import is_map_style
from zrun_core.distributed import rng

Marks = dict[int, str]  # digest of a sample, by its number in the dataset

_ROUNDS = 3
_MAX_SECONDS = 2.0  # of reading; a first read that takes longer is the last one
_MAX_BYTES = 4 << 20  # of a sample: what comes later is not looked at
_MAX_PARTS = 10_000
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def marks_of(dataset: Any, workers: int = 0, also: Iterable[int] = ()) -> Marks:
    """Return marks of a few samples; none where reading is not repeatable, fails or takes long.

    Args:
        dataset: of any kind; only one with indices has marks.
        workers: `data.workers`. If there are any, one reads: files that a dataset opens when it is
            first read must not be open in the process from which the others come.
    """
    if not is_map_style(dataset):
        return {}
    length = len(dataset)
    before = {number for number in also if 0 <= number < length}
    numbers = sorted({0, length // 2, length - 1} | before)
    if not workers:
        return _read(dataset, numbers)
    generator = torch.Generator()  # else the loader draws a seed from the rank's own stream
    loader: DataLoader[Marks] = DataLoader(
        _SampleReader(dataset, numbers), batch_size=None, num_workers=1, generator=generator
    )
    return next(iter(loader))


def differences(before: Mapping[int, str], now: Marks) -> str:
    """Return which samples differ, in words; "" if none does."""
    both = sorted(before.keys() & now.keys())
    numbers = [str(number) for number in both if now[number] != before[number]]
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"sample {numbers[0]} has changed"
    return f"samples {', '.join(numbers[:-1])} and {numbers[-1]} have changed"


class _SampleReader(Dataset[Marks]):
    """Reads the marks of a dataset in a loader process."""

    def __init__(self, dataset: Any, numbers: list[int]) -> None:
        self._dataset = dataset
        self._numbers = numbers

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Marks:
        return _read(self._dataset, self._numbers)


def _read(dataset: Any, numbers: list[int]) -> Marks:
    if _holds_generator(dataset):
        return {}
    cpu = torch.device("cpu")
    before = rng.capture(cpu)
    deadline = time.monotonic() + _MAX_SECONDS
    rounds: list[Marks] = []
    try:
        while len(rounds) < _ROUNDS and time.monotonic() < deadline:
            marks = {}
            for number in numbers:
                marks[number] = _digest(dataset[number])
                if time.monotonic() > deadline and not rounds:
                    return {}
            rounds.append(marks)
        is_random = not _same_streams(before, rng.capture(cpu))
    except Exception:  # of the user's: training says what it is, if it happens there too
        return {}
    finally:
        rng.restore(*before, cpu)
    is_repeatable = len(rounds) > 1 and all(marks == rounds[0] for marks in rounds)
    return rounds[0] if is_repeatable and not is_random else {}


_Streams = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _same_streams(before: _Streams, after: _Streams) -> bool:
    (tensors, numbers), (tensors_after, numbers_after) = before, after
    same = all(torch.equal(tensor, tensors_after[name]) for name, tensor in tensors.items())
    return same and all(numbers_after[name] == number for name, number in numbers.items())


def _holds_generator(dataset: Any) -> bool:
    """Return whether the dataset, three objects deep, or its class's module holds a generator."""
    level: list[Any] = [dataset]
    for _ in range(4):
        if any(_is_generator(each) or _is_beside_generator(each) for each in level):
            return True
        level = [below for each in level for below in _held_by(each)][:_MAX_PARTS]
    return False


def _is_generator(value: Any) -> bool:
    return isinstance(value, _GENERATORS) and value is not torch.default_generator


def _is_beside_generator(value: Any) -> bool:
    if not hasattr(type(value), "__getitem__"):
        return False
    module = sys.modules.get(type(value).__module__)
    if module is None:
        return False
    return any(_is_generator(each) for each in list(vars(module).values()))


def _held_by(owner: Any) -> list[Any]:
    if isinstance(owner, list | tuple | dict):
        values = owner.values() if isinstance(owner, dict) else owner
        return list(values) if len(owner) <= _MAX_PARTS else []
    if isinstance(owner, type | ModuleType) or not hasattr(owner, "__dict__"):
        return []
    return list(vars(owner).values())


def _digest(sample: Any) -> str:
    digest = xxhash.xxh3_128()
    left = _MAX_BYTES
    for piece in _pieces(sample):
        digest.update(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return digest.hexdigest()


def _pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield the content of a sample; of an object of an unknown kind, the name of its class."""
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        flat = value.detach()
        yield str((flat.dtype, tuple(flat.shape))).encode()
        if flat.layout == torch.strided:
            first = flat.flatten()[: _MAX_BYTES // max(1, flat.element_size())].cpu().contiguous()
            yield first.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield str((array.dtype, array.shape)).encode()
        if not array.dtype.hasobject:
            yield array.ravel()[: _MAX_BYTES // max(1, array.itemsize)].tobytes()
    elif isinstance(value, bytes | bytearray):
        yield bytes(value[:_MAX_BYTES])
    elif isinstance(value, str | int | float | complex | bool | None):
        yield str(value)[:_MAX_BYTES].encode("utf-8", "surrogatepass")
    elif hasattr(value, "__array_interface__"):  # images of Pillow
        yield from _pieces(np.asarray(value))
    elif depth < 8:
        for part in _parts(value):
            yield from _pieces(part, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [part for pair in list(value.items())[:_MAX_PARTS] for part in pair]
    if isinstance(value, list | tuple):
        return value[:_MAX_PARTS]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []
