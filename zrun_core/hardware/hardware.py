"""What a plan is made for: devices, the links between them, and the hosts that carry them. Standard library only.

    parse_simulate("512x8xA100-40G")                512 nodes of 8; 4xH100 is one node of 4
    parse_simulate("64x8xH100-80G@4xHDR,ram=1TB")   other adapters, other memory
    from_rates(rates, ranks=2)                      what `zrun doctor --bench` has measured of a host

All rates are per second: bytes, or floating-point operations of dense products (a multiply-add is two). Peaks are the
vendors' data sheets. What a device reaches of them follows curves with few constants, the same for all models: those of
the A100 reproduce the step times of Korthikanti et al. 2022; the others have the same form, and what is published of
square products, copies and collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from zrun_core.errors import JobError
from zrun_core.spine.sizes import parse_size

GB = 1e9
GIB = 1 << 30
MIB = 1 << 20
MOST_DEVICES = 1 << 20
# How far a step's time may be off to either side: from data sheets, measured, and on cores, where
# few rates stand for kernels that differ much.
PRESET_SPREAD, MEASURED_SPREAD, CORES_SPREAD = 0.25, 0.10, 0.50


@dataclass(frozen=True)
class Link:
    """A way for bytes, as one device sees it.

    Attributes:
        bandwidth: bytes per second in one direction that large messages reach.
        latency: seconds of one message.
    """

    name: str
    bandwidth: float
    latency: float

    def shared(self, adapters: int, devices: int) -> Link:
        """One device's part of so many of these."""
        return replace(self, bandwidth=self.bandwidth * adapters / devices)


@dataclass(frozen=True)
class Device:
    """What computes for one rank: a GPU, or a rank's part of the cores of a host.

    Attributes:
        memory_bytes: that processes can have, as the driver says.
        peak: FLOP/s by compute format.
        bandwidth: of its memory, reads and writes together.
        gemm: share of the peak that large matrix products reach.
        gemm_area, gemm_depth: elements of the result, and length of the sum, at which a product reaches half of that.
        attention: share of the peak that fused attention reaches.
        streaming: share of the bandwidth that elementwise operations reach.
        cache_bytes: tensors up to this size stay near the cores, at `cache_speedup` times the bandwidth.
        narrow: bytes per second of elementwise operations in 16 bits, as a share of those in 32.
        launch_s: seconds that an operation takes however small it is.
        context_bytes: of the driver, outside of any allocator; on a CPU of Python and torch, which each process has.
        workspace_bytes: of the library of matrix products, in the allocator.
        communicator_bytes: of one group of ranks, outside of the allocator.
        contention: share of a transfer's time that it takes from computation beside it; 1: nothing overlaps.
        optimizer: elements that a fused Adam in fp32 updates per second; None: as the memory allows.
    """

    name: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int
    peak: Mapping[str, float]
    bandwidth: float
    gemm: float = 0.80
    gemm_area: float = 1e6
    gemm_depth: float = 256.0
    attention: float = 0.50
    streaming: float = 0.85
    cache_bytes: int = 0
    cache_speedup: float = 1.0
    narrow: float = 1.0
    launch_s: float = 4e-6
    context_bytes: int = 0
    workspace_bytes: int = 0
    communicator_bytes: int = 0
    contention: float = 0.12
    optimizer: float | None = None

    def flops(self, precision: str) -> float:
        """Peak FLOP/s in a compute format; one that the device lacks is computed in fp32."""
        return self.peak.get(precision, self.peak["fp32"])


@dataclass(frozen=True)
class Hardware:
    """Nodes that are alike.

    Attributes:
        name: as it was asked for.
        intra, inter: between devices of a node, and of two nodes, each as one device's part.
        host: between a device and the memory of its host, as one device's part.
        host_bytes, host_bandwidth, cores: of a node.
        disk_read, disk_write: bytes per second of a node's disks together; 0: there are none.
        measured: the rates come from this machine and not from data sheets.
        spread: how far the time of a step may be from what is said, as a share of it.
        price: of one device for an hour, in whatever money; None: nobody said.
        shares_memory: devices are cores of the host, and hold what they hold in its memory.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link
    host: Link
    host_bytes: int
    host_bandwidth: float
    cores: int
    disk_read: float = 0.0
    disk_write: float = 0.0
    disk_bytes: int = 0
    measured: bool = False
    spread: float = PRESET_SPREAD
    price: float | None = None
    shares_memory: bool = False

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The slowest link of a group of `ranks` whose numbers are `stride` apart."""
        return self.intra if ranks * stride <= self.devices_per_node else self.inter


def _peaks(tensor: float, fp32: float, *, bf16: bool = True) -> dict[str, float]:
    return {"fp16": tensor, "fp32": fp32} | ({"bf16": tensor} if bf16 else {})


def _gpu(
    name: str, memory_mib: int, peak: Mapping[str, float], bandwidth: float, sms: int, **rest: Any
) -> Device:
    """A GPU; the area of a product's result that keeps it busy goes with its processors."""
    given: dict[str, Any] = {
        "context_bytes": 450 * MIB,
        "workspace_bytes": 8 * MIB + 128 * 1024,
        "communicator_bytes": 160 * MIB,
        "gemm_area": 9000.0 * sms,
    }
    return Device(name, "cuda", memory_mib * MIB, peak, bandwidth, **(given | rest))


# Memory in MiB as the CUDA runtime reports it; peaks dense; bandwidth in bytes/s; streaming multiprocessors.
# Attention is torch's flash kernel (FlashAttention-2) from the A100 on, the memory-efficient one before.
_A100 = {"gemm": 0.80, "attention": 0.55}
_HOPPER = {"gemm": 0.64, "attention": 0.32, "workspace_bytes": 32 * MIB, "context_bytes": 520 * MIB}
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "V100-16G",
            16151,
            _peaks(125e12, 15.7e12, bf16=False),
            900e9,
            80,
            gemm=0.72,
            attention=0.30,
        ),
        _gpu(
            "V100-32G",
            32500,
            _peaks(125e12, 15.7e12, bf16=False),
            900e9,
            80,
            gemm=0.72,
            attention=0.30,
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
    )
}
# One core of a server with AVX-512, as a part of a host: what a quick measurement replaces.
_CPU_CORE = Device(
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
    contention=1.0,
    optimizer=0.35e9,
    context_bytes=165 * MIB,
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
_LINK_ALIASES = {
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
class _Node:
    """The usual host of a device: links, adapters and drives, memory in GiB, its bandwidth in GB/s."""

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


_NODES = {
    "V100-16G": _Node("NVLink2", "PCIe3", "EDR", 4, "NVMe3", 4, 512, 160, 40),
    "V100-32G": _Node("NVLink2", "PCIe3", "EDR", 4, "NVMe3", 4, 768, 160, 48),
    "A100-40G": _Node("NVLink3", "PCIe4", "HDR", 8, "NVMe4", 4, 1024, 300, 128),
    "A100-80G": _Node("NVLink3", "PCIe4", "HDR", 8, "NVMe4", 8, 2048, 300, 128),
    "H100-80G": _Node("NVLink4", "PCIe5", "NDR", 8, "NVMe4", 8, 2048, 450, 112),
    "H200": _Node("NVLink4", "PCIe5", "NDR", 8, "NVMe4", 8, 2048, 450, 112),
    "B200": _Node("NVLink5", "PCIe5", "NDR", 8, "NVMe5", 8, 2048, 500, 112),
    "L40S": _Node("PCIe4", "PCIe4", "100G", 2, "NVMe4", 2, 512, 300, 64),
    "4090": _Node("PCIe4", "PCIe4", "10G", 1, "NVMe4", 1, 128, 60, 24),
}
_CPU_NODE = _Node("memory", "memory", "10G", 1, "NVMe4", 1, 64, 40, 8, devices=1)

_SIMULATED = re.compile(
    r"(?:(?P<first>\d+)x(?:(?P<second>\d+)x)?)?(?P<name>[A-Za-z0-9-]+)(?:@(?P<rest>.+))?"
)
_COUNTED = re.compile(r"(?:(\d+)x)?(.+)")


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of dense products that the vendor states for a device, by a part of its name; None where nobody says."""
    for device in DEVICES.values():
        model = device.name.partition("-")[0]
        if re.search(rf"(?<![A-Z0-9]){model}(?![0-9A-Z])", name):
            return device.peak.get(precision)
    return None


def device_named(name: str) -> Device:
    """The preset of this name, with or without a B at the end, in any case.

    Raises:
        JobError: there is none.
    """
    known = {key.upper(): device for key, device in DEVICES.items()} | {"CPU": _CPU_CORE}
    known |= {alias: DEVICES[key] for alias, key in _ALIASES.items()}
    wanted = re.sub(r"(?<=\dG)I?B$", "", name.upper().replace("_", "-"))
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1, cutoff=0.3)
    suggestion = f"did you mean {known[near[0]].name}? " if near else ""
    raise JobError(
        f"{name!r} is no device that is known: {suggestion}There are {', '.join([*DEVICES, 'CPU'])}"
    )


def parse_simulate(text: str, *, price: float | None = None) -> Hardware:
    """A cluster that is not there: `[nodes x] [devices x] device [@ part, ...]`.

    Parts replace what the device's usual host has: a link between devices or to the host (NVLink4, PCIe5), adapters
    between hosts (HDR, 4xNDR, 400G: that many per node), drives (4xNVMe4), memory of a host (ram=512GiB).

    Raises:
        JobError: the text says something else, or names what is not known.
    """
    match = _SIMULATED.fullmatch(text.strip())
    if match is None:
        raise JobError(
            f"{text!r} describes no cluster: write nodes x GPUs x device, such as 64x8xA100-80G or 4xH100"
        )
    device = device_named(match["name"])
    usual = _CPU_NODE if device.kind == "cpu" else _NODES[device.name]
    nodes, devices = _counts(text, match["first"], match["second"], usual)
    hardware = _assemble(text.strip(), device, usual, nodes, devices)
    for part in filter(None, (part.strip() for part in (match["rest"] or "").split(","))):
        hardware = _with_part(hardware, part)
    return replace(hardware, price=price)


def _counts(text: str, first: str | None, second: str | None, usual: _Node) -> tuple[int, int]:
    """(nodes, devices of each)."""
    nodes, devices = (int(first or 1), int(second)) if second else (1, int(first or 1))
    if not second and usual.devices > 1 and devices > usual.devices:
        nodes, rest = divmod(devices, usual.devices)
        if rest:
            raise JobError(
                f"{text!r}: {devices} devices do not divide over nodes of {usual.devices}: write nodes x GPUs x device"
            )
        devices = usual.devices
    if not 1 <= nodes * devices <= MOST_DEVICES:
        raise JobError(f"{text!r}: {nodes * devices} devices: write 1 to {MOST_DEVICES}")
    return nodes, devices


def _assemble(name: str, device: Device, usual: _Node, nodes: int, devices: int) -> Hardware:
    read, write = DRIVES[usual.drive]
    host_bytes = usual.host_gib * GIB
    cores, bandwidth = usual.cores, usual.host_gb_s * GB
    intra, host, shares = LINKS[usual.intra], LINKS[usual.host], device.kind == "cpu"
    if shares:
        cores = max(cores, devices)
        device = _of_cores(device, cores / devices, host_bytes // devices, 2 * bandwidth / devices)
    adapters = (
        usual.adapters if devices < usual.devices else usual.adapters * devices // usual.devices
    )
    return Hardware(
        name,
        device,
        nodes,
        devices,
        intra,
        LINKS[usual.inter].shared(adapters, devices),
        host,
        host_bytes,
        bandwidth,
        cores,
        read * usual.drives,
        write * usual.drives,
        usual.drives * 3840 * 10**9,
        shares_memory=shares,
    )


def _of_cores(core: Device, cores: float, memory_bytes: int, bandwidth: float) -> Device:
    """A rank with several cores of a host."""
    peak = {precision: flops * cores for precision, flops in core.peak.items()}
    optimizer = None if core.optimizer is None else core.optimizer * cores
    return replace(
        core, memory_bytes=memory_bytes, peak=peak, bandwidth=bandwidth, optimizer=optimizer
    )


def _with_part(hardware: Hardware, part: str) -> Hardware:
    if part.startswith("ram="):
        return _with_ram(hardware, part.removeprefix("ram="))
    count, wanted = _COUNTED.fullmatch(part).groups()  # type: ignore[union-attr]  # it matches whatever is not empty
    links = {name.upper(): name for name in (*LINKS, *DRIVES)} | {
        a.upper(): b for a, b in _LINK_ALIASES.items()
    }
    name = links.get(wanted.upper())
    if name is None:
        near = get_close_matches(wanted.upper(), links, n=1, cutoff=0.3)
        suggestion = f"did you mean {links[near[0]]}? " if near else ""
        raise JobError(
            f"{hardware.name!r}: {wanted!r} is no link or drive that is known: {suggestion}There are "
            f"{', '.join(name for name in links.values() if name in LINKS or name in DRIVES)}"
        )
    number = int(count or 0)
    if name in DRIVES:
        read, write = DRIVES[name]
        drives = number or 1
        return replace(
            hardware,
            disk_read=read * drives,
            disk_write=write * drives,
            disk_bytes=drives * 3840 * 10**9,
        )
    link = LINKS[name]
    if name.startswith("NVLink"):
        return replace(hardware, intra=link)
    if name.startswith("PCIe"):
        is_switched = hardware.intra.name.startswith("NVLink")
        return replace(hardware, host=link, intra=hardware.intra if is_switched else link)
    return replace(
        hardware, inter=link.shared(number or hardware.devices_per_node, hardware.devices_per_node)
    )


def _with_ram(hardware: Hardware, size: str) -> Hardware:
    try:
        host_bytes = parse_size(size)
    except ValueError as error:
        raise JobError(f"{hardware.name!r}: ram: {error}") from None
    if not host_bytes:
        raise JobError(
            f"{hardware.name!r}: ram: a host without memory runs nothing: write for example ram=512GiB"
        )
    device = hardware.device
    if hardware.shares_memory:
        device = replace(device, memory_bytes=host_bytes // hardware.devices_per_node)
    return replace(hardware, host_bytes=host_bytes, device=device)


@dataclass(frozen=True)
class Rates:
    """What was measured of a host, in plain numbers; None is what was not.

    Attributes:
        cpu_flops: of all cores together, by format, of large products.
        copy: of the host's memory, each byte counted once.
        cpu_streams: of all cores together, by format: bytes that elementwise operators read and
            write; empty: as the copy says.
        operator_s: seconds that an operator on next to nothing takes on a core.
        gpu_name: of each GPU, as the driver says; "" on a host without.
        gpu_flops: of one, by format, of large products.
        gpu_copy: of its memory, each byte counted once.
        to_device, from_device: between pinned memory and the GPU.
        disk_read, disk_write: of the folder that was measured.
        link: bytes per second between two hosts.
        round_trip: seconds between two hosts.
    """

    cpu_flops: Mapping[str, float]
    copy: float
    gpu_name: str = ""
    gpu_flops: Mapping[str, float] = field(default_factory=dict)
    gpu_copy: float = 0.0
    gpu_memory: int = 0
    to_device: float = 0.0
    from_device: float = 0.0
    disk_read: float | None = None
    disk_write: float | None = None
    link: float | None = None
    round_trip: float | None = None
    cpu_streams: Mapping[str, float] = field(default_factory=dict)
    operator_s: float | None = None


def from_rates(
    rates: Rates,
    *,
    ranks: int,
    nodes: int = 1,
    host_bytes: int,
    cores: int,
    name: str = "this machine",
) -> Hardware:
    """Hosts as they were measured, with `ranks` each.

    Args:
        host_bytes: memory of a host that jobs may use.
        cores: of a host.
    """
    inter = LINKS["10G"]
    if rates.link is not None:
        inter = Link("network", rates.link, (rates.round_trip or 2 * inter.latency) / 2).shared(
            1, ranks
        )
    disks: dict[str, Any] = {
        "disk_read": rates.disk_read or 0.0,
        "disk_write": rates.disk_write or 0.0,
    }
    common: dict[str, Any] = {"measured": True, **disks}
    if not rates.gpu_name:
        device = cpu_device(rates, ranks, host_bytes)
        memory = Link("memory", rates.copy / ranks / 2, LINKS["memory"].latency)
        return Hardware(
            name,
            device,
            nodes,
            ranks,
            memory,
            inter,
            memory,
            host_bytes,
            2 * rates.copy,
            cores,
            shares_memory=True,
            spread=CORES_SPREAD,
            **common,
        )
    preset = like(rates.gpu_name)
    usual = _NODES[preset.name]
    host = Link("PCIe", min(rates.to_device, rates.from_device), LINKS[usual.host].latency)
    device = replace(
        preset,
        name=rates.gpu_name,
        memory_bytes=rates.gpu_memory or preset.memory_bytes,
        **_measured_shares(preset, rates.gpu_flops, 8192, rates.gpu_copy),
    )
    return Hardware(
        name,
        device,
        nodes,
        ranks,
        LINKS[usual.intra],
        inter,
        host,
        host_bytes,
        2 * rates.copy,
        cores,
        spread=MEASURED_SPREAD,
        **common,
    )


def cpu_device(rates: Rates, ranks: int, host_bytes: int) -> Device:
    """One rank's part of a host's cores: a share of what all of them do together."""
    peak = {precision: flops / ranks for precision, flops in rates.cpu_flops.items()}
    device = replace(
        _CPU_CORE,
        memory_bytes=host_bytes // ranks,
        peak=peak,
        bandwidth=2 * rates.copy / ranks,
        gemm=1.0,
        streaming=1.0,
        optimizer=None,
    )
    if rates.cpu_streams:
        wide, narrow = rates.cpu_streams["fp32"], rates.cpu_streams["bf16"]
        device = replace(device, streaming=wide / (2 * rates.copy), narrow=narrow / wide)
    if rates.operator_s is not None:
        device = replace(device, launch_s=rates.operator_s)
    return device


def like(name: str) -> Device:
    """The preset that a driver's name means, or the one that is most like it."""
    upper = name.upper()
    same = [device for device in DEVICES.values() if device.name.partition("-")[0] in upper]
    fitting = [
        device
        for device in same
        if device.name.rpartition("-")[2].removesuffix("G") + "GB" in upper
    ]
    return (fitting or same or [DEVICES["A100-80G"]])[-1]


def _measured_shares(
    preset: Device, flops: Mapping[str, float], side: int, copy: float
) -> dict[str, Any]:
    """`gemm` and `streaming` such that a square product and a copy take what they took."""
    saturation = side**2 / (side**2 + preset.gemm_area) * side / (side + preset.gemm_depth)
    tensor = next((p for p in ("bf16", "fp16") if p in flops and p in preset.peak), None)
    shares: dict[str, Any] = {"streaming": min(1.0, 2 * copy / preset.bandwidth)}
    if tensor is not None:
        shares["gemm"] = min(1.0, flops[tensor] / preset.peak[tensor] / saturation)
    return shares
