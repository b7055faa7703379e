"""Find the columns of what a linear makes that its model takes, in forwards without values.

    q, k, v = self.c_attn(x).chunk(3, dim=-1)

    takes, of 192 columns                     0 to 63       64 to 127     128 to 191
    rank 0 should have of them, fused 3       0 to 31       64 to 95      128 to 159
    rank 0 takes, of its own, colwise         0 to 31       32 to 63      64 to 95

Shapes fit either way: only where the parts lie tells a projection that is fused. Views share the
storage of what a linear has made, so that an operation's columns are known by its strides. A copy
is not followed: the two forwards are compared up to the first one, which a view of other sizes may
not need.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zrun_core.errors import JobError
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.tensor_parallel.region_plan import Region
from zrun_core.tensor_parallel.roles import any_number
from zrun_core.zero.passes.module_hooks import storage_of, tensors_in

Columns = NDArray[np.int64]  # numbers of columns, in order
_COPIES = frozenset({"clone", "_to_copy", "copy_", "cat", "stack"})


class Taken(NamedTuple):
    """What an operation takes.

    Attributes:
        operation: as torch calls it.
        columns: of what a linear has made.
    """

    operation: str
    columns: Columns


class ColumnWatch:
    """What operations take of what linears make, in one forward.

    Attributes:
        taken: by name of a linear, one operation after the other.
    """

    def __init__(self) -> None:
        self.taken: dict[str, list[Taken]] = defaultdict(list)
        self._made: dict[int | None, tuple[str, torch.Tensor]] = {}  # by storage, which they keep

    def made(self, name: str, out: torch.Tensor) -> None:
        """Take down what a linear has made, [..., columns]."""
        if out.dim() and out.is_contiguous() and storage_of(out) is not None:
            self._made[storage_of(out)] = name, out

    def used(self, operation: str, args: Any, out: Any) -> None:
        """Take down what an operation is given, unless it hands out a view of it."""
        views = {storage_of(tensor) for tensor in tensors_in(out)}
        if not self._made or not views:
            return
        for tensor in tensors_in(args):
            storage = storage_of(tensor)
            if storage in self._made and storage not in views:
                name, whole = self._made[storage]
                self.taken[name].append(Taken(operation, _columns(tensor, whole)))


def _columns(view: torch.Tensor, whole: torch.Tensor) -> Columns:
    """Return the columns of `whole`, [..., columns], that a view of it has."""
    width = whole.shape[-1]
    columns = np.array([(view.storage_offset() - whole.storage_offset()) % width])
    for size, stride in zip(view.shape, view.stride(), strict=True):
        step = stride % width
        if step and size > 1:
            count = min(size, width // math.gcd(step, width))
            columns = np.unique((columns[:, None] + step * np.arange(count)) % width)
    return columns


def check_columns(
    plan: TensorPlan, whole: Mapping[str, list[Taken]], divided: Mapping[str, list[Taken]]
) -> None:
    """Check that the first rank takes its own part of what the whole model takes.

    Args:
        whole: what is taken in a forward of the whole model.
        divided: in one with the slices of the first rank.

    Raises:
        JobError: it takes something else.
    """
    for region in plan.regions:
        for name in region.columns:
            tensor = plan.tensors.get(f"{name}.weight")
            if tensor is None or tensor.cut is None:
                continue
            own = _own(tensor.cut.sections, plan.degree)
            pieces: list[Columns] = []
            is_alike = True
            for wanted, found in zip(whole[name], divided[name], strict=False):
                if wanted.operation != found.operation or wanted.operation in _COPIES:
                    break
                pieces.append(wanted.columns)
                ours = np.intersect1d(wanted.columns, own)
                is_alike = is_alike and np.array_equal(ours, own[found.columns])
            if not is_alike:
                raise _fused(plan, region, name, pieces, own)


def _own(sections: tuple[int, ...], degree: int) -> Columns:
    """Return the columns that the first of `degree` ranks has."""
    starts = np.cumsum((0, *sections[:-1]))
    each = zip(starts, sections, strict=True)
    return np.concatenate([start + np.arange(length // degree) for start, length in each])


def _fused(
    plan: TensorPlan, region: Region, name: str, taken: list[Columns], own: Columns
) -> JobError:
    parts = sorted({_text(part): part for part in taken}.items(), key=lambda item: item[1][0])
    texts = ", ".join(text for text, _ in parts)
    sizes = [len(part) for _, part in parts]
    joined = np.concatenate([part for _, part in parts])
    is_partition = np.array_equal(joined, np.arange(len(own) * plan.degree))
    if is_partition and len(sizes) > 1:
        unit = math.gcd(*sizes)
        proportions = ":".join(str(size // unit) for size in sizes)
        role = f"fused {len(sizes)}" if len(set(sizes)) == 1 else f"fused {proportions}"
    else:
        role = "fused, with the proportions of its sections"
    return JobError(
        f"parallel.plan: {region.around or 'the model'} takes {texts} of what {name} makes apart, "
        f"and as {plan.entries[name].role} rank 0 has {_text(own)} of it; write "
        f'"{any_number(name)}": {role}, or {name}: whole and {region.row}: whole'
    )


def _text(columns: Columns) -> str:
    """Return `columns 0 to 31 and 64 to 95`; of more than three pieces, the first ones."""
    pieces = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    shown = [f"{piece[0]} to {piece[-1]}" for piece in pieces[:3]]
    if len(pieces) > len(shown):
        shown.append("...")
    return f"columns {' and '.join(shown)}"
