"""What a wrong gradient or update looks like: a factor, a missing micro-batch, another order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zrun_core.verification.plain_loop import Contribution

_CLOSE = 1e-3  # of the norm: what remains of a difference that is explained


def of_gradient(
    name: str,
    found: Tensor,
    expected: Tensor,
    parts: Sequence[Contribution],
    ranks: str,
    axes: dict[str, int],
) -> str:
    """Return in words what a gradient looks like.

    Args:
        found: of the run, in the order of memory.
        parts: the same by micro-batch, as far as they are known.
        ranks: which ranks have it so, in words; "" where all do.
        axes: number of ranks along each, and micro-batches of a rank.
    """
    text = _of_micro_batches(name, found, parts) or _of_values(found, expected, axes)
    return f"on {ranks}, {text}" if ranks else text


def _of_values(found: Tensor, expected: Tensor, axes: dict[str, int]) -> str:
    if not torch.isfinite(found).all():
        return "it is not finite, and the plain loop's is"
    if not found.any():
        return "it is zero: this parameter gets no gradient"
    factor = _factor(found, expected)
    if factor is not None:
        return f"it is {_times(factor)} as large{_of_axis(factor, axes)}"
    known = found != 0
    if not known.all() and _is_close(found[known], expected[known]):
        return f"{_share(~known)} of it are zero, the rest is right: a part is missing"
    if _is_close(found.sort().values, expected.sort().values):
        return "it has the same numbers in another order"
    apart = (found - expected).abs() > 1e-3 * expected.abs().max()
    if apart.any() and apart.sum() < apart.numel() / 4:
        first = int(apart.nonzero()[0])
        return f"{_share(apart)} of it differ, from element {first} on"
    cosine = float(torch.nn.functional.cosine_similarity(found, expected, dim=0))
    return f"its direction differs: the cosine of both is {cosine:.3f}"


def _of_micro_batches(name: str, found: Tensor, parts: Sequence[Contribution]) -> str:
    """Return which micro-batches count how often in it; "" if that does not explain it."""
    columns = [part for part in parts if name in part.grads]
    if not 2 <= len(columns) <= 64 or not torch.isfinite(found).all() or not found.any():
        return ""
    matrix = torch.stack([part.grads[name].flatten() for part in columns], 1).double()
    if matrix.shape[0] < matrix.shape[1]:
        return ""
    # Their order of elements is that of shapes: `found` is given in it too, by the caller.
    counts = torch.linalg.lstsq(matrix, found.double().unsqueeze(1)).solution.squeeze(1)
    if not _is_close((matrix @ counts).float(), found):
        return ""
    if (counts - counts[0]).abs().max() < 0.02:
        return ""  # a factor of all
    odd: dict[str, list[int]] = {}
    for part, count in zip(columns, counts.tolist(), strict=True):
        if abs(count - 1) > 0.02:
            odd.setdefault(f"data-parallel rank {part.rank} {_counted(count)}", []).append(
                part.micro
            )
    return ", ".join(f"micro-batch {_listed(micros)} of {what}" for what, micros in odd.items())


def _counted(count: float) -> str:
    return "is missing" if abs(count) < 0.01 else f"counts {_times(count)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def of_update(before: Tensor, found: Tensor, expected: Tensor, lr: float) -> str:
    """Return in words what an update looks like.

    Args:
        before: value of the parameter.
        found: after the run's update.
        expected: after the plain one.
    """
    moved, should = found - before, expected - before
    if not moved.any():
        return "it was not updated"
    factor = _factor(moved, should)
    if factor is not None:
        return f"it moves {_times(factor)} as far"
    decay = _factor(moved - should, before)
    if decay is not None and lr:
        return f"what differs is {-decay / lr:.3g} x rate x value: weight decay"
    return "it moves in another direction: a state of the optimizer differs"


def _factor(found: Tensor, expected: Tensor) -> float | None:
    """Return the number that makes one of the other; None: there is none, or it is 1."""
    square = float(expected.double().square().sum())
    if not square:
        return None
    factor = float(found.double() @ expected.double()) / square
    is_one = abs(factor - 1) < _CLOSE
    if is_one or not math.isfinite(factor) or not _is_close(found, expected * factor):
        return None
    return factor


def _is_close(one: Tensor, other: Tensor) -> bool:
    size = float(other.double().norm())
    return float((one.double() - other.double()).norm()) <= _CLOSE * max(size, 1e-30)


def _times(count: float) -> str:
    return f"{count:.3g} times"


def _share(which: Tensor) -> str:
    return f"{int(which.sum())} of {which.numel()} elements"


def _of_axis(factor: float, axes: dict[str, int]) -> str:
    """Return which axis has as many ranks as the factor; "" if none has."""
    for axis, size in axes.items():
        if size > 1 and math.isclose(factor, size, rel_tol=0.01):
            return f", as a sum over {axis} ({size}) where a mean belongs"
        if size > 1 and math.isclose(factor, 1 / size, rel_tol=0.01):
            return f", as a mean over {axis} ({size}) where a sum belongs, or one addend of it"
    return ""
