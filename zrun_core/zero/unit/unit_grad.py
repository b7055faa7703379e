"""The gradient of a unit: from the parameters' `grad` to the sum over ranks, in its home.

    param.grad --accumulate--> unsharded --Exchange.reduce_grad--> sum_buffer()
                                                        or: scratch --store--> its home elsewhere

`unsharded` is the unit's own memory where micro-batches are added up before they are reduced
(stages 0 and 1), and scratch of the reducer elsewhere, and wherever the gradient's home is on
another tier. There micro-batches are added up in the home: sums over ranks at stages 2 and 3, and
this rank's own gradient (`has_partial`) at stages 0 and 1, which comes back to be summed with the
last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zrun_core.memory.arena import flat_buffer
from zrun_core.memory.buffers import Kind, Tier
from zrun_core.tiers.transfer import Transfer
from zrun_core.zero.unit.home import Home, InPlace
from zrun_core.zero.unit.home_elsewhere import AwayHome

if TYPE_CHECKING:
    from zrun_core.zero.unit.flat_unit import FlatUnit

_NORM_CHUNK = 1 << 18  # elements that a CPU casts at a time: they stay in cache


class UnitGrad:
    """The gradient of one trainable unit on this rank, in reduce dtype.

    Attributes:
        home: of all elements, or of the updated range.
        unsharded: [padded_numel], the flat gradient that parameters' gradients move into; None
            until there is memory for it.
        has_grad: by parameter, 1 if it received a gradient on this rank in this step.
        is_reduced: `home` holds this step's sum over ranks so far.
        keeps_partial_sums: the home is elsewhere, and has room for all elements of what this rank's
            micro-batches add up to before they are summed over ranks.
        has_partial: it holds that.
    """

    def __init__(self, unit: FlatUnit, device: torch.device) -> None:
        """Take the memory of its home."""
        self._unit = unit
        self._away: AwayHome | None = None
        self.keeps_partial_sums = False
        dtype = unit.policy.reduce_dtype
        # Stages 2 and 3 reduce after each micro-batch: each fills scratch of the reducer, and only
        # the updated range of the sum is kept here.
        reduces_each = unit.policy.zero.reduce_now(boundary=False)
        self._keeps_unsharded = not reduces_each or unit.shard.size == 1
        numel = unit.layout.padded_numel if self._keeps_unsharded else unit.layout.shard_numel
        self.home: Home
        if unit.placement.grad is Tier.DEVICE:
            self.home = InPlace(flat_buffer(numel, dtype, device))
        else:
            self.keeps_partial_sums = self._keeps_unsharded
            own = unit.updated_range if self.keeps_partial_sums else None
            self._keeps_unsharded = False
            self._away = unit.make_away(Kind.GRAD, numel, dtype, own)
            self.home = self._away
        self._seen: torch.Tensor | None = None  # memory of the home, of which `_local` is a part
        self.unsharded: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []  # of the parameters in it
        self._norms: dict[int, list[torch.Tensor]] = {}  # of this step's sum, by part
        self.begin_step()

    @property
    def local(self) -> torch.Tensor:
        """[updated range] in reduce dtype: the elements of `grad` that this rank updates."""
        grad = self.home.at()
        if grad is not self._seen:
            self._seen = grad
            is_whole = self._keeps_unsharded or self.keeps_partial_sums
            self._local = self._unit.local_part(grad) if is_whole else grad
        return self._local

    def fetch(self) -> torch.Tensor:
        """Fetch the gradient, and return the elements that this rank updates."""
        self.home.fetch()
        return self.local

    @property
    def leaves(self) -> bool:
        """True if the home of the gradient is elsewhere: `store` brings it there."""
        return self._away is not None

    def store(self, values: torch.Tensor, *, accumulate: bool, is_last: bool = False) -> Transfer:
        """Begin to store a sum, or this rank's gradient so far, in the home elsewhere.

        Args:
            values: [updated range] or [padded_numel], on the device.
            accumulate: add it to what is there.
            is_last: that is the step's gradient: its norms are taken in passing.

        Returns:
            What to wait for before `values` is written again.
        """
        assert self._away is not None
        self._wait_for_reader()
        self._norms.clear()
        look = self._keep_norms if is_last else None
        assert self._unit.tiers is not None
        with self._unit.tiers.spans.named("store gradient of", self._unit.name):
            first = self._first_of(values)
            return self._away.store(values, first, accumulate=accumulate, look=look)

    def load(self, target: torch.Tensor) -> None:
        """Copy what `store` has stored of as many elements to `target`, and wait for it."""
        assert self._away is not None
        assert self._unit.tiers is not None
        coming = self._away.load(target, self._first_of(target))
        self._unit.tiers.wait(coming, self._unit.placement.grad)

    def _first_of(self, values: torch.Tensor) -> int:
        """Return where all of the gradient, or the updated range of it, begins in its home."""
        is_whole = values.numel() == self._unit.layout.padded_numel
        return 0 if is_whole or not self.keeps_partial_sums else self._unit.updated_range[0]

    def sum_buffer(self) -> torch.Tensor:
        """Return where the sum over ranks goes; it holds an earlier sum if there is one."""
        self._wait_for_reader()
        return self.fetch() if self.is_reduced else self.local

    def _wait_for_reader(self) -> None:
        """Wait for the update that may still read the last step's gradient, before it changes."""
        self._unit.update_side.wait()

    def put(self) -> None:
        """Store the gradient, which was written, in its home."""
        self.home.put()
        self.home.drop()

    def drop(self) -> None:
        """Release the memory of what was fetched."""
        self.home.drop()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of permanent memory on the device."""
        if isinstance(self.home, InPlace):
            yield self.home.at()

    def begin_step(self) -> None:
        """Forget the gradients of the last optimizer step."""
        self.has_grad = bytearray(len(self._unit.params))
        self.is_reduced = False
        self.has_partial = False
        self._norms.clear()
        self._written = bytearray(
            len(self._unit.params)
        )  # by parameter: its view of the flat gradient
        self._use_own()

    def begin(self, scratch: torch.Tensor, *, goes_on: bool = False) -> None:
        """Use `scratch` [padded_numel] as the flat gradient until `end`.

        Args:
            goes_on: begin with what this rank's micro-batches have added up to.
        """
        self._written = bytearray(len(self._unit.params))
        if goes_on:
            self.load(scratch)
            self._written = bytearray(b"\1" * len(self._unit.params))
            self.has_partial = False
        self._use(scratch)

    def end(self) -> None:
        """Leave the flat gradient to the reduction: what comes from now on is apart from it."""
        self._use_own()

    def _use_own(self) -> None:
        """Use the unit's own flat gradient, if it has one of all elements."""
        if self._keeps_unsharded:
            self._use(self.home.at())
        else:
            self.unsharded = None
            self._views = []

    def _use(self, flat: torch.Tensor) -> None:
        if flat is self.unsharded:
            return
        self.unsharded = flat
        self._views = self._unit.views_of(flat)
        flat[self._unit.layout.numel :].zero_()  # the padding is summed too

    def reopen(self, *, counts_here: bool) -> None:
        """Prepare for more gradients after the step's sum over ranks was made.

        The next sum must contain this one once: one of the ranks that hold it keeps it, and the
        others start from zero.
        """
        total = self.fetch()
        if not counts_here:
            total.zero_()
        if not self._keeps_unsharded:
            self.put()
            return
        # The sum lies in the flat gradient itself, which is reduced again: outside of the updated
        # range there are this rank's addends, which the sum contains already.
        self._use_own()
        assert self.unsharded is not None
        start, stop = self._unit.updated_range
        self.unsharded[:start].zero_()
        self.unsharded[stop:].zero_()
        self._written = bytearray(b"\1" * len(self._unit.params))  # what comes next is added
        self.is_reduced = False

    def owns(self, flat: torch.Tensor) -> bool:
        """Return whether the flat gradient `flat` is the unit's own, not scratch."""
        return self._keeps_unsharded and flat is self.home.at()

    def accumulate(self, number: int) -> None:
        """Move the gradient of parameter `number` into the flat one."""
        param = self._unit.params[number]
        view = self._views[number]
        grad = param.grad
        param.grad = None
        assert grad is not None
        if grad.requires_grad:  # of a backward that is to be differentiated itself
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if self._written[number]:
            view.add_(grad)
        else:
            if self._keeps_unsharded:
                self._wait_for_reader()
            view.copy_(grad)
        self._written[number] = 1
        self.has_grad[number] = 1

    def complete(self) -> torch.Tensor:
        """Return this rank's flat gradient [padded_numel], with zeros where there was none."""
        assert self.unsharded is not None, "`begin` comes first where gradients are sharded"
        if self._keeps_unsharded:
            self._wait_for_reader()
        for number, view in enumerate(self._views):
            if not self._written[number]:
                view.zero_()
        return self.unsharded

    def norms(self, part: int) -> list[torch.Tensor]:
        """Return the 2-norms of pieces of the gradient in `part`, 0-d fp32 where it lives."""
        if self._away is not None:
            self._away.settle()
        if not self._norms:
            self._keep_norms(self.fetch())
            self.home.drop()
        return self._norms[part]

    def copied(self) -> torch.Tensor:
        """Return a copy of what this rank updates, once `norms` has waited for it."""
        values = self.fetch().to("cpu", torch.float32, copy=True)
        self.home.drop()
        return values

    def _keep_norms(self, grad: torch.Tensor) -> None:
        """Take the norms of the whole sum: of all of it, or of the updated range."""
        if grad.numel() == self._unit.layout.padded_numel:
            grad = self._unit.local_part(grad)
        first = self._unit.updated_range[0]
        for part in self._unit.exchange.counted_parts(self._unit.layout, self._unit.mesh_info):
            start, stop = self._unit.layout.part_range(part)
            self._norms[part] = norms_of(grad[start - first : stop - first])


def norms_of(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the 2-norms of pieces of `part`, 0-d fp32: of all of it, except on a CPU.

    There 16 bits are cast first, into memory that stays in cache: torch's own norm of them is six
    times as slow, and fresh memory for each piece four times.
    """
    if part.device.type != "cpu":
        return [torch.linalg.vector_norm(part, dtype=torch.float32)]
    chunks = part.split(_NORM_CHUNK)
    if part.dtype != torch.float32:
        wide = torch.empty(min(part.numel(), _NORM_CHUNK))
        return [torch.linalg.vector_norm(wide[: len(each)].copy_(each)) for each in chunks]
    return [torch.linalg.vector_norm(each) for each in chunks]
