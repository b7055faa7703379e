"""Steps of one stage of a pipeline alone, without a word of the other stages: those of PipeDream.

steps = StageSteps(sharded)
steps.versions.show(version)       # before each pass: the weights that its micro-batch uses
made = steps.step(lr)              # after each backward
steps.end(any_skipped)             # once the pipeline is drained
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zrun_core.distributed.comm import CommPhase
from zrun_core.distributed.step_message import all_reduce_stage
from zrun_core.zero.reduce.nonfinite import UnitNorms
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.versions import Versions


@dataclass(frozen=True)
class StageUpdate:
    """Result of the update of one stage of a pipeline alone. Tensors are 0-d and on the device.

    Attributes:
        square: float64, squared norm of the stage's gradient.
        skipped: bool: the update was not made, because that is not finite.
        norms: of its units, by which the skipped step's culprit can be found.
    """

    square: torch.Tensor
    skipped: torch.Tensor
    norms: UnitNorms


class StageSteps:
    """The steps of a stage.

    Attributes:
        sharded: the stage's part of the model.
        versions: of its parameters.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.versions = Versions(sharded.units, sharded.settings.versions)

    def step(self, lr: float) -> StageUpdate:
        """Update the stage by its newest micro-batch.

        The gradient is not clipped or divided. The stage's ranks skip the update together if it is
        not finite: the next version has the values of the last one.
        """
        sharded = self.sharded
        comm = sharded.comm
        comm.phase = CommPhase.STEP
        has_grad_here = sharded.grad.has_grad_here()
        square, num_with_grad = all_reduce_stage(
            sharded.grad.square_norm(), has_grad_here, sharded.mesh.data, comm
        )
        has_grad = sharded.grad.has_grad_anywhere(has_grad_here, num_with_grad)
        skipped = ~torch.isfinite(square)
        one = torch.ones((), dtype=torch.float32, device=comm.device)
        self.versions.advance()
        sharded.updates.make(lr, one, skipped, has_grad)
        if not sharded.updates.skips_on_device and bool(skipped):
            self.versions.repeat()
        sharded.gatherer.stale.refresh()
        sharded.grad.begin_step()
        return StageUpdate(square, skipped, sharded.grad.inspector.norms)

    def end(self, skipped: torch.Tensor) -> None:
        """End micro-batches that were steps of their own: the pipeline is drained.

        Buffers that forwards wrote are put back to where they were before all of them, if an update
        was skipped: with several under way, nobody knows which of them wrote what.

        Args:
            skipped: 0-d bool: an update of this stage was.
        """
        self.versions.begin()
        self.versions.show(0)
        self.sharded.running.end_step(skipped)
