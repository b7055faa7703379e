"""Hardware by name, by parts, and by what was measured."""

from __future__ import annotations

import pytest
import torch

from zrun_core.errors import JobError
from zrun_core.hardware.catalogue import DEVICES, LINKS, device_named, peak_flops
from zrun_core.hardware.hardware import GIB
from zrun_core.hardware.measured import Rates, from_rates
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.spine.memory_limits import share_of_rank
from zrun_core.telemetry import metrics


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "device"),
    [
        ("512x8xA100-40G", 512, 8, "A100-40G"),
        ("1x8xH100-80G", 1, 8, "H100-80G"),
        ("4xH100", 1, 4, "H100-80G"),
        ("64xa100-80gb", 8, 8, "A100-80G"),
        ("V100-16G", 1, 1, "V100-16G"),
        ("2x8x4090", 2, 8, "4090"),
        ("RTX-4090", 1, 1, "4090"),
        ("10000x8xB200", 10000, 8, "B200"),
        ("2x4xCPU", 2, 4, "CPU"),
    ],
)
def test_a_cluster_in_words(text: str, nodes: int, devices: int, device: str) -> None:
    hardware = parse_simulate(text)
    assert (hardware.nodes, hardware.devices_per_node, hardware.device.name) == (
        nodes,
        devices,
        device,
    )
    assert hardware.num_devices == nodes * devices
    assert not hardware.measured
    assert hardware.spread == 0.25


def test_parts_replace_what_a_host_usually_has() -> None:
    usual = parse_simulate("4x8xA100-80G")
    assert usual.inter.bandwidth == LINKS["HDR"].bandwidth, "an adapter for each GPU"
    other = parse_simulate("4x8xA100-80G@4xNDR, pcie5,8xNVMe5,ram=1TB")
    assert other.inter.bandwidth == LINKS["NDR"].bandwidth / 2
    assert (other.intra, other.host) == (LINKS["NVLink3"], LINKS["PCIe5"])
    assert (other.disk_read, other.host_bytes) == (96e9, 10**12)
    assert parse_simulate("2xL40S@PCIe5").intra == LINKS["PCIe5"], (
        "there is no other link between them"
    )
    assert parse_simulate("4xA100@NVLink4").intra == LINKS["NVLink4"]
    assert parse_simulate("2x8xH100@IB-HDR").inter.name == "HDR"
    assert parse_simulate("2x8xH100@1x100GbE").inter.bandwidth == LINKS["100G"].bandwidth / 8
    assert parse_simulate("H100", price=2.5).price == 2.5
    few = parse_simulate("2xA100")
    assert few.inter.bandwidth == 4 * LINKS["HDR"].bandwidth, (
        "two of eight GPUs, all adapters of the host"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xA1000-40G", "did you mean A100-40G? There are V100-16G"),
        ("8xH100-80G@NVLnk4", "did you mean NVLink4?"),
        ("9xA100", "9 devices do not divide over nodes of 8"),
        ("0xA100", "0 devices: write 1 to"),
        ("300000x8xA100", "2400000 devices"),
        ("8 A100", "is not a cluster"),
        ("", "is not a cluster"),
        ("A100@ram=lots", "ram: 'lots' is not a size"),
        ("A100@ram=0", "ram=0 does not run"),
        ("A100@tflops=nan", "tflops=nan does not run"),
        ("A100@tflops=lots", "tflops: could not convert"),
        ("CPU@memory=8GiB", "memory=8GiB does not run"),
        ("A100@price=2", "unknown number 'price': write ram=512GiB"),
    ],
)
def test_what_is_not_known_is_said(text: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_simulate(text)
    assert said in str(caught.value)


def test_ranks_on_cpus_share_their_host() -> None:
    one, four = parse_simulate("1xCPU"), parse_simulate("4xCPU")
    assert one.shares_memory
    assert four.device.memory_bytes == share_of_rank(one.device.memory_bytes, 4)
    assert four.device.flops("fp32") * 4 == one.device.flops("fp32")
    assert four.device.flops("fp16") == four.device.flops("fp32"), (
        "a format that it lacks is computed in fp32"
    )


def test_the_drivers_name_finds_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops("NVIDIA A100-SXM4-40GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 67e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("NVIDIA GeForce RTX 4090", "fp16") == 165e12
    assert peak_flops("NVIDIA GH2000", "bf16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert metrics.peak_flops(torch.device("cuda:0"), torch.bfloat16) == 989e12
    assert metrics.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_every_device_has_a_usual_host_and_sane_numbers() -> None:
    for name, device in DEVICES.items():
        hardware = parse_simulate(f"2x8x{name}")
        assert hardware.device == device_named(name.lower()) == device
        assert 10 * GIB < device.memory_bytes < hardware.host_bytes
        assert (
            hardware.host.bandwidth
            <= hardware.intra.bandwidth
            < device.bandwidth
            < device.flops("fp32")
        )
        assert hardware.disk_read > hardware.disk_write > 0


def test_measured_rates_are_reached_by_what_was_measured() -> None:
    rates = Rates(
        {"fp32": 1e12},
        50e9,
        "NVIDIA A100-SXM4-80GB",
        {"bf16": 250e12, "fp32": 18e12},
        0.8e12,
        0,
        20e9,
        22e9,
        disk_read=3e9,
        disk_write=2e9,
        link=5e9,
        round_trip=1e-4,
    )
    found = from_rates(rates, ranks=8, nodes=2, host_bytes=512 * GIB, cores=64)
    device = found.device
    side = 8192
    reached = (
        device.gemm * side**2 / (side**2 + device.gemm_area) * side / (side + device.gemm_depth)
    )
    assert reached * device.flops("bf16") == pytest.approx(250e12)
    assert device.streaming * device.bandwidth == pytest.approx(1.6e12), "a copy reads and writes"
    assert (found.host.bandwidth, found.intra, found.inter.bandwidth) == (
        20e9,
        LINKS["NVLink3"],
        5e9 / 8,
    )
    assert found.inter.latency == 5e-5
    assert found.measured
    assert found.spread < 0.25


def test_a_host_without_gpus_is_shared_by_its_ranks() -> None:
    rates = Rates({"fp32": 100e9, "bf16": 200e9}, 10e9, operator_s=2e-6)
    found = from_rates(rates, ranks=2, host_bytes=8 * GIB, cores=2)
    assert found.shares_memory
    assert (found.device.kind, found.device.memory_bytes) == ("cpu", share_of_rank(8 * GIB, 2))
    assert found.device.flops("bf16") == 100e9
    assert (found.device.bandwidth, found.device.launch_s) == (10e9, 2e-6)
    assert found.intra.bandwidth == 2.5e9
    assert found.disk_read == 0


def test_a_device_of_no_list_is_one_that_is_with_other_numbers() -> None:
    known = parse_simulate("2x4090")
    other = parse_simulate("2x4090@memory=48GiB,tflops=330,bandwidth=1.5TB,ram=256GiB")
    assert other.device.memory_bytes == 48 << 30
    assert other.device.peak == {"fp16": 330e12, "bf16": 330e12, "fp32": known.device.peak["fp32"]}
    assert other.device.bandwidth == 1.5e12
    assert (other.host_bytes, other.intra) == (256 << 30, known.intra)
