"""What one micro-batch of a model allocates, frees and computes, as data; and the peak of it: `peak_of`.

A `Profile` comes from tracing the user's model (`trace.py`) and is stored as JSON. Its timelines are event by event,
each size a linear function of the micro-batch, so that the peak of any micro-batch, of a pipeline stage, or of several
micro-batches in flight is a maximum over live sets and never a sum of categories. Nothing here needs torch.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT = 3  # of the JSON
EventKind = Literal["activation", "temp", "grad"]
Family = Literal["gemm", "attention", "conv", "norm", "elementwise", "copy", "other"]
Source = Literal["traced", "measured on the CPU", "formula"]
_NUM_HOLDERS = 3


class Phase(StrEnum):
    """The parts of a step by which memory is told apart."""

    FORWARD = "forward"
    LOSS = "loss"  # what the forward pass computes after the model's last block, outside of its modules
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    GATHER = "gather"


_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True)
class Linear:
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
    size: Linear
    alloc: bool
    phase: Phase
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
    flops: Linear
    bytes_moved: Linear
    phase: Phase
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
    events: tuple[Event, ...]
    ops: tuple[Op, ...]
    exact: Mapping[int, Trace] = field(default_factory=dict)

    def of(self, micro: int) -> Trace:
        """The timeline that holds for `micro` samples."""
        return self.exact.get(micro, self)

    @cached_property
    def columns(self) -> _Columns:
        return _Columns(self.events)


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
        notes: what a reader should know that is no fallback.
    """

    source: Source
    why: str
    params: tuple[ParamInfo, ...]
    buffer_bytes: int
    num_blocks: int
    batch_bytes: Linear
    tokens_per_sample: int | None
    traces: Mapping[str, Trace]
    modules: tuple[ModuleInfo, ...] = ()
    device: str = "cpu"  # whose kernels the trace follows: "cpu" or "cuda"
    notes: tuple[str, ...] = ()

    @property
    def num_params(self) -> int:
        return sum(param.numel for param in self.params)

    def to_json(self) -> str:
        """The profile as text."""
        return json.dumps(
            {
                "format": FORMAT,
                "source": self.source,
                "why": self.why,
                "params": [[p.name, p.shape, p.dtype, p.trainable, p.block, p.stride] for p in self.params],
                "buffer_bytes": self.buffer_bytes,
                "num_blocks": self.num_blocks,
                "batch_bytes": [self.batch_bytes.base, self.batch_bytes.per_sample],
                "tokens_per_sample": self.tokens_per_sample,
                "traces": {name: _trace_to_json(trace) for name, trace in self.traces.items()},
                "modules": [[m.name, m.kind, m.container, m.running, m.params, m.same_as] for m in self.modules],
                "device": self.device,
                "notes": self.notes,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """What `to_json` wrote.

        Raises:
            ValueError: it is not that.
        """
        was_enabled = gc.isenabled()
        gc.disable()  # a hundred thousand tuples, and no cycle: looking for one takes longer than all else
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
                batch_bytes=Linear(*found["batch_bytes"]),
                tokens_per_sample=found["tokens_per_sample"],
                traces={name: _trace_from_json(trace) for name, trace in found["traces"].items()},
                modules=tuple(
                    ModuleInfo(name, kind, container, running, tuple((a, p) for a, p in params), same_as)
                    for name, kind, container, running, params, same_as in found["modules"]
                ),
                device=found["device"],
                notes=tuple(found["notes"]),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a profile: {error!r}") from None
        finally:
            if was_enabled:
                gc.enable()


class _Table:
    """Strings by number: modules and names repeat ten thousand times."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.values = list(values)
        self._numbers: dict[str, int] = {}

    def number(self, value: str) -> int:
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


def _trace_to_json(trace: Trace) -> dict[str, Any]:
    words = _Table()
    number = words.number
    events = [
        [e.tensor, e.size.base, e.size.per_sample, int(e.alloc), _PHASES.index(e.phase), number(e.module), e.block,
         number(e.kind), int(e.accumulates)]
        for e in trace.events
    ]  # fmt: skip
    ops = [
        [number(o.name), number(o.family), o.flops.base, o.flops.per_sample, o.bytes_moved.base,
         o.bytes_moved.per_sample, _PHASES.index(o.phase), number(o.module), o.block, number(o.dtype), o.shape]
        for o in trace.ops
    ]  # fmt: skip
    return {
        "checkpoint": trace.checkpoint,
        "words": words.values,
        "events": [*zip(*events, strict=True)],  # by column: far fewer lists to read
        "ops": [*zip(*ops, strict=True)],
        "exact": {str(micro): _trace_to_json(exact) for micro, exact in trace.exact.items()},
    }


def _trace_from_json(found: dict[str, Any]) -> Trace:
    words: list[Any] = found["words"]
    sizes: dict[tuple[float, float], Linear] = {}  # far fewer than events

    def linear(base: float, per_sample: float) -> Linear:
        size = sizes.get((base, per_sample))
        if size is None:
            size = sizes[base, per_sample] = Linear(base, per_sample)
        return size

    events = tuple(
        Event(tensor, linear(base, per_sample), bool(alloc), _PHASES[phase], words[module], block, words[kind], bool(a))
        for tensor, base, per_sample, alloc, phase, module, block, kind, a in zip(*found["events"], strict=True)
    )
    ops = tuple(
        Op(words[name], words[family], linear(f0, f1), linear(b0, b1), _PHASES[phase], words[module], block,
           words[dtype], tuple(shape))
        for name, family, f0, f1, b0, b1, phase, module, block, dtype, shape in zip(*found["ops"], strict=True)
    )  # fmt: skip
    exact = {int(micro): _trace_from_json(trace) for micro, trace in found["exact"].items()}
    return Trace(found["checkpoint"], events, ops, exact)


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
    phase: Phase
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
    """A timeline's events as arrays; stages of it are kept."""

    def __init__(self, events: Sequence[Event]) -> None:
        modules, groups = _Table(), _Table()
        tensors: dict[int, int] = {}
        alloc: list[int] = []
        free: list[int] = []
        base: list[float] = []
        per_sample: list[float] = []
        group: list[int] = []
        alloc_block: list[int] = []
        accumulates: list[bool] = []
        rows: list[int] = []
        for number, event in enumerate(events):
            if event.alloc:
                tensors[event.tensor] = len(alloc)
                alloc.append(number)
                free.append(len(events))
                base.append(event.size.base)
                per_sample.append(event.size.per_sample)
                group.append(groups.number(_group_name(event)))
                accumulates.append(event.accumulates)
                alloc_block.append(event.block)
            else:
                free[tensors[event.tensor]] = number
            rows.append(tensors[event.tensor])
        self.modules, self.groups = modules, groups
        self._block = np.array([event.block for event in events], dtype=np.int64)
        module = np.array([modules.number(event.module) for event in events], dtype=np.int64)
        phase = np.array([_PHASES.index(event.phase) for event in events], dtype=np.int64)
        backward = np.flatnonzero(phase == _PHASES.index(Phase.BACKWARD))
        signs = np.array([1.0 if event.alloc else -1.0 for event in events])
        self._whole = _Live(
            np.array(alloc, dtype=np.int64),
            np.array(free, dtype=np.int64),
            np.array(base),
            np.array(per_sample),
            np.array(group, dtype=np.int64),
            phase,
            module,
            int(backward[0]) if len(backward) else len(events),
            np.array(rows, dtype=np.int64),
            signs,
        )
        self._accumulates = np.array(accumulates, dtype=bool)
        self._last_block = int(self._block.max(initial=-1))
        self._first_of_backward = self._whole.forward_end
        self._stages: dict[tuple[range | None, bool], _Live] = {}

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
        ends = [(part[0], part[-1]) for part in (inside[inside < split], inside[inside >= split]) if len(part)]
        first = {False: ends[0][0], True: ends[-1][0]}
        last = {False: ends[0][1], True: ends[-1][1]}
        in_backward = alloc >= split
        arrival = np.where(in_backward, first[True], first[False])
        departure = np.where(in_backward, last[True], last[False])
        alloc = np.where(comes, alloc, np.minimum(arrival, free))
        free = np.where(goes | (free >= num_events), free, np.maximum(departure, alloc))
        alloc, free = alloc[keep], free[keep]
        order = [(at, 1.0, row) for row, at in enumerate(alloc.tolist())]
        order += [(at, -1.0, row) for row, at in enumerate(free.tolist()) if at < num_events]
        order.sort(key=lambda item: (item[0], -item[1]))  # arrivals before departures at the same moment
        place_of_alloc, place_of_free = np.zeros(len(alloc), np.int64), np.full(len(alloc), len(order), np.int64)
        for place, (_, sign, row) in enumerate(order):
            (place_of_alloc if sign > 0 else place_of_free)[row] = place
        times = np.array([at for at, _, _ in order], dtype=np.int64)
        return _Live(
            place_of_alloc,
            place_of_free,
            whole.base[keep],
            whole.per_sample[keep],
            whole.group[keep],
            whole.phase[times],
            whole.module[times],
            int(np.searchsorted(times, split)),
            np.array([row for _, _, row in order], dtype=np.int64),
            np.array([sign for _, sign, _ in order]),
        )


def peak_of(
    trace: Trace,
    micro: int,
    *,
    blocks: range | None = None,
    in_flight: int = 1,
    steady: Mapping[Phase, int],
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
    best = Peak(-1, Phase.FORWARD, "", ())
    if len(live.rows):
        steps = sizes[live.rows] * live.signs
        in_use = np.cumsum(steps)
        held = float(in_use[live.forward_end - 1]) * (in_flight - 1) if live.forward_end else 0.0
        base = np.array([float(steady.get(phase, 0)) for phase in _PHASES])
        total = in_use + held + base[live.phase]
        place = int(np.argmax(total))
        alive = (live.alloc <= place) & (live.free > place)
        sums = np.bincount(live.group[alive], weights=sizes[alive], minlength=len(columns.groups.values))
        if in_flight > 1:
            kept = (live.alloc < live.forward_end) & (live.free >= live.forward_end)
            weights = sizes[kept] * (in_flight - 1)
            sums += np.bincount(live.group[kept], weights=weights, minlength=len(columns.groups.values))
        order = sorted(range(len(sums)), key=lambda number: (-sums[number], columns.groups.values[number]))
        holders = tuple(
            (columns.groups.values[number], round(sums[number])) for number in order[:_NUM_HOLDERS] if sums[number] > 0
        )
        best = Peak(
            round(total[place]),
            _PHASES[int(live.phase[place])],
            columns.modules.values[int(live.module[place])],
            holders,
            round(in_use[place] + held),
        )
    for phase, num_bytes in steady.items():
        if num_bytes > best.num_bytes:
            best = Peak(num_bytes, phase, "", ())
    return best


_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)")
_WORDS = {"activation": "activations", "temp": "temporaries", "grad": "gradients"}


def _group_name(event: Event) -> str:
    """What the tensor is counted under: "activations of blocks.*.mlp"."""
    place = _NUMBERED.sub("*", event.module) if event.block >= 0 else event.module
    if event.phase is Phase.LOSS and not place:
        place = "the loss"
    return f"{_WORDS[event.kind]} of {place or 'the model itself'}"
