"""What a rank has had and done in a run, in files: one of the beginning, and one of each step.

    RUN/record/rank-0/step-0     the values, buffers and formats that the run begins with
    RUN/record/rank-0/step-1     gradients, what they were divided by, the values after the update
    RUN/record/rank-1/...

A file is a safetensors file whose metadata holds a `StepNumbers` as JSON. Its tensors are ranges of
the model's tensors, in the order of their memory, on the CPU:

    grad/12/blocks.0.up.weight    elements 12 and following of its gradient, summed, not divided
    value/12/blocks.0.up.weight   of its value
    buffer/0/norm.running_mean    a buffer as it is, with its shape

Each rank writes all that it updates, copies of what other ranks have included: so a comparison sees
copies that differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = "record"
GRAD, VALUE, BUFFER = "grad", "value", "buffer"


class TensorShape(NamedTuple):
    """Shape and strides of a tensor of the model, and the format in which forwards use it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step on one rank; of the beginning, the fields from `step` to `tensors`.

    Attributes:
        step: from 1; that which the run begins with is the one before its first.
        tensors: of the model, of which this rank has a part, by name.
        positions: first and last but one of the step's samples in the stream.
        batches: digest and number of samples of each micro-batch.
        loss: mean over the step's samples of all ranks.
        weight: of these samples.
        norm: of the gradient, before clipping.
        divisor: of the gradient, clipping and loss scale included.
        scale: of the loss.
        skipped: no update was made.
        lr: learning rate.
        without_grad: tensors that got no gradient on any rank.
        draws_apart: ranks have drawn their own numbers inside of layers that they share.
    """

    step: int
    tensors: Mapping[str, TensorShape] = field(default_factory=dict)
    positions: tuple[int, int] = (0, 0)
    batches: Sequence[tuple[str, int]] = ()
    loss: float = 0.0
    weight: float = 0.0
    norm: float = 0.0
    divisor: float = 1.0
    scale: float = 1.0
    skipped: bool = False
    lr: float = 0.0
    without_grad: Sequence[str] = ()
    draws_apart: bool = False

    @classmethod
    def of_json(cls, text: str) -> StepNumbers:
        """Return the numbers that `json.dumps(asdict(...))` has written."""
        fields = json.loads(text)
        fields["tensors"] = {
            name: TensorShape(tuple(shape), tuple(stride), dtype)
            for name, (shape, stride, dtype) in fields["tensors"].items()
        }
        return cls(**fields)


class Range(NamedTuple):
    """Consecutive elements of a tensor, as one rank has them.

    Attributes:
        rank: that has them.
        first: number of the first one, in the order of memory.
        values: of them, 1-D; of a buffer, in its shape.
    """

    rank: int
    first: int
    values: torch.Tensor


@dataclass(frozen=True)
class StepRecord:
    """A step as all ranks have recorded it.

    Attributes:
        numbers: by rank.
        ranges: by kind (`GRAD`, `VALUE`, `BUFFER`) and name.
    """

    numbers: Sequence[StepNumbers]
    ranges: Mapping[str, Mapping[str, Sequence[Range]]]

    @property
    def tensors(self) -> dict[str, TensorShape]:
        """All tensors of the model that ranks have parts of."""
        found: dict[str, TensorShape] = {}
        for numbers in self.numbers:
            found |= numbers.tensors
        return found


class Writer:
    """Writes the files of one rank."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._folder = run_dir / FOLDER / f"rank-{rank}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, numbers: StepNumbers, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a step.

        Args:
            tensors: by name in the file: see `tensor_key`.
        """
        path = self._folder / f"step-{numbers.step}"
        save_file(dict(tensors), path, metadata={"numbers": json.dumps(asdict(numbers))})


def tensor_key(kind: str, first: int, name: str) -> str:
    """Return the name of a range in a file."""
    return f"{kind}/{first}/{name}"


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the steps that rank 0 has recorded, in order; the first is that of the beginning."""
    folder = run_dir / FOLDER / "rank-0"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def read_step(run_dir: Path, ranks: int, step: int) -> StepRecord:
    """Return a step as all ranks have recorded it."""
    numbers: list[StepNumbers] = []
    ranges: dict[str, dict[str, list[Range]]] = {GRAD: {}, VALUE: {}, BUFFER: {}}
    for rank in range(ranks):
        path = run_dir / FOLDER / f"rank-{rank}" / f"step-{step}"
        with safe_open(path, "pt") as file:
            metadata: dict[str, Any] = file.metadata()
            numbers.append(StepNumbers.of_json(metadata["numbers"]))
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                kind, first, name = key.split("/", 2)
                found = Range(rank, int(first), file.get_tensor(key))
                ranges[kind].setdefault(name, []).append(found)
    return StepRecord(numbers, ranges)


def merged(ranges: Sequence[Range], shape: TensorShape) -> torch.Tensor | None:
    """Return a whole tensor from its ranges; None where some elements are in none of them.

    Args:
        ranges: of it; of copies, the last one counts.
    """
    numel = torch.Size(shape.shape).numel()
    flat = torch.zeros(numel)
    is_known = torch.zeros(numel, dtype=torch.bool)
    for each in ranges:
        stop = each.first + each.values.numel()
        flat[each.first : stop] = each.values
        is_known[each.first : stop] = True
    if not is_known.all():
        return None
    return flat.as_strided(shape.shape, shape.stride)


def in_memory_order(tensor: torch.Tensor, shape: TensorShape) -> torch.Tensor:
    """Return the elements of a tensor in the order in which ranges count them, 1-D."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.as_strided(shape.shape, shape.stride).copy_(tensor)
    return flat
