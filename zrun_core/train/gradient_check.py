"""Compare, before the first step, the gradients of a divided model with those of the whole one.

    rank 0, before the model is divided     all ranks, once they have their parts
    backward of the first micro-batch       a step of it, which updates nothing: the runtime's own
                                            passes, reductions and message
    of each gradient: its square, 64 sums   the same of what each rank updates, added up

A forward that is right may have a backward that is not: of an `autograd.Function` that looks at all
features, or of a parameter that every rank of a group has and uses for its slice alone.

[Note: what is rounding]
The whole model runs once more with outputs of its nodes that are off by rounding. Three times what
that changes a gradient by may be rounding; so may a small share of its norm, and a much smaller one
of the whole model's: of a gradient that is zero in theory only noise is left.

[Note: copies]
What several ranks have of a parameter adds up to a multiple of it, and so does the number of its
elements, which tells how many copies there are. The sums are those of their mean. Their squares are
not: copies that differ have larger ones than their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.rng import ForwardStreams
from zrun_core.distributed.transport import Group
from zrun_core.memory.layout import TensorRange
from zrun_core.memory.tensors import TensorPart, contiguous_stride
from zrun_core.stages.node_calls import DrawingWalk, Node
from zrun_core.train.tensor_sums import NUM_SUMS, distance, sums_of, sums_of_part, sums_of_rows
from zrun_core.user_code.grad_hooks import has_late_hooks, hooks_of
from zrun_core.zero.unit.flat_unit import FlatUnit

_OWN = 1e-3  # of a gradient's norm, that another order of sums may make in fp32
_OF_FORMAT = 4.0  # times the distance of neighbours in halves: as much in these
_OF_ALL = 1e-2  # of that: a share of the norm of all gradients
_TIMES_NUDGED = 3.0
_NUDGE = 2.0  # times the distance of neighbours in the format
_AT_ONCE = 1 << 17  # elements: what is computed of them may take 40 times as many bytes
_WIDTH = 1 + NUM_SUMS  # of a row: the square of the norm, and the sums


class WholeGradients(NamedTuple):
    """The gradients of the whole model, on rank 0.

    Attributes:
        names: of the parameters that have one, in their order.
        numels: of these.
        rows: [names, 65] float64, of each: the square of its norm, and its sums.
        nudged: the same with activations that are off by rounding.
    """

    names: Sequence[str]
    numels: Sequence[int]
    rows: torch.Tensor
    nudged: torch.Tensor


def why_not_told(model: nn.Module) -> str:
    """Return why gradients are not compared, in words for the user; "" if they are."""
    for name, param in model.named_parameters():
        if hooks_of(param) or has_late_hooks(param):
            return f"{name} has hooks of yours on its gradient"
    return ""


@contextmanager
def noting_gradients(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Note the gradients of backwards inside, and keep none: rows of `WholeGradients`, by name."""
    rows: dict[str, torch.Tensor] = {}
    handles = []
    for name, param in model.named_parameters():

        def note(param: torch.Tensor, name: str = name) -> None:
            assert param.grad is not None
            grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
            param.grad = None
            flat = grad.reshape(-1)
            row = torch.zeros(_WIDTH, dtype=torch.float64, device=grad.device)
            for first in range(0, len(flat), _AT_ONCE):
                values = flat[first : first + _AT_ONCE]
                values = values.double()
                _add(row, values, sums_of(values, first))
            if name in rows:  # of another backward of the same pass: its square is not known
                row.fill_(math.nan)
            rows[name] = row

        if param.requires_grad:
            handles.append(param.register_post_accumulate_grad_hook(note))
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


class SavedTensors:
    """Counts the memory that a forward inside keeps for its backward; much of it ends the forward.

    Attributes:
        too_many: it has ended the forward.
    """

    def __init__(self, model: nn.Module, limit: float) -> None:
        """
        Args:
            model: whose parameters and buffers do not count.
            limit: bytes.
        """
        self.too_many = False
        self._limit = limit
        self._num_bytes = 0
        known = [*model.parameters(), *model.buffers()]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._num_bytes = 0
        self._seen = set(self._known)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._num_bytes += storage.nbytes()
        if self._num_bytes > self._limit:
            self.too_many = True
            raise MemoryError("activations of the whole model")
        return tensor


class NudgingWalk(DrawingWalk):
    """Runs all nodes, and moves what they return by what rounding may."""

    def __init__(self, draws: ForwardStreams) -> None:
        super().__init__(draws)
        self._generator = torch.Generator().manual_seed(1)

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        return tree_map(self._nudged, super().call(node, args, kwargs))

    def _nudged(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        share = torch.rand(value.shape, generator=self._generator).mul_(2).sub_(1)
        share.mul_(_NUDGE * torch.finfo(value.dtype).eps).add_(1)
        return (value * share.to(value.device)).to(value.dtype)


class PartialGradients:
    """What this rank has of the gradients of a step, seen as `Updates.watcher`."""

    def __init__(self, units: Sequence[FlatUnit], names: Sequence[str], device: Any) -> None:
        self._units = [unit for unit in units if unit.trainable]
        self._places = {name: place for place, name in enumerate(names)}
        self.counts = torch.zeros(len(names), dtype=torch.float64, device=device)
        self.rows = torch.zeros(len(names), _WIDTH, dtype=torch.float64, device=device)

    def see(self, divisor: torch.Tensor, has_grad: Sequence[bytes]) -> None:
        """Add up what this rank updates of each unit."""
        for unit in self._units:
            grad = unit.copied_grad().to(self.rows.device)
            first = unit.updated_range[0]
            of_slots: dict[int, list[TensorRange]] = {}
            for each in unit.layout.tensor_ranges(first, first + len(grad)):
                of_slots.setdefault(id(each.slot), []).append(each)
            for ranges in of_slots.values():
                place = self._places.get(ranges[0].part.tensor)
                if place is not None:
                    self._add_ranges(place, ranges, grad)

    def _add_ranges(self, place: int, ranges: Sequence[TensorRange], grad: torch.Tensor) -> None:
        for batch in _batches(ranges):
            values = torch.cat([grad[each.start : each.stop] for each in batch]).double()
            self.counts[place] += len(values)
            _add(self.rows[place], values, _sums_of_ranges(values, batch))


def _sums_of_ranges(values: torch.Tensor, ranges: Sequence[TensorRange]) -> torch.Tensor:
    """Return what ranges of one tensor add to its sums; `values`, float64, are their elements."""
    part = ranges[0].part
    if part.stride != contiguous_stride(part.shape):
        return sums_of_part(values, _places(_in_memory(ranges, 1).to(values.device), part))
    if len(ranges) == 1:
        return sums_of(values, ranges[0].first)
    if any(each.first % NUM_SUMS or (each.stop - each.start) % NUM_SUMS for each in ranges):
        return sums_of_part(values, _in_memory(ranges, 1).to(values.device))
    numbers = _in_memory(ranges, NUM_SUMS).to(values.device)
    return sums_of_rows(values.view(-1, NUM_SUMS), numbers)


def _in_memory(ranges: Sequence[TensorRange], unit: int) -> torch.Tensor:
    """Return the places of the elements of ranges in their tensor's memory, int64.

    `unit` is how many elements count as one; the ranges begin and end at multiples of it.
    """
    lengths = torch.tensor([(each.stop - each.start) // unit for each in ranges])
    firsts = torch.tensor([each.first // unit for each in ranges])
    shifts = firsts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)


def _batches(ranges: Sequence[TensorRange]) -> Iterator[list[TensorRange]]:
    """Yield ranges that together have about `_AT_ONCE` elements."""
    batch: list[TensorRange] = []
    numel = 0
    for whole in ranges:
        for start in range(whole.start, whole.stop, _AT_ONCE):
            stop = min(start + _AT_ONCE, whole.stop)
            first = whole.first + start - whole.start
            batch.append(TensorRange(whole.slot, start, stop, first))
            numel += stop - start
            if numel >= _AT_ONCE:
                yield batch
                batch, numel = [], 0
    if batch:
        yield batch


def _places(in_memory: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """Return the places of elements of a tensor in the order of its dimensions, int64.

    `in_memory` has their places in its memory order.
    """
    contiguous = contiguous_stride(part.shape)
    if part.stride == contiguous:
        return in_memory
    places = torch.zeros_like(in_memory)
    for stride, size, step in zip(part.stride, part.shape, contiguous, strict=True):
        places += in_memory // stride % size * step
    return places


def _add(row: torch.Tensor, values: torch.Tensor, sums: torch.Tensor) -> None:
    """Add elements of a gradient to its row, [65].

    `values`, 1-D and float64, are the elements, and `sums` what they add to its sums.
    """
    row[0] += values.dot(values)
    row[1:] += sums


class Apart(NamedTuple):
    """A gradient that differs.

    Attributes:
        name: of the parameter.
        share: of its norm that differs.
        times: how many times the whole model's it is; None: it is no multiple of that.
    """

    name: str
    share: float
    times: float | None


def compare_gradients(
    whole: WholeGradients | None,
    names: Sequence[str],
    numels: Sequence[int],
    partial: PartialGradients,
    dtype: torch.dtype,
    comm: Comm,
    world: Group,
) -> list[Apart] | None:
    """Return the gradients that differ, in the order of the parameters. Collective over all ranks.

    Args:
        whole: on rank 0.

    Returns:
        None where one is not finite, as where halves overflow: then nothing is told.
    """
    vector = torch.zeros(len(names), 1 + 3 * _WIDTH, dtype=torch.float64, device=comm.device)
    vector[:, 0] = partial.counts
    vector[:, 1 : 1 + _WIDTH] = partial.rows
    if whole is not None:
        vector[:, 1 + _WIDTH :] = torch.cat([whole.rows, whole.nudged], 1)
    vector = comm.all_reduce_small(vector.flatten(), world, name="gradients").view_as(vector)
    if not torch.isfinite(vector).all():
        return None
    counts, *rows = vector.cpu().split([1, _WIDTH, _WIDTH, _WIDTH], 1)
    found, expected, nudged = (each.tolist() for each in rows)
    total = math.sqrt(math.fsum(row[0] for row in expected))
    own = _OWN
    if dtype != torch.float32:
        own = _OF_FORMAT * torch.finfo(dtype).eps
    apart = []
    for place, name in enumerate(names):
        count = int(counts[place])
        if not count or count % numels[place]:
            continue
        copies = count // numels[place]
        mean = [number / copies for number in found[place]]
        off = _distance(mean, expected[place])
        size = math.sqrt(expected[place][0])
        rounding = _TIMES_NUDGED * _distance(nudged[place], expected[place])
        if off > own * (size + _OF_ALL * total) + rounding:
            times = _times(mean, expected[place], own)
            apart.append(Apart(name, off / max(size, 1e-30), times))
    return apart


def _distance(row: Sequence[float], other: Sequence[float]) -> float:
    norms = abs(math.sqrt(row[0]) - math.sqrt(other[0]))
    return max(norms, distance(row[1:], other[1:]))


def _times(row: Sequence[float], expected: Sequence[float], own: float) -> float | None:
    """Return how many times the expected gradient one is; None: it is no multiple of that."""
    square = math.fsum(number**2 for number in expected[1:])
    if not square:
        return None
    times = math.fsum(a * b for a, b in zip(row[1:], expected[1:], strict=True)) / square
    rest = [a - times * b for a, b in zip(row[1:], expected[1:], strict=True)]
    is_multiple = math.hypot(*rest) <= 10 * own * math.sqrt(square)
    return times if is_multiple else None
