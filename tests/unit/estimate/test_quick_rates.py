"""Rates of this host's cores that the first estimate measures, and keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from zrun.agent import bench
from zrun.estimate import quick_rates as module
from zrun.estimate.machine import hardware_of
from zrun.estimate.quick_rates import quick_rates
from zrun.hosts.cluster import Cluster, HostFacts
from zrun.preflight.calibration import Calibration
from zrun_core.hardware.hardware import GIB

RATES = {
    "cpu": {"fp32_flops": 1.6e11, "bf16_flops": 6e9},
    "copy_bytes_per_s": 1.2e10,
    "streams": {"fp32_bytes_per_s": 2.4e10, "bf16_bytes_per_s": 2.2e10},
    "attention": {"fp32_flops": 8e10, "bf16_flops": 1.7e10},
    "operator_s": 9e-6,
    "messages": {"seconds": 2e-4, "bytes_per_s": 2e9},
    "disk": {"folder": ""},
}
HERE = HostFacts(hostname=gethostname(), cores=2, memory_bytes=8 * GIB)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was measured."""
    made: list[int] = []

    def run_quickly() -> dict[str, Any]:
        made.append(1)
        return RATES

    monkeypatch.setattr(module, "run_quickly", run_quickly)
    return made


def test_they_are_measured_once(tmp_path: Path, calls: list[int]) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    first, again = quick_rates(environ), quick_rates(environ)
    assert first == again
    assert first is not None
    assert first.operator_s == 9e-6
    assert len(calls) == 1
    (kept,) = (tmp_path / "zrun" / "rates").iterdir()
    kept.write_text("{")
    assert quick_rates(environ) == first
    assert len(calls) == 2


def test_they_are_the_hardware_of_this_host_alone(tmp_path: Path, calls: list[int]) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    found = hardware_of(Cluster((HERE,)), "cpu", 2, environ)
    device = found.device
    assert found.measured
    assert (device.flops("fp32"), device.flops("bf16")) == (8e10, 3e9)
    assert (device.attention_flops("fp32"), device.attention_flops("bf16")) == (4e10, 8.5e9)
    assert device.launch_s == 9e-6
    assert (found.intra.latency, found.intra.bandwidth) == (2e-4, 2e9)
    assert found.usual_disk or not found.disk_bytes
    there = replace(HERE, hostname="there")
    assert not hardware_of(Cluster((there,)), "cpu", 2, environ).measured
    assert not hardware_of(Cluster((HERE, there)), "cpu", 2, environ).measured
    assert len(calls) == 1


def test_what_was_measured_at_length_counts_more(tmp_path: Path, calls: list[int]) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    hosts = {gethostname(): RATES | {"operator_s": 5e-6}}
    stored = Calibration.model_validate({"made": "now", "zrun": "0", "hosts": hosts})
    stored.write(Calibration.default_path(environ))
    assert hardware_of(Cluster((HERE,)), "cpu", 2, environ).device.launch_s == 5e-6
    assert not calls


def test_they_may_be_left_out_or_fail(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert quick_rates({**environ, "ZRUN_CALIBRATION": "off"}) is None
    assert not calls

    def fails() -> dict[str, Any]:
        raise RuntimeError("no torch")

    monkeypatch.setattr(module, "run_quickly", fails)
    assert quick_rates(environ) is None
    monkeypatch.setattr(module, "run_quickly", lambda: {"cpu": {}})
    assert quick_rates(environ) is None
    assert not hardware_of(Cluster((HERE,)), "cpu", 2, environ).measured


@pytest.mark.thorough
def test_this_host_can_be_measured() -> None:
    rates = module.HostRates.model_validate(bench.run_quickly())
    assert rates.cpu_side == 512
    assert rates.attention is not None
    assert rates.streams is not None
    assert rates.layers is not None
    assert rates.operator_s is not None
    for each in (rates.cpu, rates.attention):
        assert 1e8 < each.bf16_flops < 1e15
        assert 1e9 < each.fp32_flops < 1e15
    assert rates.inner_s is not None
    for seconds in (rates.operator_s, rates.inner_s):
        assert 1e-7 < seconds < 1e-3
    if rates.messages is not None:  # ranks of this host may read each other's memory
        assert 1e-6 < rates.messages.seconds < 1e-1
        assert 1e7 < rates.messages.bytes_per_s < 1e12
