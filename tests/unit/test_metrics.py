"""What a rank measures of itself."""

from __future__ import annotations

import pytest
import torch

from zrun_core.hardware import accelerator
from zrun_core.telemetry.metrics import process_memory
from zrun_core.telemetry.peak_memory import PeakMemory


def test_no_process_holds_more_than_it_ever_did() -> None:
    grown = []
    for _ in range(50):
        grown.append(torch.ones(300_000))  # written to, so that it is resident
        held = process_memory(torch.device("cpu"))
        now, most = held["rss_bytes"], held["peak_rss_bytes"]
        assert now is not None
        assert most is not None
        assert now <= most


def test_fragmentation_is_what_tensors_never_took(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "allocated_bytes.all.current": 1,
        "allocated_bytes.all.peak": 700,
        "reserved_bytes.all.peak": 1000,
        "num_alloc_retries": 3,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    held = process_memory(torch.device("cuda"))
    assert held["device_allocated"] == 700
    assert held["device_reserved"] == 1000
    assert held["device_fragmented"] == 300
    assert held["alloc_retries"] == 3
    assert held["process_bytes"] is None
    on_cpu = process_memory(torch.device("cpu"))
    assert on_cpu.keys() == held.keys()
    assert on_cpu["device_fragmented"] is None
    assert on_cpu["alloc_retries"] is None


def test_measuring_a_step_forgets_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator counts the peak of that step alone: the first one may have held more."""
    device = torch.device("cuda", 5)
    peak = accelerator.Peak(700, 1000)

    def set_peak(allocated: int, reserved: int) -> None:
        nonlocal peak
        peak = accelerator.Peak(allocated, reserved)

    def stats(device: torch.device) -> dict[str, int]:
        return {
            "allocated_bytes.all.peak": peak.allocated,
            "reserved_bytes.all.peak": peak.reserved,
        }

    monkeypatch.setattr(accelerator, "peak_memory", lambda device: peak)
    monkeypatch.setattr(accelerator, "reset_peak_memory", lambda device: set_peak(400, 900))
    monkeypatch.setattr(accelerator, "memory_stats", stats)
    with PeakMemory(device) as measured:
        set_peak(600, 900)
    assert (measured.num_bytes, measured.reserved) == (600, 900)

    def held() -> tuple[int | None, int | None]:
        found = process_memory(device)
        return found["device_allocated"], found["device_reserved"]

    assert held() == (700, 1000)
    set_peak(800, 900)
    assert held() == (800, 1000)
    with PeakMemory(device):
        pass
    assert held() == (800, 1000)
