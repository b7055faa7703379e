"""The record of a unit: its master and moments, in their home, and the views of both.

    record.at()    |---- master ----|-- moment 1 --|-- moment 2 --|      see `record_layout.py`

An update reads and writes it beside the gradient. Parameters that are their own masters have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from zrun_core.memory.arena import byte_buffer
from zrun_core.memory.buffers import Kind, Tier
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.tiers.stored import Stored
from zrun_core.zero.unit.home import Home, InPlace, fetch_now
from zrun_core.zero.unit.record_layout import RecordLayout

if TYPE_CHECKING:
    from zrun_core.zero.unit.flat_unit import FlatUnit


class UnitRecord:
    """The master and the moments of one trainable unit on this rank.

    Attributes:
        has_master: masters are fp32, and others than the parameters.
        layout: where in the record they are.
        home: of the record, [num_bytes] uint8.
    """

    def __init__(self, unit: FlatUnit, device: torch.device) -> None:
        """Take the memory of its home; that of the moments comes with `add_moments`."""
        start, stop = unit.updated_range
        self.has_master = unit.policy.has_master(unit.layout, unit.placement)
        master_numel = stop - start if self.has_master else 0
        # The padding at the end has no moments.
        moment_numel = max((piece.stop for piece in unit.layout.pieces(start, stop)), default=0)
        self._seen: torch.Tensor | None = None
        self.home: Home
        if unit.placement.optimizer is Tier.DEVICE:
            self.layout = RecordLayout(master_numel, moment_numel, {})
            self.home = InPlace(byte_buffer(self.layout.num_bytes, device))
            return
        alignment = 1
        planned = unit.policy.buffers(unit.layout, unit.mesh_info, unit.placement)
        capacity = sum(buffer.num_bytes for buffer in planned if buffer.kind is Kind.OPTIM)
        if unit.placement.optimizer is Tier.DISK:
            alignment = PAGE_BYTES
            capacity = 0
        self.layout = RecordLayout(master_numel, moment_numel, {}, alignment)
        self.home = unit.make_away(Kind.OPTIM, capacity, torch.uint8)
        self.home.grow(self.layout.num_bytes)

    @property
    def master(self) -> torch.Tensor:
        """[updated range] fp32, what an update changes, once the record was fetched."""
        return self._views()[0]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's states by name, each with a number for every updated element."""
        return self._views()[1]

    def _views(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return master and moments. The views are made anew only where the record has moved."""
        record = self.home.at()
        if record is not self._seen:
            self._seen = record
            self._seen_views = (self.layout.master_of(record), self.layout.moments_of(record))
        return self._seen_views

    def add_moments(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Make room for more moments. The record may lie elsewhere afterwards."""
        self.layout = self.layout.extended(dtypes)
        self.home.grow(self.layout.num_bytes)
        self._seen = None
        self._views()  # the old views would keep the old memory

    def fetch_master(self) -> torch.Tensor:
        """Fetch the record, and return the master."""
        fetch_now(self.home)
        return self.master

    def stored_master(self) -> torch.Tensor | Stored:
        """Return the master as it is stored. Nothing is fetched."""
        return self.home.stored(torch.float32, 0, self.layout.master_bytes)

    def stored_moment(self, name: str) -> torch.Tensor | Stored:
        """Return one of `moments` as it is stored. Nothing is fetched."""
        moment = self.layout.moments[name]
        return self.home.stored(moment.dtype, moment.start, moment.stop)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of permanent memory on the device."""
        if isinstance(self.home, InPlace):
            yield self.home.at()
