"""Marks of datasets: what they notice, what they leave alone, and that reading them changes
nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from zrun_core.data import marks
from zrun_core.data.marks import differences, marks_of
from zrun_core.distributed import rng

CPU = torch.device("cpu")


@dataclass
class Example:
    ids: torch.Tensor
    text: str


class Opaque:
    pass


class Image:
    """Pixels as those of Pillow are to be had."""

    def __init__(self, pixel: int) -> None:
        self.pixels = np.full((2, 2), pixel)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.pixels.__array_interface__


class Read:
    """A dataset that says where it was read."""

    def __init__(
        self, sample: Callable[[int], Any], length: int = 10, log: Path | None = None
    ) -> None:
        self.sample, self.length, self.log = sample, length, log

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return self.sample(index)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda index: torch.tensor([index]),
    "bf16": lambda index: torch.tensor([float(index), 1.0], dtype=torch.bfloat16).t(),
    "empty": lambda index: torch.zeros(0),
    "array": lambda index: np.array([index, 2.0]),
    "objects": lambda index: np.array([Opaque()], dtype=object),
    "nested": lambda index: {
        "a": [torch.ones(2), (index, "text", b"bytes", None, 1.5, True)],
        3: {"b": np.float32(2)},
    },
    "dataclass": lambda index: Example(torch.ones(2), "x" * index),
    "opaque": lambda index: (index, Opaque()),
    "sparse": lambda index: torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_any_sample_has_a_mark(kind: str) -> None:
    found = marks_of(Read(SAMPLES[kind]))
    assert list(found) == [0, 5, 9]
    assert found == marks_of(Read(SAMPLES[kind]))


def test_other_samples_have_other_marks() -> None:
    x = torch.arange(20.0).reshape(10, 2)
    before = marks_of(TensorDataset(x))
    x[5, 1] = -1
    after = marks_of(TensorDataset(x))
    assert differences(before, before) == ""
    assert differences(before, after) == "sample 5 has changed"
    assert (
        differences(before, marks_of(TensorDataset(x.double())))
        == "samples 0, 5 and 9 have changed"
    )
    assert differences(before, {}) == ""
    assert differences({}, after) == ""
    assert list(marks_of(TensorDataset(x), also=[3, 99])) == [0, 3, 5, 9]


@pytest.mark.parametrize(
    "draw",
    [
        lambda index: torch.rand(1),
        lambda index: np.random.rand(),
        lambda index: random.random(),
        lambda index: index if random.random() < 2 else 0,  # drawn, and without effect
        lambda index: int.from_bytes(os.urandom(8)),
        lambda index: 1 / 0,
    ],
)
def test_samples_that_may_differ_have_no_mark(draw: Callable[[int], Any]) -> None:
    before = rng.capture(CPU)
    assert marks_of(Read(draw)) == {}
    assert marks._same_streams(before, rng.capture(CPU))


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), np.random.default_rng(0), random.Random(0), [{"deep": random.Random(0)}]],
)
def test_a_dataset_with_a_generator_is_not_read(generator: Any, tmp_path: Path) -> None:
    dataset: Any = Read(SAMPLES["tensor"], log=tmp_path / "log")
    dataset.generator = generator
    assert marks_of(dataset) == {}
    assert not (tmp_path / "log").exists()


def test_a_generator_of_the_module_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_rng", np.random.default_rng(0))
    assert marks_of(Read(SAMPLES["tensor"])) == {}


def test_pixels_count() -> None:
    assert marks_of(Read(lambda index: Image(3))) == marks_of(Read(lambda index: Image(3)))
    assert marks_of(Read(lambda index: Image(3))) != marks_of(Read(lambda index: Image(4)))


def test_a_stream_is_not_read() -> None:
    class Once(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError

        def __len__(self) -> int:
            return 3

    assert marks_of(Once()) == {}


def test_a_slow_dataset_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter((0.0, 1.0, 1.0 + marks._MAX_SECONDS))
    monkeypatch.setattr(marks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert marks_of(Read(SAMPLES["tensor"], log=tmp_path / "log")) == {}
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_large_sample_is_read_in_part() -> None:
    large = torch.zeros(marks._MAX_BYTES + 8, dtype=torch.uint8)
    before = marks_of(TensorDataset(large[None]))
    large[-1] = 1
    assert marks_of(TensorDataset(large[None])) == before
    large[0] = 1
    assert marks_of(TensorDataset(large[None])) != before


def test_where_others_read_it_is_not_read_here(tmp_path: Path) -> None:
    before = rng.capture(CPU)
    dataset = Read(SAMPLES["tensor"], log=tmp_path / "log")
    assert marks_of(dataset, workers=2) == marks_of(Read(SAMPLES["tensor"]))
    assert str(os.getpid()) not in (tmp_path / "log").read_text().splitlines()
    assert marks._same_streams(before, rng.capture(CPU))
