"""Forward and backward of the micro-batches of one step: one after the other, or slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from zrun_core.data.batch import MicroBatch
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.rng import ForwardStreams
from zrun_core.errors import OutOfMemoryError
from zrun_core.guards.losses import LossGuard
from zrun_core.guards.oom import MemoryGuard
from zrun_core.hardware.clock import Waits
from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.pipeline.schedule import layer_major, no_pipeline
from zrun_core.spine.spec import RunSpec
from zrun_core.spine.tracebacks import add_location, raised_at
from zrun_core.stages.node_calls import DrawingWalk, Watcher, installed_nodes, walking
from zrun_core.telemetry.flops import FlopCount
from zrun_core.telemetry.metrics import StepClock, StepPhase
from zrun_core.telemetry.stage_fields import ActionMarks
from zrun_core.train.forward_order import ForwardOrder
from zrun_core.train.rank_phase import RankPhase
from zrun_core.user_code.loss import Loss, LossFunction, LossKind, compute_loss
from zrun_core.user_code.user import user_code
from zrun_core.zero.passes.slice_walk import INSTEAD, KEY
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.micro_pass import MicroPass
from zrun_core.zero.update.updates import UpdateWatcher
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

T = TypeVar("T")


class _UnderWay(NamedTuple):
    """A micro-batch between its forward and its backward."""

    micro: MicroPass
    share: torch.Tensor  # 0-d, of the loss, to be differentiated


@dataclass(frozen=True)
class RunnerContext:
    """The parts of a rank that every runner of micro-batches works with.

    Attributes:
        spec: of the run.
        sharded: the model.
        loss: the user's loss function; None: the model returns its loss.
        clock: counts the seconds of the step by phase.
        phase: told what this rank does.
        memory: decides what follows where memory runs out.
        draws: streams that forwards draw from, if the job says so.
    """

    spec: RunSpec
    sharded: ShardedModel
    loss: LossFunction | None
    clock: StepClock
    phase: RankPhase
    memory: MemoryGuard
    draws: ForwardStreams


class MicroBatchRunner:
    """Runs the actions of a step's schedule on one rank.

    Attributes:
        waited: for other ranks in this step, by phase.
        marks: of the actions of the last step, in a pipeline.
        uncounted: why FLOPs are not known, if they could not be counted.
        makes_trial_steps: `trial_step` is there.
    """

    marks: Sequence[ActionMarks] = ()
    uncounted = ""
    makes_trial_steps = True
    _fewest = 1  # micro-batches that a step may have

    def __init__(self, context: RunnerContext) -> None:
        self._global_size = context.spec.batch.global_size
        self._counts_flops = not context.spec.job.compile
        self._flops_per_sample: float | None = None
        self._sharded = context.sharded
        self._comm = context.sharded.comm
        self._loss = context.loss
        self._clock = context.clock
        self._phase = context.phase
        self._memory = context.memory
        self._draws = context.draws
        self._draws_by_block = context.spec.job.parallel.draws_by_block
        self._num_evaluated = 0
        self._losses = LossGuard(context.sharded.mesh)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget how long the last step waited."""
        self.waited = {phase: Waits(self._comm.device) for phase in StepPhase}

    def look_ahead(self, micro_batches: Sequence[MicroBatch]) -> None:
        """See the micro-batches of the next step, before it begins. Collective."""

    def flops(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the FLOPs of a step over these micro-batches; 0 if they are not known."""
        if self._flops_per_sample is None:
            return 0.0
        return self._flops_per_sample * sum(micro.num_samples for micro in micro_batches)

    def order(self, micro_batches: int) -> tuple[Action, ...]:
        """Return the actions of a step of so many micro-batches."""
        return no_pipeline(micro_batches)

    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        sums: NamedVector,
        step: int,
    ) -> list[torch.Tensor]:
        """Run the forwards and backwards of one step.

        Args:
            actions: in the order in which they run.
            micro_batches: by the number that `actions` give them.
            sums: each micro-batch adds its numbers here.
            step: its number, from 1.

        Returns:
            Shares of the loss, 0-d without their graphs, in the order of the backwards.

        Raises:
            OutOfMemoryError: memory ran out, and the step is not to be dropped.
        """
        under_way: dict[int, _UnderWay] = {}
        losses = []
        for action in actions:
            is_last = action is actions[-1]
            is_lost = False
            try:
                with self._comm.spans.named("action", action):
                    if action.kind is ActionKind.FORWARD:
                        batch = micro_batches[action.micro]
                        with self._drawing(step, action.micro):
                            under_way[action.micro] = self._forward(batch, sums)
                    elif action.micro in under_way:
                        losses.append(self._backward(under_way.pop(action.micro), boundary=is_last))
                    else:  # its forward ran out of memory
                        self._sharded.contribute_zeros(boundary=is_last)
            except OutOfMemoryError as error:
                self._memory.see(error, step)
                is_lost = True
            # Not inside the handler: while it runs, the traceback holds the activations.
            if is_lost:
                self._memory.release()
                sums.add(dropped=1.0)
                if action.kind is ActionKind.BACKWARD:
                    self._sharded.contribute_zeros(boundary=is_last)
        return losses

    def begin_evaluation(self) -> None:
        """Draw in the forwards that follow what those of each evaluation draw."""
        self._num_evaluated = 0

    def evaluate(self, call: Callable[[], T]) -> T | None:
        """Return what a forward without gradients returns; None where its end is elsewhere."""
        number = self._num_evaluated
        self._num_evaluated += 1
        with self._sharded.evaluation(), self._drawing(0, number):
            return call()

    @contextmanager
    def called_by_hook(self, step: int, number: int) -> Iterator[None]:
        """Let a hook inside call the model, whose parameters are whole.

        Args:
            step: that the hook is called after.
            number: of such a part of the hook.
        """
        yield

    def trial(self, call: Callable[[], T], watcher: Watcher, draw: int) -> T | None:
        """Return what a forward returns that is no part of training; None as of `evaluate`.

        It draws by block.
        """
        drawing = self._draws.of_micro(0, draw)
        walk = DrawingWalk(self._draws, watcher)
        with self._sharded.evaluation(), self._with_nodes(), drawing, walking(walk):
            return call()

    def trial_step(self, batch: MicroBatch, see: UpdateWatcher) -> None:
        """Make a step of one micro-batch that updates nothing. Collective.

        Its gradient is that of the first data-parallel place alone. Its forward draws by block,
        what the first `trial` draws.

        Args:
            see: is told of the gradients as `Updates.watcher` is.
        """
        sharded = self._sharded
        batches = [batch] + [replace(batch, num_samples=0)] * (self._fewest - 1)
        sums = NamedVector.of(
            self._comm.device,
            weight=0.0,
            loss=0.0,
            samples=0.0,
            tokens=0.0,
            dropped=0.0,
            **self._losses.first_sums,
        )
        with self._trying(see):
            sharded.begin_step()
            self.run(self.order(len(batches)), batches, sums, 0)
            sharded.step(None, sums, lambda sums: sums["weight"] * 0.0, sharded.scaler)
            sharded.settle_updates()

    def _with_nodes(self) -> AbstractContextManager[None]:
        """Return what has the model's nodes inside."""
        module = self._sharded.module
        return installed_nodes(module, repeated_blocks(module))

    @contextmanager
    def _trying(self, see: UpdateWatcher) -> Iterator[None]:
        """Have a step inside draw by block, and count for nothing."""
        updates = self._sharded.updates
        reducer = self._sharded.reducer
        learnt = reducer.order.state_dict()
        before = updates.watcher, updates.num_made, self._counts_flops, self._draws_by_block
        before_sum = reducer.before_sum
        if self._sharded.mesh.data.index:
            reducer.before_sum = _zero
        updates.watcher, self._counts_flops, self._draws_by_block = see, False, True
        try:
            with self._with_nodes():
                yield
        finally:
            updates.watcher, updates.num_made, self._counts_flops, self._draws_by_block = before
            reducer.order.load_state_dict(learnt)
            reducer.before_sum = before_sum
            self.begin_step()

    @contextmanager
    def _drawing(self, step: int, number: int) -> Iterator[None]:
        """Run a forward inside, which draws from streams of its own if the job says so."""
        if not self._draws_by_block:
            yield
            return
        with self._draws.of_micro(step, number), walking(DrawingWalk(self._draws)):
            yield

    def _forward(self, batch: MicroBatch, sums: NamedVector) -> _UnderWay:
        """Run the forward of one micro-batch, and add its numbers to `sums`."""
        self._phase.enter("forward")
        with self._clock.during(StepPhase.FORWARD):
            with self._sharded.forward() as micro:
                loss = self._loss_of(batch)
            self._add_numbers(sums, batch, loss)
            share = self._share_of(loss, batch)
        self.waited[StepPhase.FORWARD] += self._comm.waits.take()
        return _UnderWay(micro, share)

    def _loss_of(self, batch: MicroBatch) -> Loss:
        """Move a micro-batch to the device, and compute its loss."""
        batch = batch.to(self._comm.device)
        with user_code("forward failed"), self._counting_flops(batch):
            module = self._sharded.module
            return compute_loss(module, batch.batch, self._loss, batch.num_samples)

    def _add_numbers(self, sums: NamedVector, batch: MicroBatch, loss: Loss) -> None:
        """Add the numbers of a micro-batch to those of the step."""
        self._losses.add(loss.detached().total, sums)
        if not self._sharded.mesh.adds_samples:
            return
        if batch.num_samples:
            sums.add(
                weight=loss.weight,
                loss=loss.detached().total.double(),
                samples=batch.num_samples,
                tokens=batch.num_tokens,
            )
        else:  # a stand-in on a rank that has run out of samples, whatever its loss function says
            sums.add(weight=0.0, loss=0.0, samples=0, tokens=batch.num_tokens)

    def _share_of(self, loss: Loss, batch: MicroBatch) -> torch.Tensor:
        """Return the part of the loss that is differentiated, 0-d."""
        return share_of(loss, batch, self._global_size)

    def _backward(self, under_way: _UnderWay, *, boundary: bool) -> torch.Tensor:
        """Run the backward of one micro-batch; return its share of the loss, without its graph."""
        self._phase.enter("backward")
        timed = self._clock.during(StepPhase.BACKWARD)
        with timed, user_code("backward failed"), pointing_at_forward():
            self._sharded.backward(under_way.share, under_way.micro, boundary=boundary)
        self.waited[StepPhase.BACKWARD] += self._comm.waits.take()
        return under_way.share.detach()

    @contextmanager
    def _counting_flops(self, micro: MicroBatch) -> Iterator[None]:
        """Count the first forward's FLOPs; backward takes twice as many."""
        if not micro.num_samples or not self._counts_flops:
            yield
            return
        self._counts_flops = False
        with FlopCount() as count:
            yield
        self.uncounted = count.note
        if not count.note:
            self._flops_per_sample = 3 * count.flops / micro.num_samples


def _zero(unit: FlatUnit, grad: torch.Tensor) -> None:
    grad.zero_()


class LayerMajorRunner(MicroBatchRunner):
    """Runs the micro-batches of a step slice by slice: see `zero/passes/sliced_passes.py`."""

    makes_trial_steps = False  # its forwards do not draw by block

    def __init__(self, context: RunnerContext) -> None:
        """
        Raises:
            JobError: the model has no repeated blocks.
        """
        super().__init__(context)
        self._passes = self._sharded.use_slices(self._loss)
        self._order: ForwardOrder | None = None  # after the first step, and if nothing is checked
        if context.spec.job.guards.check_values:
            self._order = ForwardOrder(self._sharded, self._loss, self._trial_loss_of, KEY, INSTEAD)

    def order(self, micro_batches: int) -> tuple[Action, ...]:
        return layer_major(self._passes.num_slices, micro_batches)

    def look_ahead(self, micro_batches: Sequence[MicroBatch]) -> None:
        if self._order is not None:
            self._order.look_ahead(micro_batches)

    def _trial_loss_of(self, batch: MicroBatch) -> Loss:
        """Compute a loss that counts for nothing."""
        counts_flops, self._counts_flops = self._counts_flops, False
        try:
            return self._loss_of(batch)
        finally:
            self._counts_flops = counts_flops

    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        sums: NamedVector,
        step: int,
    ) -> list[torch.Tensor]:
        shares: dict[int, torch.Tensor] = {}
        with self._passes.step([partial(self._loss_of, batch) for batch in micro_batches]):
            for action in actions:
                is_lost = False
                try:
                    with self._comm.spans.named("action", action):
                        self._execute(action, micro_batches, sums, shares)
                except OutOfMemoryError as error:
                    self._memory.see(error, step)
                    is_lost = True
                # Not inside the handler: while it runs, the traceback holds the activations.
                if is_lost:
                    shares.clear()
                    self._passes.drop()
                    self._memory.release()
                    sums.add(dropped=1.0)
                    self._execute(action, micro_batches, sums, shares)
        self._order = None
        return list(shares.values())

    def _execute(
        self,
        action: Action,
        micro_batches: Sequence[MicroBatch],
        sums: NamedVector,
        shares: dict[int, torch.Tensor],
    ) -> None:
        """Run an action.

        At its end a micro-batch adds its numbers to `sums`. `shares` are those of the loss, by
        micro-batch: to be differentiated at first, and then without graphs.
        """
        number = action.micro
        turns_round = action.chunk == self._passes.num_slices - 1
        if action.kind is ActionKind.FORWARD:
            self._phase.enter("forward")
            with self._clock.during(StepPhase.FORWARD):
                self._passes.forward(action)
                if turns_round and not self._passes.is_lost:
                    loss = self._passes.take_result(number)
                    if self._order is not None:
                        self._order.check(number, loss)
                    self._add_numbers(sums, micro_batches[number], loss)
                    shares[number] = self._share_of(loss, micro_batches[number])
            self.waited[StepPhase.FORWARD] += self._comm.waits.take()
            return
        self._phase.enter("backward")
        timed = self._clock.during(StepPhase.BACKWARD)
        with timed, user_code("backward failed"), pointing_at_forward():
            loss = None
            if turns_round and number in shares:
                loss = self._sharded.scaler.scaled(shares[number])
                shares[number] = shares[number].detach()
            boundary = number == len(micro_batches) - 1
            self._passes.backward(action, loss, boundary=boundary)
        self.waited[StepPhase.BACKWARD] += self._comm.waits.take()


def share_of(loss: Loss, batch: MicroBatch, global_size: int) -> torch.Tensor:
    """Return the part of a micro-batch's loss that is differentiated, 0-d.

    It is a share of the nominal global batch N, so that where every rank has full batches of means
    the sum over ranks is the gradient already, and nothing is divided afterwards. E.g. with N = 8
    on two ranks, two micro-batches each of 2 samples, a mean loss counts 2/8 of it. Otherwise
    `Trainer._divisor` corrects: total weight / N.
    """
    if not batch.num_samples:
        return loss.value * 0.0
    if loss.kind is LossKind.MEAN:
        return loss.value * (float(loss.weight) / global_size)
    return loss.value / global_size


@contextmanager
def pointing_at_forward() -> Iterator[None]:
    """Say how to find the line of the user's code behind an error that names none."""
    try:
        yield
    except RuntimeError as error:
        if raised_at(error) is None:
            setting = "torch.autograd.set_detect_anomaly(True)"
            advice = f": with {setting} in your file, the log shows the line of forward"
            add_location(error, advice)
        raise
