"""The trace of a rank as a file for Perfetto, made of the one that torch's profiler has written.

    parts = convert(raw, target, place, "rank 1 (node1, cuda:1, pp 1)")

A trace is JSON of Chrome's format: a list of events, each with `ph`, `pid`, `tid`, `ts` and, if it
is a span, `dur`, in microseconds. Changed are:

    process         its number is the rank and its name says where that is, so that traces of
                    several ranks can be looked at together; a GPU's is `GPU_PIDS` further on
    marks           become a track of blocks in backward: see [Note: backwards of blocks] in
                    `hardware/spans.py`
    the profiler's  own spans, whose processes have names instead of numbers, are left out

On the way what is named is added up by itself: the time of a span without the named spans inside.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from zrun_core.hardware.spans import MARK

GPU_PIDS = 1_000_000  # from the number of a rank to that of its first GPU's process
BLOCK_TIDS = 1_000_000_000  # from the number of a thread to that of its blocks in backward
STEP = "step"  # how names of steps begin
_NAMED = "user_annotation"
_NAMED_ON_GPU = "gpu_user_annotation"
_BACKWARD = "backward"
_EACH = re.compile(r" of micro-batch \d+|(?<=^step) \d+|(?<=^action) .*")  # of many alike
_LEVEL = 3  # of compression: a third of the time that the usual one takes, and hardly larger

Event = dict[str, Any]


class Span(NamedTuple):
    """Something that is named, in microseconds."""

    start: float
    stop: float
    name: str


@dataclass
class Part:
    """What all spans of a name have taken by themselves.

    Attributes:
        self_s: seconds without the named spans inside, as the host sees it.
        calls: number of spans.
        device_s: the same of kernels of a GPU; None: there is none.
    """

    name: str
    self_s: float = 0.0
    calls: int = 0
    device_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that the event has."""
        found: dict[str, Any] = {"name": self.name, "self_s": self.self_s, "calls": self.calls}
        if self.device_s is not None:
            found["device_s"] = self.device_s
        return found


@dataclass
class Parts:
    """What a trace has by names.

    Attributes:
        steps_s: seconds of all steps.
        by_name: the parts; those of other threads than the one that trains are told apart.
    """

    steps_s: float = 0.0
    by_name: dict[str, Part] = field(default_factory=dict)

    def largest(self, number: int) -> list[Part]:
        """Return the parts with the most time by themselves: on the device, if it is known."""

        def time_of(part: Part) -> tuple[float, float]:
            return (part.device_s or 0.0, part.self_s)

        return sorted(self.by_name.values(), key=time_of, reverse=True)[:number]

    def add(self, spans: Sequence[Span], *, on_gpu: bool) -> None:
        """Add the spans of a track, one of which may be inside of another."""
        for span, microseconds in self_times(spans):
            name = _EACH.sub("", span.name)
            part = self.by_name.setdefault(name, Part(name))
            if on_gpu:
                part.device_s = (part.device_s or 0.0) + microseconds / 1e6
                continue
            part.self_s += microseconds / 1e6
            part.calls += 1
            if name == STEP:
                self.steps_s += (span.stop - span.start) / 1e6


def convert(source: Path, target: Path, pid: int, rank: int, name: str) -> Parts:
    """Write the trace `source` of a rank as `target`, compressed; return what it has by names.

    Args:
        pid: of the process that was profiled: what has another one is of a GPU.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: it is no trace, as when the disk was full before all of it was there.
    """
    text = source.read_text(encoding="utf-8", errors="replace")
    begin = _EVENTS.search(text)
    if begin is None:
        raise ValueError("torch's profiler has left a file that is no trace")
    head = json.loads(text[: begin.end()] + "]}")  # behind the events is the name of `source`
    head.pop("traceEvents")
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=_LEVEL) as file:
        converter = _Converter(file, head, pid, rank, name)
        for event in _listed(text, begin.end()):
            converter.take(event)
        return converter.end()


def self_times(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Yield each span, and its microseconds without those that lie inside.

    What ends later than the span that it began in is cut there.
    """
    under_way: list[Span] = []
    inside: list[float] = []

    def end() -> tuple[Span, float]:
        span, covered = under_way.pop(), inside.pop()
        if inside:
            inside[-1] += span.stop - span.start
        return span, max(0.0, span.stop - span.start - covered)

    for span in sorted(spans, key=lambda each: (each.start, -each.stop)):
        while under_way and under_way[-1].stop <= span.start:
            yield end()
        if under_way and span.stop > under_way[-1].stop:
            span = span._replace(stop=under_way[-1].stop)
        under_way.append(span)
        inside.append(0.0)
    while under_way:
        yield end()


class _Converter:
    """Writes the events of a trace, changed, one after the other."""

    def __init__(
        self, file: TextIO, head: Mapping[str, Any], pid: int, rank: int, name: str
    ) -> None:
        self._file = file
        self._pid = pid
        self._rank = rank
        self._name = name
        self._num_events = 0
        self._named: dict[int, list[Span]] = defaultdict(list)  # by thread
        self._marks: dict[int, list[Span]] = defaultdict(list)  # by thread
        self._on_gpu: dict[tuple[int, int], list[Span]] = defaultdict(list)  # by process, stream
        self._told: set[tuple[object, ...]] = set()  # metadata that is there
        self._of_gpus: dict[int, list[Event]] = defaultdict(list)  # metadata, until they are used
        self._write_head(head)

    def _write_head(self, head: Mapping[str, Any]) -> None:
        fields = json.dumps({**head, "rank": self._rank})
        self._file.write(f'{fields[:-1]}, "traceEvents": [\n')
        self._tell("process_name", self._rank, 0, name=self._name)
        self._tell("process_sort_index", self._rank, 0, sort_index=self._rank)

    def take(self, event: Event) -> None:
        """Write an event, unless others take its place."""
        pid, tid = event.get("pid"), event.get("tid")
        if not isinstance(pid, int) or not isinstance(tid, int):
            return  # of the profiler itself
        is_on_gpu = pid != self._pid
        event["pid"] = self._rank + GPU_PIDS * (1 + pid) if is_on_gpu else self._rank
        if event["ph"] == "M":
            if is_on_gpu:
                self._of_gpus[event["pid"]].append(event)
            elif not event["name"].startswith("process_"):  # that is told already
                self._tell(event["name"], self._rank, tid, **event.get("args", {}))
            return
        if is_on_gpu:
            self._tell_of_gpu(event["pid"])
        if event["ph"] == "X" and event.get("cat") in (_NAMED, _NAMED_ON_GPU):
            span = Span(event["ts"], event["ts"] + event["dur"], str(event["name"]))
            if span.name.startswith(MARK):
                if not is_on_gpu:
                    self._marks[tid].append(span)
                return
            if is_on_gpu:
                self._on_gpu[event["pid"], tid].append(span)
            else:
                self._named[tid].append(span)
        self._write(event)

    def _tell_of_gpu(self, pid: int) -> None:
        """Write what is told of a GPU, once it does something: torch tells of absent ones too."""
        if ("process_name", pid, 0) in self._told:
            return
        self._tell("process_name", pid, 0, name=f"{self._name}: kernels")
        self._tell("process_sort_index", pid, 0, sort_index=pid)
        for event in self._of_gpus[pid]:
            if not event["name"].startswith("process_"):
                self._tell(event["name"], pid, event["tid"], **event.get("args", {}))

    def _tell(self, what: str, pid: int, tid: int, **of: object) -> None:
        """Write the first of what may be told several times."""
        if (what, pid, tid) not in self._told:
            self._told.add((what, pid, tid))
            self._write({"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": tid, "args": of})

    def _write(self, event: Event) -> None:
        if self._num_events:
            self._file.write(",\n")
        self._num_events += 1
        self._file.write(json.dumps(event, separators=(",", ":")))

    def end(self) -> Parts:
        """Write the blocks in backward, and the end; return what is named."""
        ends = sorted(
            span.stop for spans in self._named.values() for span in spans if span.name == _BACKWARD
        )
        blocks = {tid: blocks_between(marks, ends) for tid, marks in self._marks.items()}
        for tid, spans in blocks.items():
            self._tell("thread_name", self._rank, tid + BLOCK_TIDS, name="blocks in backward")
            for span in spans:
                of = {"cat": _NAMED, "name": span.name, "pid": self._rank}
                at = {"tid": tid + BLOCK_TIDS, "ts": span.start, "dur": span.stop - span.start}
                self._write({"ph": "X", **of, **at})
        self._file.write("\n]}\n")
        return self._parts(blocks)

    def _parts(self, blocks: Mapping[int, Sequence[Span]]) -> Parts:
        parts = Parts()
        trains = {tid for tid, spans in self._named.items() if any(map(_is_step, spans))}
        trains |= blocks.keys()  # on CUDA autograd has a thread, for which the first one waits
        together: list[Span] = []
        for tid, spans in self._named.items():
            if tid in trains:
                together += spans
            else:
                beside = [span._replace(name=f"{span.name} (another thread)") for span in spans]
                parts.add(beside, on_gpu=False)
        for of_thread in blocks.values():
            together += of_thread
        parts.add(together, on_gpu=False)
        for of_stream in self._on_gpu.values():
            parts.add(of_stream, on_gpu=True)
        return parts


def _is_step(span: Span) -> bool:
    return _EACH.sub("", span.name) == STEP


def blocks_between(marks: Sequence[Span], ends: Sequence[float]) -> list[Span]:
    """Return the spans of blocks that marks of one thread stand for.

    Args:
        marks: of the thread; one without a name ends the block before it.
        ends: of backwards, sorted: there the last block ends too.
    """
    found = []
    ordered = sorted(marks)
    followers = [mark.start for mark in ordered[1:]]
    for number, mark in enumerate(ordered):
        name = mark.name.removeprefix(MARK)
        if not name:
            continue
        stop = followers[number] if number < len(followers) else mark.stop
        place = bisect_right(ends, mark.start)
        if place < len(ends) and (number == len(followers) or ends[place] < stop):
            stop = ends[place]
        found.append(Span(mark.start, stop, name))
    return found


_DECODER = json.JSONDecoder()
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')


_BETWEEN = re.compile(r"[,\s]*")


def _listed(text: str, start: int) -> Iterator[Event]:
    """Yield the objects of a list in JSON, one at a time: a trace may be large.

    What is in the brackets of the list begins at `start` of `text`.

    Raises:
        ValueError: the list does not end.
    """
    while True:
        between = _BETWEEN.match(text, start)
        assert between is not None, "it matches nothing too"
        start = between.end()
        if text.startswith("]", start):
            return
        try:
            event, start = _DECODER.raw_decode(text, start)
        except ValueError:
            raise ValueError(
                "torch's profiler has left a part of a trace, as where a disk is full"
            ) from None
        yield event
