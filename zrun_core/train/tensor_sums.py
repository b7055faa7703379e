"""A few numbers of a tensor that tell whether another one is the same, wherever its parts are.

Of a tensor's elements, 64 sums: each element times a fixed number between -1 and 1 is added to the
sum of its place modulo 64. The squares of how far the sums of two tensors are apart add up, on
average, to half the square of how far the tensors are apart; so elements in another order are seen
too. Sums of parts of a tensor add up to those of all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

NUM_SUMS = 64


def sums_of(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of a whole tensor: [64], float64.

    Args:
        values: 1-D, float64.
    """
    places = torch.arange(len(values), dtype=torch.float64, device=values.device)
    weighted = F.pad(places.mul_(0.7).cos_().mul_(values), (0, -len(values) % NUM_SUMS))
    return weighted.view(-1, NUM_SUMS).sum(0)


def sums_of_part(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what some elements of a tensor add to its sums: [64], float64.

    Args:
        values: 1-D, float64.
        places: of them in the whole tensor, int64.
    """
    weighted = places.double().mul_(0.7).cos_().mul_(values)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, places % NUM_SUMS, weighted)


def distance(sums: Sequence[float], others: Sequence[float]) -> float:
    """Return how far two tensors are apart, by their sums: about the 2-norm."""
    return math.dist(sums, others) * math.sqrt(2)
