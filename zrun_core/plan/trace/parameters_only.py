"""Traces that stand for those that cannot be made, so that states can be told all the same. Pure.

They are no more than guesses: see `Estimate.is_guess`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zrun_core.plan.trace.profile import ParamInfo, Profile, Trace
from zrun_core.plan.trace.rows import EventKind, Operator, RowWriter, TracePhase, Vocabulary

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_OUTPUTS = 2  # that are kept of each matrix: its own, and what a function makes of it


def with_guesses(profile: Profile, policies: Sequence[str]) -> Profile:
    """Return `profile` with a trace for each of these checkpointing policies that was not traced.

    It is that of the model that recomputes nothing, if there is one; else each matrix is used once,
    by each token of a sample or by the sample.
    """
    missing = [policy for policy in policies if policy not in profile.traces]
    if not missing:
        return profile
    plain = profile.traces.get("none") or _from_shapes(profile)
    guesses = {policy: replace(plain, checkpoint=policy) for policy in missing}
    return replace(profile, traces={**profile.traces, **guesses}, guessed=frozenset(missing))


def _from_shapes(profile: Profile) -> Trace:
    """Return a trace in which each matrix keeps outputs, and each gradient lasts a moment."""
    vocabulary = Vocabulary()
    rows = RowWriter(vocabulary)
    positions = profile.tokens_per_sample or 1
    numbered = [*enumerate(profile.params)]
    output_bytes = {
        number: float(_OUTPUTS * positions * param.shape[0] * _item_bytes(param))
        for number, param in numbered
        if len(param.shape) > 1
    }
    for number, per_sample in output_bytes.items():
        param = profile.params[number]
        _event(rows, param, number, 0.0, per_sample, True, TracePhase.FORWARD, "activation")
        _product(rows, param, positions, 1, TracePhase.FORWARD)
    for number, param in reversed(numbered):
        if number in output_bytes:
            _product(rows, param, positions, 2, TracePhase.BACKWARD)
        if param.trainable:
            tensor = number + len(numbered)
            grad_bytes = float(param.numel * _item_bytes(param))
            for alloc in (True, False):
                _event(rows, param, tensor, grad_bytes, 0.0, alloc, TracePhase.BACKWARD, "grad")
        if number in output_bytes:
            per_sample = output_bytes[number]
            _event(rows, param, number, 0.0, per_sample, False, TracePhase.BACKWARD, "activation")
    return Trace.of_rows("none", rows.rows(), vocabulary)


def _item_bytes(param: ParamInfo) -> int:
    return _ITEM_BYTES.get(param.dtype, 4)


def _event(
    rows: RowWriter,
    param: ParamInfo,
    tensor: int,
    base: float,
    per_sample: float,
    alloc: bool,
    phase: TracePhase,
    kind: EventKind,
) -> None:
    module = param.name.rpartition(".")[0]
    rows.event(
        tensor,
        base,
        per_sample,
        alloc=alloc,
        phase=phase,
        module=module,
        block=param.block,
        kind=kind,
    )


def _product(
    rows: RowWriter, param: ParamInfo, positions: int, times: int, phase: TracePhase
) -> None:
    """Append `times` products of the matrix with a sample."""
    num_rows = param.shape[0]
    shape = (positions, num_rows, param.numel // max(1, num_rows))
    rows.op(
        Operator("mm", "gemm", param.dtype, shape),
        flops=(0.0, 2.0 * times * positions * param.numel),
        bytes_moved=(float(_item_bytes(param) * times * param.numel), 0.0),
        phase=phase,
        module=param.name.rpartition(".")[0],
        block=param.block,
    )
