"""`zrun estimate --at-peak`: the curve of a step's memory, its phases and its highest moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zrun.estimate.course import lines_at_peak
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.buffers import Buffer, Kind
from zrun_core.plan.answer.outcome import RankMemory
from zrun_core.plan.trace.peak import Course, Peak
from zrun_core.plan.trace.rows import TracePhase

F, B = TracePhase.FORWARD, TracePhase.BACKWARD
MIB = 1 << 20
SIZES = (*range(10, 60), *range(58, 8, -2), 12)
COURSE = Course(
    tuple(size * MIB for size in SIZES),
    (*[F] * 50, *[B] * 25, TracePhase.UPDATE),
    (*[f"blocks.{number // 10}" for number in range(50)], *["head"] * 25, ""),
)


def answer(found: Course | None, pp: int = 1) -> Any:
    peak = Peak(59 * MIB, F, "blocks.4", (("activations of blocks.*", 40 * MIB),), 49 * MIB)
    rank = RankMemory(
        role="all" if pp == 1 else "first",
        buffers=(Buffer("weights", Kind.PARAM, 10 * MIB),),
        peak=peak,
        allocated=59 * MIB,
        reserved=64 * MIB,
        device_used=100 * MIB,
        communicators=0,
        pinned=0,
        pageable=0,
        disk=0,
    )
    candidate = SimpleNamespace(dims=SimpleNamespace(pp=pp))
    return SimpleNamespace(
        chosen=SimpleNamespace(ranks=(rank,), candidate=candidate),
        question=SimpleNamespace(planner=SimpleNamespace(course=lambda _: found)),
    )


@pytest.mark.parametrize("width", [40, 60, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_peak_is_marked_below_its_moment(width: int, ascii_only: bool) -> None:
    lines = lines_at_peak(answer(COURSE), width, ascii_only=ascii_only)
    assert lines[0] == "tensors of a rank over a step: peak 59.0 MiB"
    drawn = lines[: lines.index("held at the peak:")]
    assert all(len(line) <= width for line in drawn[1:])
    assert all(line.isascii() for line in lines) or not ascii_only
    assert any("peak: in forward, blocks.4" in line for line in lines)
    (mark,) = (line for line in lines if "^" in line)
    margin = len("59.0 MiB") + 2
    assert mark.index("^") == margin + round(49 / 75 * (width - margin - 1))
    picture = [line for line in lines if line[margin - 1 : margin] in tuple("┤│+|")]
    highest, lowest = picture[0], picture[-1]
    assert highest.startswith("59.0 MiB")
    assert abs(len(highest) - 1 - mark.index("^")) <= width // 20, "its top is there"
    assert lowest.startswith("10.0 MiB")
    (ruler,) = (line for line in lines if line.strip().startswith("forward"))
    assert ruler.index("forward") == margin
    assert ruler.index("backward") == margin + round(50 / 75 * (width - margin - 1))


def test_what_is_there_adds_up_to_the_peak() -> None:
    lines = lines_at_peak(answer(COURSE), 80, ascii_only=False)
    held = lines[lines.index("held at the peak:") + 1 : -1]
    assert held == [
        "  40.0 MiB  activations of blocks.*",
        "  10.0 MiB  parameters",
        "   9.0 MiB  other activations and temporaries",
    ]
    assert lines[-1] == (
        "beyond tensors: 41.0 MiB in the allocator and libraries, 100.0 MiB in all"
    )


def test_a_stage_is_named_with_what_it_looks_at() -> None:
    first = lines_at_peak(answer(COURSE, pp=2), 80, ascii_only=False)[0]
    assert first.startswith("tensors of a rank of the first stage over one micro-batch with others")


def test_a_terminal_without_room_has_the_words_alone() -> None:
    lines = lines_at_peak(answer(COURSE), 12, ascii_only=False)
    assert not any("┤" in line for line in lines)
    assert "held at the peak:" in lines


def test_it_is_the_course_of_the_fullest_stage() -> None:
    from test_plan_traced import JOB, profile

    from zrun_core.plan.answer.planner import Planner
    from zrun_core.plan.question.candidate import Candidate
    from zrun_core.spine.parallel_dims import ParallelDims

    planner = Planner(profile(), parse_simulate("2xA100-80G"), JOB)
    for candidate in (Candidate(0, ParallelDims(2), 4, 3), Candidate(2, ParallelDims(2), 4, 3)):
        ranks = planner.estimate(candidate).ranks
        peak = max(ranks, key=lambda rank: rank.device_used).peak
        found = planner.course(candidate)
        assert found is not None
        assert max(found.num_bytes) == peak.num_bytes
