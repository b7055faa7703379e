"""Seconds of one operation, by a roofline.

An operation has two times, and a launch: its floating-point operations at the share of the peak
that the device reaches for its size and format, and its bytes at the rate of the memory. A GPU
fetches what comes next while it computes, and takes the larger of the two. Of a core both count: it
computes on what its cache holds, and what a model uses comes from farther away.
"""

from __future__ import annotations

from zrun_core.hardware.hardware import Device
from zrun_core.plan.timing.micro_batch_cost import BYTES, TimingSettings


def product_seconds(
    device: Device,
    precision: str,
    m: float,
    n: float,
    k: float,
    count: float = 1,
    extra_bytes: float = 0,
) -> float:
    """Return the seconds of `count` products [m, k] x [k, n] in one launch.

    A product reaches half of the device's share of the peak where its result has `gemm_area`
    elements, or where its sum is `gemm_depth` long:

        share of the peak = gemm * m n / (m n + gemm_area) * k / (k + gemm_depth)

    Args:
        m: rows of each result.
        n: columns of each result.
        k: length of the sum.
        count: products in the launch.
        extra_bytes: read and written besides the operands and the results.
    """
    area = m * n * count
    reached = device.gemm * area / (area + device.gemm_area) * k / (k + device.gemm_depth)
    computing = 2 * area * k / (reached * device.flops(precision))
    moved = BYTES[precision] * count * (m * k + k * n + m * n) + extra_bytes
    fetching = stream_seconds(device, moved)
    if device.kind == "cpu":
        return computing + fetching + device.launch_s
    return max(computing, fetching) + device.launch_s


def stream_seconds(device: Device, num_bytes: float) -> float:
    """Return the seconds of reading and writing `num_bytes` in all."""
    speedup = device.cache_speedup if num_bytes <= device.cache_bytes else 1.0
    return num_bytes / (device.bandwidth * device.streaming * speedup)


def accumulation_seconds(
    device: Device, precision: str, params: float, settings: TimingSettings
) -> float:
    """Return the seconds in which gradients are added to the flat ones.

    Args:
        precision: the format that backward makes the gradients in.
        params: elements of the gradients.
        settings: the format of the flat ones, and whether products add to them by themselves.
    """
    if settings.fused_accumulation:
        return 0.0
    return stream_seconds(device, params * (BYTES[precision] + 2 * settings.reduce_bytes))
