"""Cross-entropy over a vocabulary, in fp32, whole or in chunks that bound its memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zrun_core.data.batch import IGNORED


def token_loss(
    hidden: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor], chunk: int | None
) -> Tensor:
    """Return the mean cross-entropy of the labelled positions: fp32, 0-d.

    It is NaN where no position is labelled, as torch's own.

    Logits are the largest activation of a small model: 4 bytes * positions * vocabulary, twice with
    their gradient. With `chunk` they exist for that many positions at a time and are computed again
    in backward.

    Args:
        hidden: [B, T, D].
        labels: int64 [B, T], `IGNORED` where a position does not count.
        head: [N, D] -> logits [N, V].
        chunk: positions per chunk; None: all at once.
    """
    hidden = hidden.flatten(0, 1)  # [N, D]
    labels = labels.flatten()  # [N]
    if chunk is None:
        return F.cross_entropy(head(hidden).float(), labels, ignore_index=IGNORED)

    def part(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).float(), labels, ignore_index=IGNORED, reduction="sum")

    chunks = zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
    sums = [
        checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False) for each in chunks
    ]
    return torch.stack(sums).sum() / (labels != IGNORED).sum()
