"""When things would happen on a real machine, from a trace of what the host has asked for.

    spans = replay(trace, Rates(...))

Nothing is measured here. A trace (`simulated_gpu.trace`) has kernels in the order of each stream,
and what each stream and the host waits for; `Rates` says how long a kernel takes by what it reads,
writes and computes. From both follows when each begins and ends.

Threads of the host run beside each other where the trace has marks of them:

    "submit" k    a task k is given to a thread
    "begin" k     that thread begins with it, not before it was given
    "end" k       it is done
    "join" k      a thread goes on, not before it is done
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HOST = "the host"


class Rates(NamedTuple):
    """How fast a machine is.

    Attributes:
        flops: per second, of products of matrices.
        memory: bytes per second that a kernel reads and writes.
        link: bytes per second that a rank sends to others.
        up, down: bytes per second from the host to a device, and back.
        host: bytes per second that an operator on the host reads and writes.
        launch_s: seconds of the host for each kernel that it launches.
        ranks: that collectives are over.
    """

    flops: float
    memory: float
    link: float
    up: float
    down: float
    host: float
    launch_s: float
    ranks: int

    def seconds(self, entry: Mapping[str, Any]) -> float:
        """Return how long a kernel takes."""
        payload: int = max(entry["read"], entry["written"])
        if entry["name"].startswith("nccl:"):
            passes = 2 if "ALLREDUCE" in entry["name"] else 1
            return passes * payload * (self.ranks - 1) / self.ranks / self.link
        if entry["kind"] == "host kernel":
            return float(entry["read"] + entry["written"]) / self.host
        if entry["link"] in ("up", "down"):
            return payload / float(getattr(self, entry["link"]))
        bytes_s = (entry["read"] + entry["written"]) / self.memory
        return float(max(bytes_s, entry["flops"] / self.flops))


class Span(NamedTuple):
    """What a stream, or the host, does for a while.

    Attributes:
        stream: its name; `HOST` for a thread of the host.
        name: of the kernel.
        line: that launched it.
        link: that limits it.
        begin, end: seconds.
    """

    stream: str
    name: str
    line: str
    link: str
    begin: float
    end: float


@dataclass
class _Clocks:
    streams: dict[str, float] = field(default_factory=dict)
    threads: dict[int, float] = field(default_factory=dict)  # those that run tasks
    main: float = 0.0  # of all other threads: one at a time trains
    places: dict[int, float] = field(default_factory=dict)  # that were recorded
    tasks: dict[tuple[str, int], float] = field(default_factory=dict)

    def of(self, thread: int) -> float:
        return self.threads.get(thread, self.main)

    def set(self, thread: int, time: float) -> None:
        if thread in self.threads:
            self.threads[thread] = time
        else:
            self.main = time


def replay(trace: Iterable[Mapping[str, Any]], rates: Rates) -> list[Span]:
    """Return what happens when, in the order of the trace."""
    clocks, spans = _Clocks(), list[Span]()
    for entry in trace:
        kind, thread, stream = entry["kind"], entry["thread"], entry["stream"]
        point = entry["point"]
        if kind == "begin":
            given = clocks.tasks.get(("submit", point), 0.0)
            clocks.threads[thread] = max(clocks.threads.get(thread, 0.0), given)
        now = clocks.of(thread)
        if kind == "kernel":
            now += rates.launch_s
            begin = max(now, clocks.streams.get(stream, 0.0))
            end = begin + rates.seconds(entry)
            clocks.streams[stream] = end
            spans.append(Span(stream, entry["name"], entry["line"], entry["link"], begin, end))
        elif kind == "host kernel":
            end = now + rates.seconds(entry)
            spans.append(Span(HOST, entry["name"], entry["line"], entry["link"], now, end))
            now = end
        elif kind == "record":
            clocks.places[point] = max(now, clocks.streams.get(stream, 0.0))
        elif kind == "wait":
            clocks.streams[stream] = max(clocks.streams.get(stream, 0.0), clocks.places[point])
        elif kind == "host wait":
            now = max(now, clocks.places[point])
        elif kind == "join":
            now = max(now, clocks.tasks.get(("end", point), 0.0))
        elif kind in ("submit", "end"):
            clocks.tasks[kind, point] = now
        clocks.set(thread, now)
    return spans
