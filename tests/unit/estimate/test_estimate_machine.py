"""Hosts as they were measured, as the hardware of a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.estimate.machine import hardware_of
from zrun.hosts.cluster import Cluster, HostFacts
from zrun.preflight.calibration import Calibration
from zrun_core.hardware.hardware import GIB
from zrun_core.hardware.measured import Rates, from_rates
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.tiers.probe import DiskFacts

HERE = HostFacts(hostname="here", cores=4, memory_bytes=8 * GIB)
MEASURED = {
    "cpu": {"fp32_flops": 8e10, "bf16_flops": 2e11},
    "copy_bytes_per_s": 8e9,
    "disk": {"folder": "/"},
}
STREAMS = {
    "streams": {"fp32_bytes_per_s": 12e9, "bf16_bytes_per_s": 6e9},
    "operator_s": 3e-6,
}
# As a zrun wrote it that timed single operators.
TABLES = {
    "ranks": 1,
    "threads": 4,
    "flops": {"fp32": 1e11, "bf16": 2e11},
    "copy_bytes_per_s": 1e10,
    "exchange_bytes_per_s": 5e9,
    "exchange_s": 1e-4,
    "extra": {"step_s": 0.002, "param_s": 1e-5, "selective_s": 1e-6},
    "update": {"fp32": 1e9},
    "operators": {"streams": {"add float32": [[1e3, 1e-6], [1e6, 1e-4]]}},
}


def stored(folder: Path, **more: Any) -> dict[str, str]:
    """An environment with the rates of one host."""
    path = Calibration.default_path({"XDG_CACHE_HOME": str(folder)})
    path.parent.mkdir(exist_ok=True)
    hosts = {"here": MEASURED | more}
    path.write_text(json.dumps({"made": "now", "zrun": "0", "hosts": hosts}))
    return {"XDG_CACHE_HOME": str(folder)}


def test_ranks_share_the_rates_of_their_host(tmp_path: Path) -> None:
    found = hardware_of(Cluster((HERE,)), "cpu", 2, stored(tmp_path, **STREAMS))
    device = found.device
    assert found.measured
    assert (device.flops("fp32"), device.flops("bf16")) == (4e10, 1e11)
    assert device.bandwidth * device.streaming == pytest.approx(6e9)
    assert device.bandwidth * device.streaming * device.narrow == pytest.approx(3e9)
    assert device.launch_s == 3e-6


def test_rates_of_products_leave_out_their_way_from_memory(tmp_path: Path) -> None:
    """A calibration says how large they were; of hosts that differ in it nothing is left out."""
    environ = stored(tmp_path, **STREAMS, cpu_side=512)
    device = hardware_of(Cluster((HERE,)), "cpu", 2, environ).device
    assert device.flops("fp32") > 4.4e10
    path = Calibration.default_path(environ)
    text = json.loads(path.read_text())
    text["hosts"]["there"] = MEASURED | STREAMS | {"cpu_side": 1536}
    path.write_text(json.dumps(text))
    there = HostFacts(hostname="there", cores=4, memory_bytes=8 * GIB)
    device = hardware_of(Cluster((HERE, there)), "cpu", 2, environ).device
    assert device.flops("fp32") == 4e10


def test_what_small_layers_make_has_a_rate_of_its_own(tmp_path: Path) -> None:
    layers = {"fp32_bytes_per_s": 24e9, "bf16_bytes_per_s": 6e9}
    environ = stored(tmp_path, **STREAMS, layers=layers)
    device = hardware_of(Cluster((HERE,)), "cpu", 2, environ).device
    assert device.cache_speedup == pytest.approx((24 / 12 + 6 / 6) / 2)
    without = hardware_of(Cluster((HERE,)), "cpu", 2, stored(tmp_path, **STREAMS)).device
    assert without.cache_speedup == parse_simulate("2xCPU").device.cache_speedup


def test_rates_with_tables_of_operators_are_read_without_them(tmp_path: Path) -> None:
    old = hardware_of(Cluster((HERE,)), "cpu", 2, stored(tmp_path, cores=[TABLES]))
    rates = Rates({"fp32": 8e10, "bf16": 2e11}, copy=8e9)
    plain = from_rates(rates, ranks=2, host_bytes=old.host_bytes, cores=4)
    assert old.measured
    assert old.device == plain.device
    assert old.intra == plain.intra


def test_the_slowest_host_counts(tmp_path: Path) -> None:
    environ = stored(tmp_path, **STREAMS)
    path = Calibration.default_path(environ)
    text = json.loads(path.read_text())
    text["hosts"]["there"] = MEASURED | {
        "streams": {"fp32_bytes_per_s": 20e9, "bf16_bytes_per_s": 5e9},
        "operator_s": 9e-6,
    }
    path.write_text(json.dumps(text))
    there = HostFacts(hostname="there", cores=4, memory_bytes=8 * GIB)
    device = hardware_of(Cluster((HERE, there)), "cpu", 1, environ).device
    assert device.bandwidth * device.streaming == pytest.approx(12e9)
    assert device.narrow == pytest.approx(5 / 12)
    assert device.launch_s == 9e-6


def test_of_the_disks_that_hosts_have_shown_the_fullest_counts(tmp_path: Path) -> None:
    disk = DiskFacts("/scratch", None, "xfs", False, True, 1_234_567_890, 2.96e9, 1.51e9)
    roomy = replace(HERE, disk=disk)
    full = replace(HERE, hostname="there", disk=replace(disk, free_bytes=999_999))
    assert hardware_of(Cluster((roomy,)), "cpu", 2, {}).disk_bytes == 1_230_000_000
    assert hardware_of(Cluster((roomy, full)), "cpu", 2, {}).disk_bytes == 999_000
    memory = replace(HERE, disk=replace(disk, filesystem="tmpfs", is_memory=True))
    assert hardware_of(Cluster((memory,)), "cpu", 2, {}).disk_bytes == 0
