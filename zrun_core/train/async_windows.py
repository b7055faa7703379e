"""Windows of an asynchronous parameter server: ranks compute shares, push, pull, and never wait.

    begin            all ranks have the same parameters; each has its own share of the first step
    share after share  forward, backward; push the gradient; pull parameters, and the next share
    end              every share was pushed, and all ranks have the parameters that came of it

A step is so many samples as everywhere: its totals are those of its shares, whoever computed them,
and its times are those of the window, divided evenly. What a signal asks for travels with a push,
and ends the window with the steps that were begun.

A save beside training becomes a step where ranks meet, so windows are short until it is one: after
a save of step S they end at S+1, S+2, S+4, S+8, ... It is there after at most twice the steps that
writing it has taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import BatchLoader
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.hardware.clock import Waits
from zrun_core.parameter_server.messages import Push
from zrun_core.parameter_server.server import LeftOut, WindowPlan, WindowRecord, make_channel
from zrun_core.parameter_server.shares import Share
from zrun_core.spine.events import Emitter
from zrun_core.telemetry.metrics import StepClock, StepMarks, StepPhase
from zrun_core.telemetry.recorder import IssuedStep
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.train.micro_batches import MicroBatchRunner, RunnerContext
from zrun_core.train.windows import EndedStep, ReadStep, steps_until_due, totals_of
from zrun_core.zero.push_pull import PushPull

K = TypeVar("K", bound=Hashable)

_MOST_STEPS = 32  # of a window: at its end the fastest rank waits for the slowest's last share
_OF_SHARES = ("weight", "loss", "samples", "tokens")
_COLUMNS = (*_OF_SHARES, "grad_norm", "skipped")  # the last two are counted by the server


class _Done(NamedTuple):
    """What a rank has done in a window.

    Attributes:
        num_steps: that all ranks have made.
        micro_batches: of this one.
        flops: of this one.
        losses: by step, shares of the loss of the micro-batches that are its own by the contract.
    """

    num_steps: int
    micro_batches: int
    flops: float
    losses: dict[int, list[torch.Tensor]]


class AsyncWindows:
    """Reads and runs windows of steps whose shares are dealt out."""

    def __init__(
        self,
        context: RunnerContext,
        loader: BatchLoader,
        emitter: Emitter,
        runner: MicroBatchRunner,
        asked_to_stop: Callable[[], bool],
        saving: Callable[[], int | None],
    ) -> None:
        """
        Args:
            loader: of the data; a rank reads whatever share it computes.
            saving: returns the step that is being saved beside training; the same on all ranks.

        Raises:
            JobError: the dataset has no indices.
        """
        self._job = context.spec.job
        self._sharded = context.sharded
        self._comm = context.sharded.comm
        self._clock = context.clock
        self._phase = context.phase
        self._loader = loader
        self._emitter = emitter
        self._runner = runner
        self._asked_to_stop = asked_to_stop
        self._saving = saving
        self._memory = PushPull(context.sharded)
        self._group = context.sharded.mesh.replicate
        bound = context.spec.job.staleness
        self._channel = make_channel(
            self._memory,
            self._group,
            self._comm,
            None if bound == "any" else bound,
            context.spec.batch.global_size,
            context.spec.job.limits.collective_s,
        )
        self._draws = context.draws
        loader.coming(0)

    def length(self, steps: int) -> int:
        saving = self._saving()
        most = _MOST_STEPS if saving is None else min(_MOST_STEPS, max(1, steps - saving))
        return steps_until_due(self._job, steps, most)

    def read(self, steps: int) -> list[ReadStep]:
        """Return the steps of the next window, and have the newest parameters on all ranks.

        They are not, where a checkpoint was loaded, or the user has written to them.
        """
        self._sharded.gatherer.stale.refresh()
        self._sharded.updates.wait_for_readers()
        return [
            ReadStep((), positions, self._loader.epoch_at(positions.stop))
            for positions in self._loader.coming(self.length(steps))
        ]

    def run(
        self,
        steps: Sequence[ReadStep],
        first: int,
        lr_of: Callable[[int], float],
        wishes_of: Callable[[], NamedVector],
    ) -> list[EndedStep]:
        table = torch.zeros(len(steps), len(_COLUMNS), dtype=torch.float64)
        rows = [NamedVector(_COLUMNS, row) for row in table]
        self._runner.begin_step()
        self._memory.refresh()
        self._memory.show(newest=False)
        done = self._compute_shares(steps, first, lr_of, rows)
        record = self._channel.end()
        self._memory.show(newest=True)
        num_steps = done.num_steps
        if record is not None:
            self._add_updates(record, rows[:num_steps])
            self._tell(record, steps, first, num_steps)
        wishes = wishes_of()
        message = torch.cat([table[:num_steps].view(-1), wishes.values])
        message = self._comm.all_reduce_small(message, self._sharded.mesh.world, name="window")
        all_totals = totals_of(self._comm.read(message), _COLUMNS, num_steps, wishes.names)
        self._runner.waited[StepPhase.OPTIM] += self._comm.waits.take()
        self._loader.seek(steps[num_steps - 1].samples.stop)
        # Without a sample that counts there is no update.
        all_totals = [
            totals._replace(skipped=float(totals.skipped > 0 or not totals.weight))
            for totals in all_totals
        ]
        all_issued = self._issued(first, done, self._rates(all_totals, lr_of))
        return [
            EndedStep(
                steps[number],
                all_issued[number],
                totals,
                (record and record.skipped(number)) or [],
                done.losses.get(number, []),
            )
            for number, totals in enumerate(all_totals)
        ]

    def _rates(
        self, all_totals: Sequence[StepTotals], lr_of: Callable[[int], float]
    ) -> list[float]:
        """Return the learning rate of each step, as the server had it."""
        if self._job.staleness != 0:
            return [lr_of(number) for number in range(len(all_totals))]
        made = accumulate((not totals.skipped for totals in all_totals), initial=0)
        return [lr_of(number) for number in made]

    def _compute_shares(
        self,
        steps: Sequence[ReadStep],
        first: int,
        lr_of: Callable[[int], float],
        rows: Sequence[NamedVector],
    ) -> _Done:
        """Compute shares, push and pull, until the window is over.

        The numbers of a share are added to the row of its step. The rest is as of `run`.
        """
        sizes = [len(step.samples) for step in steps]
        share = self._channel.begin(WindowPlan(sizes, lr_of))
        losses: dict[int, list[torch.Tensor]] = {}
        micro_batches = 0
        flops = 0.0
        while True:
            batches = self._read(steps[share.step], share.part)
            # A rank's own share draws what it does elsewhere, each other one of the step apart.
            with self._draws.apart((share.part - self._group.index) % self._group.size):
                push, of_share = self._compute(share, batches, first, rows[share.step])
            if share.part == self._group.index:
                losses[share.step] = of_share
            micro_batches += len(batches)
            flops += self._runner.flops(batches)
            self._phase.enter("update")
            with self._clock.during(StepPhase.OPTIM):
                reply = self._channel.exchange(push)
            self._runner.waited[StepPhase.OPTIM] += self._comm.waits.take()
            self._sharded.running.end_step(torch.tensor(reply.was_skipped))
            self._sharded.num_pushes += 1
            if reply.step < 0:
                return _Done(reply.num_steps, micro_batches, flops, losses)
            share = Share(reply.step, reply.part)

    def _read(self, step: ReadStep, part: int) -> list[MicroBatch]:
        self._phase.enter("data")
        with self._clock.during(StepPhase.DATA):
            return self._loader.share(step.samples, part)

    def _compute(
        self, share: Share, batches: Sequence[MicroBatch], first: int, row: NamedVector
    ) -> tuple[Push, list[torch.Tensor]]:
        """Compute the gradient of a share.

        The numbers of the share are added to `row`; the window's first step has number `first`.

        Returns:
            What is told with the gradient, and the shares of the loss.
        """
        self._sharded.begin_step()
        sums = NamedVector.of(self._comm.device, **dict.fromkeys(_OF_SHARES, 0.0))
        order = self._runner.order(len(batches))
        losses = self._runner.run(order, batches, sums, first + share.step)
        weight, loss, samples, _ = sums.values.tolist()
        row.add(**{name: sums[name] for name in _OF_SHARES})
        has_grad = self._memory.has_grad()
        asks = self._asked_to_stop()
        return Push(*share, weight, int(samples), loss, asks, has_grad), losses

    # At the end of a window

    @staticmethod
    def _add_updates(record: WindowRecord, rows: Sequence[NamedVector]) -> None:
        """Add what the server knows of the steps."""
        for step, row in enumerate(rows):
            is_skipped = record.skipped(step) is not None
            row.add(grad_norm=record.grad_norm(step), skipped=float(is_skipped))

    def _tell(
        self, record: WindowRecord, steps: Sequence[ReadStep], first: int, num_steps: int
    ) -> None:
        """Emit how late the gradients of the window came, and which were left out."""
        for step, left_out in sorted(record.left_out.items()):
            if record.skipped(step) is None:  # else the step's own warning says why
                for each in left_out:
                    self._warn_of(each, first + step, steps[step].samples)
        self._emitter.emit(
            "pushes",
            step=first + num_steps - 1,
            steps=num_steps,
            bound=self._job.staleness,
            staleness={str(late): count for late, count in sorted(record.staleness.items())},
            by_rank=record.pushes_of(self._group.size),
            most_ahead=max(each.lead for each in record.made),
            left_out=record.num_left_out,
        )

    def _warn_of(self, left_out: LeftOut, step: int, positions: range) -> None:
        """Warn of a push that was left out of a step of which others were made use of."""
        spoiled = [
            unit.name
            for units, norms in left_out.norms
            for unit, norm in zip(units, norms.tolist(), strict=True)
            if not math.isfinite(norm)
        ]
        what = f"a gradient in {spoiled[-1]} is" if spoiled else "its loss or gradient is"
        samples = self._loader.samples_of(positions, left_out.parts[0])
        self._emitter.emit(
            "warning",
            message=f"step {step}: a push of rank {left_out.ranks[0]} was left out, since {what} "
            f"not finite ({samples}); other updates of the step were made",
        )

    def _issued(
        self,
        first: int,
        done: _Done,
        rates: Sequence[float],
    ) -> list[IssuedStep]:
        """Return what this rank knows of each step: its part of the window, divided evenly.

        `done` is what this rank has computed; `first` is the number of the first step, and `rates`
        has the learning rate of each.
        """
        num_steps = done.num_steps
        clocks = _divided(self._clock.restart(), self._runner.waited, num_steps)
        sent = _dealt_out(self._comm.drain(), num_steps)
        micro_batches = _dealt_out({"micro": done.micro_batches}, num_steps)
        return [
            IssuedStep(
                step=first + number,
                lr=rates[number],
                clock=clocks,
                waited={},
                sent=sent[number],
                flops=done.flops / num_steps,
                uncounted=self._runner.uncounted,
                micro_batches=micro_batches[number]["micro"],
                tier_counts=self._sharded.updates.step_counts,
            )
            for number in range(num_steps)
        ]


def _divided(marks: StepMarks, waited: Mapping[StepPhase, Waits], parts: int) -> StepMarks:
    """Return the marks of an even part of a window, on a CPU, whose marks are seconds."""
    window_s, split = StepClock.read(marks, waited)
    spans = [(StepPhase(phase), 0.0, seconds / parts) for phase, seconds in split.items()]
    return StepMarks(0.0, spans, window_s / parts)


def _dealt_out(counts: Mapping[K, int], parts: int) -> list[Counter[K]]:
    """Return whole numbers divided into parts as even as they go."""
    borders = {
        key: [count * number // parts for number in range(parts + 1)]
        for key, count in counts.items()
    }
    return [
        Counter({key: of_key[number + 1] - of_key[number] for key, of_key in borders.items()})
        for number in range(parts)
    ]
