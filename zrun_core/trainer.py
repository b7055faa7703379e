"""The training loop: steps of micro-batches, evaluation, the user's hooks, and a record of each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from zrun_core.board import Board
from zrun_core.comm import TrafficKey
from zrun_core.data.batch import MicroBatch
from zrun_core.data.loader import BatchLoader, eval_batches
from zrun_core.errors import HangError, JobError, NumericError
from zrun_core.events import Emitter
from zrun_core.layout import Kind
from zrun_core.loss import LossFunction, LossKind, compute_loss
from zrun_core.metrics import FlopCount, Phase, StepClock, peak_flops, process_memory
from zrun_core.optim.lr import Schedule
from zrun_core.spec import RunSpec
from zrun_core.user import user_code
from zrun_core.zero.sharded import ShardedModel, StepResult


@dataclass(frozen=True)
class HookContext:
    """What a user's hook is called with.

    Attributes:
        model: the user's module; parameters are whole only inside `gathered()`.
        step: optimizer steps done.
        loss: of the step or of the evaluation, over all ranks.
        is_main: true on one rank.
        log: print a line above the progress display; only the main rank's lines are shown.
        gathered: context manager that makes every parameter whole; enter it on all ranks.
    """

    model: nn.Module
    step: int
    loss: float
    is_main: bool
    device: torch.device
    log: Callable[[str], None]
    gathered: Callable[[], AbstractContextManager[nn.Module]]


Hook = Callable[[HookContext], object]


@dataclass(frozen=True)
class Parts:
    """The user's functions, loaded."""

    loss: LossFunction | None
    on_step: Hook | None
    on_eval: Hook | None
    eval_data: object | None
    collate: Callable[[list[Any]], Any] | None


@dataclass(frozen=True)
class _Pending:
    """A step that was issued. On a GPU its numbers are read when the next one is, so that the device never idles.

    Attributes:
        numbers: float64 on the host; there once `arrived` has happened.
    """

    step: int
    lr: float
    numbers: torch.Tensor
    arrived: torch.cuda.Event | None
    clock: Any
    waited: Mapping[Phase, float]
    sent: Mapping[TrafficKey, int]
    flops: float

    def read(self) -> _Numbers:
        if self.arrived is not None:
            self.arrived.synchronize()
        return _Numbers(*self.numbers.tolist())


class _Numbers(NamedTuple):
    """What a step came to, over all ranks."""

    weight: float
    loss: float  # summed
    samples: float
    tokens: float
    grad_norm: float
    skipped: float
    agreed: float
    scale: float


class Trainer:
    """Runs a job on one rank."""

    def __init__(
        self,
        spec: RunSpec,
        sharded: ShardedModel,
        loader: BatchLoader,
        parts: Parts,
        schedule: Schedule,
        emitter: Emitter,
        board: Board | None,
    ) -> None:
        self.spec, self.job = spec, spec.job
        self.sharded, self.loader, self.parts = sharded, loader, parts
        self.schedule, self.emitter, self.board = schedule, emitter, board
        self.module, self.comm, self.world = sharded.module, sharded.comm, sharded.mesh.world
        self.device = self.comm.device
        self.num_steps = 0  # optimizer steps issued, skipped ones included
        self.num_updates = 0  # those that changed the parameters: what the learning rate follows
        self.num_micro_batches = 0
        self.num_skips = self._skips_in_a_row = 0
        self.total_samples = self.total_tokens = 0
        self.phase = "start"
        self.loss = float("nan")
        self._pending: _Pending | None = None
        self._clock = StepClock(self.device)
        self._flops_per_sample: float | None = None
        self._peak_flops = peak_flops(self.device, sharded.settings.precision.compute)
        self._has_warned = False
        self._traffic_bytes: dict[str, int] = {}
        self._start_time = time.monotonic()

    @property
    def is_main(self) -> bool:
        return self.world.index == 0

    def run(self) -> None:
        """Train to the end of the job.

        Raises:
            UserCodeError: the user's model, loss, data or hooks raised.
            NumericError: loss scaling found no scale that does not overflow.
            JobError: the job counts tokens, and the data has none.
        """
        if not self.module.training:
            self.module.train()
        self._broadcast_buffers()
        if self.job.eval is not None and self.job.eval.first:
            self.evaluate()
        self._clock.restart()
        reason = self._train()
        self._resolve()
        self._warn_once()
        if self.job.eval is not None:
            every = self.job.eval.every
            if every is None or self.num_steps % every:
                self.evaluate()
        self._end(reason)

    def _train(self) -> str:
        evaluation = self.job.eval
        while self.job.steps is None or self.num_steps < self.job.steps:
            self.phase = "data"
            with self._clock.during(Phase.DATA):
                micro_batches = self.loader.next_step()
            if micro_batches is None:
                return "epochs" if self.job.epochs is not None else "data ended"
            self.step(micro_batches)
            if evaluation is not None and evaluation.every is not None and self.num_steps % evaluation.every == 0:
                self._resolve()
                self.evaluate()
                self._clock.restart()
            if self.job.tokens is not None:
                self._resolve()
                if not self.total_tokens:
                    raise JobError(
                        "tokens: the batches hold none (no input_ids, no integer tensor of 2 or more dims): "
                        "write steps or epochs"
                    )
                if self.total_tokens >= self.job.tokens:
                    return "tokens"
        return "steps"

    # One step

    def step(self, micro_batches: list[MicroBatch]) -> None:
        """One optimizer step: forward and backward of each micro-batch, then the update."""
        self.num_steps += 1
        self.num_micro_batches += len(micro_batches)
        if self.board is not None:
            self.board.step(self.num_steps)
        self.comm.drain()
        self.comm.take_waited()  # what came before the step is not its own
        waited = dict.fromkeys(Phase, 0.0)
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)  # weight, loss, samples, tokens
        self.sharded.begin_step()
        for number, micro in enumerate(micro_batches):
            self.phase = "forward"
            with self._clock.during(Phase.FORWARD):
                scaled = self._forward(micro, sums)
            waited[Phase.FORWARD] += self.comm.take_waited()
            self.phase = "backward"
            with self._clock.during(Phase.BACKWARD), user_code("backward failed"):
                self.sharded.backward(scaled, boundary=number == len(micro_batches) - 1)
            waited[Phase.BACKWARD] += self.comm.take_waited()
        if self.device.type == "cuda":
            self._resolve()  # the last step's: whether it was skipped decides this one's learning rate
        self.phase = "update"
        lr = self.job.optim.lr * self.schedule(self.num_updates)
        scale = self.sharded.scaler.scale.clone()
        with self._clock.during(Phase.OPTIM):
            result = self.sharded.step(lr, sums, self._divisor)
        waited[Phase.OPTIM] += self.comm.take_waited()
        flops = (self._flops_per_sample or 0.0) * sum(micro.num_samples for micro in micro_batches)
        self._pending = _Pending(
            self.num_steps, lr, *self._to_host(result, scale), self._clock.restart(), waited, self.comm.drain(), flops
        )
        if self.device.type != "cuda" or self.parts.on_step is not None:  # the hook is called between two steps
            self._resolve()

    def _to_host(self, result: StepResult, scale: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """`_Numbers` as one tensor on its way to the host, and when it is there."""
        single = torch.stack([t.double() for t in (result.grad_norm, result.skipped, result.agreed, scale)])
        numbers = torch.cat([result.sums, single])
        if self.device.type != "cuda":
            return numbers, None
        numbers = numbers.to("cpu", non_blocking=True)  # to pinned memory, after this step and before the next one
        arrived = torch.cuda.Event()
        arrived.record()
        return numbers, arrived

    def _forward(self, micro: MicroBatch, sums: torch.Tensor) -> torch.Tensor:
        """The micro-batch's contribution to the loss, to be differentiated. Adds its numbers to `sums`.

        Contributions are shares of the nominal global batch: full batches of means need no division afterwards.
        """
        micro = micro.to(self.device)
        with self.sharded.forward(), user_code("forward failed"), self._counting_flops(micro):
            loss = compute_loss(self.module, micro.batch, self.parts.loss, micro.num_samples)
        # A stand-in for a rank that has run out of samples counts nothing, whatever its loss function says.
        weight = loss.weight if micro.num_samples else 0.0
        total = loss.total.detach().double() if micro.num_samples else 0.0
        numbers = (weight, total, micro.num_samples, micro.num_tokens)
        for place, number in enumerate(numbers):
            sums[place] += number
        nominal = self.spec.batch.global_size
        if not micro.num_samples:
            return loss.value * 0.0
        return loss.value * (float(loss.weight) / nominal) if loss.kind is LossKind.MEAN else loss.value / nominal

    def _divisor(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / self.spec.batch.global_size

    @contextmanager
    def _counting_flops(self, micro: MicroBatch) -> Iterator[None]:
        """Count the first forward's FLOPs; backward takes twice as many."""
        if self._flops_per_sample is not None or not micro.num_samples or self.job.compile:
            yield
            return
        with FlopCount() as count:
            yield
        self._flops_per_sample = 3 * count.flops / micro.num_samples

    def _resolve(self) -> None:
        """Read the numbers of the step that was issued last, and tell them."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._waiting():
            numbers = pending.read()
        if not numbers.agreed:
            raise HangError(
                f"step {pending.step}: ranks gathered different modules; name the module that chooses between them in "
                "zero.leaf, so that it is handled as a whole"
            )
        skipped = bool(numbers.skipped)
        self.loss = numbers.loss / numbers.weight if numbers.weight else float("nan")
        self.total_samples += int(numbers.samples)
        self.total_tokens += int(numbers.tokens)
        self.num_skips += skipped
        self.num_updates += not skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped and numbers.weight else 0
        for key, sent in pending.sent.items():
            self._traffic_bytes[key.kind] = self._traffic_bytes.get(key.kind, 0) + sent
        self._emit_step(pending, numbers)
        if self._skips_in_a_row >= self.job.precision.loss_scale.max_skips:
            raise NumericError(
                f"step {pending.step}: {self._skips_in_a_row} steps in a row overflowed, down to a loss scale of "
                f"{numbers.scale:g}; write precision: bf16, or lower optim.lr"
            )
        if self.parts.on_step is not None:
            with user_code("hooks.on_step failed"):
                self.parts.on_step(self._context())

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The host waits for the device, which may wait for other ranks: the watchdog looks after it."""
        if self.board is not None:
            self.board.waiting(True)
        yield
        if self.board is not None:
            self.board.waiting(False)

    def _emit_step(self, pending: _Pending, numbers: _Numbers) -> None:
        step_s, split = self._clock.read(pending.clock, dict(pending.waited))
        tflops = pending.flops / step_s / 1e12 if pending.flops else None
        if self.is_main:
            self.emitter.emit(
                "step",
                step=pending.step,
                loss=self.loss,
                lr=pending.lr,
                grad_norm=numbers.grad_norm,
                loss_scale=numbers.scale if self.sharded.scaler.enabled else None,
                skipped=bool(numbers.skipped),
                skips=self.num_skips,
                samples=int(numbers.samples),
                tokens=int(numbers.tokens),
                total_samples=self.total_samples,
                total_tokens=self.total_tokens,
                epoch=self.loader.epoch,
                step_s=step_s,
                samples_per_s=numbers.samples / step_s,
                tokens_per_s=numbers.tokens / step_s,
                tflops=tflops,
                mfu=tflops * 1e12 / self._peak_flops if tflops and self._peak_flops else None,
                split=split,
                traffic={"sent_bytes": sum(pending.sent.values())},
            )
        if pending.step == 1 or pending.step % self.job.log.every == 0:
            by_kind = {kind.value: size for kind, size in self.sharded.allocated_memory().by_kind.items()}
            self.emitter.emit("memory", step=pending.step, **by_kind, **process_memory(self.device))
        if pending.step == 2:
            self._warn_once()

    def _warn_once(self) -> None:
        names = self.sharded.without_gradient
        if names and not self._has_warned and self.is_main:
            self._has_warned = True
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self.emitter.emit("warning", message=f"no gradient so far, and so left alone: {shown}")

    # Evaluation

    def evaluate(self) -> float:
        """Mean loss over the held-out samples; modules get their modes back."""
        assert self.job.eval is not None
        self.phase = "evaluation"
        start = time.monotonic()
        self._broadcast_buffers()
        modes = [(inner, inner.training) for inner in self.module.modules()]
        self.module.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        batches = eval_batches(
            self.parts.eval_data,
            self.spec.batch.micro,
            self.world.index,
            self.world.size,
            self.job.eval.samples,
            self.parts.collate,
        )
        for micro in batches:
            micro = micro.to(self.device)
            with self.sharded.evaluation(), user_code("evaluation failed"):
                loss = compute_loss(self.module, micro.batch, self.parts.loss, micro.num_samples)
            if micro.num_samples:
                numbers = (loss.weight, loss.total.double(), micro.num_samples, micro.num_tokens)
                for place, number in enumerate(numbers):
                    sums[place] += number
        for inner, mode in modes:
            inner.training = mode
        weight, total, samples, tokens = self.comm.sum_small(sums, self.world, name="evaluation").tolist()
        loss_value = total / weight if weight else float("nan")
        if self.is_main:
            seconds = time.monotonic() - start
            self.emitter.emit(
                "eval", step=self.num_steps, loss=loss_value, samples=int(samples), tokens=int(tokens), seconds=seconds
            )
        if self.parts.on_eval is not None:
            with user_code("hooks.on_eval failed"):
                self.parts.on_eval(self._context(loss_value))
        return loss_value

    def _broadcast_buffers(self) -> None:
        """Buffers (running statistics) are the first rank's."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                self.comm.broadcast(buffer, self.world, name=name)

    # Telling

    def _context(self, loss: float | None = None) -> HookContext:
        return HookContext(
            model=self.module,
            step=self.num_steps,
            loss=self.loss if loss is None else loss,
            is_main=self.is_main,
            device=self.device,
            log=self._log,
            gathered=self.sharded.gathered,
        )

    def _log(self, text: str) -> None:
        if self.is_main:
            self.emitter.emit("log", message=text)

    def describe(self, notes: list[str]) -> None:
        """The `start` event: what is about to run."""
        if not self.is_main:
            return
        layouts = self.sharded.layouts
        planned = self.sharded.planned_memory().by_kind
        self.emitter.emit(
            "start",
            job=self.job.name,
            world_size=self.world.size,
            params=sum(layout.numel for layout in layouts),
            trainable=sum(layout.numel for layout in layouts if layout.trainable),
            stage=self.job.zero.stage,
            precision=self.job.precision.compute,
            batch=self.spec.batch.model_dump(),
            total_steps=self.job.steps,
            planned_bytes={kind.value: size for kind, size in planned.items()},
            units=len(layouts),
            versions={"torch": torch.__version__, "python": sys.version.split()[0]},
            device=str(self.device) if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            notes=notes,
        )

    def _end(self, reason: str) -> None:
        allocated = self.sharded.allocated_memory().by_kind
        planned = self.sharded.planned_memory().by_kind
        if self.is_main:
            expected = self.sharded.expected_traffic(self.num_steps, self.num_micro_batches)
            self.emitter.emit(
                "end",
                step=self.num_steps,
                reason=reason,
                total_s=time.monotonic() - self._start_time,
                loss=self.loss,
                traffic={
                    kind: {"measured_bytes": self._traffic_bytes.get(kind, 0), "expected_bytes": num_bytes}
                    for kind, num_bytes in expected.items()
                },
                memory={
                    "planned_bytes": sum(planned[kind] for kind in Kind),
                    "measured_bytes": sum(allocated[kind] for kind in Kind),
                },
            )
        self.phase = "end"
