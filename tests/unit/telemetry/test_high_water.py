"""The most memory that tensors took: watched, unless somebody else profiles."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from zrun.job.environment import WORKER_DEFAULTS
from zrun_core.telemetry import peak_memory
from zrun_core.telemetry.peak_memory import PeakMemory

BYTES = 777_767


def test_the_highest_moment_counts():
    with PeakMemory(torch.device("cpu")) as water:
        first = torch.empty(BYTES, dtype=torch.uint8)
        second = torch.empty(BYTES, dtype=torch.uint8)
        del first, second
        torch.empty(BYTES, dtype=torch.uint8)
    assert water.num_bytes == 2 * BYTES


def test_what_it_notes_is_allocations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []

    def highest(results: Any) -> int:
        noted.extend(event.name() for event in results.events())
        return 0

    monkeypatch.setattr(peak_memory, "_highest", highest)
    with PeakMemory(torch.device("cpu")):
        torch.ones(3) + torch.ones(3)
    assert set(noted) == {"[memory]"}


_GIVES_BACK = """
import torch
from zrun_core.telemetry.peak_memory import PeakMemory
before = [torch.ones(1000)]
with PeakMemory(torch.device("cpu")) as water:
    before.clear()
    torch.ones(3)
print(water.num_bytes)
"""


@pytest.mark.thorough
def test_a_workers_log_hears_nothing_of_it():
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"
    } | WORKER_DEFAULTS
    done = subprocess.run(
        [sys.executable, "-c", _GIVES_BACK],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("12\n", "")


def test_a_profiler_of_the_users_goes_on():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        with PeakMemory(torch.device("cpu")) as water:
            torch.ones(3) + torch.ones(3)
        torch.ones(3) * torch.ones(3)
    assert water.num_bytes is None
    assert {"aten::add", "aten::mul"} <= {event.key for event in profiler.key_averages()}
