"""Seconds of the optimizer's update, on the device and on the host."""

from __future__ import annotations

from zrun_core.hardware.hardware import Device, Hardware
from zrun_core.memory.buffers import Tier
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
    """Return the seconds of an update on the device.

    Args:
        device: computes it.
        elements: that are updated.
        settings: of the optimizer.
        precision: the compute format of the parameters.
    """
    num_bytes = update_bytes(settings, precision)
    if device.optimizer is None:
        return stream_seconds(device, elements * num_bytes)
    return elements / (device.optimizer * _ADAM_BYTES / num_bytes)


def host_seconds_per_element(
    hardware: Hardware, settings: TimingSettings, tier: Tier, precision: str = "bf16"
) -> float:
    """Return the seconds per element of an update on the host.

    The bandwidths of the memory and of the disks are shared by all ranks of a node. The updated
    parameters go back to the device meanwhile.

    Args:
        hardware: the hosts.
        settings: of the optimizer.
        tier: where the states live: in the host's memory or on its disks.
        precision: the compute format of the parameters.
    """
    bandwidth = hardware.host_bandwidth * _HOST_UPDATE_SHARE / hardware.devices_per_node
    seconds = update_bytes(settings, precision) / bandwidth
    if tier is Tier.DISK:
        slower = max(min(hardware.disk_read, hardware.disk_write), 1.0) / hardware.devices_per_node
        seconds = max(seconds, state_bytes(settings) / slower)
    return max(seconds, BYTES[precision] / hardware.host.bandwidth)
