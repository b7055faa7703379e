"""The record of a unit: what its update reads and writes beside the gradient, as one flat tensor.

    |------- fp32 master -------|---- exp_avg ----|---- exp_avg_sq ----|

A rank that updates 1024 elements, of which the last 24 are padding, with moments in bf16:

    bytes     0 .. 4096          .. 6096           .. 8096
    content   master 1024 x 4    exp_avg 1000 x 2  exp_avg_sq 1000 x 2

There is no master where the parameters are fp32 and on the device: they are their own. Moments come
with the unit's first update, because the optimizer itself makes them, with the values that it
begins with. Each moment has room for all elements that this rank updates, in their order and
without the padding at the end: elements [start, stop) are [start, stop) of the master and of each
moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

_MASTER = torch.float32


@dataclass(frozen=True)
class _Moment:
    """Bytes [start, stop) of the record, with one number for each element."""

    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class RecordLayout:
    """The division of a record's bytes.

    Attributes:
        master_numel: elements of the master, padding included; 0 where there is none.
        moment_numel: elements of each moment.
        moments: by name, in the order in which they lie.
        alignment: bytes; master and moments begin on multiples of it: pages, on a disk.
    """

    master_numel: int
    moment_numel: int
    moments: Mapping[str, _Moment]
    alignment: int = 1

    @property
    def master_bytes(self) -> int:
        return self.master_numel * _MASTER.itemsize

    @property
    def num_bytes(self) -> int:
        end = max((moment.stop for moment in self.moments.values()), default=self.master_bytes)
        return _round_up(end, self.alignment)

    def extended(self, dtypes: Mapping[str, torch.dtype]) -> RecordLayout:
        """Return the layout with more moments behind those that there are.

        Wide numbers come first, so that little is lost to alignment.

        Args:
            dtypes: of the new moments, by name.
        """
        moments = dict(self.moments)
        end = self.num_bytes
        for name, dtype in sorted(dtypes.items(), key=lambda item: -item[1].itemsize):
            start = _round_up(end, max(dtype.itemsize, self.alignment))
            end = start + self.moment_numel * dtype.itemsize
            moments[name] = _Moment(dtype, start, end)
        return replace(self, moments=moments)

    def master_of(self, record: torch.Tensor) -> torch.Tensor:
        """Return the master, [master_numel] fp32, as a view of `record`, [num_bytes] uint8."""
        return record[: self.master_bytes].view(_MASTER)

    def moments_of(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments, [moment_numel] each, as views of `record`, [num_bytes] uint8."""
        return {
            name: record[moment.start : moment.stop].view(moment.dtype)
            for name, moment in self.moments.items()
        }


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
