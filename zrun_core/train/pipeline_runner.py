"""Executes the actions of a pipeline's stage: passes through chunks, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from zrun_core.data.batch import MicroBatch, copied
from zrun_core.distributed.comm import CommPhase
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.hardware.clock import mark
from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.pipeline.schedule import stage_actions
from zrun_core.stages.links import StageLinks
from zrun_core.stages.node_calls import Watcher
from zrun_core.stages.outside import Outside
from zrun_core.stages.stage import ChunkPass, Stage
from zrun_core.stages.weight_grads import WeightGrads
from zrun_core.stages.whole_calls import WholeCalls
from zrun_core.telemetry.metrics import StepPhase
from zrun_core.telemetry.stage_fields import ActionMarks
from zrun_core.train.micro_batches import MicroBatchRunner, RunnerContext, pointing_at_forward
from zrun_core.user_code.loss import Loss
from zrun_core.user_code.user import user_code
from zrun_core.zero.split_backward import SplitBackward
from zrun_core.zero.unit.micro_pass import MicroPass

T = TypeVar("T")


class _InChunk(NamedTuple):
    """A micro-batch between its forward and its backward through a chunk."""

    micro: MicroPass
    passed: ChunkPass
    share: torch.Tensor | None  # 0-d, of the loss, to be differentiated; of the last chunk
    sent: tuple[tuple[torch.Size, torch.dtype], ...]  # what gradients come back of, by place


class PipelineRunner(MicroBatchRunner):
    """Runs the actions of one stage."""

    def __init__(
        self,
        context: RunnerContext,
        stage: Stage,
        links: StageLinks,
        weight_grads: WeightGrads | None = None,
    ) -> None:
        """
        Args:
            context: as of every runner.
            weight_grads: keeps those that the schedule makes later; None: it makes all at once.
        """
        super().__init__(context)
        self._step = 0
        self._stage = stage
        self._outside: Outside | None = None  # where forwards run more than once
        if len(stage.chunks) > 1:
            self._outside = Outside(context.sharded.module, stage.nodes, context.loss)
        self._schedule = context.spec.job.parallel.schedule
        if stage.split.virtual > 1:
            self._fewest = stage.split.pp
        self._links = links
        self._under_way: dict[tuple[int, int], _InChunk] = {}  # by chunk and micro-batch
        self._weight_grads = weight_grads
        if weight_grads is not None:
            self._split_backward = SplitBackward(context.sharded, weight_grads.params)
        self._held: dict[tuple[int, int], MicroPass] = {}  # whose weights' gradients are to be made

    def order(self, micro_batches: int) -> tuple[Action, ...]:
        split = self._stage.split
        schedule = self._schedule
        return stage_actions(schedule, self._stage.index, split.pp, split.virtual, micro_batches)

    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        sums: NamedVector,
        step: int,
    ) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        marks: list[ActionMarks] = []
        self.marks = marks
        self._step = step
        self._links.waits.take()
        begin = mark(self._comm.device)
        for action in actions:
            with self._comm.spans.named("action", action):
                share = self._execute(action, micro_batches, sums)
            if share is not None:
                losses.append(share)
            end = mark(self._comm.device)
            marks.append(ActionMarks(action, begin, end, self._links.waits.take()))
            begin = end
        self._links.flush()
        return losses

    def _execute(
        self, action: Action, micro_batches: Sequence[MicroBatch], sums: NamedVector
    ) -> torch.Tensor | None:
        """Run an action; return what `_run_backward` returns."""
        is_last = action.micro == len(micro_batches) - 1
        match action.kind:
            case ActionKind.FORWARD:
                self._run_forward(action, micro_batches[action.micro], sums)
            case ActionKind.BACKWARD:
                return self._run_backward(action, boundary=is_last)
            case ActionKind.WEIGHT:
                self._make_weight_grads(action, boundary=is_last)
        return None

    def _run_forward(self, action: Action, batch: MicroBatch, sums: NamedVector) -> None:
        """Run a micro-batch's forward through a chunk, and send on what it makes."""
        chunk, number = action.chunk, action.micro
        receive = partial(self._receive, chunk, number)
        share = None
        self._phase.enter("forward")
        with self._clock.during(StepPhase.FORWARD):
            drawing = self._draws.of_micro(*self._drawn_as(number))
            in_chunk = self._in_chunk(chunk, number)
            with self._sharded.forward(self._local(chunk)) as micro, drawing, in_chunk:
                call = partial(self._loss_of, batch)
                passed = self._stage.forward(chunk, call, receive, self._draws)
            if self._is_last(chunk):
                self._add_numbers(sums, batch, passed.result)
                share = self._share_of(passed.result, batch)
                passed.result = None
            sent = tuple((tensor.shape, tensor.dtype) for tensor in passed.outputs)
            for place, tensor in enumerate(passed.outputs):
                self._links.send_activation(tensor, chunk, number, place)
            passed.outputs = []
        self._under_way[chunk, number] = _InChunk(micro, passed, share, sent)
        self.waited[StepPhase.FORWARD] += self._comm.waits.take()

    @contextmanager
    def _in_chunk(self, chunk: int, number: int) -> Iterator[None]:
        """Run inside a forward of a micro-batch, which changes the model once whatever its chunks.

        Their forwards come in the order of the chunks.
        """
        outside = self._outside
        if outside is None:
            yield
            return
        if chunk == self._stage.chunks[0]:
            with outside.first(number):
                yield
            return
        with outside.later(number, is_last=chunk == self._stage.chunks[-1]):
            yield

    def _loss_of(self, batch: MicroBatch) -> Loss:
        if len(self._stage.chunks) > 1:  # each of them runs the forward, which may write to it
            batch = replace(batch, batch=copied(batch.batch))
        return super()._loss_of(batch)

    def _drawn_as(self, number: int) -> tuple[int, int]:
        """Return the step of a micro-batch, and its number there."""
        return self._step, number

    def _run_backward(self, action: Action, *, boundary: bool) -> torch.Tensor | None:
        """Run a micro-batch's backward through a chunk, and send back what it makes.

        Returns:
            Its share of the loss, without its graph; of the last chunk.
        """
        chunk, number = action.chunk, action.micro
        micro, passed, share, sent = self._under_way.pop((chunk, number))
        self._phase.enter("backward")
        self._comm.phase = CommPhase.BACKWARD  # gradients are received before the pass begins
        timed = self._clock.during(StepPhase.BACKWARD)
        with timed, user_code("backward failed"), pointing_at_forward():
            roots: list[Any] = []
            grads: list[torch.Tensor | None] = []
            if share is not None:
                roots.append(self._sharded.scaler.scaled(share))
                grads.append(None)
            for place, edge in enumerate(passed.edges):
                if edge is not None:
                    roots.append(edge)
                    grads.append(self._links.receive_grad(*sent[place], chunk, number, place))
            with self._backward_pass(action, micro, boundary=boundary):
                if roots:
                    torch.autograd.backward(roots, grads)
                for place, arrived in sorted(passed.arrived.items()):  # the order of receipts
                    self._links.send_grad(arrived.take_grad(), chunk, number, place)
        self.waited[StepPhase.BACKWARD] += self._comm.waits.take()
        return None if share is None else share.detach()

    @contextmanager
    def _backward_pass(self, action: Action, micro: MicroPass, *, boundary: bool) -> Iterator[None]:
        """Run a backward inside, whole or as far as other stages wait for it."""
        if self._weight_grads is None:
            with self._sharded.backward_pass(micro, boundary=boundary):
                yield
            return
        with self._split_backward.input_pass(micro) as hold:
            self._weight_grads.hold = hold
            try:
                yield
            finally:
                self._weight_grads.hold = None
        self._held[action.chunk, action.micro] = micro

    def _make_weight_grads(self, action: Action, *, boundary: bool) -> None:
        """Make the gradients of weights that a backward has put off."""
        self._phase.enter("backward")
        with self._clock.during(StepPhase.BACKWARD):
            micro = self._held.pop((action.chunk, action.micro))
            self._split_backward.weight_pass(micro, boundary=boundary)
        self.waited[StepPhase.BACKWARD] += self._comm.waits.take()

    def evaluate(self, call: Callable[[], T]) -> T | None:
        number = self._num_evaluated
        self._num_evaluated += 1
        return self._without_gradients(call, number, may_skip=True)

    @contextmanager
    def called_by_hook(self, step: int, number: int) -> Iterator[None]:
        calls = WholeCalls(self._stage, self._links, self._draws)
        with calls.installed(self._sharded.module), self._draws.of_hook(step, number):
            yield

    def trial(self, call: Callable[[], T], watcher: Watcher, draw: int) -> T | None:
        return self._without_gradients(call, draw, watcher=watcher)

    def _with_nodes(self) -> AbstractContextManager[None]:
        return nullcontext()  # the stage has them

    def _without_gradients(
        self,
        call: Callable[[], T],
        number: int,
        *,
        may_skip: bool = False,
        watcher: Watcher | None = None,
    ) -> T | None:
        result: T | None = None
        for chunk in self._stage.chunks:
            receive = partial(self._receive, chunk, 0)
            drawing = self._draws.of_micro(0, number)
            in_chunk = self._in_chunk(chunk, -1)
            with self._sharded.evaluation(self._local(chunk)), drawing, in_chunk:
                passed = self._stage.forward(
                    chunk, call, receive, self._draws, may_skip=may_skip, watcher=watcher
                )
            for place, tensor in enumerate(passed.outputs):
                self._links.send_activation(tensor, chunk, 0, place)
            result = passed.result
        self._links.flush()
        return result

    def _receive(self, chunk: int, number: int, place: int, like: torch.Tensor) -> torch.Tensor:
        return self._links.receive_activation(like, chunk, number, place)

    def _is_last(self, chunk: int) -> bool:
        return chunk == self._stage.split.num_chunks - 1

    def _local(self, chunk: int) -> int:
        """Return the number of a chunk among those of this stage."""
        return chunk // self._stage.split.pp
