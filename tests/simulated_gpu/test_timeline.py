"""A trace is replayed with the rates of a machine, and what shall overlap does so by its order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.replay import HOST, Rates, Span, replay

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import timeline

RATES = Rates(flops=100.0, memory=10.0, link=5.0, up=2.0, down=1.0, host=4.0, launch_s=0.0, ranks=2)


def entry(kind: str, stream: str = "", name: str = "", **more: Any) -> dict[str, Any]:
    """Return an entry of a trace."""
    fields: dict[str, Any] = {"line": "", "link": "device", "flops": 0, "read": 0, "written": 0}
    return {**fields, "kind": kind, "stream": stream, "name": name, "point": -1, "thread": 1} | more


def times(*trace: dict[str, Any], rates: Rates = RATES) -> list[tuple[float, float]]:
    return [(span.begin, span.end) for span in replay(trace, rates)]


def test_a_kernel_takes_as_long_as_what_limits_it() -> None:
    found = times(
        entry("kernel", "a", read=20, written=10),
        entry("kernel", "b", flops=500, read=20),
        entry("kernel", "c", "copy_", link="up", read=8, written=8),
        entry("kernel", "d", "copy_", link="down", read=8, written=8),
        entry("kernel", "e", "nccl:ALLGATHER", read=10, written=20),
        entry("kernel", "f", "nccl:ALLREDUCE", read=20, written=20),
    )
    assert found == [(0, 3), (0, 5), (0, 4), (0, 8), (0, 2), (0, 4)]


def test_streams_wait_for_places_and_hosts_for_streams() -> None:
    found = times(
        entry("kernel", "a", read=10),
        entry("record", "a", point=1),
        entry("kernel", "a", read=10),
        entry("wait", "b", point=1),
        entry("kernel", "b", read=10),
        entry("record", "b", point=2),
        entry("host wait", point=2),
        entry("kernel", "c", read=10),
    )
    assert found == [(0, 1), (1, 2), (1, 2), (2, 3)]


def test_launches_take_the_host_time() -> None:
    slow = RATES._replace(launch_s=2.0)
    found = times(entry("kernel", "a", read=10), entry("kernel", "b", read=10), rates=slow)
    assert found == [(2, 3), (4, 5)]


def test_a_task_runs_beside_those_who_do_not_wait_for_it() -> None:
    trace = [
        entry("kernel", "a", read=10),
        entry("record", "a", point=1),
        entry("submit", point=0),
        entry("begin", point=0, thread=2),
        entry("host wait", point=1, thread=2),
        entry("host kernel", read=8, thread=2),
        entry("end", point=0, thread=2),
        entry("kernel", "b", read=10),
        entry("join", point=0),
        entry("kernel", "b", read=10),
    ]
    assert times(*trace) == [(0, 1), (1, 3), (0, 1), (3, 4)]
    assert replay(trace, RATES)[1].stream == HOST


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ("ZeRO-3", {"gathers": 0.8, "reduces": 0.8}),
        ("ZeRO-2", {"gathers": 0.8, "reduces": 0.8}),
        (
            "ZeRO-2, optimizer and gradients on the host",
            {"reduces": 0.6, "to the host": 0.7, "to the device": 0.7, "the host updates": 0.5},
        ),
    ],
)
def test_what_is_sent_and_copied_is_beside_computation(plan: str, shares: dict[str, float]) -> None:
    """The first gather and the last reduction have nothing beside them."""
    by_lane = rows_of(plan)
    found = {name: timeline.overlap(by_lane[name], by_lane["computes"]) for name in shares}
    assert all(found[name] >= share for name, share in shares.items()), found


def test_an_update_on_the_host_copies_both_ways_at_once() -> None:
    """A unit's gradient comes down while another one is updated, and a third one's weights go up.

    The first one to come down and the last one to go up have nothing beside them.
    """
    by_lane = rows_of("ZeRO-2, optimizer on the host")
    pairs = {
        ("to the device", "to the host"): 0.8,
        ("to the host", "the host updates"): 0.7,
        ("the host updates", "to the host"): 0.7,
    }
    found = {pair: timeline.overlap(by_lane[pair[0]], by_lane[pair[1]]) for pair in pairs}
    assert all(found[pair] >= share for pair, share in pairs.items()), found


def rows_of(plan: str) -> dict[str, list[Span]]:
    """Return what is in each row of a plan's picture."""
    spans = replay(timeline.in_ranks(plan), timeline.rates())
    return {
        name: [span for span in spans if timeline.lane(span) == name] for name in timeline.LANES
    }
