"""A few numbers of a tensor that tell whether another one is the same, wherever its parts are.

Of a tensor's elements, 64 sums: each element times a fixed number between -1 and 1 is added to the
sum of its place modulo 64. The squares of how far the sums of two tensors are apart add up, on
average, to half the square of how far the tensors are apart; so elements in another order are seen
too. Sums of parts of a tensor add up to those of all of it.

[Note: rows]
The number of place p is cos(0.7 p). Within a row of 64 elements, that begins at place 64 n,

    cos(0.7 (64 n + k)) = cos(44.8 n) cos(0.7 k) - sin(44.8 n) sin(0.7 k)

so a product of two numbers for each row by the rows makes all sums, without one for each element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

NUM_SUMS = 64
_STEP = 0.7  # of the angle, from one place to the next


def sums_of(values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return what consecutive elements of a tensor add to its sums: [64], float64.

    Args:
        values: 1-D, float64.
        first: the place of the first one in the whole tensor.
    """
    before = first % NUM_SUMS
    after = -(before + len(values)) % NUM_SUMS
    if before or after:
        values = F.pad(values, (before, after))
    rows = values.view(-1, NUM_SUMS)
    number = first // NUM_SUMS
    return sums_of_rows(rows, torch.arange(number, number + len(rows), device=values.device))


def sums_of_rows(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return what rows of a tensor add to its sums, [64], float64: see [Note: rows].

    Args:
        rows: [rows, 64], float64.
        numbers: of the rows in the whole tensor, [rows], int64.
    """
    angles = numbers.double().mul_(NUM_SUMS * _STEP)
    cosines, sines = torch.stack([angles.cos(), angles.sin_()]) @ rows
    within = torch.arange(NUM_SUMS, dtype=torch.float64, device=rows.device).mul_(_STEP)
    return within.cos().mul_(cosines).sub_(within.sin().mul_(sines))


def sums_of_part(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what some elements of a tensor add to its sums: [64], float64.

    Args:
        values: 1-D, float64.
        places: of them in the whole tensor, int64.
    """
    weighted = places.double().mul_(_STEP).cos_().mul_(values)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, places % NUM_SUMS, weighted)


def distance(sums: Sequence[float], others: Sequence[float]) -> float:
    """Return how far two tensors are apart, by their sums: about the 2-norm."""
    return math.dist(sums, others) * math.sqrt(2)
