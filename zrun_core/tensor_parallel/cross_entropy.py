"""Cross-entropy of logits of which each rank has a slice.

Of a position with logits x and label y, loss = log(sum of exp(x - m)) - (x[y] - m), m the largest.
Three messages of a number per position carry m, the sum and x[y] - m; the gradient needs none.

It is computed in fp32 for a few positions at a time, so that besides the logits, in whatever format
they are, no tensor of their size is made: neither for the loss, nor, where nobody else holds the
logits, for their gradient, which then takes their place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from zrun_core.tensor_parallel.vocabulary import Vocabulary

# Of logits in fp32 at a time: few enough to stay in a CPU's cache; a GPU wants long operators.
_CPU_CHUNK_BYTES = 1 << 22
_GPU_CHUNK_BYTES = 1 << 26


class Target(NamedTuple):
    """The targets of N positions.

    Attributes:
        labels: int64 [N].
        ignored: label of positions that do not count.
        weight: of each entry of the vocabulary, [V]; None: 1.
        smoothing: the part of a label that all entries share.
    """

    labels: torch.Tensor
    ignored: int
    weight: torch.Tensor | None
    smoothing: float

    @property
    def counts(self) -> torch.Tensor:
        """Return which positions count, [N]."""
        return self.labels != self.ignored

    def label_weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of each position's label, 0 where it does not count, [N]."""
        if self.weight is None:
            return self.counts.to(dtype)
        labels = self.labels.where(self.counts, 0)
        return self.weight.to(dtype)[labels].where(self.counts, 0)


class _Losses(torch.autograd.Function):
    """Logits of this rank [N, length] -> the loss of each position [N], at least in fp32."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, target: Target, vocabulary: Vocabulary
    ) -> torch.Tensor:
        comm, name = vocabulary.comm, vocabulary.name
        own = local[:, : vocabulary.num_own]
        ends = _Ends.of(own, target, vocabulary)
        largest = comm.all_reduce_max(ends.largest, f"{name}: largest logits")
        ends = ends.relative_to(largest)
        total = comm.all_reduce(ends.total, f"{name}: sums of exponentials")
        aimed = comm.all_reduce(ends.aimed, f"{name}: logits of labels")
        mass = _mass(target, vocabulary, total.dtype)
        ctx.save_for_backward(local.detach(), largest, total, mass, target.labels, target.weight)
        ctx.ignored, ctx.smoothing = target.ignored, target.smoothing
        ctx.vocabulary = vocabulary
        return (mass * total.log() - aimed).where(target.counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        local, largest, total, mass, labels, weight = ctx.saved_tensors
        target = Target(labels, ctx.ignored, weight, ctx.smoothing)
        vocabulary = ctx.vocabulary
        num_own = vocabulary.num_own
        out = local if _is_ours(local, largest) else torch.empty_like(local)
        out[:, num_own:] = 0.0
        grad = grad.where(target.counts, 0.0)
        at_label, shared = _aims(target, vocabulary, grad.dtype)
        column, is_own = _columns(target, vocabulary)
        scale = grad * mass / total
        at_label = (grad * at_label).where(is_own, 0.0)
        for rows in _chunks(local, vocabulary):
            part = _less(local[rows, :num_own], largest[rows, None])
            part.exp_().mul_(scale[rows, None])
            if shared is not None:
                part.addcmul_(grad[rows, None], shared, value=-1.0)
            if num_own:
                part.scatter_add_(1, column[rows, None], -at_label[rows, None])
            out[rows, :num_own] = part
        return out, None, None


class _Ends(NamedTuple):
    """Sums over this rank's entries that the loss of each position is made of. All are [N].

    Attributes:
        largest: of the logits, finite.
        total: sum of exp(x - largest).
        aimed: sum of (x - largest) * aim: the weight that the target gives to an entry.
        aim: sum of it.
    """

    largest: torch.Tensor
    total: torch.Tensor
    aimed: torch.Tensor
    aim: torch.Tensor

    @classmethod
    def of(cls, own: torch.Tensor, target: Target, vocabulary: Vocabulary) -> _Ends:
        """Compute them.

        `own` are the logits of this rank, without padding.
        """
        dtype = torch.promote_types(own.dtype, torch.float32)
        at_label, shared = _aims(target, vocabulary, dtype)
        column, is_own = _columns(target, vocabulary)
        at_label = at_label.where(is_own, 0.0)
        largest = own.new_full(own.shape[:1], torch.finfo(dtype).min, dtype=dtype)
        total = torch.zeros_like(largest)
        aimed = torch.zeros_like(largest)
        aim = at_label if shared is None else at_label + shared.sum()
        if not vocabulary.num_own:
            return cls(largest, total, aimed, aim)
        for rows in _chunks(own, vocabulary):
            # One that is -inf everywhere has no distance from itself.
            largest[rows] = own[rows].amax(1).to(dtype).clamp_min(torch.finfo(dtype).min)
            part = _less(own[rows], largest[rows, None])
            found = part.gather(1, column[rows, None]).squeeze(1)
            aimed[rows] = (found * at_label[rows]).where(is_own[rows], 0.0)
            if shared is not None:
                aimed[rows] += part @ shared
            total[rows] = part.exp_().sum(1)
        return cls(largest, total, aimed, aim)

    def relative_to(self, largest: torch.Tensor) -> _Ends:
        """Return the same, with the largest logits of all ranks in place of this one's."""
        less = self.largest - largest
        total = self.total * less.exp()
        aimed = self.aimed + (self.aim * less).where(self.aim != 0.0, 0.0)
        return _Ends(largest, total, aimed, self.aim)


def position_losses(local: torch.Tensor, target: Target, vocabulary: Vocabulary) -> torch.Tensor:
    """Return the loss of each position, [N], in fp32 or what is wider.

    Args:
        local: logits of this rank, [N, length].
        target: of the positions, the same on all ranks.
    """
    vocabulary.check(target.labels, target.ignored)
    return _Losses.apply(local, target, vocabulary)  # type: ignore[no-any-return, no-untyped-call]


def _aims(
    target: Target, vocabulary: Vocabulary, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what the target gives to the label of each position, and to each entry of this rank.

    The latter is None where it is nothing.
    """
    at_label = target.label_weights(dtype) * (1.0 - target.smoothing)
    if not target.smoothing:
        return at_label, None
    shared = at_label.new_full((vocabulary.num_own,), target.smoothing / vocabulary.size)
    if target.weight is not None:
        stop = vocabulary.start + vocabulary.num_own
        shared *= target.weight[vocabulary.start : stop].to(dtype)
    return at_label, shared


def _mass(target: Target, vocabulary: Vocabulary, dtype: torch.dtype) -> torch.Tensor:
    """Return what the target of each position gives to all entries of the vocabulary, [N]."""
    mass = target.label_weights(dtype) * (1.0 - target.smoothing)
    if not target.smoothing:
        return mass
    if target.weight is None:
        return mass + target.smoothing
    return mass + target.weight.to(dtype).sum() * (target.smoothing / vocabulary.size)


def _columns(target: Target, vocabulary: Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each label, and whether this rank has it; column 0 where not."""
    column = target.labels - vocabulary.start
    is_own = (column >= 0) & (column < vocabulary.num_own) & target.counts
    return column.where(is_own, 0), is_own


def _less(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return `logits - largest`, in the format of `largest`, as a tensor of its own."""
    if logits.device.type == "cpu" and logits.dtype != largest.dtype:
        # An operator of a CPU copies what it promotes, and makes its result beside the copy.
        return logits.to(largest.dtype).sub_(largest)
    return logits - largest


def _chunks(logits: torch.Tensor, vocabulary: Vocabulary) -> list[slice]:
    """Return ranges of rows that are few bytes in fp32."""
    num_rows, length = logits.shape
    is_cpu = vocabulary.comm.device_type == "cpu"
    num_bytes = _CPU_CHUNK_BYTES if is_cpu else _GPU_CHUNK_BYTES
    step = max(1, num_bytes // (4 * max(1, length)))
    return [slice(first, first + step) for first in range(0, num_rows, step)]


def _is_ours(saved: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether nobody else can see the memory of `saved`, now or in another backward.

    `own` was saved together with it, and is known to be held by nobody else.
    """
    if torch._C._autograd._get_current_graph_task_keep_graph() or not saved.is_contiguous():
        return False
    return _num_holders(saved) <= _num_holders(own)


def _num_holders(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
