"""What one micro-batch of a model allocates, frees and computes, as data; and the peak of it: `peak_of`.

A `Profile` comes from tracing the user's model (`trace.py`) and is stored as JSON. Its timelines are event by event,
each size a linear function of the micro-batch, so that the peak of any micro-batch, of a pipeline stage, or of several
micro-batches in flight is a maximum over live sets and never a sum of categories. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from zrun_core.plan.trace.folding import Table, fold, unfold

FORMAT = 7  # of the JSON
EventKind = Literal["activation", "temp", "grad"]
Family = Literal["gemm", "attention", "conv", "norm", "elementwise", "copy", "other"]
Source = Literal["traced", "measured on the CPU", "formula", "guessed"]
_NUM_HOLDERS = 3


class TracePhase(StrEnum):
    """The parts of a step by which memory is told apart."""

    FORWARD = "forward"
    LOSS = "loss"  # what the forward pass computes after the model's last block, outside of its modules
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    GATHER = "gather"


PHASES = tuple(TracePhase)
_PLACES = {phase: place for place, phase in enumerate(PHASES)}


@dataclass(frozen=True, slots=True)
class Affine:
    """Bytes or FLOPs as a function of the micro-batch."""

    base: float
    per_sample: float

    def at(self, micro: float) -> float:
        """The value for `micro` samples; never negative."""
        return max(0.0, self.base + self.per_sample * micro)


@dataclass(frozen=True, slots=True)
class Event:
    """A tensor's memory comes or goes.

    Attributes:
        tensor: number of the memory; it comes once, and goes at most once.
        module: name of the module that runs, "" for the model itself and what is outside of it.
        block: number of the repeated block to which the module belongs; -1 outside.
        kind: activation: kept beyond its phase; grad: a parameter's gradient, before it moves to its flat unit.
        accumulates: happens only where a gradient is added to one that is there already.
    """

    tensor: int
    size: Affine
    alloc: bool
    phase: TracePhase
    module: str
    block: int
    kind: EventKind
    accumulates: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One operator's work.

    Attributes:
        shape: (m, n, k) of a matrix product, or of each one of a batch, for the smallest micro-batch that was traced;
            the kernel's for a convolution; else the output's.
    """

    name: str
    family: Family
    flops: Affine
    bytes_moved: Affine
    phase: TracePhase
    module: str
    block: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Forward, loss and backward of one micro-batch, in order, all blocks written out.

    Attributes:
        checkpoint: "none", "full", "every_n" or "selective".
        exact: timelines of micro-batches for which the linear one does not hold.
    """

    checkpoint: str
    events: Sequence[Event]
    ops: Sequence[Op]
    exact: Mapping[int, Trace] = field(default_factory=dict)

    def of(self, micro: int) -> Trace:
        """The timeline that holds for `micro` samples."""
        return self.exact.get(micro, self)

    @cached_property
    def event_table(self) -> EventTable:
        return self.events.table if isinstance(self.events, _Rows) else _event_table(self.events)

    @cached_property
    def op_table(self) -> OpTable:
        return self.ops.table if isinstance(self.ops, _Rows) else _op_table(self.ops)

    @cached_property
    def columns(self) -> _Columns:
        return _Columns(self.event_table)


class EventTable(NamedTuple):
    """Events by column: what is no number of its own is a place in `words` or `sizes`, or in `PHASES`."""

    words: Sequence[str]
    sizes: NDArray[np.float64]  # [places, 2]: base, per sample
    tensor: NDArray[np.int64]
    size: NDArray[np.int64]
    alloc: NDArray[np.int64]
    phase: NDArray[np.int64]
    module: NDArray[np.int64]
    block: NDArray[np.int64]
    kind: NDArray[np.int64]
    accumulates: NDArray[np.int64]


class OpTable(NamedTuple):
    """Operators by column, in the same way."""

    words: Sequence[str]
    sizes: NDArray[np.float64]
    shapes: Sequence[tuple[int, ...]]
    name: NDArray[np.int64]
    family: NDArray[np.int64]
    flops: NDArray[np.int64]
    bytes_moved: NDArray[np.int64]
    phase: NDArray[np.int64]
    module: NDArray[np.int64]
    block: NDArray[np.int64]
    dtype: NDArray[np.int64]
    shape: NDArray[np.int64]


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, under its first name. `dtype` is what the model computes with."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    block: int = -1
    stride: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class ModuleInfo:
    """A module of the tree, from which `skeleton.py` builds one that is cut into the same units.

    Attributes:
        kind: equal for modules of one class.
        container: "list", "sequential", or "" of other modules.
        running: whether it is a norm with running statistics.
        params: its own parameters: (attribute, first name of the parameter).
        same_as: first name of the module, where it is registered under several.
    """

    name: str
    kind: int
    container: str = ""
    running: bool = False
    params: tuple[tuple[str, str], ...] = ()
    same_as: str = ""


@dataclass(frozen=True)
class Profile:
    """A model and what its micro-batches take.

    Attributes:
        why: reason of a fallback, and what else the numbers do not cover; "" if there is nothing to say.
        buffer_bytes: of the modules' buffers.
        num_blocks: repeated blocks.
        batch_bytes: of one micro-batch's tensors. They are no events: on a CPU all micro-batches of a step are held.
        tokens_per_sample: None where samples are no tokens.
        traces: by checkpointing policy; none if the source is "formula".
        untraced: why others were not traced, by policy.
        guessed: policies whose traces are no more than a guess.
        notes: what a reader should know that is no fallback.
        follows_values: whether sizes of tensors do, as where tokens are dropped by a mask.
        files: digests of the files of code that it came from, by path.
        is_ragged: samples differ in size: these are batches of the longest.
        num_samples: of the training data; None: it does not say, or was not opened.
        is_partial: time was over before all of it was traced.
    """

    source: Source
    why: str
    params: tuple[ParamInfo, ...]
    buffer_bytes: int
    num_blocks: int
    batch_bytes: Affine
    tokens_per_sample: int | None
    traces: Mapping[str, Trace]
    modules: tuple[ModuleInfo, ...] = ()
    device: str = "cpu"  # whose kernels the trace follows: "cpu" or "cuda"
    notes: tuple[str, ...] = ()
    follows_values: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    untraced: Mapping[str, str] = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()
    is_ragged: bool = False
    num_samples: int | None = None
    is_partial: bool = False

    @property
    def num_params(self) -> int:
        return sum(param.numel for param in self.params)

    def source_of(self, policy: str) -> Source:
        """Where the trace of a checkpointing policy comes from."""
        return "guessed" if policy in self.guessed else self.source

    def to_json(self) -> str:
        """The profile as text."""
        return json.dumps(
            {
                "format": FORMAT,
                "source": self.source,
                "why": self.why,
                "params": [
                    [p.name, p.shape, p.dtype, p.trainable, p.block, p.stride] for p in self.params
                ],
                "buffer_bytes": self.buffer_bytes,
                "num_blocks": self.num_blocks,
                "batch_bytes": [self.batch_bytes.base, self.batch_bytes.per_sample],
                "tokens_per_sample": self.tokens_per_sample,
                "traces": {name: _trace_to_json(trace) for name, trace in self.traces.items()},
                "modules": [
                    [m.name, m.kind, m.container, m.running, m.params, m.same_as]
                    for m in self.modules
                ],
                "device": self.device,
                "notes": self.notes,
                "follows_values": self.follows_values,
                "files": dict(self.files),
                "untraced": dict(self.untraced),
                "is_ragged": self.is_ragged,
                "num_samples": self.num_samples,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """What `to_json` wrote.

        Raises:
            ValueError: it is not that.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise ValueError(f"a profile of format {found['format']}, not {FORMAT}")
            return cls(
                source=found["source"],
                why=found["why"],
                params=tuple(
                    ParamInfo(name, tuple(shape), dtype, trainable, block, tuple(stride))
                    for name, shape, dtype, trainable, block, stride in found["params"]
                ),
                buffer_bytes=found["buffer_bytes"],
                num_blocks=found["num_blocks"],
                batch_bytes=Affine(*found["batch_bytes"]),
                tokens_per_sample=found["tokens_per_sample"],
                traces={name: _trace_from_json(trace) for name, trace in found["traces"].items()},
                modules=tuple(
                    ModuleInfo(
                        name, kind, container, running, tuple((a, p) for a, p in params), same_as
                    )
                    for name, kind, container, running, params, same_as in found["modules"]
                ),
                device=found["device"],
                notes=tuple(found["notes"]),
                follows_values=found["follows_values"],
                files=found["files"],
                untraced=found["untraced"],
                is_ragged=found["is_ragged"],
                num_samples=found["num_samples"],
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a profile: {error!r}") from None


# Timelines as tables

_Row = TypeVar("_Row", Event, Op)
_TableOf = TypeVar("_TableOf", EventTable, OpTable)
_Value = TypeVar("_Value")


class _Rows(Sequence[_Row], Generic[_Row, _TableOf]):
    """The rows of a table as objects, which are made once somebody looks at one of them: few ever do."""

    def __init__(self, table: _TableOf, write: Callable[[_TableOf], list[_Row]]) -> None:
        self.table: _TableOf = table
        self._write: Callable[[_TableOf], list[_Row]] = write

    @cached_property
    def _all(self) -> tuple[_Row, ...]:
        return tuple(self._write(self.table))

    def __len__(self) -> int:
        return len(self.table.module)

    def __getitem__(self, place: Any) -> Any:
        return self._all[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


class _Numbers(Generic[_Value]):
    """Values by number: modules, names and sizes repeat ten thousand times, most of them as the same objects."""

    def __init__(self) -> None:
        self.values: list[_Value] = []
        self._numbers: dict[_Value, int] = {}
        self._met: dict[
            int, tuple[int, _Value]
        ] = {}  # by identity, which holds as long as the value is kept

    def of(self, value: _Value) -> int:
        met = self._met.get(id(value))
        if met is not None:
            return met[0]
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        self._met[id(value)] = found, value
        return found


def _event_table(events: Sequence[Event]) -> EventTable:
    words, sizes = _Numbers[str](), _Numbers[Affine]()
    rows = [
        (
            e.tensor,
            sizes.of(e.size),
            e.alloc,
            _PLACES[e.phase],
            words.of(e.module),
            e.block,
            words.of(e.kind),
            e.accumulates,
        )
        for e in events
    ]
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 8)
    return EventTable(words.values, _lines(sizes.values), *np.ascontiguousarray(columns.T))


def _op_table(ops: Sequence[Op]) -> OpTable:
    words, sizes, shapes = _Numbers[str](), _Numbers[Affine](), _Numbers[tuple[int, ...]]()
    rows = [
        (
            words.of(o.name),
            words.of(o.family),
            sizes.of(o.flops),
            sizes.of(o.bytes_moved),
            _PLACES[o.phase],
            words.of(o.module),
            o.block,
            words.of(o.dtype),
            shapes.of(o.shape),
        )
        for o in ops
    ]
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 9)
    return OpTable(
        words.values,
        _lines(sizes.values),
        shapes.values,
        *np.ascontiguousarray(columns.T),
    )


def _lines(sizes: Sequence[Affine]) -> NDArray[np.float64]:
    return _pairs([(each.base, each.per_sample) for each in sizes])


def _pairs(sizes: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.array(sizes, dtype=np.float64).reshape(len(sizes), 2)


def _events_of(table: EventTable) -> list[Event]:
    words: Sequence[Any] = table.words
    sizes = [Affine(base, per_sample) for base, per_sample in table.sizes.tolist()]
    columns = (column.tolist() for column in table[2:])
    return [
        Event(
            tensor,
            sizes[size],
            bool(alloc),
            PHASES[phase],
            words[module],
            block,
            words[kind],
            bool(accumulates),
        )
        for tensor, size, alloc, phase, module, block, kind, accumulates in zip(
            *columns, strict=True
        )
    ]


def _ops_of(table: OpTable) -> list[Op]:
    words: Sequence[Any] = table.words
    sizes = [Affine(base, per_sample) for base, per_sample in table.sizes.tolist()]
    columns = (column.tolist() for column in table[3:])
    return [
        Op(
            words[name],
            words[family],
            sizes[flops],
            sizes[moved],
            PHASES[phase],
            words[module],
            block,
            words[dtype],
            table.shapes[shape],
        )
        for name, family, flops, moved, phase, module, block, dtype, shape in zip(
            *columns, strict=True
        )
    ]


def _trace_to_json(trace: Trace) -> dict[str, Any]:
    events, ops = trace.event_table, trace.op_table
    return {
        "checkpoint": trace.checkpoint,
        "events": {
            "words": events.words,
            "sizes": events.sizes.tolist(),
            "rows": _folded(events[2:], events.block),
        },
        "ops": {
            "words": ops.words,
            "sizes": ops.sizes.tolist(),
            "shapes": ops.shapes,
            "rows": _folded(ops[3:], ops.block),
        },
        "exact": {str(micro): _trace_to_json(exact) for micro, exact in trace.exact.items()},
    }


def _folded(columns: Sequence[Any], block: NDArray[np.int64]) -> list[list[Any]]:
    """Columns of equal length, repeated blocks written once: they begin where another block does."""
    begins = (block >= 0) & (np.diff(block, prepend=-1) != 0)
    return fold(np.stack(columns, axis=1), np.flatnonzero(begins).tolist())


def _trace_from_json(found: Mapping[str, Any]) -> Trace:
    events, ops = found["events"], found["ops"]
    event_table = EventTable(
        events["words"], _pairs(events["sizes"]), *_unfolded(events["rows"], 8)
    )
    shapes = [tuple(shape) for shape in ops["shapes"]]
    op_table = OpTable(ops["words"], _pairs(ops["sizes"]), shapes, *_unfolded(ops["rows"], 9))
    exact = {int(micro): _trace_from_json(trace) for micro, trace in found["exact"].items()}
    return Trace(
        found["checkpoint"], _Rows(event_table, _events_of), _Rows(op_table, _ops_of), exact
    )


def _unfolded(rows: Sequence[Sequence[Any]], columns: int) -> Table:
    return np.ascontiguousarray(unfold(rows, columns).T)


# The peak


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use.

    Attributes:
        num_bytes: with `steady`.
        module: that runs then.
        holders: the largest groups of live tensors and their bytes, largest first; without `steady`.
        dynamic: bytes of live tensors, without `steady`.
    """

    num_bytes: int
    phase: TracePhase
    module: str
    holders: tuple[tuple[str, int], ...]
    dynamic: int = 0


class _Live(NamedTuple):
    """A timeline's events as one pipeline stage sees them: what comes and goes, in order."""

    alloc: NDArray[np.int64]  # by tensor: when it comes
    free: NDArray[np.int64]  # by tensor: when it goes; after the last event if never
    base: NDArray[np.float64]  # by tensor
    per_sample: NDArray[np.float64]
    group: NDArray[np.int64]  # by tensor: number of its name
    phase: NDArray[np.int64]  # by event
    module: NDArray[np.int64]  # by event: number of its name
    forward_end: int  # events before the backward pass
    rows: NDArray[np.int64]  # tensors by event
    signs: NDArray[np.float64]  # +1 or -1 by event


class _Columns:
    """A timeline's events as a peak needs them; stages of it are kept."""

    def __init__(self, table: EventTable) -> None:
        count = len(table.tensor)
        alloc, goes = np.flatnonzero(table.alloc), np.flatnonzero(table.alloc == 0)
        row_of = np.zeros(int(table.tensor.max(initial=-1)) + 1, dtype=np.int64)
        row_of[table.tensor[alloc]] = np.arange(len(alloc))
        rows = row_of[table.tensor]
        free = np.full(len(alloc), count, dtype=np.int64)
        free[rows[goes]] = goes
        sizes = table.sizes[table.size[alloc]]
        self.modules, self.groups = table.words, _Numbers[str]()
        backward = np.flatnonzero(table.phase == PHASES.index(TracePhase.BACKWARD))
        self._block = table.block
        self._whole = _Live(
            alloc,
            free,
            sizes[:, 0],
            sizes[:, 1],
            self._group(table, alloc),
            table.phase,
            table.module,
            int(backward[0]) if len(backward) else count,
            rows,
            np.where(table.alloc == 1, 1.0, -1.0),
        )
        self._accumulates = table.accumulates[alloc] == 1
        self._last_block = int(self._block.max(initial=-1))
        self._first_of_backward = self._whole.forward_end
        self._stages: dict[tuple[range | None, bool], _Live] = {}

    def _group(self, table: EventTable, alloc: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the name under which each tensor is counted."""
        parts = np.stack([table.module, table.kind, table.phase, table.block >= 0], axis=1)[alloc]
        different, where = np.unique(parts, axis=0, return_inverse=True)
        names = [
            self.groups.of(
                _group_name(table.words[module], table.words[kind], PHASES[phase], bool(inside))
            )
            for module, kind, phase, inside in different.tolist()
        ]
        return np.array(names, dtype=np.int64)[where.reshape(-1)]

    def stage(self, blocks: range | None, accumulating: bool) -> _Live:
        """What the stage with these blocks sees; None: all of it."""
        key = (blocks, accumulating)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._cut(blocks, accumulating)
        return found

    def _owners(self) -> NDArray[np.int64]:
        """The block to which each event goes where blocks are dealt out: what is outside of them goes to the ends.

        Forward: what comes before the first block goes with it, what comes after a block, up to the next, with that.
        Backward: what comes after a block's backward goes with that block, what comes before the last one's with it.
        """
        owners = self._block.copy()
        forward = slice(0, self._first_of_backward)
        backward = slice(self._first_of_backward, None)
        for part, before in ((forward, 0), (backward, self._last_block)):
            blocks = owners[part]
            places = np.where(blocks >= 0, np.arange(len(blocks)), -1)
            last = np.maximum.accumulate(places) if len(places) else places
            owners[part] = np.where(last >= 0, blocks[np.maximum(last, 0)], max(before, 0))
        return owners

    def _cut(self, blocks: range | None, accumulating: bool) -> _Live:
        whole = self._whole
        keep = np.ones(len(whole.alloc), dtype=bool) if accumulating else ~self._accumulates
        if blocks is None and keep.all():
            return whole
        num_events = len(whole.phase)
        mine = np.ones(num_events + 1, dtype=bool)
        if blocks is not None:
            owners = self._owners()
            mine[:num_events] = (owners >= blocks.start) & (owners < blocks.stop)
        inside = np.flatnonzero(mine[:num_events])
        if not len(inside):
            empty = np.zeros(0, dtype=np.int64)
            none = empty.astype(np.float64)
            return _Live(empty, empty, none, none, empty, empty, empty, 0, empty, none)
        split = whole.forward_end
        alloc, free = whole.alloc.copy(), whole.free.copy()
        comes, goes = mine[alloc], mine[np.minimum(free, num_events)] & (free < num_events)
        keep &= comes | goes
        # What arrives from a neighbour is there when the pass begins here; what leaves goes when the pass ends here.
        ends = [
            (part[0], part[-1])
            for part in (inside[inside < split], inside[inside >= split])
            if len(part)
        ]
        first = {False: ends[0][0], True: ends[-1][0]}
        last = {False: ends[0][1], True: ends[-1][1]}
        in_backward = alloc >= split
        arrival = np.where(in_backward, first[True], first[False])
        departure = np.where(in_backward, last[True], last[False])
        alloc = np.where(comes, alloc, np.minimum(arrival, free))
        free = np.where(goes | (free >= num_events), free, np.maximum(departure, alloc))
        alloc, free = alloc[keep], free[keep]
        leaves = np.flatnonzero(free < num_events)
        moments = np.concatenate([alloc, free[leaves]])
        signs = np.concatenate([np.ones(len(alloc)), -np.ones(len(leaves))])
        rows = np.concatenate([np.arange(len(alloc)), leaves])
        order = np.lexsort((-signs, moments))  # arrivals before departures at the same moment
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        place_of_free = np.full(len(alloc), len(order), dtype=np.int64)
        place_of_free[leaves] = places[len(alloc) :]
        times = moments[order]
        return _Live(
            places[: len(alloc)],
            place_of_free,
            whole.base[keep],
            whole.per_sample[keep],
            whole.group[keep],
            whole.phase[times],
            whole.module[times],
            int(np.searchsorted(times, split)),
            rows[order],
            signs[order],
        )


def peak_of(
    trace: Trace,
    micro: int,
    *,
    blocks: range | None = None,
    in_flight: int = 1,
    steady: Mapping[TracePhase, int],
    accumulating: bool = False,
    align: int = 1,
) -> Peak:
    """The most memory that is in use at any moment of a step.

    Args:
        micro: samples of a micro-batch.
        blocks: those of a pipeline stage; the first stage also has what comes before them, the last what comes after.
        in_flight: micro-batches whose activations are held when the last of them runs.
        steady: bytes that are in use anyway, by phase. A phase that is missing there and has no events is left out.
        accumulating: whether gradients are added to those of earlier micro-batches.
        align: bytes to which each allocation is rounded up: 512 on CUDA.
    """
    trace = trace.of(micro)
    columns = trace.columns
    live = columns.stage(blocks, accumulating)
    sizes = np.maximum(0.0, live.base + live.per_sample * micro)
    if align > 1:
        sizes = np.ceil(sizes / align) * align
    best = Peak(-1, TracePhase.FORWARD, "", ())
    if len(live.rows):
        steps = sizes[live.rows] * live.signs
        in_use = np.cumsum(steps)
        held = float(in_use[live.forward_end - 1]) * (in_flight - 1) if live.forward_end else 0.0
        base = np.array([float(steady.get(phase, 0)) for phase in PHASES])
        total = in_use + held + base[live.phase]
        place = int(np.argmax(total))
        alive = (live.alloc <= place) & (live.free > place)
        sums = np.bincount(
            live.group[alive], weights=sizes[alive], minlength=len(columns.groups.values)
        )
        if in_flight > 1:
            kept = (live.alloc < live.forward_end) & (live.free >= live.forward_end)
            weights = sizes[kept] * (in_flight - 1)
            sums += np.bincount(
                live.group[kept], weights=weights, minlength=len(columns.groups.values)
            )
        order = sorted(
            range(len(sums)), key=lambda number: (-sums[number], columns.groups.values[number])
        )
        holders = tuple(
            (columns.groups.values[number], round(sums[number]))
            for number in order[:_NUM_HOLDERS]
            if sums[number] > 0
        )
        best = Peak(
            round(total[place]),
            PHASES[int(live.phase[place])],
            columns.modules[int(live.module[place])],
            holders,
            round(in_use[place] + held),
        )
    for phase, num_bytes in steady.items():
        if num_bytes > best.num_bytes:
            best = Peak(num_bytes, phase, "", ())
    return best


_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)")
_WORDS = {"activation": "activations", "temp": "temporaries", "grad": "gradients"}


def _group_name(module: str, kind: str, phase: TracePhase, is_in_block: bool) -> str:
    """What a tensor is counted under: "activations of blocks.*.mlp"."""
    place = _NUMBERED.sub("*", module) if is_in_block else module
    if phase is TracePhase.LOSS and not place:
        place = "the loss"
    return f"{_WORDS[kind]} of {place or 'the model itself'}"
