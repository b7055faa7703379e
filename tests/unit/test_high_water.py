"""The most memory that tensors took: watched, unless somebody else profiles."""

from __future__ import annotations

import torch

from zrun_core.high_water import HighWater

BYTES = 777_767


def test_the_highest_moment_counts():
    with HighWater(torch.device("cpu")) as water:
        first = torch.empty(BYTES, dtype=torch.uint8)
        second = torch.empty(BYTES, dtype=torch.uint8)
        del first, second
        torch.empty(BYTES, dtype=torch.uint8)
    assert water.num_bytes == 2 * BYTES


def test_a_profiler_of_the_users_goes_on():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        with HighWater(torch.device("cpu")) as water:
            torch.ones(3) + torch.ones(3)
        torch.ones(3) * torch.ones(3)
    assert water.num_bytes is None
    assert {"aten::add", "aten::mul"} <= {event.key for event in profiler.key_averages()}
