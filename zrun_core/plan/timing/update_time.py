"""Seconds of the optimizer's update, on the device and on the host."""

from __future__ import annotations

from zrun_core.hardware.hardware import Device, Hardware
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.plan.timing.micro_batch_cost import BYTES, TimingSettings
from zrun_core.plan.timing.roofline import stream_seconds

_HOST_UPDATE_SHARE = 0.75  # of the memory bandwidth of a host that a fused update reaches
_ADAM_BYTES = 28  # per element of a fused Adam in fp32, in which `Device.optimizer` is counted


def update_bytes(settings: TimingSettings, precision: str) -> int:
    """Return the bytes that an update reads and writes per element.

    States go both ways, the gradient in fp32 is read, and the parameter in the compute format is
    written where that is not the fp32 master itself.
    """
    size = BYTES[precision]
    written = size if size < 4 else 0
    return 2 * state_bytes(settings) + 4 + written


def state_bytes(settings: TimingSettings) -> int:
    """Return the bytes of an element's fp32 parameter and its moments."""
    return 4 + settings.moments * settings.moment_bytes


def device_update_seconds(
    device: Device, elements: float, settings: TimingSettings, precision: str
) -> float:
    """Return the seconds of an update on the device."""
    num_bytes = update_bytes(settings, precision)
    if device.optimizer is None:
        return stream_seconds(device, elements * num_bytes)
    return elements / (device.optimizer * _ADAM_BYTES / num_bytes)


def host_seconds_per_element(
    hardware: Hardware, settings: TimingSettings, placement: Placement, precision: str = "bf16"
) -> float:
    """Return the seconds per element of an update on the host.

    The bandwidths of the memory and of the disks are shared by all ranks of a node. The updated
    parameters go back to the device meanwhile. Where the cores of the host are what trains, only
    the disk is beside them.

    Args:
        placement: of the states; the optimizer's are in the host's memory or on its disks.
    """
    ranks = hardware.devices_per_node
    seconds = 0.0
    if not hardware.shares_memory:
        bandwidth = hardware.host_bandwidth * _HOST_UPDATE_SHARE / ranks
        seconds = max(
            update_bytes(settings, precision) / bandwidth,
            BYTES[precision] / hardware.host.bandwidth,
        )
    read, written = disk_bytes(settings, placement, precision)
    read_s = read * ranks / max(hardware.disk_read, 1.0)
    written_s = written * ranks / max(hardware.disk_write, 1.0)
    return max(seconds, read_s, written_s)


def disk_bytes(
    settings: TimingSettings, placement: Placement, precision: str
) -> tuple[float, float]:
    """Return the bytes per element that an update reads from disks, and writes to them."""
    size = BYTES[precision]
    read = written = 0.0
    is_master = size == 4 and placement.param is placement.optimizer
    if placement.optimizer is Tier.DISK:
        read = written = float(state_bytes(settings))
    if placement.grad is Tier.DISK:
        read += settings.reduce_bytes
    if placement.param is Tier.DISK and not is_master:
        written += size
    return read, written
