"""How many ways to divide a model are traced at a time follows from cores, memory and the trace."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from zrun.estimate.question import _traces_at_once
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.rows import Affine
from zrun_core.spine import memory_limits
from zrun_core.spine.parallel_dims import ParallelDims

GPUS = parse_simulate("8xH100-80G")
WHOLE = Profile("traced", "", (), 0, 0, Affine(0, 0), None, {}, tracing_bytes=500 << 20)


@pytest.mark.parametrize(
    ("whole", "cores", "free", "expected"),
    [
        (WHOLE, 8, 8 << 30, 2),
        (WHOLE, 1, 8 << 30, 1),
        (WHOLE, 8, 1 << 30, 1),
        (WHOLE, 8, 100 << 20, 1),
        (replace(WHOLE, source="measured on the CPU"), 8, 8 << 30, 1),
        (replace(WHOLE, tracing_bytes=0), 8, 8 << 30, 1),
    ],
)
def test_two_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, whole: Profile, cores: int, free: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(memory_limits, "host_available", lambda: free)
    asked = Candidate(1, ParallelDims(8), 1, 4)
    assert _traces_at_once(whole, GPUS, asked) == expected
