"""The checks of one step: its loss, gradients, norm and update against those of a plain loop.

[Note: what is rounding]
A gradient may differ by a share of its own norm and by a much smaller one of the whole model's: of
parameters whose gradient is zero in theory, such as the bias of keys in attention, only noise is
left. In bf16 and fp16 the plain loop runs in fp32 as well. What the format itself does to each
gradient is measured by that, and three times as much is allowed.

Some models make much of little: a batch norm of values that are all but equal divides their
rounding by its own size, and the mean of what one returns is nothing but rounding. So what seems
to differ, a gradient or a buffer, is looked at once more: the plain loop makes the step with values
that are off by rounding, and three times what that changes is rounding too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zrun_core.spine.spec import RunSpec
from zrun_core.verification import diagnosis
from zrun_core.verification.plain_loop import PlainGradient
from zrun_core.verification.record import (
    GRAD,
    VALUE,
    Range,
    StepRecord,
    TensorShape,
    in_memory_order,
    merged,
)
from zrun_core.verification.verdict import Difference, Worst

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of sums in another order, in fp32: of a gradient's own norm, and of the whole model's.
OWN, _OF_ALL = 1e-4, 1e-6
_OF_LOSS = 1e-5
_TIMES_FORMAT = 3.0  # of what the format does to the plain loop
# By the format of moments. Lion moves by signs: a moment near zero that is rounded moves the other
# way, one element in a few hundred in bf16.
_OF_UPDATE = {"fp32": 1e-4, "bf16": 2e-2}
_OF_SIGNS = {"fp32": 5e-2, "bf16": 0.4}


class Apart(NamedTuple):
    """How far a tensor is off. The largest is the one that is furthest off.

    Attributes:
        off: 2-norm of the difference.
        allowed: that is rounding.
        size: norm of what it should be.
    """

    off: float
    allowed: float
    size: float
    name: str

    def difference(self, step: int, what: str, looks_like: str, others: int) -> Difference:
        """Return it as the difference of a step, relative to its size."""
        size = max(self.size, 1e-30)
        return Difference(
            step, what, self.name, self.off / size, self.allowed / size, looks_like, others
        )


class StepCheck:
    """Compares one step. Each check returns what differs first, or None.

    Attributes:
        nudged_buffers: by replica, with values that are off by rounding; none where that was not
            needed.
    """

    def __init__(
        self,
        spec: RunSpec,
        step: int,
        record: StepRecord,
        tensors: Mapping[str, TensorShape],
        plain: PlainGradient,
        wide: PlainGradient,
        nudged: PlainGradient | None,
        worst: Worst,
    ) -> None:
        """
        Args:
            plain: the same step of the plain loop, in the run's format.
            wide: the same in fp32.
            nudged: the same with values that are off by rounding; None: it was not needed.
            worst: is raised by what agrees.
        """
        self._spec = spec
        self._step = step
        self._record = record
        self._numbers = record.numbers[0]
        self._tensors = tensors
        self._plain = plain
        self._wide = wide
        self._nudged = plain if nudged is None else nudged
        self.nudged_buffers = self._nudged.buffers
        self._worst = worst
        dtype = DTYPES[spec.job.precision.compute]
        self._is_narrow = dtype != torch.float32
        self._eps = torch.finfo(dtype).eps if self._is_narrow else 0.0

    def loss_and_gradients(self, names: Iterable[str]) -> Difference | None:
        """Compare all that the plain loop's forwards and backwards have come to."""
        return self._loss() or self._gradients(names) or self._norm()

    def _loss(self) -> Difference | None:
        """Compare the mean loss."""
        plain, found = self._plain.loss, self._numbers.loss
        if not math.isfinite(plain) and not math.isfinite(found):
            return None
        size = max(abs(plain), 1e-12)
        allowed = _OF_LOSS + self.allowed_for_format(abs(plain - self._wide.loss), size)
        allowed += _TIMES_FORMAT * abs(plain - self._nudged.loss) / size
        apart = abs(found - plain) / size
        if apart <= allowed:
            self._worst.loss = max(self._worst.loss, apart)
            return None
        like = f"{found:.7g}, and {plain:.7g} in the plain loop"
        return Difference(self._step, "loss", "", apart, allowed, like)

    def allowed_for_format(self, apart: float, size: float) -> float:
        """Return the relative difference that the format makes.

        Args:
            apart: of the plain loop in the run's format and in fp32.
            size: to which it is relative.
        """
        return _TIMES_FORMAT * apart / max(size, 1e-30) + self._eps

    def _gradients(self, names: Iterable[str]) -> Difference | None:
        """Compare the gradient of each parameter, on each rank that has a part of it."""
        total = norm_of(self._plain.grads.values())
        if not math.isfinite(total):
            return None  # both overflow: `norm` sees whether the run has skipped it
        apart: list[Apart] = []
        for name in names:
            shape = self._tensors[name]
            zeros = torch.zeros(shape.shape)
            expected = self._plain.grads.get(name, zeros)
            flat = in_memory_order(expected, shape)
            size = float(flat.norm())
            nudged = float((expected - self._nudged.grads.get(name, zeros)).norm())
            allowed = OWN * size + _OF_ALL * total + _TIMES_FORMAT * nudged
            if self._is_narrow:
                in_format = float((expected - self._wide.grads.get(name, zeros)).norm())
                allowed += _TIMES_FORMAT * in_format + self._eps * (size + 0.01 * total)
            off = _most_apart(self._record.ranges[GRAD].get(name, ()), flat)
            if not off <= allowed:  # also where one of them is not a number
                apart.append(Apart(off, allowed, size, name))
            elif size > 1e-3 * total:
                self._worst.gradient = max(self._worst.gradient, off / size)
        if not apart:
            return None
        worst = max(apart)
        like = self._gradient_in_words(worst.name)
        return worst.difference(self._step, "gradient", like, len(apart) - 1)

    def _gradient_in_words(self, name: str) -> str:
        shape = self._tensors[name]
        ranges = self._record.ranges[GRAD].get(name, ())
        expected = self._plain.grads.get(name)
        if expected is None:
            return "the plain loop has none"
        flat = in_memory_order(expected, shape)
        wrong = {
            each.rank
            for each in ranges
            if _is_off(each.values, flat[each.first : each.first + len(each.values)])
        }
        everyone = {each.rank for each in ranges}
        ranks = ""
        if wrong and wrong != everyone:
            ranks = "rank " + ", ".join(map(str, sorted(wrong)))
            ranges = sorted(ranges, key=lambda each: each.rank in wrong)  # the last ones count
        whole = merged(ranges, shape)
        if whole is None:
            return "no rank has all of it"
        dims = self._spec.plan.dims
        axes = {"dp": dims.dp, "tp": dims.tp, "micro-batches": self._spec.batch.accumulation}
        return diagnosis.of_gradient(
            name, whole.flatten(), expected.flatten(), self._plain.parts, ranks, axes
        )

    def _norm(self) -> Difference | None:
        """Compare the norm, what the gradient is divided by, and whether the step is skipped."""
        numbers, weight = self._numbers, self._plain.weight
        share = weight / self._spec.batch.global_size
        to_mean = share * numbers.scale
        norm = norm_of(self._plain.grads.values()) / to_mean if to_mean else 0.0
        is_skipped = not (math.isfinite(norm) and math.isfinite(self._plain.loss) and share)
        others = norm_of(self._wide.grads.values()) / to_mean if to_mean else 0.0
        is_at_the_edge = self._spec.job.precision.compute == "fp16" and not math.isfinite(others)
        if numbers.skipped != is_skipped and not is_at_the_edge:
            does = "skips" if numbers.skipped else "makes"
            like = f"the run {does} this step, and the norm of the plain gradient is {norm:g}"
            return Difference(self._step, "skip", "", 1.0, 0.0, like)
        if is_skipped or numbers.skipped:
            return None
        nudged = norm_of(self._nudged.grads.values()) / to_mean if to_mean else 0.0
        allowed = OWN + self.allowed_for_format(abs(others - norm), norm)
        allowed += _TIMES_FORMAT * abs(nudged - norm) / max(norm, 1e-30)
        apart = abs(numbers.norm - norm) / max(norm, 1e-30)
        if not apart <= allowed:
            like = f"{numbers.norm:.6g}, and {norm:.6g} in the plain loop"
            if norm:
                like += f": {numbers.norm / norm:.4g} times"
            return Difference(self._step, "norm", "", apart, allowed, like)
        divisor = to_mean
        if self._spec.job.optim.clip is not None:
            divisor *= max(1.0, norm / self._spec.job.optim.clip)
        apart = abs(numbers.divisor - divisor) / max(divisor, 1e-30)
        if not apart <= allowed:
            like = (
                f"the gradient is divided by {numbers.divisor:.6g}, and by {divisor:.6g} in the "
                "plain loop: loss weights, loss scale or clipping"
            )
            return Difference(self._step, "norm", "", apart, allowed, like)
        return None

    def values(
        self, before: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> Difference | None:
        """Compare the values after the update, on each rank that has a part of them.

        Args:
            before: by name, before the update.
            expected: after the plain update by the run's gradient.
        """
        apart: list[Apart] = []
        optim = self._spec.job.optim
        rounding_of = _OF_SIGNS if optim.name.lower() == "lion" else _OF_UPDATE
        for name, value in before.items():
            moved = float((expected[name] - value).norm())
            rounding = 4 * torch.finfo(torch.float32).eps * float(value.norm())
            allowed = rounding_of[optim.moments] * moved + rounding
            flat = in_memory_order(expected[name], self._tensors[name])
            off = _most_apart(self._record.ranges[VALUE].get(name, ()), flat)
            scale = max(moved, rounding, 1e-30)
            if not off <= allowed:  # also where one of them is not a number
                apart.append(Apart(off, allowed, scale, name))
            elif moved:
                self._worst.update = max(self._worst.update, max(off - rounding, 0.0) / scale)
        if not apart:
            return None
        worst = max(apart)
        name = worst.name
        like = "no rank has all of it"
        found = merged(self._record.ranges[VALUE].get(name, ()), self._tensors[name])
        if found is not None:
            like = diagnosis.of_update(
                before[name].flatten(),
                found.flatten(),
                expected[name].flatten(),
                self._numbers.lr,
            )
        return worst.difference(self._step, "update", like, len(apart) - 1)


def _most_apart(ranges: Sequence[Range], flat: Tensor) -> float:
    """Return by how much the rank that is furthest off differs; inf where a part is missing."""
    squares: dict[int, float] = {}
    is_known = torch.zeros(len(flat), dtype=torch.bool)
    for rank, first, values in ranges:
        stop = first + len(values)
        off = float((values - flat[first:stop]).double().square().sum())
        squares[rank] = squares.get(rank, 0.0) + off
        is_known[first:stop] = True
    if not is_known.all():
        return math.inf
    if any(math.isnan(square) for square in squares.values()):
        return math.inf
    # Ranks with slices of one copy are each a part of it.
    return math.sqrt(max(squares.values(), default=0.0))


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the 2-norm of several tensors together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _is_off(found: Tensor, expected: Tensor) -> bool:
    """Return whether a range differs by more than rounding."""
    if not torch.isfinite(found).all():
        return True
    return float((found - expected).norm()) > 10 * OWN * float(expected.norm())
