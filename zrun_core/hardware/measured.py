"""Hosts as they were measured: rates in plain numbers, and the hardware that they make.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from zrun_core.hardware.catalogue import CPU_CORE, LINKS, NODES, like
from zrun_core.hardware.hardware import CORES_SPREAD, MEASURED_SPREAD, Device, Hardware, Link
from zrun_core.spine.memory_limits import share_of_rank

# Ranks of a host look whether a message is there ever less often, up to two times in a millisecond:
# who waits wakes up half of that too late. Cores that do the same work differ by some hundredths.
_WAIT_S = 250e-6
_UNEVEN = 0.05
_GPU_SIDE = 8192  # of the square products that are measured on a GPU
_LAUNCHING_S = 4e-6  # of a host, to give a GPU what it would compute itself


@dataclass(frozen=True)
class Rates:
    """The measurements of a host, in plain numbers; None: not measured.

    Attributes:
        cpu_flops: of all cores together, by format, of large products.
        cpu_side: of the square matrices of these products; None: not known, and large.
        copy: of the host's memory, each byte counted once.
        cpu_streams: of all cores together, by format: bytes that elementwise operators read and
            write; empty: as the copy says.
        cpu_layers: the same of tensors of a MiB or two, as small layers make them; empty: as the
            catalogue says.
        cpu_attention: of all cores together, by format, of fused attention with its backward;
            empty: as a share of products.
        operator_s: seconds that an operator on next to nothing takes on a core.
        inner_s: the same of one that a kernel of torch calls, such as that of a recurrent layer.
        message_s: seconds of an exchange of next to nothing between two ranks on its cores.
        message_bytes: bytes per second that each of them gets of the other meanwhile.
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
    cpu_side: int | None = None
    cpu_streams: Mapping[str, float] = field(default_factory=dict)
    cpu_layers: Mapping[str, float] = field(default_factory=dict)
    cpu_attention: Mapping[str, float] = field(default_factory=dict)
    operator_s: float | None = None
    inner_s: float | None = None
    message_s: float | None = None
    message_bytes: float | None = None


def from_rates(
    rates: Rates,
    *,
    ranks: int,
    nodes: int = 1,
    host_bytes: int,
    cores: int,
    name: str = "this machine",
) -> Hardware:
    """Return hosts as they were measured.

    Args:
        rates: of each host.
        ranks: on each host.
        host_bytes: memory of a host that jobs may use.
        cores: of a host.
    """
    inter = LINKS["10G"]
    if rates.link is not None:
        round_trip = rates.round_trip or 2 * inter.latency
        inter = Link("network", rates.link, round_trip / 2).shared(1, ranks)
    if rates.gpu_name:
        preset = like(rates.gpu_name)
        usual = NODES[preset.name]
        device = _gpu(rates, preset)
        intra = LINKS[usual.intra]
        host = Link("PCIe", min(rates.to_device, rates.from_device), LINKS[usual.host].latency)
        spread = MEASURED_SPREAD
    else:
        device = _cpu(rates, ranks, host_bytes)
        host = Link("memory", rates.copy / ranks / 2, LINKS["memory"].latency)
        most = host.bandwidth if rates.message_bytes is None else rates.message_bytes
        latency = host.latency if rates.message_s is None else rates.message_s
        intra = Link("memory", min(host.bandwidth, most), latency)
        spread = CORES_SPREAD
    return Hardware(
        name=name,
        device=device,
        nodes=nodes,
        devices_per_node=ranks,
        intra=intra,
        inter=inter,
        host=host,
        host_bytes=host_bytes,
        host_bandwidth=2 * rates.copy,
        cores=cores,
        disk_read=rates.disk_read or 0.0,
        disk_write=rates.disk_write or 0.0,
        measured=True,
        spread=spread,
        shares_memory=not rates.gpu_name,
        wait_s=0.0 if rates.gpu_name else _WAIT_S,
        uneven=0.0 if rates.gpu_name else _UNEVEN,
    )


def _cpu(rates: Rates, ranks: int, host_bytes: int) -> Device:
    """Return one rank's part of a host's cores: its share of the rates of all of them together."""
    device = replace(
        CPU_CORE,
        memory_bytes=share_of_rank(host_bytes, ranks),
        peak={precision: flops / ranks for precision, flops in rates.cpu_flops.items()},
        bandwidth=2 * rates.copy / ranks,
        gemm=1.0,
        streaming=1.0,
        optimizer=None,
    )
    if rates.cpu_streams:
        wide = rates.cpu_streams["fp32"]
        narrow = rates.cpu_streams["bf16"]
        device = replace(device, streaming=wide / (2 * rates.copy), narrow=narrow / wide)
        if rates.cpu_layers:
            speedups = [
                rates.cpu_layers[name] / rates.cpu_streams[name] for name in ("fp32", "bf16")
            ]
            device = replace(device, cache_speedup=fmean(speedups))
    if rates.cpu_side is not None:
        peak = {name: _of_products(device, name, rates.cpu_side) for name in device.peak}
        device = replace(device, peak=peak)
    attention = {name: flops / ranks for name, flops in rates.cpu_attention.items()}
    device = replace(device, attention_rates=attention)
    if rates.operator_s is not None:
        device = replace(device, launch_s=rates.operator_s)
    if rates.inner_s is not None:
        device = replace(device, inner_s=rates.inner_s)
    return device


def _of_products(device: Device, precision: str, side: int) -> float:
    """Return the FLOP/s with which an estimate of the measured product is what it took.

    The rate of `device` is that of square matrices of this side, their way from memory included. An
    estimate adds that of each product, and takes less of the rate for small ones.
    """
    count = 2.0 * side**3
    taken = count / device.flops(precision)
    is_wide = precision == "fp32"
    moved = 3.0 * side**2 * (4 if is_wide else 2)
    speedup = device.cache_speedup if moved <= device.cache_bytes else 1.0
    speedup *= 1.0 if is_wide else device.narrow
    fetching = moved / (device.bandwidth * device.streaming * speedup)
    area = side**2
    reached = device.gemm * area / (area + device.gemm_area) * side / (side + device.gemm_depth)
    return count / (reached * max(taken - fetching, taken / 2))


def _gpu(rates: Rates, preset: Device) -> Device:
    """Return a GPU that takes as long for a square product and for a copy as was measured."""
    device = replace(
        preset,
        name=rates.gpu_name,
        memory_bytes=rates.gpu_memory or preset.memory_bytes,
        streaming=min(1.0, 2 * rates.gpu_copy / preset.bandwidth),
    )
    if rates.operator_s is not None:
        device = replace(device, host_s=rates.operator_s + _LAUNCHING_S)
    for precision in ("bf16", "fp16"):
        if precision in rates.gpu_flops and precision in preset.peak:
            area = _GPU_SIDE**2
            saturation = area / (area + preset.gemm_area) * _GPU_SIDE
            saturation /= _GPU_SIDE + preset.gemm_depth
            share = rates.gpu_flops[precision] / preset.peak[precision] / saturation
            return replace(device, gemm=min(1.0, share))
    return device
