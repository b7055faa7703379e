"""Trace the model of a job: run micro-batches of its data through it, and record what they take.

This is the heavy side, which runs the user's code: `trace_process.py` gives it a process of its
own. A pass is the rows that one micro-batch makes (`traced_model.py`). From passes to a trace:

    1, 2 samples, 3 units and the tail   two passes
    affine.fit                           one pass, whose sizes are affine in the micro-batch
    block_extrapolation.expand           ... and all blocks written out
    Trace                                ... and what comes after the last block is the loss

Micro-batches for which sizes are not affine are traced by themselves (`Trace.exact`).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from zrun_core.data.batch import count_tokens
from zrun_core.errors import ZrunError
from zrun_core.models.generate import last_step_of_sample, sample
from zrun_core.plan.trace import cuda_decompositions
from zrun_core.plan.trace.affine import fit, fit_loops, line_through
from zrun_core.plan.trace.block_extrapolation import (
    UNITS,
    BlocksDifferError,
    BlockSeries,
    alike,
    expand,
    find_series,
)
from zrun_core.plan.trace.module_tree import describe_modules, describe_params
from zrun_core.plan.trace.parts_check import check_division
from zrun_core.plan.trace.peak import peak_of
from zrun_core.plan.trace.profile import COMPILER_BYTES, Profile, Source, Trace
from zrun_core.plan.trace.rows import (
    KIND_NUMBER,
    PHASE_NUMBER,
    Affine,
    Rows,
    TracePhase,
    Vocabulary,
    same_but,
    values_at,
)
from zrun_core.plan.trace.sample_batches import bytes_of, samples_of
from zrun_core.plan.trace.traced_model import CannotTraceError, TracedModel, build, last_line
from zrun_core.spine import memory_limits
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.evaluation import EvalConfig
from zrun_core.spine.sections.section import Ref
from zrun_core.train.hook_check import enters_gathered
from zrun_core.user_code import user
from zrun_core.user_code.build import check, check_trained
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

# Micro-batches between which sizes are taken to be affine; the first pair that the model bears.
_PAIRS = ((1, 2), (2, 3), (2, 4), (4, 8))
_LOOP_ERROR = 0.01  # between what loops are taken to need and what they do
_REAL_S = 60.0  # that a pass may take on values
_REAL_BYTES = 256 << 20  # parameters of a model that runs for real with all of its blocks
_SOME = 8  # samples of a micro-batch that is not chosen yet

_Method: TypeAlias = tuple[Source, Callable[[], None]]  # to run a model, and what begins it


def trace_job(
    job: JobConfig,
    job_dir: Path,
    *,
    micros: Sequence[int] = (),
    checkpoints: Sequence[str] = ("none",),
    device: str = "cpu",
    mode: str = "fake",
    why: str = "",
    threads: int | None = None,
    tell: Callable[[str | Profile], None] = lambda _: None,
) -> Profile:
    """Return what the job's model and micro-batches take.

    Args:
        micros: micro-batches that will be asked for; they matter only to models that are not
            affine in it.
        checkpoints: policies of activation checkpointing, the one that matters most first; those
            that the model cannot have are left out.
        device: whose kernels count: "cpu" or "cuda".
        mode: what to begin with: "fake" tensors, or a run on "values".
        threads: that compute for a rank on a CPU; None: as many as there are now.

    Raises:
        JobError: the job names what does not exist, or what the model cannot do.
        UserCodeError: the user's code raised.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    before = memory_limits.resident_bytes([os.getpid()])
    user.add_to_path(job_dir)
    loss = None
    if job.loss is not None:
        loss = user.function(job.loss, job_dir, user.TAKES["loss"])
    if device == "cuda":
        cuda_decompositions.follow_cuda()
    tell(f"building {job.model.call}")
    # What came before may have ended its process while it was built without values.
    model, table = build(job, job_dir, device, for_real=mode == "values")
    check(model)
    check_trained(model)
    if not model.training:
        model.train()
    described = replace(_described(model, job, device), table=table, why=why)
    tell(described)
    tell(f"reading the first samples of {job.data.call}")
    samples = samples_of(job, job_dir)
    described = _with_imports(described, model, before + sum(map(bytes_of, samples.first)))
    if job.parallel.tp > 1:
        tell(f"checking what ranks with slices of {job.model.call} compute")
    notes = check_division(job, job_dir, samples, max(micros, default=1), few_blocks=True)
    subject = TracedModel(job, job_dir, model, loss, samples, device)
    gc.collect()
    gc.freeze()  # each pass collects what it makes, and not again all that is there before
    try:
        tracer = _PolicyTracer(job, subject, micros, tell, notes)
        return tracer.profile(described, checkpoints, mode)
    finally:
        gc.unfreeze()


def _described(model: nn.Module, job: JobConfig, device: str) -> Profile:
    """Return what its parameters alone tell."""
    return Profile(
        source="states alone",
        why="",
        params=describe_params(model, Precision.of(job.precision).compute),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        num_blocks=len(repeated_blocks(model)),
        batch_bytes=Affine(0.0, 0.0),
        tokens_per_sample=None,
        traces={},
        modules=describe_modules(model),
        device=device,
    )


def _with_imports(profile: Profile, model: nn.Module, before: int) -> Profile:
    """Return a profile that says what the user's imports and data take of a process.

    `before` are the bytes of this process before anything of the user's was imported, and those of
    samples that were read since.
    """
    has_compiler = "torch._dynamo" in sys.modules
    tensors = [*model.parameters(), *model.buffers()]
    others = sum(each.nbytes for each in tensors if not each.is_meta)
    if has_compiler:
        others += COMPILER_BYTES
    taken = memory_limits.resident_bytes([os.getpid()]) - before - others
    return replace(profile, imported_bytes=max(0, taken), builds_with_compiler=has_compiler)


class _AffineFit(NamedTuple):
    """Two micro-batches, and the rows between them.

    Attributes:
        low: the smaller one.
        high: the larger one.
        rows: with affine sizes; None: other things run for the larger one.
        has_loops: whether a loop runs more often for the larger one.
    """

    low: int
    high: int
    rows: Rows | None
    has_loops: bool


class _PolicyTracer:
    """Traces a model with one policy of activation checkpointing after the other.

    The first policy is looked at more closely than the others: whether a third micro-batch and one
    more block fit to what is written down. What holds for it is taken to hold for the others.
    """

    def __init__(
        self,
        job: JobConfig,
        model: TracedModel,
        micros: Sequence[int],
        tell: Callable[[str | Profile], None],
        notes: Sequence[str],
    ) -> None:
        self._job = job
        self._model = model
        self._micros = micros
        self._tell = tell
        self._first_policy = ""
        self._is_affine = True
        self._notes = [*notes]
        if model.samples.note:
            self._notes.append(model.samples.note)

    def _micro(self) -> int:
        """Return the samples of a micro-batch; some of them where the plan is to choose."""
        micro = self._job.batch.micro
        return _SOME if micro == "auto" else micro

    # All of it

    def profile(self, described: Profile, checkpoints: Sequence[str], mode: str) -> Profile:
        """Trace every policy that can be traced; the first one as well as that can be done.

        `described` is what the parameters alone tell. Of `checkpoints`, the policy that matters
        most comes first; `mode` is as of `trace_job`.
        """
        model = self._model
        policies = [each for each in checkpoints if each == "none" or model.blocks] or ["none"]
        no_blocks = "the model has no repeated blocks that could be recomputed"
        impossible = {each: no_blocks for each in checkpoints if each not in policies}
        if self._job.compile:
            self._notes.append(
                "traced without torch.compile, which fuses operators and then keeps less"
            )
        samples = model.samples
        of_one, of_two = (bytes_of(samples.batch(micro)) for micro in (1, 2))
        found = replace(
            described,
            batch_bytes=Affine(*line_through(1, of_one, 2, of_two)),
            tokens_per_sample=count_tokens(samples.batch(1)) or None,
            is_ragged=samples.is_ragged,
            num_samples=samples.num_samples,
            sample_s=samples.sample_s,
            usual_share=samples.usual_share(self._micro()),
            untraced=impossible,
        )
        methods: list[_Method] = [("measured on the CPU", model.make_real)]
        if mode == "fake":
            methods.insert(0, ("traced", model.make_fake))
        # What the model cannot do with the policy that is asked for, it may do without any.
        for policy in dict.fromkeys([policies[0], "none"]):
            found = self._by_any(found, policy, methods)
            if found.traces:
                break
        found = self._with_others(found, policies)
        if found.traces and self._job.eval is not None:
            found = self._evaluated(found, self._job.eval)
        if found.traces:
            found = self._hooked(found)
        if found.traces and model.blocks and self._job.parallel.tp == 1:
            found = self._followed(found)  # of the whole model, as in training
        return replace(found, notes=self._distinct_notes())

    def _evaluated(self, found: Profile, config: EvalConfig) -> Profile:
        """Return `found` with what the largest evaluation takes; a note says of which it is not
        known.
        """
        self._tell(found)
        model = self._model
        job_dir = model.job_dir
        largest = found.evaluation_bytes
        for name, ref in config.sets.items():
            key = f"eval.data.{name}".rstrip(".")
            self._tell(f"evaluating {self._job.model.call} with {ref.call}")
            try:
                metrics = None
                if config.metrics is not None:
                    metrics = user.function(config.metrics, job_dir, user.TAKES["eval.metrics"])
                data = self._job.data.model_copy(update={"call": ref.call, "args": ref.args})
                held_out = self._job.model_copy(update={"data": data})
                samples = samples_of(held_out, job_dir, values=not model.is_fake)
                sizes = [model.evaluate(samples, micro, metrics) for micro in (1, 2)]
            except (CannotTraceError, ZrunError) as error:
                self._notes.append(f"{key} is not planned: {last_line(error)}")
                continue
            line = Affine(*line_through(1, sizes[0], 2, sizes[1]))
            largest = max(largest, line, key=lambda each: each.at(self._micro()))
        return replace(found, evaluation_bytes=largest)

    def _hooked(self, found: Profile) -> Profile:
        """Return `found` with what is known of the hooks: text that the bundled one makes, and
        whether they have all parameters whole.
        """
        model = self._model
        held, others = 0, []
        gathers = False
        for name, ref in self._job.hooks:
            if not isinstance(ref, Ref):
                continue
            key = f"hooks.{name}"
            self._tell(f"looking at {ref.call}")
            try:
                hook = user.load(Ref(call=ref.call), model.job_dir)
                gathers = gathers or enters_gathered(hook)
                if hook is not sample:
                    others.append(key)
                    continue
                step = last_step_of_sample(model.model, ref.args)
                held = max(held, model.most_held([step], None, "generating failed"))
            except (CannotTraceError, ZrunError) as error:
                self._notes.append(f"{key} is not planned: {last_line(error)}")
        if others:
            verb = "allocates" if len(others) == 1 else "allocate"
            self._notes.append(
                f"what {' and '.join(others)} {verb} is not in this estimate: leave memory free "
                "for it"
            )
        return replace(found, generation_bytes=held, hooks_gather=gathers)

    def _followed(self, found: Profile) -> Profile:
        """Return `found` with what flows through the model, or with why that is not known."""
        self._tell(found)
        self._tell(f"following {self._job.model.call} from block to block")
        why = ""
        for micro in dict.fromkeys(micro for pair in _PAIRS for micro in pair):
            try:
                return replace(found, flow=self._model.follow(micro), flow_micro=micro)
            except ZrunError as error:
                why = why or last_line(error)
        return replace(found, why_no_flow=why)

    def _distinct_notes(self) -> tuple[str, ...]:
        notes = list(self._notes)
        if self._model.counter.note:
            notes.append(f"times are too short: {self._model.counter.note}")
        return tuple(dict.fromkeys(notes))

    def _by_any(self, found: Profile, policy: str, methods: Sequence[_Method]) -> Profile:
        """Return `found` with the trace of one policy, or with why there is none.

        The first of `methods` that works makes the trace.
        """
        why = found.why
        last_why = ""
        for source, begin in methods:
            self._tell(f"running {self._job.model.call} with activations.checkpoint {policy}")
            try:
                begin()
                trace = self._traced(policy)
            except (CannotTraceError, ZrunError) as error:
                last_why = f"the model does not run: {last_line(error)}"
                why = why or f"the model does not run on fake tensors: {last_line(error)}"
                continue
            found = replace(
                found,
                source=source,
                why=why,
                traces={policy: trace},
                notes=self._distinct_notes(),
                follows_values=self._model.follows_values,
            )
            self._tell(found)
            return found
        return replace(found, untraced={**found.untraced, policy: found.why or last_why})

    def _with_others(self, found: Profile, policies: Sequence[str]) -> Profile:
        """Return `found` with the other policies' traces too, made by the method that worked."""
        if not found.traces:
            why = found.untraced[policies[0]]
            untraced = {**found.untraced, **dict.fromkeys(policies, why)}
            return replace(found, why=why, untraced=untraced)
        traces = dict(found.traces)
        untraced = dict(found.untraced)
        for policy in policies:
            if policy in traces or policy in untraced:
                continue
            self._tell(f"running {self._job.model.call} with activations.checkpoint {policy}")
            try:
                traces[policy] = self._traced(policy)
            except (CannotTraceError, ZrunError) as error:
                untraced[policy] = last_line(error)
        return replace(found, traces=traces, untraced=untraced)

    # One policy

    def _traced(self, policy: str) -> Trace:
        """Trace one policy: from few blocks where the others do the same, else from all of them.

        Raises:
            CannotTraceError: the model does not run on what it is made of now.
        """
        model = self._model
        self._first_policy = self._first_policy or policy
        with model.checkpointed(policy):
            runs_few_blocks = model.is_fake or model.parameter_bytes > _REAL_BYTES
            series: list[BlockSeries] = []
            if runs_few_blocks:
                multiple = self._job.activations.n if policy == "every_n" else 1
                series = find_series(model.blocks, model.model, multiple)
            if series:
                try:
                    return self._fitted(policy, series)
                except (BlocksDifferError, CannotTraceError):
                    pass  # with all blocks then
            return self._fitted(policy, ())

    def _fitted(self, policy: str, series: Sequence[BlockSeries]) -> Trace:
        """Return the trace from passes of a few micro-batches, all blocks written out.

        The model has `policy` now; of the repeated blocks in `series` only some run.

        Raises:
            BlocksDifferError: the blocks that do not run do something else.
            CannotTraceError: the model does not run on what it is made of now.
        """
        model = self._model
        is_first = policy == self._first_policy

        @functools.cache
        def rows_of(micro: int, units: int = UNITS) -> Rows:
            return model.run(micro, series, units)

        # Scratch of matrix products is no line: it grows with their sizes up to that of a block.
        has_scratch = is_first and model.has_half_products and model.parameter_bytes <= _REAL_BYTES

        def exactly(micro: int) -> Trace:
            rows = rows_of(micro)
            if has_scratch:
                rows = model.run(micro, series, UNITS, products=True)
            return self._trace(policy, rows, series)

        found = self._affine(policy, rows_of, _PAIRS[:1] if series else _PAIRS)
        if found.rows is None and series:
            raise BlocksDifferError
        if found.rows is None:
            return self._proportional(policy, rows_of, exactly, found.high)
        if series and is_first:
            self._check_one_more_unit(rows_of, series, found.low)
        beside = {micro for micro in self._micros if micro < found.low or has_scratch}
        if is_first and model.is_fake and not found.has_loops:
            third = 2 * found.high
            again = fit(rows_of(found.low), found.low, rows_of(third), third, model.vocabulary)
            self._is_affine = again is not None and same_but(again, found.rows)
        if not self._is_affine:
            micros = ", ".join(str(micro) for micro in self._micros) or "none"
            self._notes.append(f"memory is not linear in the micro-batch: exact for {micros}")
            beside |= set(self._micros)
        trace = self._trace(policy, found.rows, series)
        return replace(trace, exact={micro: exactly(micro) for micro in sorted(beside)})

    def _proportional(
        self,
        policy: str,
        rows_of: Callable[[int], Rows],
        exactly: Callable[[int], Trace],
        high: int,
    ) -> Trace:
        """Return a trace in proportion to one micro-batch: what runs depends on values or number.

        `exactly` traces one micro-batch, of which `high` is the largest that ran.
        """
        self._notes.append(
            "what runs depends on the micro-batch: its memory is taken to be proportional to it"
        )
        largest = high
        if self._model.is_fake or self._is_quick():
            largest = max(self._micros, default=high)
        trace = self._trace(policy, _in_proportion(rows_of(largest), largest), ())
        return replace(trace, exact={largest: exactly(largest)})

    def _is_quick(self) -> bool:
        """Return whether a pass of the largest micro-batch may run on values."""
        largest = max(self._micros, default=1)
        return largest <= 4 or self._model.seconds_per_sample * largest < _REAL_S

    def _check_one_more_unit(
        self, rows_of: Callable[..., Rows], series: Sequence[BlockSeries], micro: int
    ) -> None:
        """Raise unless a pass with one unit more is what extrapolation makes of the one without."""
        expanded = self._expanded(rows_of(micro), series, 1)
        if not alike(expanded, rows_of(micro, UNITS + 1)):
            raise BlocksDifferError

    def _affine(
        self, policy: str, rows_of: Callable[[int], Rows], pairs: Sequence[tuple[int, int]]
    ) -> _AffineFit:
        """Fit the first pair between which only sizes differ, or how often a loop runs.

        Raises:
            CannotTraceError: none of them runs.
        """
        first_problem: CannotTraceError | None = None
        tried: tuple[int, int] | None = None
        for low, high in pairs:
            looped = None
            try:
                rows = fit(rows_of(low), low, rows_of(high), high, self._model.vocabulary)
                if rows is None and self._model.is_fake:
                    looped = self._looped(policy, rows_of, low, high)
            except CannotTraceError as error:  # such as a loss that needs pairs
                first_problem = first_problem or error
                continue
            if rows is not None:
                return _AffineFit(low, high, rows, has_loops=False)
            if looped is not None:
                return _AffineFit(low, high, looped, has_loops=True)
            tried = (low, high)
            if not self._model.is_fake:
                break
        if tried is None:
            assert first_problem is not None
            raise first_problem
        return _AffineFit(*tried, None, has_loops=False)

    def _looped(
        self, policy: str, rows_of: Callable[[int], Rows], low: int, high: int
    ) -> Rows | None:
        """Fit loops that run more often for a larger micro-batch, if a third one confirms it."""
        vocabulary = self._model.vocabulary
        rows = fit_loops(rows_of(low), low, rows_of(high), high, vocabulary)
        if rows is None or policy != self._first_policy:
            return rows
        third = 2 * high
        expected = _as_trace(policy, rows, vocabulary)
        real = _as_trace(policy, rows_of(third), vocabulary)
        figures = [
            (
                peak_of(trace, third, steady={}).num_bytes,
                float(values_at(trace.ops["flops"], third).sum()),
            )
            for trace in (expected, real)
        ]
        is_good = all(
            abs(one - other) <= _LOOP_ERROR * other for one, other in zip(*figures, strict=True)
        )
        return rows if is_good else None

    # From a pass to a trace

    def _trace(self, policy: str, rows: Rows, series: Sequence[BlockSeries]) -> Trace:
        return _as_trace(policy, self._expanded(rows, series), self._model.vocabulary)

    def _expanded(
        self, rows: Rows, series: Sequence[BlockSeries], copies: int | None = None
    ) -> Rows:
        """Return `rows` with all units of each series, or with `copies` more than ran."""
        for each in series:
            missing = each.num_units - UNITS if copies is None else copies
            rows = expand(rows, each, missing, self._model.vocabulary)
        return rows


def _in_proportion(rows: Rows, micro: int) -> Rows:
    """Return `rows` in proportion to the micro-batch, but for what is of the size of parameters."""
    found = rows.copy()
    is_proportional = rows["kind"] != KIND_NUMBER["grad"]
    for name in ("size", "flops"):
        at_micro = rows[name][is_proportional, 0]
        found[name][is_proportional] = np.stack([np.zeros(len(at_micro)), at_micro / micro], axis=1)
    return found


def _as_trace(policy: str, rows: Rows, vocabulary: Vocabulary) -> Trace:
    """Return the finished trace: the loss is what follows the last block, outside of modules."""
    is_forward = rows["phase"] == PHASE_NUMBER[TracePhase.FORWARD]
    is_outside = rows["module"] == vocabulary.modules.number_of("")
    ends = np.flatnonzero(is_forward & (rows["block"] >= 0))
    if not len(ends):
        ends = np.flatnonzero(is_forward & ~is_outside)
    last = int(ends[-1]) if len(ends) else -1
    is_loss = is_forward & is_outside
    is_loss[: last + 1] = False
    rows = rows.copy()
    rows["phase"][is_loss] = PHASE_NUMBER[TracePhase.LOSS]
    return Trace.of_rows(policy, rows, vocabulary)
