"""Compare a recorded run with a plain loop, step by step.

    values before the step   -------- from the run --------+
                                                           |
    run     [ forward, backward, reduction ] gradient      |    [ update ] values after it
                                             compared      |               compared
    plain   [ forward, backward ]            gradient      |    [ torch's update of the run's
              with the run's values                              values, by the run's gradient ]

Each step begins where the run is, so a difference shows in the step, and in the half of the step,
that makes it; rounding does not add up, and tolerances are those of one step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zrun_core.data.batch import digest
from zrun_core.errors import JobError
from zrun_core.optim.lr import make_schedule
from zrun_core.spine.sections.precision import LossScaleConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.spine.spec import RunSpec
from zrun_core.user_code import user
from zrun_core.verification.no_dropout import has_dropout, without_dropout
from zrun_core.verification.plain_loop import (
    PlainData,
    PlainGradient,
    PlainLoop,
    split_samples,
)
from zrun_core.verification.plain_optimizers import plain_optimizer
from zrun_core.verification.record import (
    BUFFER,
    GRAD,
    VALUE,
    Range,
    StepNumbers,
    StepRecord,
    merged,
    read_step,
    recorded_steps,
)
from zrun_core.verification.steady_data import check_data, check_read_again
from zrun_core.verification.step_check import DTYPES, OWN, Apart, StepCheck, norm_of
from zrun_core.verification.verdict import Difference, Unverifiable, Verdict

_NUDGES = 4  # before something counts as more than rounding
_MOST_PARTS = 1 << 30  # bytes of gradients by micro-batch


@dataclass
class Carried:
    """What a run that goes on from a save begins with, as the plain loop has it."""

    values: Mapping[str, Tensor]
    optimizer: dict[str, Any]  # its state
    buffers: Sequence[Mapping[str, Tensor]]  # of each data-parallel rank
    positions: Sequence[Any]  # of their random numbers
    updates: int
    scale: LossScale


@dataclass
class LossScale:
    """The loss scale, by the rule of dynamic loss scaling."""

    value: float
    good: int = 0
    bad: int = 0

    def follow(self, overflows: bool, config: LossScaleConfig) -> None:
        """Follow a step."""
        self.good = 0 if overflows else self.good + 1
        self.bad = self.bad + 1 if overflows else 0
        if self.bad >= config.hysteresis:
            self.value, self.bad = max(self.value / 2, config.min), 0
        elif self.good >= config.window:
            self.value, self.good = self.value * 2, 0


def compare(run_dirs: Sequence[Path], device: str | None = None) -> Verdict:
    """Compare a run, and those that went on from its save, with a plain loop.

    Args:
        run_dirs: of runs that were recorded; the first one begins anew, others go on from the step
            that their record begins with.
        device: that the plain loop computes on; None: that of rank 0.
    """
    verdict = Verdict()
    carried: dict[int, Carried] = {}
    try:
        for run_dir in run_dirs:
            later = {recorded_steps(each)[0] for each in run_dirs[1:]}
            _RunComparison(run_dir, verdict, carried, later, device).run()
            if verdict.difference is not None:
                break
    except Unverifiable as error:
        verdict.why_not = str(error)
    return verdict


class _RunComparison:
    """The comparison of one run."""

    def __init__(
        self,
        run_dir: Path,
        verdict: Verdict,
        carried: dict[int, Carried],
        carried_at: Set[int],
        device: str | None,
    ) -> None:
        """Get ready to compare the run, and to add what is found to `verdict`.

        Runs go on from the steps `carried_at`. What they begin with is added to `carried`, by step.
        """
        self._run_dir = run_dir
        self._verdict = verdict
        self._carried = carried
        self._carried_at = carried_at
        self.spec = RunSpec.read(run_dir / "spec.json")
        self._ranks = self.spec.plan.world_size
        self._device = torch.device(device or self.spec.plan.ranks[0].device)
        # Of a CPU: sums have the bits of the ranks then.
        torch.set_num_threads(self.spec.plan.ranks[0].threads)
        self._dtype = DTYPES[self.spec.job.precision.compute]
        job_dir = Path(self.spec.job_dir)
        user.add_to_path(job_dir)
        verdict.precision = self.spec.job.precision.compute
        self._data = PlainData(self.spec)

    def run(self) -> None:
        """Compare all steps, up to the first difference."""
        drops_nothing: AbstractContextManager[None] = nullcontext()
        if self.spec.plan.dims.tp > 1:
            drops_nothing = without_dropout()
        with drops_nothing:
            self._run()

    def _run(self) -> None:
        steps = recorded_steps(self._run_dir)
        if len(steps) < 2:
            raise Unverifiable("the run made no step: give it data")
        begin = read_step(self._run_dir, self._ranks, steps[0])
        self._check_itself(begin)
        self._begin(begin)
        del begin  # as large as the model
        if self._verdict.difference is not None:
            return
        num_made = 0
        for step in steps[1:]:
            record = read_step(self._run_dir, self._ranks, step)
            if any(numbers.draws_apart for numbers in record.numbers):
                raise Unverifiable(
                    "ranks draw their own random numbers inside of layers that they share, which "
                    "depends on the layout: verify without those random numbers, or with tp: 1"
                )
            self._verdict.difference = self._step(step, record)
            if self._verdict.difference is not None:
                return
            self._verdict.steps += 1
            num_made += not record.numbers[0].skipped
            del record  # before the next one is read
        if not num_made:
            raise Unverifiable(
                "every step was skipped, as where numbers are not finite: give it more --steps, or "
                "begin with a smaller precision.loss_scale.init"
            )

    # The beginning

    def _check_itself(self, begin: StepRecord) -> None:
        """Read the first micro-batch twice, and run it twice.

        Raises:
            Unverifiable: the data or the model differ from themselves.
        """
        parts = split_samples(self._data.positions(1), self.spec.batch.ranks, self.spec.batch.micro)
        first_part = [[parts[0][0]]]
        (((batch, _),),) = self._data.batches(first_part)
        check_read_again(self._data, first_part, 0, 0, batch)
        results: list[PlainGradient] = []
        values: list[dict[str, Tensor]] = []
        for _ in range(2):
            loop = PlainLoop(self.spec, self._device, torch.float32, replicas=1)
            values.append({n: p.detach().cpu() for n, p in loop.replicas[0].params.items()})
            results.append(loop.gradient(1, [[(batch, len(parts[0][0]))]], 1.0))
        if has_dropout(loop.replicas[0].module) and self.spec.plan.dims.tp > 1:
            self._note("dropout is off: inside of layers that tp divides each rank draws its own")
        factory_differs = [n for n, v in values[0].items() if not torch.equal(v, values[1][n])]
        if factory_differs:
            raise Unverifiable(
                f"the model's factory makes other values each time ({factory_differs[0]}): use "
                "torch's generator, which the job's seed sets"
            )
        first, again = results
        if not math.isclose(first.loss, again.loss, rel_tol=1e-5):
            raise Unverifiable(
                "the model is not deterministic: with the same values, batch and seeds, the loss "
                f"of the first micro-batch is {first.loss:.6g} and then {again.loss:.6g}: use the "
                "generators of torch, numpy or Python, which zrun seeds, and not the clock"
            )
        total = norm_of(first.grads.values())
        for name, grad in first.grads.items():
            apart = float((grad - again.grads[name]).norm())
            if apart > 1e-3 * float(grad.norm()) + 1e-5 * total:
                raise Unverifiable(
                    "the model is not deterministic: with the same values, batch and seeds, the "
                    f"gradient of {name} differs each time: "
                    "torch.use_deterministic_algorithms(True) names the operation"
                )

    def _begin(self, begin: StepRecord) -> None:
        job = self.spec.job
        self._tensors = begin.tensors
        self._step_before = begin.numbers[0].step
        self._loop = PlainLoop(self.spec, self._device, self._dtype)
        self._wide: PlainLoop | None = None
        if self._dtype != torch.float32:
            self._wide = PlainLoop(self.spec, self._device, torch.float32)
        built = {n: p.detach().cpu().float() for n, p in self._loop.replicas[0].params.items()}
        for replica in self._loop.replicas:
            replica.use_formats(self._tensors)
        self._values = {name: self._value(begin, name) for name in built}
        frozen = {name: self._value(begin, name) for name in begin.tensors if name not in built}
        self._check_frozen(frozen)
        self._verdict.tensors = len(built)
        before = self._carried.get(self._step_before)
        if self.spec.resume is not None and before is not None:
            self._check_begin("save", before.values)
        elif job.init == "factory" and job.init_from is None:
            self._check_begin("start", built)
        else:
            self._note("initial values are those that the run has loaded")
        if self._verdict.difference is not None:
            return
        self._masters = {
            name: torch.nn.Parameter(value.clone()) for name, value in self._values.items()
        }
        self._optimizer = plain_optimizer(job.optim, self._masters, Path(self.spec.job_dir))
        self._schedule = self._lr_schedule()
        self._updates = self._step_before
        self._scale = LossScale(1.0)
        if job.precision.compute == "fp16":
            self._scale = LossScale(job.precision.loss_scale.init)
        if before is not None and self.spec.resume is not None:
            self._optimizer.load_state_dict(before.optimizer)
            self._scale = replace(before.scale)
            self._updates = before.updates
            for loop in self._loops:
                for replica in loop.replicas:
                    if replica.rank < len(before.positions):
                        replica.position = before.positions[replica.rank]
                    else:
                        replica.begin_late(self._step_before)
        self._check_first_buffers(begin, before)
        self._load_buffers(begin)

    def _check_first_buffers(self, begin: StepRecord, before: Carried | None) -> None:
        """Compare the buffers that each data-parallel rank begins with, or goes on with."""
        job = self.spec.job
        what = "start"
        expected: Sequence[Mapping[str, Tensor]] = [
            replica.buffers() for replica in self._loop.replicas
        ]
        if self.spec.resume is not None:
            what = "save"
            expected = () if before is None else before.buffers
        elif job.init != "factory" or job.init_from is not None:
            return
        saved = {name for module in [self._loop.replicas[0].module] for name in module.state_dict()}
        for name, ranges in begin.ranges[BUFFER].items():
            for each in ranges:
                rank = self.spec.plan.ranks[each.rank].dp
                if rank >= len(expected) or name not in expected[rank] or name not in saved:
                    continue
                own = expected[rank][name]
                if own.shape != each.values.shape or torch.equal(own, each.values):
                    continue
                if torch.allclose(own.double(), each.values.double(), rtol=1e-6, equal_nan=True):
                    continue
                if self._others_alike(name, ranges, rank, own):
                    continue
                like = f"of data-parallel rank {rank}"
                self._verdict.difference = Difference(self._step_before, what, name, 1.0, 0.0, like)
                return

    def _others_alike(
        self, name: str, ranges: Sequence[Range], rank: int, expected: Tensor
    ) -> bool:
        """Return whether one of this data-parallel rank's stages has a buffer as it should be."""
        own = [each for each in ranges if self.spec.plan.ranks[each.rank].dp == rank]
        return any(torch.equal(each.values, expected) for each in own)

    def _check_frozen(self, frozen: Mapping[str, Tensor]) -> None:
        """Compare what does not train with what the factory makes, and give it to all models."""
        job = self.spec.job
        if job.init == "factory" and job.init_from is None:
            own = dict(self._loop.replicas[0].module.named_parameters())
            for name, value in frozen.items():
                made = own[name].detach().cpu()
                if not torch.equal(value.to(made.dtype), made):
                    off = float((value - made.float()).norm() / max(float(made.norm()), 1e-30))
                    self._verdict.difference = Difference(
                        self._step_before, "start", name, off, 1e-6, "it does not train"
                    )
                    return
        for loop in self._loops:
            for replica in loop.replicas:
                replica.load(frozen)

    def _check_begin(self, what: str, expected: Mapping[str, Tensor]) -> None:
        apart: list[Apart] = []
        for name, value in self._values.items():
            size = float(expected[name].norm())
            off = float((value - expected[name]).norm())
            if not off <= 1e-6 * size:  # also where it is not a number
                apart.append(Apart(off, 1e-6 * size, size, name))
        if apart:
            self._verdict.difference = max(apart).difference(
                self._step_before, what, "", len(apart) - 1
            )

    def _load_buffers(self, begin: StepRecord) -> None:
        """Give each model the buffers that its ranks begin with."""
        for loop in self._loops:
            for replica in loop.replicas:
                own = {
                    name: each.values
                    for name, ranges in begin.ranges[BUFFER].items()
                    for each in ranges
                    if self.spec.plan.ranks[each.rank].dp == replica.rank
                }
                replica.load_buffers(own)

    def _lr_schedule(self) -> Any:
        job = self.spec.job
        custom = None
        if isinstance(job.lr.schedule, Ref):
            custom = user.function(job.lr.schedule, Path(self.spec.job_dir), ("step",))
        return make_schedule(job.lr, job.steps, custom)

    # One step

    def _step(self, step: int, record: StepRecord) -> Difference | None:
        numbers = record.numbers[0]
        positions = self._data.positions(step)
        parts = split_samples(positions, self.spec.batch.ranks, self.spec.batch.micro)
        batches = self._data.batches(parts)
        found = self._check_batches(step, record, parts, batches)
        if found is not None:
            return found
        for replica in self._loop.replicas:
            replica.load(self._values)
        num_parts = sum(len(of_rank) for of_rank in parts)
        num_bytes = 4 * num_parts * sum(value.numel() for value in self._values.values())
        plain = self._loop.gradient(
            step, batches, numbers.scale, keeps_parts=num_bytes <= _MOST_PARTS
        )
        wide = plain
        if self._wide is not None:
            for replica in self._wide.replicas:
                replica.load(self._values)
            wide = self._wide.gradient(step, batches, numbers.scale)
        check = self._step_check(step, record, plain, wide)

        def difference() -> Difference | None:
            return (
                self._check_scale(step, numbers)
                or check.loss_and_gradients(self._values)
                or self._check_buffers(step, record, check)
            )

        found = difference()
        is_rounding = found is not None and self._repeats(step, batches, numbers.scale, plain)
        for nudge in range(_NUDGES):  # a branch is not taken otherwise by each of them
            if found is None or not is_rounding:
                break
            nudged = self._loop.nudged(step, nudge, batches, numbers.scale, self._values)
            check = self._step_check(step, record, plain, wide, nudged)
            found = difference()
        self._load_buffers(record)
        found = found or self._check_update(step, record, check)
        if found is None:
            self._end_step(step, overflows=not math.isfinite(numbers.norm))
        return found

    def _repeats(
        self,
        step: int,
        batches: Sequence[Sequence[tuple[Any, int]]],
        scale: float,
        plain: PlainGradient,
    ) -> bool:
        """Return whether the plain loop's step comes to the same again; tell it if it does not."""
        try:
            does = self._loop.repeats(step, batches, scale, self._values, plain)
        except JobError as error:
            reason = f": {error}"
            does = False
        else:
            reason = ": it has state outside of the model, its loss and its batch"
        if not does:
            self._note(
                "what rounding makes of this step is not known, and is not allowed for: the plain "
                f"loop's own step differs when it is run again{reason}"
            )
        return does

    def _step_check(
        self,
        step: int,
        record: StepRecord,
        plain: PlainGradient,
        wide: PlainGradient,
        nudged: PlainGradient | None = None,
    ) -> StepCheck:
        return StepCheck(
            self.spec,
            step,
            record,
            self._tensors,
            plain,
            wide,
            nudged,
            self._verdict.worst,
        )

    def _check_batches(
        self,
        step: int,
        record: StepRecord,
        parts: Sequence[Sequence[Sequence[int]]],
        batches: Sequence[Sequence[tuple[Any, int]]],
    ) -> Difference | None:
        """Compare what each rank has read.

        Raises:
            Unverifiable: the data differ from themselves.
        """
        for rank, numbers in enumerate(record.numbers):
            of_rank = self.spec.plan.ranks[rank].dp
            expected = [(digest(batch) if size else "", size) for batch, size in batches[of_rank]]
            read = [(each if size else "", size) for each, size in numbers.batches]
            if read == expected:
                continue
            if len(read) != len(expected):
                what = f"rank {rank} has {len(read)} micro-batches, and should have {len(expected)}"
            else:
                micro = next(m for m, each in enumerate(read) if each != expected[m])
                own = parts[of_rank][micro]
                if own:
                    batch = batches[of_rank][micro][0]
                    check_data(self._run_dir, self._data, step, (of_rank, micro), batch)
                where = f"{own[0]} to {own[-1]}" if own else "none"
                what = (
                    f"rank {rank}, micro-batch {micro} has {read[micro][1]} other samples than "
                    f"those at positions {where} of the stream"
                )
            return Difference(step, "batch", "", 1.0, 0.0, what)
        return None

    def _check_scale(self, step: int, numbers: StepNumbers) -> Difference | None:
        if numbers.scale == self._scale.value:
            return None
        like = f"the loss scale is {numbers.scale:g}, and should be {self._scale.value:g}"
        return Difference(step, "loss", "", 1.0, 0.0, like)

    def _check_update(self, step: int, record: StepRecord, check: StepCheck) -> Difference | None:
        numbers = record.numbers[0]
        lr = self.spec.job.optim.lr * self._schedule(self._updates)
        if not math.isclose(numbers.lr, lr, rel_tol=1e-9):
            like = f"{numbers.lr:g}, and {lr:g} in the plain loop"
            return Difference(step, "rate", "", abs(numbers.lr / lr - 1) if lr else 1, 1e-9, like)
        if not numbers.skipped:
            self._make_update(record, lr)
            self._updates += 1
        expected = {name: master.detach() for name, master in self._masters.items()}
        found = check.values(self._values, expected)
        if found is not None:
            return found
        self._values = {name: self._value(record, name) for name in self._values}
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(self._values[name])
        return None

    def _make_update(self, record: StepRecord, lr: float) -> None:
        """Update the plain loop's values by the run's gradient."""
        numbers = record.numbers[0]
        none = {name for each in record.numbers for name in each.without_grad}
        for name, master in self._masters.items():
            grad = merged(record.ranges[GRAD].get(name, ()), self._tensors[name])
            master.grad = None
            if grad is not None and name not in none:
                master.grad = grad / numbers.divisor
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def _check_buffers(self, step: int, record: StepRecord, check: StepCheck) -> Difference | None:
        """Compare the buffers of each data-parallel rank: those of one of its stages and slices."""
        plain = [replica.buffers() for replica in self._loop.replicas]
        if record.numbers[0].skipped:
            return None
        wide = plain
        if self._wide is not None:
            wide = [replica.buffers() for replica in self._wide.replicas]
        for name, ranges in record.ranges[BUFFER].items():
            for rank in range(self.spec.batch.ranks):
                expected = plain[rank].get(name)
                own = [r for r in ranges if self.spec.plan.ranks[r.rank].dp == rank]
                if expected is None or not own:
                    continue
                alike = [r.values for r in own if r.values.shape == expected.shape]
                if not alike:
                    continue  # slices
                size = max(float(expected.double().norm()), 1e-12)
                apart = min(float((v.double() - expected.double()).norm()) for v in alike) / size
                other = float((expected.double() - wide[rank][name].double()).norm())
                nudged = check.nudged_buffers[rank][name] if check.nudged_buffers else expected
                moved = float((expected.double() - nudged.double()).norm())
                allowed = OWN + check.allowed_for_format(max(other, moved), size)
                if not apart <= allowed and not any(torch.equal(v, expected) for v in alike):
                    like = f"of data-parallel rank {rank}"
                    return Difference(step, "buffer", name, apart, allowed, like)
                if math.isfinite(apart):
                    self._verdict.worst.buffer = max(self._verdict.worst.buffer, apart)
        return None

    def _end_step(self, step: int, *, overflows: bool) -> None:
        """Follow the loss scale, and keep what a run needs that goes on after this step."""
        if self._dtype == torch.float16:
            self._scale.follow(overflows, self.spec.job.precision.loss_scale)
        if step in self._carried_at:
            self._carried[step] = Carried(
                dict(self._values),
                copy.deepcopy(self._optimizer.state_dict()),
                [replica.buffers() for replica in self._loop.replicas],
                [replica.position for replica in self._loop.replicas],
                self._updates,
                replace(self._scale),
            )

    # Parts

    @property
    def _loops(self) -> list[PlainLoop]:
        """The plain loop, and the one in fp32 where that is another."""
        return [self._loop] if self._wide is None else [self._loop, self._wide]

    def _value(self, record: StepRecord, name: str) -> Tensor:
        whole = merged(record.ranges[VALUE].get(name, ()), self._tensors[name])
        if whole is None:
            raise Unverifiable(f"no rank has recorded all of {name}")
        return whole.contiguous()

    def _note(self, text: str) -> None:
        if text not in self._verdict.notes:
            self._verdict.notes.append(text)
