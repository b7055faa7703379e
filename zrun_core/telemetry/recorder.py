"""Counters and events of a run: what its steps, evaluations and hooks found."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.distributed.comm import TrafficKey
from zrun_core.hardware import accelerator
from zrun_core.hardware.clock import Waits
from zrun_core.memory.buffers import Tier
from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.spine.releases import own_release
from zrun_core.spine.spec import RunSpec
from zrun_core.telemetry.metrics import (
    StepClock,
    StepMarks,
    StepPhase,
    peak_flops,
    process_memory,
)
from zrun_core.telemetry.peak_memory import PeakMemory
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.sent_bytes import SentBytes
from zrun_core.telemetry.stage_fields import (
    ActionMarks,
    ActionTime,
    StageFacts,
    StageUse,
    action_fields,
    action_times,
    use_fields,
)
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.telemetry.tier_fields import memory_beside_plan, memory_by_tier, moves_of_step
from zrun_core.tiers.tiers import TierCounts
from zrun_core.zero.account import (
    allocated_memory,
    expected_traffic,
    grown_rings,
    planned_memory,
    planned_moves,
)
from zrun_core.zero.sharded_model import ShardedModel

_METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./@%-]{0,63}")
_FIRST_SCHEDULE = 2  # step whose actions are told: the first one warms up
_GROWS = {
    "gathering": "some parameters stay gathered for long: they are read outside of their modules, "
    "or share a unit with modules that run much later",
    "reducing": "more gradients were pending at once than planned",
}


class IssuedStep(NamedTuple):
    """A step that was issued, as far as this rank knows it before its totals arrive.

    Attributes:
        step: its number, from 1.
        lr: that it was updated with.
        clock: from `StepClock.restart`.
        waited: for other ranks, by phase.
        sent: bytes, by kind of collective.
        flops: of this rank; 0 if they are not known.
        uncounted: why they could not be counted; empty: they could, or nobody tried.
        micro_batches: of this rank.
        actions: of its stage of a pipeline; of PipeDream those of a window, with its last step.
        tier_counts: what moved between tiers.
    """

    step: int
    lr: float
    clock: StepMarks
    waited: Mapping[StepPhase, Waits]
    sent: Mapping[TrafficKey, int]
    flops: float
    uncounted: str
    micro_batches: int
    tier_counts: TierCounts
    actions: Sequence[ActionMarks] = ()


def checked_name(name: object) -> str:
    """Return `name` if a number can be recorded under it.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(name, str) or not _METRIC.fullmatch(name):
        what = "write 1 to 64 letters, digits or ._/@%-, such as accuracy"
        raise ValueError(f"{name!r} cannot name a metric: {what}")
    return name


class Evaluated(NamedTuple):
    """Result of an evaluation.

    Attributes:
        values: over all ranks, by name; of several sets as `set/name`. A set begins with its loss.
    """

    values: dict[str, float]
    samples: int
    tokens: int
    seconds: float

    @property
    def loss(self) -> float:
        """Return the loss of the first set."""
        return next(iter(self.values.values()))


def _pauses(job: JobConfig) -> dict[str, dict[str, Any]]:
    """Return when the job evaluates and saves: what there is between its steps."""
    found: dict[str, dict[str, Any]] = {}
    if job.eval is not None:
        found["eval"] = {"every": job.eval.every, "minutes": None, "at_end": True}
    saves = job.checkpoint
    if saves is not None:
        found["save"] = {"every": saves.every, "minutes": saves.minutes, "at_end": saves.final}
    return found


class Recorder:
    """Counts steps and emits events: most of them on the main rank, memory on every rank.

    Attributes:
        progress: the run's counters.
        lr: of the newest step whose totals were read; None before.
        grad_norm: as `lr`.
        metrics: numbers of the newest evaluation, by name.
        inputs: moves inputs of recomputed blocks; None: they stay on the device.
        stage: of a pipeline that this rank has; None: there is none.
    """

    def __init__(
        self, spec: RunSpec, sharded: ShardedModel, emitter: Emitter, clock: StepClock
    ) -> None:
        self.spec = spec
        self.job = spec.job
        self.progress = Progress()
        self.lr: float | None = None
        self.grad_norm: float | None = None
        self.metrics: dict[str, float] = {}
        self.inputs: OffloadedInputs | None = None
        self.stage: StageFacts | None = None
        self._first = Progress()  # made before this process
        self._sharded = sharded
        self._emitter = emitter
        self._clock = clock
        self._world = sharded.mesh.world
        self._device = sharded.comm.device
        self._peak_flops = peak_flops(self._device, sharded.settings.precision.compute)
        self._has_warned = False
        self._has_told_uncounted = False
        self._told_growth: dict[str, int] = {}  # bytes held, by the ring's purpose
        self._sent = SentBytes()
        self._pipe_sent: dict[str, int] = {}  # to other stages, at the end of a step or window
        self._splits: list[Mapping[str, float]] = []  # of steps since the last `memory` event
        self._stage_uses: list[StageUse] = []  # as `_splits`
        self._next_schedule = _FIRST_SCHEDULE  # of the steps of this process
        self._start_time = time.monotonic()

    @property
    def is_main(self) -> bool:
        return self._world.index == 0

    def start(
        self, notes: list[str], resumed_from: Path | None = None, total_steps: int | None = None
    ) -> None:
        """Announce the run.

        Args:
            total_steps: optimizer steps of the whole run, if they are known.
        """
        self._start_time = time.monotonic()
        self._emit_stage()
        if not self.is_main:
            return
        resumed = None
        if resumed_from is not None:
            before = self._first
            resumed = {
                "step": before.steps,
                "path": str(resumed_from),
                "first_loss": before.first_loss,
                "seconds": before.seconds,
            }
        device = str(self._device)
        if accelerator.is_accelerator(self._device):
            device = accelerator.device_name(self._device)
        planned = planned_memory(self._sharded)
        elsewhere = {}
        if self._sharded.tiers is not None:
            notes = [*notes, *self._sharded.tiers.notes]
            elsewhere["planned_tiers"] = memory_by_tier(planned)
        label = {}
        if self.job.changes_numerics:
            label["changes_numerics"] = self.job.changes_numerics
        self._emitter.emit(
            "start",
            job=self.job.name,
            world_size=self._world.size,
            **self._model_params(),
            stage=self.job.zero.stage,
            precision=self.job.precision.compute,
            batch=self.spec.batch.model_dump(),
            total_steps=total_steps,
            pauses=_pauses(self.job),
            planned_bytes={kind.value: size for kind, size in planned.by_kind.items()},
            **elsewhere,
            **label,
            units=len(self._sharded.layouts),
            versions={
                "zrun": own_release(),
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
            device=device,
            resumed=resumed,
            notes=notes,
        )

    def _own_params(self) -> dict[str, int]:
        """Return how many parameters there are in the tensors of which this rank has a part."""
        found = {
            slot.part.tensor: (math.prod(slot.part.shape), layout.trainable)
            for layout in self._sharded.layouts
            for slot in layout.slots
        }
        return {
            "params": sum(numel for numel, _ in found.values()),
            "trainable": sum(numel for numel, trainable in found.values() if trainable),
        }

    def _model_params(self) -> dict[str, int]:
        if self.stage is None:
            return self._own_params()
        return {"params": self.stage.model_params, "trainable": self.stage.model_trainable}

    @property
    def _tells_of_stage(self) -> bool:
        """Return whether this rank speaks for its stage, whose ranks all do the same."""
        mesh = self._sharded.mesh
        return self.stage is not None and mesh.data.index == 0 and mesh.tensor.index == 0

    def _emit_stage(self) -> None:
        """Emit what this rank's stage of a pipeline has."""
        if self.stage is None or not self._tells_of_stage:
            return
        self._emitter.emit(
            "stage",
            stage=self.stage.stage,
            stages=self.stage.stages,
            virtual=self.stage.virtual,
            schedule=self.job.parallel.schedule,
            blocks=list(self.stage.blocks),
            **self._own_params(),
        )

    def _emit_schedule(self, step: int, actions: Sequence[ActionTime], number: int) -> None:
        """Emit when this rank's stage did what, after the second step, the fourth, the eighth ...

        `number` is that of the step in this process.
        """
        if self.stage is None or not self._tells_of_stage:
            return
        if not actions or number < self._next_schedule:
            return
        self._next_schedule = 2 * number
        self._emitter.emit(
            "schedule",
            step=step,
            stage=self.stage.stage,
            actions=action_fields(actions),
        )

    def resume(self, progress: Progress) -> None:
        """Count on from `progress`."""
        for each in fields(progress):  # others hold on to the object
            setattr(self.progress, each.name, getattr(progress, each.name))
        self._first = replace(progress)

    @property
    def num_steps(self) -> int:
        """Steps that this process has issued."""
        return self.progress.steps - self._first.steps

    def peak(self, measured: PeakMemory) -> None:
        """Emit the peak memory of the newest step."""
        if measured.note and self.is_main:
            self._emitter.emit("warning", message=measured.note)
        peak_bytes = measured.num_bytes
        if peak_bytes is not None and not accelerator.is_accelerator(self._device):
            # On a CPU it is measured above what was allocated before the step.
            allocated = allocated_memory(self._sharded)
            peak_bytes += sum(allocated.by_kind.values())
            peak_bytes += sum(
                size for (tier, _), size in allocated.elsewhere.items() if tier is Tier.HOST
            )
        self._emitter.emit(
            "peak",
            step=self.progress.steps,
            peak_bytes=peak_bytes,
            reserved_bytes=measured.reserved,
            process_bytes=process_memory(self._device)["process_bytes"],
        )

    def step(self, issued: IssuedStep, totals: StepTotals, epoch: float | None) -> None:
        """Count a step, and emit its event.

        Args:
            epoch: how often the data was read by then; None if its length is not known.
        """
        progress = self.progress
        self.lr = issued.lr
        self.grad_norm = totals.grad_norm
        progress.loss = math.nan
        if totals.weight:
            progress.loss = totals.loss / totals.weight
        if issued.step == 1:
            progress.first_loss = progress.loss
        if self._first.seconds is not None:
            progress.seconds = self._first.seconds + time.monotonic() - self._start_time
        progress.samples += int(totals.samples)
        progress.tokens += int(totals.tokens)
        if totals.skipped:
            progress.skips += 1
        else:
            progress.updates += 1
        self._sent.add(issued.sent, issued.micro_batches)

        step_s, split = self._clock.read(issued.clock, issued.waited)
        self._splits.append(split)
        actions = action_times(issued.actions)
        if self.stage is not None and actions:
            self._stage_uses.append(StageUse.of(actions))
            # Between the steps of a window PipeDream has sent more than they need.
            self._pipe_sent = {"stage": self.stage.stage, **self._sent.to_other_stages()}
        if self.is_main:
            self._emit_step(issued, totals, epoch, step_s, split)
            self._tell_uncounted(issued.uncounted)
        number = issued.step - self._first.steps  # in this process
        self._emit_schedule(issued.step, actions, number)
        # An update beside training has made its moments when the second step ends.
        is_first_full = number == 2 and self._sharded.tiers is not None
        if number == 1 or is_first_full or issued.step % self.job.log.every == 0:
            self._emit_memory(issued.step)
        if number == 2:
            self.warn_once()
            self._warn_of_slow_copies()
        if number >= 2:  # the first does not gather ahead yet
            self.warn_of_growth()

    def _emit_step(
        self,
        issued: IssuedStep,
        totals: StepTotals,
        epoch: float | None,
        step_s: float,
        split: Mapping[str, float],
    ) -> None:
        progress = self.progress
        scale = totals.scale if self._sharded.scaler.enabled else None
        tflops = None
        mfu = None
        if issued.flops:
            tflops = issued.flops / step_s / 1e12
            if tflops and self._peak_flops:
                mfu = tflops * 1e12 / self._peak_flops
        self._emitter.emit(
            "step",
            step=issued.step,
            loss=progress.loss,
            lr=issued.lr,
            grad_norm=totals.grad_norm,
            loss_scale=scale,
            skipped=bool(totals.skipped),
            skips=progress.skips,
            samples=int(totals.samples),
            tokens=int(totals.tokens),
            total_samples=progress.samples,
            total_tokens=progress.tokens,
            epoch=epoch,
            step_s=step_s,
            samples_per_s=totals.samples / step_s,
            tokens_per_s=totals.tokens / step_s,
            tflops=tflops,
            mfu=mfu,
            split=split,
            traffic={"sent_bytes": sum(issued.sent.values())},
            **self._moves(issued),
            **self._pipeline(self._stage_uses[-1:] if issued.actions else []),
        )

    def _pipeline(self, uses: Sequence[StageUse]) -> dict[str, Any]:
        """Return how this rank's stage of a pipeline spent some steps, if they are known."""
        if self.stage is None or not uses:
            return {}
        return {"pipeline": use_fields(self.stage.stage, uses)}

    def _moves(self, issued: IssuedStep) -> dict[str, Any]:
        """Return what moved between tiers beside the plan, if states live elsewhere."""
        if self._sharded.tiers is None:
            return {}
        planned = planned_moves(self._sharded, issued.micro_batches)
        return moves_of_step(issued.tier_counts, planned)

    def _tiers(self) -> dict[str, Any]:
        """Return the memory of each tier beside the plan, if states live elsewhere."""
        sharded = self._sharded
        if sharded.tiers is None:
            return {}
        allocated = allocated_memory(sharded)
        return {"tiers": memory_beside_plan(planned_memory(sharded), allocated)}

    def _emit_memory(self, step: int) -> None:
        """Emit this rank's memory, and its mean seconds by phase since the last such event."""
        allocated = allocated_memory(self._sharded).by_kind
        by_kind = {kind.value: size for kind, size in allocated.items()}
        phases = self._splits[-1]
        mean = {phase: fmean(each[phase] for each in self._splits) for phase in phases}
        pipeline = self._pipeline(self._stage_uses)
        self._splits = []
        self._stage_uses = []
        kept = {} if self.inputs is None else self.inputs.kept_bytes
        self._emitter.emit(
            "memory",
            step=step,
            planned_bytes=sum(planned_memory(self._sharded).by_kind.values()),
            **by_kind,
            **process_memory(self._device),
            kept_bytes={tier.value: size for tier, size in kept.items()},
            split=mean,
            **self._tiers(),
            **pipeline,
            **({"pipe_sent": self._pipe_sent} if self._pipe_sent else {}),
        )

    def warn_of_growth(self) -> None:
        """Warn of rings that have outgrown their plan, or the size that was told last."""
        for purpose, planned, held in grown_rings(self._sharded):
            if held <= self._told_growth.get(purpose, planned):
                continue
            if purpose == "gathering" and not self.is_main:  # all ranks gather the same
                continue
            self._told_growth[purpose] = held
            message = (
                f"the ring of {purpose} holds {format_size(held)}, {format_size(held - planned)} "
                f"more than the {format_size(planned)} that were planned: {_GROWS[purpose]}; "
                "zrun estimate does not count that"
            )
            self._emitter.emit("warning", message=message)

    def warn_once(self) -> None:
        """Warn of the parameters that have got no gradient so far."""
        names = self._sharded.grad.without_gradient
        if not names or self._has_warned or not self.is_main:
            return
        self._has_warned = True
        shown = ", ".join(names[:5])
        if len(names) > 5:
            shown += f" and {len(names) - 5} more"
        self._emitter.emit("warning", message=f"no gradient yet, so not updated: {shown}")

    def _tell_uncounted(self, why: str) -> None:
        """Say once why the record has no FLOP/s, if they could not be counted."""
        if why and not self._has_told_uncounted:
            self._has_told_uncounted = True
            self._emitter.emit("warning", message=f"FLOP/s are left out: {why}")

    def _warn_of_slow_copies(self) -> None:
        """Say why inputs of blocks come and go more slowly than they might, if so."""
        if self.is_main and self.inputs is not None and self.inputs.note:
            self._emitter.emit("warning", message=self.inputs.note)

    def evaluation(self, found: Evaluated) -> None:
        """Emit the result of an evaluation."""
        self.metrics = found.values
        if self.is_main:
            self._emitter.emit(
                "eval",
                step=self.progress.steps,
                loss=found.loss,
                metrics=found.values,
                samples=found.samples,
                tokens=found.tokens,
                seconds=found.seconds,
            )

    def hook_metrics(self, hook: str, step: int, values: Mapping[str, float]) -> None:
        """Emit the numbers that a hook recorded.

        Args:
            values: by name.
        """
        if values and self.is_main:
            self._emitter.emit("metrics", step=step, hook=hook, values=dict(values))

    def log(self, text: str) -> None:
        """Emit a line of the user's, which is shown above the progress display."""
        if self.is_main:
            self._emitter.emit("log", message=text)

    def end(self, reason: str, why: str | None = None) -> None:
        """Emit the end of the run, with its traffic and memory beside what was planned."""
        if not self.is_main:
            return
        done = self.progress
        before = self._first
        expected = expected_traffic(
            self._sharded, done.steps - before.steps, done.micro_batches - before.micro_batches
        )
        self._emitter.emit(
            "end",
            step=done.steps,
            reason=reason,
            why=why,
            total_s=time.monotonic() - self._start_time,
            loss=done.loss,
            traffic=self._sent.beside(expected),
            memory={
                "planned_bytes": sum(planned_memory(self._sharded).by_kind.values()),
                "measured_bytes": sum(allocated_memory(self._sharded).by_kind.values()),
                **self._tiers(),
            },
        )
