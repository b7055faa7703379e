"""The answer to a question: the job at each stage, why it does not fit, and what would."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from zrun.estimate import answer_cache
from zrun.estimate.forecast import Forecast
from zrun.estimate.patch import Changes, as_overrides, as_yaml, job_changes
from zrun.estimate.plan_tables import fullest, units_of
from zrun.estimate.question import Question
from zrun.estimate.why import overshoot, sentence, time_of, uncertainty

if TYPE_CHECKING:
    from zrun.estimate.history import History
    from zrun.estimate.trial import Comparison
    from zrun_core.plan.answer.outcome import Estimate, SearchResult
    from zrun_core.plan.answer.search import SearchGoal, Watch
    from zrun_core.plan.question.candidate import Candidate

_QUICK = 4096  # devices up to which a change is looked for among everything


@dataclass(frozen=True)
class Answer:
    """Estimates of a question.

    Attributes:
        chosen: of what the job asks for.
        stages: of that at each ZeRO stage.
        found: of a search, if there was one.
        fix: the cheapest change that is known to fit; None: it fits, or nothing does. Of a search
            for that it has the headroom that was asked for, if anything has.
        sentence: why it does not fit, or why nobody can say; "" if it fits.
        num_params: of the model.
        tokens_per_sample: None where samples are no tokens.
        num_samples: of the training data; None where that is not known.
        is_partial: looking at the model took too long: the next answer may know more.
        measured: a trial of the job, by which all times are scaled; None: there was none.
        history: earlier runs of the job, by which all times are scaled; None: they are not.
        goal: of the search; None: nobody asked for one.
        headroom: share of a device's memory that was to be left free; None: as usual.
    """

    question: Question
    chosen: Estimate
    stages: tuple[Estimate, ...]
    found: SearchResult | None = None
    fix: Estimate | None = None
    sentence: str = ""
    num_params: int = 0
    tokens_per_sample: int | None = None
    num_samples: int | None = None
    is_partial: bool = False
    measured: Comparison | None = None
    history: History | None = None
    goal: SearchGoal | None = None
    headroom: float | None = None

    @property
    def num_steps(self) -> int | None:
        """The optimizer steps of the whole job; None: a model without a job, or its end is not
        known.
        """
        job = self.question.config
        batch = self.question.batch
        if job is None:
            return None
        if job.steps is not None:
            return job.steps
        if job.epochs is not None:
            if self.num_samples is None:
                return None
            return batch.num_steps(job.epochs * self.num_samples)
        if job.tokens is None or not self.tokens_per_sample:
            return None
        return batch.num_steps(-(-job.tokens // self.tokens_per_sample))

    @property
    def fits(self) -> bool | None:
        """True if the job as it is fits; None: nobody can say."""
        return None if self.chosen.fits and self.chosen.knows_states_only else self.chosen.fits

    @property
    def lines_of_scale(self) -> list[str]:
        """By what all times are scaled, in words; empty if they are as predicted."""
        if self.measured is not None:
            return self.measured.lines()
        return [] if self.history is None else [self.history.line()]

    @property
    def verdict(self) -> str:
        """`sentence`, and what it is about."""
        if self.fits:
            return ""
        about = "cannot say whether it fits" if self.fits is None else "does not fit"
        return f"{about}: {self.sentence}"

    @property
    def target(self) -> Estimate | None:
        """The estimate that a patch leads to: the fastest if that was asked for, or the fix."""
        if self.goal == "best" and self.found is not None and self.found.best:
            return None if self.found.keeps_base else self.found.best[0]
        return self.fix

    @property
    def is_interrupted(self) -> bool:
        """True if its search was ended before all was considered."""
        return self.found is not None and self.found.is_interrupted

    @property
    def notes(self) -> list[str]:
        """Remarks for the reader."""
        from zrun_core.plan.answer.outcome import FROM_DATA_SHEETS

        notes = list(self.chosen.notes)
        if self.found is not None and self.chosen.time.doubt == 1:
            shown = (*self.found.best, *self.found.pareto)
            notes += [note for each in shown for note in each.notes if each.time.doubt > 1][:1]
        if self.measured is not None or self.history is not None:
            notes = [note for note in notes if note != FROM_DATA_SHEETS]
        device = self.question.hardware.device
        precision = self.chosen.candidate.precision
        fast = [name for name in ("bf16", "fp16") if name in device.peak]
        if fast and precision not in device.peak:
            slow = f"{device.name} computes {precision} no faster than fp32"
            notes.insert(0, f"{slow}: write precision: {fast[0]}")
        return notes

    @property
    def changes(self) -> Changes:
        """Keys of the job that a patch has; none without a job."""
        question = self.question
        target = self.target
        if question.config is None or target is None:
            return {}
        return job_changes(question.config, question.batch, target.candidate, question.hardware)


def answer(
    question: Question,
    goal: SearchGoal | None = None,
    headroom: float | None = None,
    watch: Watch | None = None,
) -> Answer:
    """Estimate what was asked, and search where it does not fit or where `goal` says so.

    The answer to the same question is kept, unless its search was interrupted.

    Args:
        headroom: share of a device's memory that is to be left free; None: as usual.
        watch: is told how far the search is.

    Raises:
        JobError: it is impossible, or the search has nothing to choose from.
        KeyboardInterrupt: it was interrupted before anything was found.
    """
    key = None
    if question.key is not None:
        room = "" if headroom is None else f"-{headroom:g}"
        key = f"{question.key}-{goal or 'asked'}{room}"
    if key is not None and (parts := answer_cache.read(key)) is not None:
        return Answer(question, *parts, goal=goal, headroom=headroom)
    found = _answered(question, goal, headroom, watch)
    if key is not None and not found.is_partial and not found.is_interrupted:
        parts = (
            found.chosen,
            found.stages,
            found.found,
            found.fix,
            found.sentence,
            found.num_params,
            found.tokens_per_sample,
            found.num_samples,
        )
        answer_cache.write(key, as_data(parts), question.planner.parts.files)
    return found


def _answered(
    question: Question, goal: SearchGoal | None, headroom: float | None, watch: Watch | None
) -> Answer:
    planner = question.planner
    chosen = planner.estimate(question.base)
    stages = []
    for stage in range(4) if planner.job.sync == "ring" else [question.base.stage]:
        if stage == question.base.stage:
            stages.append(chosen)
        else:
            other = _at_stage(question.base, stage)
            stages.append(planner.estimate(other, all_stages=False))
    found = None if goal is None else _search(question, goal, headroom, watch)
    fix = None
    why = ""
    if not chosen.fits or chosen.knows_states_only:
        fits = found
        if found is None or (goal == "best" and not found.is_interrupted):
            fits = _search(question, "fit", headroom, watch)
            if fits.is_interrupted:
                raise KeyboardInterrupt
        assert fits is not None
        fix = next((each for each in fits.best if not each.knows_states_only), None)
        change = None if fix is None else describe_change(question, chosen, fix)
        tell = uncertainty if chosen.fits else sentence
        why = tell(chosen, question.hardware, change)
    elif goal == "fit" and found is not None and found.best[0].candidate != chosen.candidate:
        fix = found.best[0]  # with more headroom
    is_partial = planner.parts.is_partial
    return Answer(
        question,
        chosen,
        tuple(stages),
        found,
        fix,
        why,
        planner.num_params,
        planner.tokens_per_sample,
        planner.num_samples,
        is_partial,
        goal=goal,
        headroom=headroom,
    )


def describe_change(question: Question, before: Estimate, fix: Estimate) -> str:
    """Return a change as keys and its price: `zero.stage=3 activations.checkpoint=full (+12%
    time)`.
    """
    if question.config is not None:
        changes = job_changes(question.config, question.batch, fix.candidate, question.hardware)
        text = " ".join(as_overrides(changes))
    else:
        text = _difference(before.candidate, fix.candidate)
    free = fix.capacity - fullest(fix).device_used
    notes = [
        note for note in (time_of(fix, before), f"{free / fix.capacity:.0%} left free") if note
    ]
    return f"{text} ({', '.join(notes)})"


def forecast_of(found: Answer) -> Forecast:
    """Return the part of an answer that a launcher keeps."""
    question = found.question
    chosen = found.chosen
    rank = fullest(chosen)
    over = overshoot(chosen, question.hardware)
    changes = {} if chosen.fits else found.changes
    units = units_of(rank)
    return Forecast(
        source=chosen.source,
        peak_bytes=rank.allocated,
        activation_bytes=rank.peak.dynamic,
        reserved_bytes=rank.reserved,
        device_bytes=rank.device_used,
        capacity=chosen.capacity,
        step_s=chosen.time.seconds,
        low_s=chosen.time.low,
        high_s=chosen.time.high,
        calibrated=question.hardware.measured,
        is_bound=chosen.is_bound,
        sentence=found.sentence if over is not None and not chosen.fits else "",
        changes=tuple(as_overrides(changes)),
        patch=as_yaml(changes, question.config) if changes and question.config is not None else "",
        fraction=chosen.candidate.placement.fraction,
        units_away=sum(units.values()),
        units=len(units),
        sent=chosen.sent_apart,
        stages_sent=tuple(stage.sent for stage in chosen.stages),
    )


def as_data(value: Any) -> Any:
    """Return a value of plans as JSON takes it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            key: as_data(item)
            for key, item in ((name, getattr(value, name)) for name in value.__dataclass_fields__)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(as_data(key)): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [as_data(item) for item in value]
        return sorted(items) if isinstance(value, set | frozenset) else items
    return value


def _at_stage(base: Candidate, stage: int) -> Candidate:
    """Return the candidate at another stage; below 3 with its parameters on the device."""
    from zrun_core.memory.buffers import Tier

    placement = base.placement
    if stage < 3:
        placement = replace(placement, param=Tier.DEVICE)
    dims = base.dims if stage else replace(base.dims, shard=None)
    return replace(base, stage=stage, dims=dims, placement=placement)


def _search(
    question: Question, goal: SearchGoal, headroom: float | None, watch: Watch | None
) -> SearchResult:
    from zrun_core.plan.answer.choice import HEADROOM
    from zrun_core.plan.answer.search import SearchSpace, search

    base = question.base
    constraints = SearchSpace(
        global_batch=question.batch.global_size,
        base=base,
        headroom=HEADROOM if headroom is None else headroom,
    )
    tell = watch or (lambda state: None)
    if goal == "fit":
        # First with the layers as they are: each way to divide them is traced by itself.
        quick = replace(constraints, tp=(base.dims.tp,))
        found = search(question.planner, quick, goal, tell)
        if found.best:
            return found
    return search(question.planner, constraints, goal, tell)


def _difference(before: Candidate, after: Candidate) -> str:
    """Return the words of a candidate in which it differs from another."""
    old = set(str(before).split(", "))
    return ", ".join(part for part in str(after).split(", ") if part not in old) or str(after)
