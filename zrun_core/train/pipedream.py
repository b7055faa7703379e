"""PipeDream: each micro-batch is a step, and stages update without waiting for each other.

The trainer runs windows of micro-batches. In a window every stage updates after each backward
(`schedule.pipedream`), and no message goes to all ranks; at its end the pipeline is drained, and
one message over all ranks carries what the message of a step carries: losses, norms, wishes to stop
or to save. A window ends where something looks at the whole model (a save, an evaluation, the end),
and after 16 micro-batches for each stage, so that nobody waits long for a stop.

The same windows are made by a run that goes on from a save: so that resumes exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import BatchLoader
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.guards.losses import APART
from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.pipeline.schedule import num_flowing, version_used
from zrun_core.spine.config import JobConfig
from zrun_core.telemetry.metrics import StepClock, StepPhase
from zrun_core.telemetry.recorder import IssuedStep
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.pipeline_runner import PipelineRunner
from zrun_core.train.windows import EndedStep, ReadStep, steps_until_due, totals_of
from zrun_core.user_code.loss import Loss, LossKind
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.stage_steps import StageSteps, StageUpdate
from zrun_core.zero.unit.versions import Versions

# Numbers of a step that ranks sum; the last two are counted once per stage, and the norm's square
# stands for it until it is summed.
_COLUMNS = ("weight", "loss", "samples", "tokens", APART, "grad_norm", "skipped")


class PipeDreamRunner(PipelineRunner):
    """Runs the actions of one stage, with its updates.

    Attributes:
        versions: of the stage's parameters.
        update: called after the backward of each micro-batch, with its number.
        rows: by micro-batch, the numbers that ranks sum.
    """

    makes_trial_steps = False  # stages update as they please
    versions: Versions
    update: Callable[[int], None]
    rows: Sequence[NamedVector] = ()

    def _execute(
        self, action: Action, micro_batches: Sequence[MicroBatch], sums: NamedVector
    ) -> torch.Tensor | None:
        kind, _, number = action
        if kind is ActionKind.UPDATE:
            self._phase.enter("update")
            with self._clock.during(StepPhase.OPTIM):
                self.update(number)
            return None
        stages = self._stage.split.pp
        version = version_used(self._schedule, self._stage.index, stages, number)
        self.versions.show(version)
        if kind is ActionKind.FORWARD:
            self._run_forward(action, micro_batches[number], self.rows[number])
            return None
        return self._run_backward(action, boundary=True)

    def _drawn_as(self, number: int) -> tuple[int, int]:
        return self._step + number, 0

    def _share_of(self, loss: Loss, batch: MicroBatch) -> torch.Tensor:
        """Return the part of the micro-batch's loss that is differentiated here, 0-d.

        Other stages update before they could know the weight of all samples: so the loss is divided
        by that before its backward. Where no sample counts it is NaN, and all stages skip.
        """
        weight = torch.zeros((), dtype=torch.float64, device=loss.value.device)
        if batch.num_samples:
            weight += loss.weight
        data = self._sharded.mesh.data
        total = weight
        if data.size > 1:
            total = self._comm.all_reduce_small(weight.view(1), data, name="weight of samples")[0]
        factor = 1 / total
        if loss.kind is LossKind.MEAN:
            factor = weight / total
        value = loss.value if batch.num_samples else loss.value * 0.0
        return value * factor.to(value.dtype)


class PipeDreamWindows:
    """Reads and runs windows of micro-batches."""

    def __init__(
        self,
        job: JobConfig,
        stages: int,
        sharded: ShardedModel,
        loader: BatchLoader,
        runner: PipeDreamRunner,
        clock: StepClock,
    ) -> None:
        self._job = job
        self._most = num_flowing(job.parallel.schedule, stages, 1)
        self._sharded = sharded
        self._steps = StageSteps(sharded)
        self._comm = sharded.comm
        self._loader = loader
        self._runner = runner
        runner.versions = self._steps.versions
        self._clock = clock

    def length(self, steps: int) -> int:
        """Return the steps that may be made until the pipeline must be drained.

        Args:
            steps: made so far.
        """
        return steps_until_due(self._job, steps, self._most)

    def read(self, steps: int) -> list[ReadStep]:
        """Read the micro-batches of the next window: none where the data has ended.

        Args:
            steps: made so far.
        """
        found = []
        for _ in range(self.length(steps)):
            micro_batches = self._loader.next_step()
            if micro_batches is None:
                break
            found.append(ReadStep(micro_batches, self._loader.last_step, self._loader.epoch))
        return found

    def run(
        self,
        steps: Sequence[ReadStep],
        first: int,
        lr_of: Callable[[int], float],
        wishes_of: Callable[[], NamedVector],
    ) -> list[EndedStep]:
        """Run a window. Collective.

        Args:
            first: number of the first one.
            lr_of: returns the learning rate of each, counted from 0.
            wishes_of: returns at the end what else ranks sum, named as fields of `StepTotals`.
        """
        runner = self._runner
        batches = [batch for step in steps for batch in step.batches]
        table = torch.zeros(
            len(steps), len(_COLUMNS), dtype=torch.float64, device=self._comm.device
        )
        runner.rows = [NamedVector(_COLUMNS, row) for row in table]
        is_counted = self._sharded.mesh.data.index == 0
        updates: list[StageUpdate] = []
        issued: list[IssuedStep] = []

        def end_step(number: int) -> None:
            is_last = number == len(steps) - 1
            runner.waited[StepPhase.OPTIM] += self._comm.waits.take()
            issued.append(
                IssuedStep(
                    step=first + number,
                    lr=lr_of(number),
                    clock=self._clock.restart(),
                    waited=runner.waited,
                    sent=self._comm.drain(),
                    flops=runner.flops(batches[number : number + 1]),
                    uncounted=runner.uncounted,
                    micro_batches=1,
                    tier_counts=self._sharded.updates.step_counts,
                    actions=runner.marks if is_last else (),  # of the whole window
                )
            )
            runner.begin_step()

        def update(number: int) -> None:
            made = self._steps.step(lr_of(number))
            updates.append(made)
            if is_counted:
                runner.rows[number].add(grad_norm=made.square, skipped=made.skipped.double())
            if number < len(steps) - 1:  # the last one ends with the window
                end_step(number)

        runner.update = update
        runner.begin_step()
        self._sharded.begin_step()
        order = runner.order(len(steps))
        losses = runner.run(order, batches, NamedVector.of(self._comm.device), first)
        self._steps.end(torch.stack([each.skipped for each in updates]).any())
        wishes = wishes_of()
        message = torch.cat([table.view(-1), wishes.values])
        message = self._comm.all_reduce_small(message, self._sharded.mesh.world, name="window")
        end_step(len(steps) - 1)
        all_totals = _totals(self._comm.read(message), len(steps), wishes.names)
        return [
            EndedStep(
                step,
                issued[number],
                all_totals[number],
                updates[number].norms,
                losses[number : number + 1],
            )
            for number, step in enumerate(steps)
        ]


def _totals(numbers: list[float], num_steps: int, names: Sequence[str]) -> list[StepTotals]:
    """Return the totals of each step of a window.

    `numbers`, summed over all ranks, are a row of `_COLUMNS` for each step, then the wishes, of
    which `names` has the names.
    """
    found = totals_of(numbers, _COLUMNS, num_steps, names)
    return [
        step._replace(grad_norm=step.grad_norm**0.5, skipped=float(step.skipped > 0))
        for step in found
    ]
