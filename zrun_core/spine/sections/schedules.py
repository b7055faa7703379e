"""What sets the schedules of a step apart from each other: facts, by name.

Whoever does something else for one schedule asks for a fact, not for its name: `SCHEDULES[name]`.
The orders themselves are made by `pipeline/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

PLAIN: Final = "1f1b"  # the default


@dataclass(frozen=True)
class Schedule:
    """What is true of a schedule, and of no other where it says nothing.

    Attributes:
        forwards_first: all forwards of a step come before its backwards.
        has_chunks: each stage has several chunks of the model.
        splits_backward: weights' gradients are made apart from those of their inputs, later.
        goes_in_slices: one stage; all micro-batches go through a slice of the model before the
            next one comes.
        updates_each: stages update after each micro-batch, and do not wait for each other.
        keeps_version: a micro-batch uses one version of the weights on all stages, that with which
            it entered the pipeline; of those that update each.
    """

    forwards_first: bool = False
    has_chunks: bool = False
    splits_backward: bool = False
    goes_in_slices: bool = False
    updates_each: bool = False
    keeps_version: bool = False

    @property
    def needs_stages(self) -> bool:
        """True if it is an order of several stages."""
        return self.has_chunks or self.updates_each

    @property
    def is_plain_on_one_stage(self) -> bool:
        """True if on one stage it is the same as all others of which this is true."""
        return not (self.needs_stages or self.goes_in_slices)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        PLAIN: Schedule(),
        "gpipe": Schedule(forwards_first=True),
        "interleaved": Schedule(has_chunks=True),
        "zero_bubble": Schedule(splits_backward=True),
        "layer_major": Schedule(goes_in_slices=True),
        "pipedream": Schedule(updates_each=True),
        "pipedream_vertical": Schedule(updates_each=True, keeps_version=True),
    }
)
