"""Seconds of one operation, by a roofline.

An operation has two times, and a launch: its floating-point operations at the share of the peak
that the device reaches for its size and format, and its bytes at the rate of the memory. A GPU
fetches what comes next while it computes, and takes the larger of the two. Of a core both count: it
computes on what its cache holds, and what a model uses comes from farther away.
"""

from __future__ import annotations

from zrun_core.hardware.hardware import Device
from zrun_core.plan.timing.micro_batch_cost import BYTES, TimingSettings


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
        settings: the format of the flat ones.
    """
    return stream_seconds(device, params * (BYTES[precision] + 2 * settings.reduce_bytes))
