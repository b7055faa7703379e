"""What a rank measures of itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from zrun_core.hardware import accelerator
from zrun_core.telemetry.flops import FlopCount
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


@pytest.mark.parametrize("heads", [4, 2])
def test_the_flops_of_attention_are_those_of_its_products(heads: int) -> None:
    query = torch.randn(2, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(2, heads, 7, 8, requires_grad=True) for _ in range(2))
    with FlopCount() as forward:
        out = functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=heads < 4, scale=1.0
        )
    with FlopCount() as backward:
        out.sum().backward()
    product = 2 * (2 * 4) * 5 * 7 * 8
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert (forward.note, backward.note) == ("", "")


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


def test_what_has_shapes_alone_computes_nothing() -> None:
    """As ghosts of other stages, in a pipeline's first forward."""
    linear = nn.Linear(8, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.ones(2, 8))
        with FlopCount() as count:
            linear(fake)
    assert count.flops == 0
    with FlopCount() as count:
        linear(torch.ones(2, 8))
    assert count.flops == 2 * 2 * 8 * 8
