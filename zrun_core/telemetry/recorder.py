"""What a step came to: read from the device late, counted, and told as events."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from zrun_core.distributed.comm import TrafficKey
from zrun_core.spine.config import JobConfig
from zrun_core.spine.events import Emitter
from zrun_core.spine.sizes import format_size
from zrun_core.spine.spec import RunSpec
from zrun_core.telemetry.metrics import StepClock, StepPhase, peak_flops, process_memory
from zrun_core.telemetry.peak_memory import PeakMemory
from zrun_core.telemetry.progress import Progress
from zrun_core.telemetry.step_totals import StepTotals
from zrun_core.zero.sharded_model import ShardedModel

_METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./@%-]{0,63}")
_GROWS = {
    "gathering": "parameters that are looked at outside of their modules stay whole until backward is over",
    "reducing": "more gradients than expected are incomplete at a time, as those of modules that run several times are",
}


class IssuedStep(NamedTuple):
    """A step that was issued, as far as this rank knows it before its totals arrive.

    Attributes:
        step: its number, from 1.
        lr: that it was updated with.
        clock: from `StepClock.restart`.
        waited: seconds of waiting for other ranks, by phase.
        sent: bytes, by kind of collective.
        flops: of this rank; 0 if they are not known.
    """

    step: int
    lr: float
    clock: Any
    waited: Mapping[StepPhase, float]
    sent: Mapping[TrafficKey, int]
    flops: float


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
    """What an evaluation came to.

    Attributes:
        values: over all ranks, by name; of several sets as `set/name`. A set begins with its loss.
    """

    values: dict[str, float]
    samples: int
    tokens: int
    seconds: float

    @property
    def loss(self) -> float:
        """That of the first set."""
        return next(iter(self.values.values()))


def _pauses(job: JobConfig) -> dict[str, dict[str, Any]]:
    """Return when the job evaluates and saves: what there is between its steps."""
    found: dict[str, dict[str, Any]] = {}
    if job.eval is not None:
        found["eval"] = {"every": job.eval.every, "minutes": None, "at_end": True}
    if (saves := job.checkpoint) is not None:
        found["save"] = {"every": saves.every, "minutes": saves.minutes, "at_end": saves.final}
    return found


class Recorder:
    """Counts what steps came to, and tells it: most of it on the main rank, memory on every rank.

    Attributes:
        lr: of the newest step whose numbers were read; None before.
        grad_norm: as `lr`.
        metrics: what the newest evaluation came to, by name.
    """

    def __init__(
        self, spec: RunSpec, sharded: ShardedModel, emitter: Emitter, clock: StepClock
    ) -> None:
        self.spec, self.job = spec, spec.job
        self.progress = Progress()
        self.lr: float | None = None
        self.grad_norm: float | None = None
        self.metrics: dict[str, float] = {}
        self._first = Progress()  # what of it was done before this process
        self._sharded, self._emitter, self._clock = sharded, emitter, clock
        self._world, self._device = sharded.mesh.world, sharded.comm.device
        self._peak_flops = peak_flops(self._device, sharded.settings.precision.compute)
        self._has_warned = False
        self._told_growth: dict[str, int] = {}  # bytes held, by what the ring is for
        self._traffic_bytes: Counter[str] = Counter()
        self._splits: list[Mapping[str, float]] = []  # of the steps that `memory` has not told yet
        self._start_time = time.monotonic()

    @property
    def is_main(self) -> bool:
        return self._world.index == 0

    def start(
        self, notes: list[str], resumed_from: Path | None = None, total_steps: int | None = None
    ) -> None:
        """Announce what is about to run.

        Args:
            notes: lines for the user.
            resumed_from: the checkpoint that it goes on from.
            total_steps: optimizer steps of the whole run, where they are known.
        """
        self._start_time = time.monotonic()
        if not self.is_main:
            return
        before = self._first
        resumed = {
            "step": before.steps,
            "path": str(resumed_from),
            "first_loss": before.first_loss,
            "seconds": before.seconds,
        }
        layouts = self._sharded.layouts
        planned = self._sharded.planned_memory().by_kind
        self._emitter.emit(
            "start",
            job=self.job.name,
            world_size=self._world.size,
            params=sum(layout.numel for layout in layouts),
            trainable=sum(layout.numel for layout in layouts if layout.trainable),
            stage=self.job.zero.stage,
            precision=self.job.precision.compute,
            batch=self.spec.batch.model_dump(),
            total_steps=total_steps,
            pauses=_pauses(self.job),
            planned_bytes={kind.value: size for kind, size in planned.items()},
            units=len(layouts),
            versions={
                "zrun": metadata.version("zrun"),
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
            device=str(self._device)
            if self._device.type == "cpu"
            else torch.cuda.get_device_name(self._device),
            resumed=resumed if resumed_from is not None else None,
            notes=notes,
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

    def peak(self, water: PeakMemory) -> None:
        """What the memory of the newest step came to."""
        if self.num_steps != 2:  # the data had ended
            return
        own = (
            0
            if self._device.type == "cuda"
            else sum(self._sharded.allocated_memory().by_kind.values())
        )
        self._emitter.emit(
            "peak",
            step=self.progress.steps,
            peak_bytes=None if water.num_bytes is None else own + water.num_bytes,
            reserved_bytes=water.reserved,
            process_bytes=process_memory(self._device)["process_bytes"],
        )

    def step(self, issued: IssuedStep, totals: StepTotals, epoch: float | None) -> None:
        """Count a step, and emit its event.

        Args:
            issued: what this rank knew when it issued the step.
            totals: over all ranks.
            epoch: how often the data was read by then; None if its length is not known.
        """
        progress, skipped = self.progress, bool(totals.skipped)
        self.lr, self.grad_norm = issued.lr, totals.grad_norm
        progress.loss = totals.loss / totals.weight if totals.weight else float("nan")
        if issued.step == 1:
            progress.first_loss = progress.loss
        if self._first.seconds is not None:
            progress.seconds = self._first.seconds + time.monotonic() - self._start_time
        progress.samples += int(totals.samples)
        progress.tokens += int(totals.tokens)
        progress.skips += skipped
        progress.updates += not skipped
        for key, sent in issued.sent.items():
            self._traffic_bytes[key.kind] += sent
        self._tell_step(issued, totals, epoch)

    def _tell_step(self, issued: IssuedStep, totals: StepTotals, epoch: float | None) -> None:
        progress = self.progress
        step_s, split = self._clock.read(issued.clock, dict(issued.waited))
        self._splits.append(split)
        tflops = issued.flops / step_s / 1e12 if issued.flops else None
        if self.is_main:
            self._emitter.emit(
                "step",
                step=issued.step,
                loss=progress.loss,
                lr=issued.lr,
                grad_norm=totals.grad_norm,
                loss_scale=totals.scale if self._sharded.scaler.enabled else None,
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
                mfu=tflops * 1e12 / self._peak_flops if tflops and self._peak_flops else None,
                split=split,
                traffic={"sent_bytes": sum(issued.sent.values())},
            )
        number = issued.step - self._first.steps
        if number == 1 or issued.step % self.job.log.every == 0:
            by_kind = {
                kind.value: size for kind, size in self._sharded.allocated_memory().by_kind.items()
            }
            mean = {phase: fmean(each[phase] for each in self._splits) for phase in split}
            self._splits = []
            self._emitter.emit(
                "memory", step=issued.step, **by_kind, **process_memory(self._device), split=mean
            )
        if number == 2:
            self.warn_once()
        if number >= 2:  # the first does not gather ahead yet
            self.warn_of_growth()

    def warn_of_growth(self) -> None:
        """Name the rings that have outgrown their plan, or what was told of them."""
        for purpose, planned, held in self._sharded.grown_rings():
            is_told = held <= self._told_growth.get(purpose, planned)
            if is_told or (
                purpose == "gathering" and not self.is_main
            ):  # all ranks gather the same
                continue
            self._told_growth[purpose] = held
            self._emitter.emit(
                "warning",
                message=f"the ring of {purpose} holds {format_size(held)}, {format_size(held - planned)} more than the "
                f"{format_size(planned)} that were planned: {_GROWS[purpose]}; zrun estimate does not count that",
            )

    def warn_once(self) -> None:
        """Name the parameters that have got no gradient so far."""
        names = self._sharded.without_gradient
        if names and not self._has_warned and self.is_main:
            self._has_warned = True
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self._emitter.emit("warning", message=f"no gradient so far, and so left alone: {shown}")

    def evaluation(self, found: Evaluated) -> None:
        """What an evaluation came to."""
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
        """What a hook has recorded."""
        if values and self.is_main:
            self._emitter.emit("metrics", step=step, hook=hook, values=dict(values))

    def log(self, text: str) -> None:
        """A line of the user's, above the progress display."""
        if self.is_main:
            self._emitter.emit("log", message=text)

    def end(self, reason: str, why: str | None = None) -> None:
        """What the run came to, and what of it was planned.

        Args:
            why: what made it end early, if something did.
        """
        if not self.is_main:
            return
        allocated, planned = (
            self._sharded.allocated_memory().by_kind,
            self._sharded.planned_memory().by_kind,
        )
        done, before = self.progress, self._first
        expected = self._sharded.expected_traffic(
            done.steps - before.steps, done.micro_batches - before.micro_batches
        )
        self._emitter.emit(
            "end",
            step=self.progress.steps,
            reason=reason,
            why=why,
            total_s=time.monotonic() - self._start_time,
            loss=self.progress.loss,
            traffic={
                kind: {"measured_bytes": self._traffic_bytes[kind], "expected_bytes": num_bytes}
                for kind, num_bytes in expected.items()
            },
            memory={
                "planned_bytes": sum(planned.values()),
                "measured_bytes": sum(allocated.values()),
            },
        )
