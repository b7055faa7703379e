"""What GPUs reported in a run, and which of it explains why the run failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zrun.topology.boards import Fault
from zrun.transport.frames import Frame
from zrun_core.spine.spec import LaunchPlan

_MOST_KEPT = 256  # faults of a run: a bad GPU reports thousands
_SHORTLY_S = 30.0


@dataclass(frozen=True)
class GpuFault:
    """An error that the GPU of some ranks has reported.

    Attributes:
        time: unix seconds at which the launcher heard of it.
    """

    ranks: tuple[int, ...]
    fault: Fault
    time: float

    @classmethod
    def of_frame(cls, frame: Frame, now: float) -> GpuFault:
        """Return what an agent's frame tells."""
        return cls(tuple(frame["ranks"]), Fault(**frame["fault"]), now)

    def describe(self, plan: LaunchPlan) -> str:
        """Return it as a sentence: `the GPU of rank 1 (node1, cuda:1) reported Xid 79, ...`."""
        names = [f"rank {rank} ({plan.place_in_words(rank)})" for rank in self.ranks]
        return f"the GPU of {' and '.join(names)}, {self.fault.uuid}, reported {self.fault}"

    def to_json(self) -> dict[str, Any]:
        """Return it for failure.json."""
        return {"ranks": list(self.ranks), **asdict(self.fault), "time": self.time}


def add(faults: list[GpuFault], new: GpuFault) -> None:
    """Add a fault to those of a run, unless it is one of too many."""
    if len(faults) < _MOST_KEPT:
        faults.append(new)


def explaining(
    faults: Sequence[GpuFault], ranks: Iterable[int], failed_at: float
) -> GpuFault | None:
    """Return the fault that explains best why ranks failed; None: there is none.

    Of their own GPUs the first after which nothing can go on, else the first shortly before they
    failed: many errors are survived. Else the first of another GPU after which nothing can go on:
    its rank makes all others wait.

    Args:
        failed_at: unix seconds at which the ranks failed, or were seen alive last.
    """
    blamed = set(ranks)
    fatal = [each for each in faults if each.fault.is_fatal]
    own_fatal = [each for each in fatal if blamed & set(each.ranks)]
    lately = [
        each for each in faults if blamed & set(each.ranks) and each.time > failed_at - _SHORTLY_S
    ]
    return next(iter((*own_fatal, *lately, *fatal)), None)


def lost_ranks(faults: Iterable[GpuFault]) -> set[int]:
    """Return the ranks whose GPU cannot go on."""
    return {rank for each in faults if each.fault.is_fatal for rank in each.ranks}
