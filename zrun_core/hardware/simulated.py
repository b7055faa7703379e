"""Clusters that are not there, in words such as `512x8xA100-40G`. Standard library only."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from zrun_core.errors import JobError
from zrun_core.hardware.catalogue import (
    CPU_NODE,
    DRIVES,
    LINK_ALIASES,
    LINKS,
    NODES,
    UsualNode,
    device_named,
)
from zrun_core.hardware.hardware import GB, GIB, Device, Hardware
from zrun_core.sizes import parse_size
from zrun_core.spine.memory_limits import share_of_rank

MOST_DEVICES = 1 << 20
_DRIVE_BYTES = 3840 * 10**9

_SIMULATED = re.compile(
    r"(?:(?P<first>\d+)x(?:(?P<second>\d+)x)?)?(?P<name>[A-Za-z0-9-]+)(?:@(?P<rest>.+))?"
)
# What a number after the @ may be, each with an example.
_NUMBERS = {
    "ram": "ram=512GiB",
    "memory": "memory=48GiB",
    "tflops": "tflops=330",
    "bandwidth": "bandwidth=1.2TB",
}
_COUNTED = re.compile(r"(?:(\d+)x)?(.+)")


def parse_simulate(text: str, *, price: float | None = None) -> Hardware:
    """Return a cluster that is not there: `[nodes x] [devices x] device [@ part, ...]`.

    Parts replace those of the device's usual host: a link between devices or to the host (NVLink4,
    PCIe5), adapters between hosts (HDR, 4xNDR, 400G: that many per node), drives (4xNVMe4), memory
    of a host (ram=512GiB); and those of the device, for one that is in no list: memory=48GiB,
    tflops=330 (of dense products in 16 bits), bandwidth=1.2TB (per second).

    Args:
        text: such as 64x8xA100-80G@4xHDR.
        price: of a device for an hour.

    Raises:
        JobError: the text says something else, or names what is not known.
    """
    match = _SIMULATED.fullmatch(text.strip())
    if match is None:
        raise JobError(
            f"{text!r} is not a cluster: write nodes x GPUs x device, such as 64x8xA100-80G or "
            "4xH100"
        )
    device = device_named(match["name"])
    usual = CPU_NODE if device.kind == "cpu" else NODES[device.name]
    nodes, devices = _counts(text, match["first"], match["second"], usual)
    hardware = _assemble(text.strip(), device, usual, nodes, devices)
    for part in (match["rest"] or "").split(","):
        if part.strip():
            hardware = _with_part(hardware, part.strip())
    return replace(hardware, price=price)


def _counts(text: str, first: str | None, second: str | None, usual: UsualNode) -> tuple[int, int]:
    """Return the nodes, and the devices of each.

    One number counts devices: more of them than a node usually has fill several nodes.
    """
    if second:
        nodes = int(first or 1)
        devices = int(second)
    else:
        nodes = 1
        devices = int(first or 1)
        if 1 < usual.devices < devices:
            nodes, rest = divmod(devices, usual.devices)
            if rest:
                raise JobError(
                    f"{text!r}: {devices} devices do not divide over nodes of {usual.devices}: "
                    "write nodes x GPUs x device"
                )
            devices = usual.devices
    if not 1 <= nodes * devices <= MOST_DEVICES:
        raise JobError(f"{text!r}: {nodes * devices} devices: write 1 to {MOST_DEVICES}")
    return nodes, devices


def _assemble(name: str, device: Device, usual: UsualNode, nodes: int, devices: int) -> Hardware:
    """Return nodes with the usual links, memory and drives of a device."""
    host_bytes = usual.host_gib * GIB
    bandwidth = usual.host_gb_s * GB
    cores = usual.cores
    is_cpu = device.kind == "cpu"
    if is_cpu:
        cores = max(cores, devices)
        device = _of_cores(
            device, cores / devices, share_of_rank(host_bytes, devices), 2 * bandwidth / devices
        )
    adapters = usual.adapters
    if devices >= usual.devices:
        adapters = usual.adapters * devices // usual.devices
    read, write = DRIVES[usual.drive]
    return Hardware(
        name=name,
        device=device,
        nodes=nodes,
        devices_per_node=devices,
        intra=LINKS[usual.intra],
        inter=LINKS[usual.inter].shared(adapters, devices),
        host=LINKS[usual.host],
        host_bytes=host_bytes,
        host_bandwidth=bandwidth,
        cores=cores,
        disk_read=read * usual.drives,
        disk_write=write * usual.drives,
        disk_bytes=usual.drives * _DRIVE_BYTES,
        shares_memory=is_cpu,
    )


def _of_cores(core: Device, cores: float, memory_bytes: int, bandwidth: float) -> Device:
    """Return a rank with several cores of a host."""
    peak = {precision: flops * cores for precision, flops in core.peak.items()}
    optimizer = None if core.optimizer is None else core.optimizer * cores
    return replace(
        core, memory_bytes=memory_bytes, peak=peak, bandwidth=bandwidth, optimizer=optimizer
    )


def _with_part(hardware: Hardware, part: str) -> Hardware:
    """Return the hardware with one of its parts replaced."""
    key, equals, value = part.partition("=")
    if equals:
        return _with_value(hardware, key.strip(), value.strip())
    match = _COUNTED.fullmatch(part)
    assert match is not None  # anything but the empty text matches
    count, wanted = match.groups()
    name = _part_named(hardware, wanted)
    if name in DRIVES:
        drives = int(count or 0) or 1
        read, write = DRIVES[name]
        return replace(
            hardware,
            disk_read=read * drives,
            disk_write=write * drives,
            disk_bytes=drives * _DRIVE_BYTES,
        )
    link = LINKS[name]
    if name.startswith("NVLink"):
        return replace(hardware, intra=link)
    if name.startswith("PCIe"):
        if hardware.intra.name.startswith("NVLink"):
            return replace(hardware, host=link)
        return replace(hardware, host=link, intra=link)
    devices = hardware.devices_per_node
    adapters = int(count or 0) or devices
    return replace(hardware, inter=link.shared(adapters, devices))


def _part_named(hardware: Hardware, wanted: str) -> str:
    """Return the name of a link or a drive as the catalogue has it."""
    known = {name.upper(): name for name in (*LINKS, *DRIVES)}
    known |= {alias.upper(): name for alias, name in LINK_ALIASES.items()}
    name = known.get(wanted.upper())
    if name is not None:
        return name
    near = get_close_matches(wanted.upper(), known, n=1, cutoff=0.3)
    suggestion = f"did you mean {known[near[0]]}? " if near else ""
    raise JobError(
        f"{hardware.name!r}: unknown link or drive {wanted!r}: {suggestion}There are "
        f"{', '.join(known.values())}"
    )


def _with_value(hardware: Hardware, key: str, text: str) -> Hardware:
    """Return the hardware with a number of its host, or of its devices, replaced."""
    if key not in _NUMBERS:
        raise JobError(
            f"{hardware.name!r}: unknown number {key!r}: write {', '.join(_NUMBERS.values())}"
        )
    try:
        number = float(text) if key == "tflops" else parse_size(text)
    except ValueError as error:
        raise JobError(f"{hardware.name!r}: {key}: {error}") from None
    device = hardware.device
    if not 0 < number < float("inf") or (key == "memory" and device.kind == "cpu"):
        raise JobError(
            f"{hardware.name!r}: {key}={text} does not run: write for example {_NUMBERS[key]}"
        )
    if key == "ram":
        return _with_ram(hardware, int(number))
    if key == "memory":
        return replace(hardware, device=replace(device, memory_bytes=int(number)))
    if key == "bandwidth":
        return replace(hardware, device=replace(device, bandwidth=float(number)))
    peak = {name: 1e12 * number for name in device.peak if name != "fp32"}
    peak["fp32"] = device.peak["fp32"]
    return replace(hardware, device=replace(device, peak=peak))


def _with_ram(hardware: Hardware, host_bytes: int) -> Hardware:
    device = hardware.device
    if hardware.shares_memory:
        own = share_of_rank(host_bytes, hardware.devices_per_node)
        device = replace(device, memory_bytes=own)
    return replace(hardware, host_bytes=host_bytes, device=device)
