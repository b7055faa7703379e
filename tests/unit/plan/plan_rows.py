"""Traces written by hand, row by row, and rows of traces to be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zrun_core.plan.trace.profile import Trace
from zrun_core.plan.trace.rows import (
    EVENT_KINDS,
    PHASES,
    Affine,
    EventKind,
    Family,
    Operator,
    RowWriter,
    TracePhase,
    Vocabulary,
)


class Event(NamedTuple):
    """Memory that comes or goes."""

    tensor: int
    size: Affine
    alloc: bool
    phase: TracePhase
    module: str
    block: int
    kind: EventKind
    accumulates: bool = False


class Op(NamedTuple):
    """An operator that runs."""

    name: str
    family: Family
    flops: Affine
    bytes_moved: Affine
    phase: TracePhase
    module: str
    block: int
    dtype: str
    shape: tuple[int, ...]


def trace_of(
    events: Sequence[Event] = (), ops: Sequence[Op] = (), exact: Mapping[int, Trace] | None = None
) -> Trace:
    """Return a trace of these rows without checkpointing."""
    vocabulary = Vocabulary()
    rows = RowWriter(vocabulary)
    for tensor, size, alloc, phase, module, block, kind, accumulates in events:
        rows.event(
            tensor,
            size.base,
            size.per_sample,
            alloc=alloc,
            phase=phase,
            module=module,
            block=block,
            kind=kind,
            accumulates=accumulates,
        )
    for op in ops:
        rows.op(
            Operator(op.name, op.family, op.dtype, op.shape),
            flops=(op.flops.base, op.flops.per_sample),
            bytes_moved=(op.bytes_moved.base, op.bytes_moved.per_sample),
            phase=op.phase,
            module=op.module,
            block=op.block,
        )
    return replace(Trace.of_rows("none", rows.rows(), vocabulary), exact=exact or {})


def events_of(trace: Trace) -> list[Event]:
    """Return the events of a trace."""
    return [
        Event(
            int(row["tensor"]),
            Affine(*row["size"].tolist()),
            bool(row["alloc"]),
            PHASES[row["phase"]],
            trace.modules[row["module"]],
            int(row["block"]),
            EVENT_KINDS[row["kind"]],
            bool(row["accumulates"]),
        )
        for row in trace.events
    ]


def ops_of(trace: Trace) -> list[Op]:
    """Return the operators of a trace."""
    found = []
    for row in trace.ops:
        operator = trace.operators[row["operator"]]
        op = Op(
            operator.name,
            operator.family,
            Affine(*row["flops"].tolist()),
            Affine(*row["size"].tolist()),
            PHASES[row["phase"]],
            trace.modules[row["module"]],
            int(row["block"]),
            operator.dtype,
            operator.shape,
        )
        found.append(op)
    return found
