"""Devices, links and drives by name, and the usual host of each device. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from zrun_core.errors import JobError
from zrun_core.hardware.hardware import GB, MIB, Device, Link


def _peaks(tensor: float, fp32: float, *, bf16: bool = True) -> dict[str, float]:
    return {"fp16": tensor, "fp32": fp32} | ({"bf16": tensor} if bf16 else {})


def _communicators(channels: int, between_two: int) -> dict[str, int]:
    """Return what communicators of NCCL take of a device.

    A channel has 10 MiB to receive and 2 MiB to send for each rank that it is connected with, as
    NCCL_DEBUG_SUBSYS=ALLOC told on 8 H100 (NVIDIA/nccl#1685): buffers of all three protocols, of
    which NCCL_BUFFSIZE, 4 MiB, is the largest. Rings receive of one rank and send to one; a message
    goes one way, and a rank has as many ends of either kind. All of it is linear in the channels
    (nccl#864), of which faster links have more.

    Collectives within a host have `channels`, messages between two ranks `between_two`.
    """
    return {"communicator_bytes": 12 * channels * MIB, "pair_bytes": 6 * between_two * MIB}


def _gpu(
    name: str, memory_mib: int, peak: Mapping[str, float], bandwidth: float, sms: int, **rest: Any
) -> Device:
    """Return a GPU; the area of a product's result that keeps it busy goes with its processors."""
    given: dict[str, Any] = {
        "context_bytes": 450 * MIB,
        "workspace_bytes": 8 * MIB + 128 * 1024,
        **_communicators(4, 2),
        "gemm_area": 9000.0 * sms,
    }
    return Device(name, "cuda", memory_mib * MIB, peak, bandwidth, **(given | rest))


# Memory in MiB as the CUDA runtime reports it; dense peaks; bandwidth in bytes/s; streaming
# multiprocessors. Attention is torch's flash kernel (FlashAttention-2) from the A100 on, the
# memory-efficient one before.
_V100 = {"gemm": 0.72, "attention": 0.30, **_communicators(12, 16)}
_A100 = {"gemm": 0.80, "attention": 0.55, **_communicators(24, 32)}
_HOPPER = {
    "gemm": 0.64,
    "attention": 0.32,
    "workspace_bytes": 32 * MIB,
    "context_bytes": 520 * MIB,
    **_communicators(16, 32),
}
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "V100-16G",
            16151,
            _peaks(125e12, 15.7e12, bf16=False),
            900e9,
            80,
            **_V100,
        ),
        _gpu(
            "V100-32G",
            32500,
            _peaks(125e12, 15.7e12, bf16=False),
            900e9,
            80,
            **_V100,
        ),
        _gpu("A100-40G", 40338, _peaks(312e12, 19.5e12), 1555e9, 108, **_A100),
        _gpu("A100-80G", 81051, _peaks(312e12, 19.5e12), 2039e9, 108, **_A100),
        _gpu("H100-80G", 81090, _peaks(989e12, 67e12), 3350e9, 132, **_HOPPER),
        _gpu("H200", 143156, _peaks(989e12, 67e12), 4800e9, 132, **_HOPPER),
        _gpu(
            "B200",
            182642,
            _peaks(2250e12, 75e12),
            8000e9,
            148,
            **(_HOPPER | {"gemm": 0.60, "attention": 0.22}),
        ),
        _gpu("L40S", 45488, _peaks(362e12, 91.6e12), 864e9, 142, gemm=0.62, attention=0.45),
        _gpu("4090", 24217, _peaks(165e12, 82.6e12), 1008e9, 128, gemm=0.88, attention=0.75),
        _gpu("5090", 32109, _peaks(209e12, 104.8e12), 1792e9, 170, gemm=0.85, attention=0.70),
        _gpu("3090", 24260, _peaks(71e12, 35.6e12), 936e9, 82, gemm=0.88, attention=0.75),
        _gpu("A6000", 48677, _peaks(155e12, 38.7e12), 768e9, 84, gemm=0.70, attention=0.50),
        _gpu("A40", 45416, _peaks(150e12, 37.4e12), 696e9, 84, gemm=0.65, attention=0.50),
        _gpu("A10", 22725, _peaks(125e12, 31.2e12), 600e9, 72, gemm=0.55, attention=0.45),
        _gpu("L4", 22563, _peaks(121e12, 30.3e12), 300e9, 58, gemm=0.50, attention=0.45),
        _gpu("T4", 14914, _peaks(65e12, 8.1e12, bf16=False), 320e9, 40, gemm=0.50, attention=0.30),
    )
}
# One core of a server with AVX-512, as a part of a host: what a quick measurement replaces.
CPU_CORE = Device(
    "CPU",
    "cpu",
    0,
    {"fp32": 90e9, "bf16": 180e9},
    12e9,
    gemm=0.85,
    gemm_area=4096.0,
    gemm_depth=48.0,
    attention=0.35,
    streaming=0.8,
    cache_bytes=16 * MIB,
    cache_speedup=2.0,
    narrow=0.55,
    launch_s=5e-6,
    inner_s=1.5e-6,
    contention=1.0,
    optimizer=0.35e9,
    context_bytes=171 * MIB,
)
_ALIASES = {
    "V100": "V100-32G",
    "A100": "A100-80G",
    "H100": "H100-80G",
    "RTX4090": "4090",
    "RTX-4090": "4090",
    "H200-141G": "H200",
    "B200-180G": "B200",
    "B200-192G": "B200",
    "L40S-48G": "L40S",
    "4090-24G": "4090",
    "RTX5090": "5090",
    "RTX-5090": "5090",
    "RTX3090": "3090",
    "RTX-3090": "3090",
    "RTX-A6000": "A6000",
    "A10G": "A10",
}

# What large messages reach, per device (NVLink, PCIe: all links of one), per adapter, or per drive.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("NVLink2", 120 * GB, 5e-6),
        Link("NVLink3", 235 * GB, 4e-6),
        Link("NVLink4", 360 * GB, 4e-6),
        Link("NVLink5", 690 * GB, 4e-6),
        Link("PCIe3", 12 * GB, 8e-6),
        Link("PCIe4", 24 * GB, 8e-6),
        Link("PCIe5", 50 * GB, 7e-6),
        Link("EDR", 11.5 * GB, 8e-6),
        Link("HDR", 23 * GB, 8e-6),
        Link("NDR", 46 * GB, 8e-6),
        Link("10G", 1.15 * GB, 40e-6),
        Link("25G", 2.8 * GB, 30e-6),
        Link("100G", 11.2 * GB, 20e-6),
        Link("400G", 44 * GB, 12e-6),
        Link("memory", 8 * GB, 30e-6),
    )
}
LINK_ALIASES = {
    "IB-EDR": "EDR",
    "IB-HDR": "HDR",
    "IB-NDR": "NDR",
    "Ethernet-100G": "100G",
    "Ethernet-400G": "400G",
    "Ethernet-10G": "10G",
    "Ethernet-25G": "25G",
    "100GbE": "100G",
    "400GbE": "400G",
    "10GbE": "10G",
    "25GbE": "25G",
}
# Bytes per second that one drive reads and writes.
DRIVES = {
    "NVMe3": (3.2 * GB, 2.0 * GB),
    "NVMe4": (6.5 * GB, 4.0 * GB),
    "NVMe5": (12 * GB, 8.0 * GB),
}


@dataclass(frozen=True)
class UsualNode:
    """The usual host of a device: links, adapters, drives; memory in GiB, bandwidth in GB/s."""

    intra: str
    host: str
    inter: str
    adapters: int  # of a full node
    drive: str
    drives: int
    host_gib: int
    host_gb_s: float
    cores: int
    devices: int = 8


NODES = {
    "V100-16G": UsualNode("NVLink2", "PCIe3", "EDR", 4, "NVMe3", 4, 512, 160, 40),
    "V100-32G": UsualNode("NVLink2", "PCIe3", "EDR", 4, "NVMe3", 4, 768, 160, 48),
    "A100-40G": UsualNode("NVLink3", "PCIe4", "HDR", 8, "NVMe4", 4, 1024, 300, 128),
    "A100-80G": UsualNode("NVLink3", "PCIe4", "HDR", 8, "NVMe4", 8, 2048, 300, 128),
    "H100-80G": UsualNode("NVLink4", "PCIe5", "NDR", 8, "NVMe4", 8, 2048, 450, 112),
    "H200": UsualNode("NVLink4", "PCIe5", "NDR", 8, "NVMe4", 8, 2048, 450, 112),
    "B200": UsualNode("NVLink5", "PCIe5", "NDR", 8, "NVMe5", 8, 2048, 500, 112),
    "L40S": UsualNode("PCIe4", "PCIe4", "100G", 2, "NVMe4", 2, 512, 300, 64),
    "4090": UsualNode("PCIe4", "PCIe4", "10G", 1, "NVMe4", 1, 128, 60, 24),
    "5090": UsualNode("PCIe5", "PCIe5", "10G", 1, "NVMe4", 1, 128, 60, 24),
    "3090": UsualNode("PCIe4", "PCIe4", "10G", 1, "NVMe4", 1, 128, 60, 24),
    "A6000": UsualNode("PCIe4", "PCIe4", "25G", 1, "NVMe4", 2, 256, 150, 64),
    "A40": UsualNode("PCIe4", "PCIe4", "100G", 1, "NVMe4", 2, 512, 200, 64),
    "A10": UsualNode("PCIe4", "PCIe4", "100G", 1, "NVMe4", 2, 768, 200, 96),
    "L4": UsualNode("PCIe4", "PCIe4", "100G", 1, "NVMe4", 2, 384, 200, 96),
    "T4": UsualNode("PCIe3", "PCIe3", "100G", 1, "NVMe3", 2, 384, 150, 48),
}
CPU_NODE = UsualNode("memory", "memory", "10G", 1, "NVMe4", 1, 64, 40, 8, devices=1)


def peak_flops(name: str, precision: str) -> float | None:
    """Return the FLOP/s of dense products that a device's vendor states; None: not known.

    Args:
        name: of the device, as its driver says; a part of it names the model.
    """
    for device in DEVICES.values():
        model = device.name.partition("-")[0]
        if re.search(rf"(?<![A-Z0-9]){model}(?![0-9A-Z])", name):
            return device.peak.get(precision)
    return None


def device_named(name: str) -> Device:
    """Return the preset of this name, with or without a B at the end, in any case.

    Raises:
        JobError: there is none.
    """
    known = {key.upper(): device for key, device in DEVICES.items()} | {"CPU": CPU_CORE}
    known |= {alias: DEVICES[key] for alias, key in _ALIASES.items()}
    wanted = re.sub(r"(?<=\dG)I?B$", "", name.upper().replace("_", "-"))
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1, cutoff=0.6)
    suggestion = f"did you mean {known[near[0]].name}? " if near else ""
    raise JobError(
        f"unknown device {name!r}: {suggestion}There are {', '.join([*DEVICES, 'CPU'])}; for "
        "another one write its numbers behind the most similar, such as "
        "4090@memory=16GiB,tflops=97,bandwidth=717GB"
    )


def like(name: str) -> Device:
    """Return the preset that a driver's name means, or the one that is most like it."""
    upper = name.upper()
    same = [device for device in DEVICES.values() if device.name.partition("-")[0] in upper]
    fitting = [
        device
        for device in same
        if device.name.rpartition("-")[2].removesuffix("G") + "GB" in upper
    ]
    return (fitting or same or [DEVICES["A100-80G"]])[-1]
