"""Trace the model of a job: build it, run a micro-batch of its data through it on fake tensors, and write that down.

This is the heavy side, which runs the user's code: `trace.py` gives it a process of its own. Nothing of the size of the
model is allocated: it is built on the meta device where its factory bears that, and its parameters become fake tensors
in the compute dtype, as flat units have them. A model that looks at values cannot be run so: it is built for real then,
with few of its blocks, and runs on the CPU under the same recorder.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kv_cache import omit_cache
from zrun_core.data.batch import _map_tensors, count_tokens
from zrun_core.errors import UserCodeError, ZrunError
from zrun_core.memory.layout import dense_stride
from zrun_core.plan.trace import cuda_decompositions
from zrun_core.plan.trace.affine import fit, fit_loops, line
from zrun_core.plan.trace.block_extrapolation import (
    UNITS,
    BlockSeries,
    Timeline,
    alike,
    expand,
    find_series,
    shortened,
)
from zrun_core.plan.trace.op_recorder import OpRecorder, OpRow
from zrun_core.plan.trace.profile import (
    Affine,
    Event,
    ModuleInfo,
    Op,
    ParamInfo,
    Profile,
    Source,
    Trace,
    TracePhase,
    peak_of,
)
from zrun_core.plan.trace.sample_batches import SampleBatches, bytes_of, samples_of, tensors_of
from zrun_core.plan.trace.uncompiled import pass_by_compiler
from zrun_core.plan.trace.unpacked import as_unpacked
from zrun_core.spine import memory_limits
from zrun_core.spine.config import ActivationsConfig, JobConfig
from zrun_core.user_code import user
from zrun_core.user_code.build import check
from zrun_core.user_code.loss import LossFunction, LossKind, compute_loss
from zrun_core.zero.auto_wrap import _of_running_norms, repeated_blocks
from zrun_core.zero.precision import Precision

_CPU = torch.device("cpu")
_PAIRS = (
    (1, 2),
    (2, 3),
    (2, 4),
    (4, 8),
)  # micro-batches from which sizes are known as a function of it
_LOOP_ERROR = 0.01  # between what loops are taken to need and what they do
_REAL_S = 60.0  # that a pass may take on values
_REAL_BYTES = 256 << 20  # parameters of a model that runs for real with all of its blocks


_Way: TypeAlias = tuple[Source, Callable[[], None]]  # to run a model, and what begins it


class _CannotTraceError(Exception):
    """The model does not run on fake tensors; the text says why."""


class _NotAlikeError(Exception):
    """Blocks that looked alike do not do the same."""


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
    """What the job's model and micro-batches take.

    Args:
        micros: micro-batches that will be asked for; they matter only to models that are not linear in it.
        checkpoints: policies of activation checkpointing, the one that matters most first; those
            that the model cannot have are left out.
        device: whose kernels count: "cpu" or "cuda".
        mode: what to begin with: "fake" tensors, or a run on "values".
        why: how what comes before that failed.
        threads: that compute for a rank on a CPU; None: as many as there are now.
        tell: gets what is being done now, and what is known so far.

    Raises:
        JobError: the job names what does not exist, or what the model cannot do.
        UserCodeError: the user's code raised.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    user.add_to_path(job_dir)
    loss = None if job.loss is None else user.function(job.loss, job_dir, user.TAKES["loss"])
    if device == "cuda":
        cuda_decompositions.follow_cuda()
    pass_by_compiler()
    tell(f"building {job.model.call}")
    # What came before may have ended its process while it was built without values.
    model = _build_for_real(job, job_dir) if mode == "values" else _build(job, job_dir)
    check(model)
    if not model.training:
        model.train()
    described = replace(_described(model, job, device), why=why)
    tell(described)
    tell(f"reading the first samples of {job.data.call}")
    subject = _Subject(job, job_dir, model, loss, samples_of(job, job_dir), device, tell)
    gc.collect()
    gc.freeze()  # each pass collects what it makes, and not again all that is there before
    try:
        return subject.profile(described, micros, checkpoints, mode)
    finally:
        gc.unfreeze()


def _described(model: nn.Module, job: JobConfig, device: str) -> Profile:
    """What its parameters alone tell."""
    return Profile(
        source="formula",
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


def _build(job: JobConfig, job_dir: Path) -> nn.Module:
    """The model, on the meta device if its factory bears that."""
    try:
        with torch.device("meta"):
            return user.build_model(job.model, job_dir)
    except UserCodeError:
        return _build_for_real(job, job_dir)


def _build_for_real(job: JobConfig, job_dir: Path) -> nn.Module:
    torch.manual_seed(job.seed)
    return user.build_model(job.model, job_dir)


# The model


class _Subject:
    """A job's model, and the passes that are run through it."""

    def __init__(
        self,
        job: JobConfig,
        job_dir: Path,
        model: nn.Module,
        loss: LossFunction | None,
        samples: SampleBatches,
        device: str,
        tell: Callable[[str | Profile], None],
    ) -> None:
        self._tell = tell
        self._job, self._job_dir, self._model, self._loss, self._samples = (
            job,
            job_dir,
            model,
            loss,
            samples,
        )
        self._precision = Precision.of(job.precision)
        self._blocks = repeated_blocks(model)
        self._mode: AbstractContextManager[Any] = nullcontext()
        self._is_fake = False
        self._known: list[torch.Tensor] = []
        self._seconds_per_sample = 0.0
        self._device = device
        self._first_policy = ""
        self._is_linear = True
        self._follows_values = False
        self.notes: list[str] = [samples.note] if samples.note else []

    # All of it

    def profile(
        self,
        described: Profile,
        micros: Sequence[int],
        checkpoints: Sequence[str],
        mode: str,
    ) -> Profile:
        """Trace every policy that can be traced; the first one as well as that can be done."""
        policies = [each for each in checkpoints if each == "none" or self._blocks] or ["none"]
        no_blocks = "the model has no repeated blocks that could be recomputed"
        impossible = {each: no_blocks for each in checkpoints if each not in policies}
        if self._job.compile:
            self.notes.append(
                "traced without torch.compile, which fuses operators and then keeps less"
            )
        batches = {micro: bytes_of(self._samples.batch(micro)) for micro in (1, 2)}
        found = replace(
            described,
            batch_bytes=line(1, batches[1], 2, batches[2]),
            tokens_per_sample=count_tokens(self._samples.batch(1)) or None,
            is_ragged=self._samples.is_ragged,
            num_samples=self._samples.num_samples,
            untraced=impossible,
        )
        ways: list[_Way] = [("traced", self._make_fake), ("measured on the CPU", self._make_real)]
        # What the model cannot do with the policy that is asked for, it may do without any.
        for policy in dict.fromkeys([policies[0], "none"]):
            found = self._by_any(found, policy, ways if mode == "fake" else ways[1:], micros)
            if found.traces:
                break
        found = self._with_others(found, policies, micros)
        return replace(found, notes=tuple(dict.fromkeys(self.notes)))

    def _by_any(
        self,
        found: Profile,
        policy: str,
        ways: Sequence[_Way],
        micros: Sequence[int],
    ) -> Profile:
        """With the trace of one policy, made in the first way that works, or why none does."""
        why, at_last = found.why, ""
        for label, make in ways:
            self._tell(f"running {self._job.model.call} with activations.checkpoint {policy}")
            try:
                make()
                traces = {policy: self.traced(policy, micros)}
            except (_CannotTraceError, ZrunError) as error:
                at_last = f"the model does not run: {_last_line(error)}"
                why = why or f"the model does not run on fake tensors: {_last_line(error)}"
            else:
                notes = tuple(dict.fromkeys(self.notes))
                found = replace(
                    found,
                    source=label,
                    why=why,
                    traces=traces,
                    notes=notes,
                    follows_values=self._follows_values,
                )
                self._tell(found)
                return found
        return replace(found, untraced={**found.untraced, policy: found.why or at_last})

    def _with_others(
        self,
        found: Profile,
        policies: Sequence[str],
        micros: Sequence[int],
    ) -> Profile:
        """With the traces of the other policies too, in the way that worked; none if no way did."""
        if not found.traces:
            why = found.untraced[policies[0]]
            return replace(
                found,
                why=why,
                untraced={**found.untraced, **dict.fromkeys(policies, why)},
            )
        traces, untraced = dict(found.traces), dict(found.untraced)
        for policy in policies:
            if policy in traces or policy in untraced:
                continue
            self._tell(f"running {self._job.model.call} with activations.checkpoint {policy}")
            try:
                traces[policy] = self.traced(policy, micros)
            except (_CannotTraceError, ZrunError) as error:
                untraced[policy] = _last_line(error)
        return replace(found, traces=traces, untraced=untraced)

    # Fake

    def _make_fake(self) -> None:
        """Parameters in the compute dtype, buffers and other tensors become fake."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mode, self._is_fake = mode, True

        def made(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            shape, stride = tensor.shape, dense_stride(tensor)
            with mode:
                return torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)

        self._replace_tensors(made)

    def _make_real(self) -> None:
        """Parameters in the compute dtype and with values, but without those of blocks that will not run."""
        gc.collect()
        self._mode, self._is_fake = nullcontext(), False
        shape = describe_params(self._model, self._precision.compute)
        num_bytes = 4 * sum(param.numel for param in shape)
        if num_bytes > 0.4 * memory_limits.host_available():
            raise UserCodeError(
                f"the model must run for real to be measured, and its {num_bytes / 2**30:.1f} GiB do not fit here"
            )
        self._samples = samples_of(self._job, self._job_dir, values=True)
        self._model = _build_for_real(self._job, self._job_dir)
        if not self._model.training:
            self._model.train()
        self._blocks = repeated_blocks(self._model)
        self._replace_tensors(lambda tensor, dtype: tensor.detach().to(dtype))

    def _replace_tensors(self, made: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        """Every tensor of the model becomes what `made` makes of it, in a dtype; one that is shared stays shared."""
        in_fp32 = _of_running_norms(self._model)
        new: dict[int, torch.Tensor] = {}
        self._known = []

        def replaced(old: torch.Tensor) -> torch.Tensor:
            if id(old) not in new:
                dtype = old.dtype
                if isinstance(old, nn.Parameter):
                    dtype = torch.float32 if id(old) in in_fp32 else self._precision.compute
                new[id(old)] = made(old.detach(), dtype)
                if isinstance(old, nn.Parameter):
                    new[id(old)] = nn.Parameter(new[id(old)], requires_grad=old.requires_grad)
                    new[id(old)].__dict__.update(vars(old))
                self._known += [
                    old,
                    new[id(old)],
                ]  # the old one keeps its identity from being used again
            return new[id(old)]

        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        tensors[key] = replaced(tensor)  # type: ignore[assignment]
        for module in self._model.modules():
            for key, value in list(vars(module).items()):
                if key not in ("_parameters", "_buffers", "_modules"):
                    vars(module)[key] = _with_tensors(value, replaced)

    # One policy

    def traced(self, policy: str, micros: Sequence[int]) -> Trace:
        """The timeline of one policy: from few blocks where the others do the same, else from all of them.

        Raises:
            _CannotTraceError: the model does not run on what it is made of now.
        """
        self._first_policy = (
            self._first_policy or policy
        )  # which is looked at more closely than the others
        with self._checkpointed(policy):
            is_small = 4 * sum(param.numel() for param in self._model.parameters()) <= _REAL_BYTES
            if self._is_fake or not is_small:
                multiple = self._job.activations.n if policy == "every_n" else 1
                if series := find_series(self._blocks, self._model, multiple):
                    try:
                        return self._fitted(policy, micros, series)
                    except (_NotAlikeError, _CannotTraceError):
                        pass
            return self._fitted(policy, micros, ())

    @contextmanager
    def _checkpointed(self, policy: str) -> Iterator[None]:
        """Blocks recompute as `policy` says inside, and nothing else is done to the model than in training."""
        config = ActivationsConfig(checkpoint=policy, n=self._job.activations.n)  # type: ignore[arg-type]
        with apply_checkpointing(self._model, config) as undo:
            for hook in omit_cache(self._model, config, compile=self._job.compile):
                undo.callback(hook.remove)
            yield

    def _fitted(self, policy: str, micros: Sequence[int], series: Sequence[BlockSeries]) -> Trace:
        """Sizes as functions of the micro-batch, from passes of a few of them; all blocks written out."""

        @functools.cache
        def rows(micro: int, units: int = UNITS) -> list[OpRow]:
            return self._pass(micro, series, units)

        has_scratch = policy == self._first_policy and self._has_scratch

        def exactly(micro: int) -> Trace:
            found = rows(micro)
            if has_scratch:
                found = self._pass(micro, series, UNITS, products=True)
            return _as_trace(policy, _expanded(fit(found, micro, found, micro), series))

        low, high, timeline, has_loops = self._line(policy, rows, _PAIRS[:1] if series else _PAIRS)
        if timeline is None and series:
            raise _NotAlikeError
        if timeline is None:  # what runs depends on the values, or on their number
            self.notes.append(
                "what runs depends on the micro-batch: its memory is taken to be proportional to it"
            )
            largest = max(micros, default=high) if self._is_fake or self._is_quick(micros) else high
            proportional = _as_trace(
                policy, _expanded(_proportional(rows(largest), largest), series)
            )
            return replace(proportional, exact={largest: exactly(largest)})
        if series and policy == self._first_policy:
            once = fit(rows(low), low, rows(low), low)
            deeper = fit(rows(low, UNITS + 1), low, rows(low, UNITS + 1), low)
            if once is None or deeper is None or not alike(_expanded(once, series, 1), deeper):
                raise _NotAlikeError
        # Scratch of matrix products is no line: it grows with their sizes up to that of a block.
        beside = {micro for micro in micros if micro < low or has_scratch}
        if policy == self._first_policy and self._is_fake and not has_loops:
            again = fit(rows(low), low, rows(2 * high), 2 * high)
            self._is_linear = again == timeline
        if not self._is_linear:
            self.notes.append(
                f"memory is not linear in the micro-batch: exact for {_listed(micros)}"
            )
            beside |= set(micros)
        found = _as_trace(policy, _expanded(timeline, series))
        return replace(found, exact={micro: exactly(micro) for micro in sorted(beside)})

    def _line(
        self, policy: str, rows: Callable[[int], list[OpRow]], pairs: Sequence[tuple[int, int]]
    ) -> tuple[int, int, Timeline | None, bool]:
        """Two micro-batches between which only sizes differ, or how often a loop runs, and the timeline of them.

        Returns:
            The two; None if there is none; whether a loop runs more often for the larger one.
        """
        problem: _CannotTraceError | None = None
        tried = (0, 0)
        for low, high in pairs:
            try:
                timeline = fit(rows(low), low, rows(high), high)
                looped = (
                    self._looped(policy, rows, low, high)
                    if timeline is None and self._is_fake
                    else None
                )
            except _CannotTraceError as error:  # such as a loss that needs pairs
                problem = problem or error
                continue
            if timeline is not None or looped is not None:
                return low, high, timeline or looped, timeline is None
            tried = (low, high)
            if not self._is_fake:
                break
        if tried == (0, 0):
            assert problem is not None
            raise problem
        return *tried, None, False

    def _looped(
        self, policy: str, rows: Callable[[int], list[OpRow]], low: int, high: int
    ) -> Timeline | None:
        """The timeline of a model whose loops run more often for a larger micro-batch, if a third one confirms it."""
        timeline = fit_loops(rows(low), low, rows(high), high)
        if timeline is None or policy != self._first_policy:
            return timeline
        third = 2 * high
        found = fit(rows(third), third, rows(third), third)
        assert found is not None
        expected, real = _as_trace(policy, timeline), _as_trace(policy, found)
        peaks = [peak_of(trace, third, steady={}).num_bytes for trace in (expected, real)]
        flops = [sum(op.flops.at(third) for op in trace.ops) for trace in (expected, real)]
        is_good = all(abs(one - other) <= _LOOP_ERROR * other for one, other in (peaks, flops))
        return timeline if is_good else None

    def _is_quick(self, micros: Sequence[int]) -> bool:
        return max(micros, default=1) <= 4 or self._seconds_per_sample * max(micros) < _REAL_S

    @property
    def _has_scratch(self) -> bool:
        """Whether products take scratch of a size that matters beside the model's own."""
        num_bytes = 4 * sum(param.numel() for param in self._model.parameters())
        is_half = self._precision.compute is not torch.float32
        return self._device == "cpu" and is_half and num_bytes <= _REAL_BYTES

    def _pass(
        self,
        micro: int,
        series: Sequence[BlockSeries],
        units: int,
        *,
        products: bool = False,
    ) -> list[OpRow]:
        """Forward, loss and backward of one micro-batch.

        Args:
            products: whether the scratch of matrix products is found out too.

        Raises:
            _CannotTraceError: something raised.
            _NotAlikeError: other blocks ran than those that were left.
        """
        names = {id(module): name for name, module in self._model.named_modules()}
        block_of = {
            names[id(inner)]: number
            for number, (_, block) in enumerate(self._blocks)
            for inner in block.modules()
        }
        recorder = OpRecorder(
            self._model,
            names,
            block_of,
            reduce_dtype=self._precision.reduce,
            probes=self._device == "cpu",
            products=products,
        )
        gc.collect()
        gc.disable()  # cycles are freed when Python thinks fit: not in here
        start = time.monotonic()
        try:
            batch = self._batch(micro)
            positions = as_unpacked(batch) if self._is_fake else nullcontext()
            with self._mode, positions, shortened(series, units):
                recorder.know(self._known)
                recorder.know(tensors_of(batch))
                with recorder.following():
                    value = self._forward(batch, micro)
                    recorder.phase = TracePhase.BACKWARD
                    value.backward()
                    del value
        except ZrunError as error:
            raise _CannotTraceError(_last_line(error)) from error
        except Exception as error:
            raise _CannotTraceError(f"{type(error).__name__}: {_last_line(error)}") from error
        finally:
            gc.enable()
        self._seconds_per_sample = (time.monotonic() - start) / micro
        self._follows_values = self._follows_values or recorder.follows_values
        kept = [each.first + place for each in series for place in each.kept(units)]
        within = {each.first + place for each in series for place in range(len(each.names))}
        if sorted(block for block in recorder.entered if block in within) != sorted(kept):
            raise _NotAlikeError
        return recorder.rows()

    def _batch(self, micro: int) -> Any:
        if not self._is_fake:
            return self._samples.real_batch(micro)
        batch = self._samples.batch(micro)
        with self._mode:
            return _map_tensors(
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_CPU),
                batch,
            )

    def _forward(self, batch: Any, micro: int) -> torch.Tensor:
        """What `Trainer` differentiates."""
        with self._precision.autocast(_CPU), user.user_code("forward failed"):
            loss = compute_loss(self._model, batch, self._loss, micro)
        weight = float(loss.weight) if loss.kind is LossKind.MEAN else 1.0
        return loss.value * (weight / micro)


def _with_tensors(
    value: Any, replaced: Callable[[torch.Tensor], torch.Tensor], depth: int = 0
) -> Any:
    """`value` with every tensor in it replaced; itself where there is none."""
    if isinstance(value, torch.Tensor):
        return replaced(value)
    if depth > 3 or not isinstance(value, dict | list | tuple) or hasattr(value, "_fields"):
        return value
    if isinstance(value, dict):
        for key, item in list(value.items()):
            changed = _with_tensors(item, replaced, depth + 1)
            if changed is not item:
                value[key] = changed
        return value
    items = [_with_tensors(item, replaced, depth + 1) for item in value]
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return type(value)(items)


# From passes to timelines


def _proportional(rows: Sequence[OpRow], micro: int) -> Timeline:
    """All that one micro-batch took, in proportion to it, but for what is of the size of parameters."""
    timeline = fit(rows, micro, rows, micro)
    assert timeline is not None
    out: Timeline = []
    for row in timeline:
        if isinstance(row, Op):
            flops, moved = (
                Affine(0.0, value.base / micro) for value in (row.flops, row.bytes_moved)
            )
            out.append(replace(row, flops=flops, bytes_moved=moved))
        else:
            out.append(
                row if row.kind == "grad" else replace(row, size=Affine(0.0, row.size.base / micro))
            )
    return out


def _expanded(
    timeline: Timeline | None, series: Sequence[BlockSeries], copies: int | None = None
) -> Timeline:
    """`timeline` with all units of each series, or with so many more than ran.

    Raises:
        _NotAlikeError: it is not that simple.
    """
    for each in series:
        if timeline is not None:
            timeline = expand(timeline, each, each.num_units - UNITS if copies is None else copies)
    if timeline is None:
        raise _NotAlikeError
    return timeline


def _as_trace(policy: str, timeline: Timeline) -> Trace:
    """The finished timeline: the loss is what comes after the last block, outside of modules."""
    forward = [place for place, row in enumerate(timeline) if row.phase is TracePhase.FORWARD]
    in_blocks = [place for place in forward if timeline[place].block >= 0]
    in_modules = [place for place in forward if timeline[place].module]
    last = max(in_blocks or in_modules, default=-1)
    rows = [
        replace(row, phase=TracePhase.LOSS)
        if place > last and row.phase is TracePhase.FORWARD and not row.module
        else row
        for place, row in enumerate(timeline)
    ]
    events = tuple(row for row in rows if isinstance(row, Event))
    return Trace(policy, events, tuple(row for row in rows if isinstance(row, Op)))


# The model as data


def describe_params(model: nn.Module, compute: torch.dtype) -> tuple[ParamInfo, ...]:
    """Every parameter, under its first name, in the dtype in which it is computed with."""
    in_fp32 = _of_running_norms(model)
    block_of = {
        id(param): number
        for number, (_, block) in reversed([*enumerate(repeated_blocks(model))])
        for param in block.parameters()
    }
    return tuple(
        ParamInfo(
            name,
            tuple(param.shape),
            str(torch.float32 if id(param) in in_fp32 else compute).removeprefix("torch."),
            param.requires_grad,
            block_of.get(id(param), -1),
            tuple(dense_stride(param)),
        )
        for name, param in model.named_parameters()
    )


def describe_modules(model: nn.Module) -> tuple[ModuleInfo, ...]:
    """The module tree, parents before children, as `skeleton` builds it again."""
    names = {id(param): name for name, param in model.named_parameters()}
    kinds: dict[type, int] = {}
    first: dict[int, str] = {}
    found: list[ModuleInfo] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            if not any(name.startswith(f"{info.name}.") for info in found if info.same_as):
                found.append(ModuleInfo(name, 0, same_as=first[id(module)]))
            continue
        first[id(module)] = name
        container = "list" if isinstance(module, nn.ModuleList) else ""
        container = "sequential" if isinstance(module, nn.Sequential) else container
        found.append(
            ModuleInfo(
                name,
                kinds.setdefault(type(module), len(kinds)),
                container,
                isinstance(module, _NormBase) and bool(module.track_running_stats),
                tuple(
                    (key, names[id(param)])
                    for key, param in module._parameters.items()
                    if param is not None
                ),
            )
        )
    return tuple(found)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__).strip()[:300]


def _listed(micros: Sequence[int]) -> str:
    return ", ".join(str(micro) for micro in micros) or "none"
