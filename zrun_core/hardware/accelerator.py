"""Streams, events, memory and generators of an accelerator: the one module that asks torch for any.

[Note: who asks torch]
No other module names `torch.cuda`. Streams, the current device and waits for all of a device are
those of `torch.accelerator` and `torch.Stream`, which torch has for every kind of accelerator. The
rest is CUDA's, which ROCm has by the same names: events that the host waits for without spinning
(`torch.Event` ignores `blocking`), statistics of memory, generators, host memory that is pinned
where it lies.

[Note: waits]
Whoever waits, a stream for a stream or the host for a device, does so by a function of this module,
which tests replace to see what happens without the wait. Functions of torch are looked up when they
are called: tests put others in their place. Nothing here talks to a device when it is imported.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

TYPE = "cuda"  # of torch's devices, under CUDA and ROCm
_WITHOUT_STREAMS = ("cpu", "meta")

Stream = torch.Stream


def is_accelerator(device: torch.device) -> bool:
    """Return whether what `device` is given is queued, and computed beside the host."""
    return device.type not in _WITHOUT_STREAMS


def device_count() -> int:
    """Return how many devices this process may use. It may still fork afterwards."""
    return torch.cuda.device_count()


def device_at(index: int) -> torch.device:
    """Return the device of a number, among those that this process may use."""
    return torch.device(TYPE, index)


def set_device(device: torch.device) -> None:
    """Make `device` the one that this thread means where it names none."""
    torch.accelerator.set_device_index(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device, as its driver says it: "NVIDIA H200"."""
    return torch.cuda.get_device_name(device)


def device_uuid(device: torch.device) -> str:
    """Return the name that no other device has, as its driver says it: "GPU-8a2f..."."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def backend_name(device: torch.device) -> str:
    """Return the name of the process groups between such devices: gloo between CPUs, else nccl."""
    return dist.get_default_backend_for_device(device)


def current_stream(device: torch.device) -> Stream:
    """Return the stream that this thread gives its work for `device` to."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> Stream:
    """Return a stream beside those there are; torch takes turns with 32 of them."""
    return torch.Stream(device)


def use_stream(stream: Stream) -> None:
    """Have this thread give its work to `stream` from now on, and to its device."""
    torch.accelerator.set_stream(stream)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Have this thread give its work to `stream` inside."""
    with stream:
        yield


def wait_stream(stream: Stream, other: Stream) -> None:
    """Have what `stream` is given from now on follow what `other` was given so far."""
    stream.wait_stream(other)


def synchronize_stream(device: torch.device) -> None:
    """Wait, on the host, for what the current stream of `device` was given."""
    event = Event(device)
    event.wait_on_host()


def synchronize(device: torch.device) -> None:
    """Wait, on the host, for all that `device` was given."""
    torch.accelerator.synchronize(device)


class Event:
    """A point in the work of a stream. It is a `Work`, and a `Transfer`, which is over there."""

    def __init__(self, device: torch.device) -> None:
        """Mark what the current stream of `device` was given so far."""
        self._device = device
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        """Have what the current stream is given from now on follow the event."""
        self._event.wait(torch.cuda.current_stream(self._device))

    def wait_on_host(self) -> None:
        """Return when it has happened. The thread sleeps meanwhile."""
        self._event.synchronize()


_SPARE_EVENTS = 4096  # of a device: those of a few steps
_spare_events: defaultdict[torch.device, list[torch.cuda.Event]] = defaultdict(list)


class TimingEvent:
    """A point in the work of a stream, whose time the device notes.

    A step has hundreds: when one is not used any more, the next one takes torch's event over.
    """

    def __init__(self, device: torch.device) -> None:
        """Mark what the current stream of `device` was given so far."""
        stream = torch.cuda.current_stream(device)
        self._device = stream.device  # of the stream: an event belongs to the first that records it
        spare = _spare_events[self._device]
        self._event = spare.pop() if spare else torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_event"):
            return
        spare = _spare_events[self._device]
        if len(spare) < _SPARE_EVENTS:
            spare.append(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait_on_host(self) -> None:
        """Return when it has happened. The thread sleeps meanwhile."""
        self._event.synchronize()

    def seconds_until(self, later: TimingEvent) -> float:
        """Return the seconds between two events that have both happened."""
        return float(self._event.elapsed_time(later._event)) / 1e3


class Peak(NamedTuple):
    """The most bytes that tensors took, and that the allocator held for them."""

    allocated: int
    reserved: int


def memory_stats(device: torch.device) -> Mapping[str, int]:
    """Return the counters of torch's allocator, by its names: "allocated_bytes.all.peak"."""
    return torch.cuda.memory_stats(device)


def reset_peak_memory(device: torch.device) -> None:
    """Count the peak from here."""
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> Peak:
    """Return the peak since it was last reset, or since the process began."""
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


# The allocator's settings, by the names that torch reads them under. The first one is the newest.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def prefer_expandable_segments() -> None:
    """Have the memory that the allocator holds follow what tensors take, as in a job.

    Nothing is done where the environment has settings of the allocator, which reads them when it
    first gives out memory, or where it may have done so.
    """
    if torch.cuda.is_initialized() or any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        return
    os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def empty_cache() -> None:
    """Give back to the device what the allocator holds and no tensor uses."""
    torch.cuda.empty_cache()


def default_generator(device: torch.device) -> torch.Generator:
    """Return what kernels on `device` draw from that are given no generator."""
    torch.cuda.init()  # before that there are none
    number = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[number]
    return generator


def register_host_memory(address: int, num_bytes: int) -> str:
    """Pin host memory where it lies: copies then pass beside what computes.

    Args:
        address: of the first byte.
        num_bytes: from there.

    Returns:
        "", or why the driver does not.
    """
    cudart = torch.cuda.cudart()
    failure = cudart.cudaHostRegister(address, num_bytes, 0)
    if int(failure) == 0:
        return ""
    return str(cudart.cudaGetErrorString(failure))


def unregister_host_memory(address: int) -> None:
    """Take back what `register_host_memory` did."""
    torch.cuda.cudart().cudaHostUnregister(address)


def forget_error(device: torch.device) -> None:
    """Have torch take note of the driver's last error, so that no later kernel is blamed for it."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return
