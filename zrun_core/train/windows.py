"""Windows of steps: what a run is made of where steps do not end with a message of all ranks.

Within a window ranks go their own ways; at its end they meet, and one message carries what that of
a step carries elsewhere. A window ends where something looks at the whole model (a save, an
evaluation, the end).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from zrun_core.data.batch import MicroBatch
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.spine.config import JobConfig
from zrun_core.telemetry.recorder import IssuedStep
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.zero.reduce.nonfinite import UnitNorms


class ReadStep(NamedTuple):
    """A step that was read, or is to be.

    Attributes:
        batches: its micro-batches of this rank, so far.
        samples: its positions in the data.
        epoch: how often the data was read by its end; None if its length is not known.
    """

    batches: Sequence[MicroBatch]
    samples: range
    epoch: float | None


@dataclass(frozen=True)
class EndedStep:
    """A step of a window that has ended.

    Attributes:
        read: what it was made of.
        issued: what this rank knew of it before the message.
        totals: over all ranks. Wishes of ranks come with the last step of the window.
        norms: of this rank's units, by which the culprit of a skipped step can be found.
        losses: shares of the loss, of micro-batches that this rank has read for itself.
    """

    read: ReadStep
    issued: IssuedStep
    totals: StepTotals
    norms: UnitNorms
    losses: Sequence[torch.Tensor]


class Windows(Protocol):
    """Reads and runs windows of steps."""

    def length(self, steps: int) -> int:
        """Return the steps that may be made until ranks must meet.

        Args:
            steps: made so far.
        """
        ...

    def read(self, steps: int) -> list[ReadStep]:
        """Return the steps of the next window: none where the data has ended.

        Args:
            steps: made so far.
        """
        ...

    def run(
        self,
        steps: Sequence[ReadStep],
        first: int,
        lr_of: Callable[[int], float],
        wishes_of: Callable[[], NamedVector],
    ) -> list[EndedStep]:
        """Run a window, or the steps of it before somebody had to stop. Collective.

        Args:
            first: number of the first one.
            lr_of: returns the learning rate of each, counted from 0.
            wishes_of: returns at the end what else ranks sum, named as fields of `StepTotals`.
        """
        ...


def steps_until_due(job: JobConfig, steps: int, most: int) -> int:
    """Return the steps of a window that ends where something looks at the whole model.

    Args:
        steps: made so far.
    """
    saves = None if job.checkpoint is None else job.checkpoint.every
    evaluations = None if job.eval is None else job.eval.every
    until_due = [
        every - steps % every for every in (saves, evaluations, job.guards.replica_every) if every
    ]
    if job.steps is not None:
        until_due.append(job.steps - steps)
    return min(most, *until_due)


def totals_of(
    numbers: Sequence[float], columns: Sequence[str], num_steps: int, wishes: Sequence[str]
) -> list[StepTotals]:
    """Return the totals of each step of a window.

    Args:
        numbers: summed over all ranks: for each step a row of `columns`, then wishes.
        columns: names of a step's numbers, as in `StepTotals`.
        wishes: names of theirs, which come with the last step. Those of `columns` are left out.
    """
    width = len(columns)
    found = []
    for start in range(0, num_steps * width, width):
        row = dict(zip(columns, numbers[start : start + width], strict=True))
        found.append(StepTotals(**row, agreed=1.0, scale=1.0))
    told = dict(zip(wishes, numbers[num_steps * width :], strict=True))
    found[-1] = found[-1]._replace(
        **{name: value for name, value in told.items() if name not in columns}
    )
    return found
