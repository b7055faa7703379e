"""What a rank has of the model before it is sharded: all of it, or a stage, or slices of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.resume import Resumed
from zrun_core.distributed.rng import Streams
from zrun_core.tensor_parallel.divide import Divided
from zrun_core.train.stage_building import StageParts
from zrun_core.train.trainer import Trainer
from zrun_core.train.value_check import ValueCheck, not_compared, why_not_compared
from zrun_core.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank computes with. By default it is all of it.

    Attributes:
        stage: of a pipeline; None: the rank has all blocks.
        divided: layers of which it has slices; None: it has all of each.
        check: compares what the part computes with the whole model; or why nothing does; None:
            the rank has the whole model.
        notes: for the user.
    """

    stage: StageParts | None = None
    divided: Divided | None = None
    check: ValueCheck | str | None = None
    notes: Sequence[str] = ()

    def state_of(self, sharded: ShardedModel) -> ModelState:
        """Return what is saved of the model, in the order of the whole one."""
        if self.stage is None:
            return ModelState(sharded)
        saved_elsewhere = self.stage.stage.saved_elsewhere
        return ModelState(sharded, order=self.stage.order, saved_elsewhere=saved_elsewhere)

    def draw_from(self, streams: Streams) -> None:
        """Let divided layers draw from the rank's streams."""
        if self.divided is not None:
            self.divided.regions.streams = streams

    def end_check(self, trainer: Trainer, resumed: Resumed | None) -> list[str]:
        """Compare what this rank's part of the model computes; return notes for the user."""
        if self.check is None:
            return []
        if isinstance(self.check, str):
            trainer.loss_causes.why_not_compared = self.check
            return [not_compared(self.check)]
        step = None if resumed is None else resumed.path
        notes = self.check.compare(trainer.micro_batches, trainer.sharded, self.divided, step)
        trainer.loss_causes.why_not_compared = why_not_compared(notes)
        return notes
