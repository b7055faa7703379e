"""Streams, events, memory and generators of an accelerator: the one module that asks torch for any.

[Note: who asks torch]
No other module names `torch.cuda`. Streams, the current device and waits for all of a device are
those of `torch.accelerator` and `torch.Stream`, which torch has for every kind of accelerator. The
rest is CUDA's, which ROCm has by the same names: events that the host waits for without spinning
(`torch.Event` ignores `blocking`), generators, host memory that is pinned where it lies, why there
is no device. So are statistics of memory, which `torch.accelerator` has too, by the same names, of
allocators that are registered with it.

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
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zrun_core.spine import device_names

TYPE = "cuda"  # of torch's devices, under CUDA and ROCm
_WITHOUT_STREAMS = ("cpu", "meta")
_DEVICE_FILES = Path("/dev")

Stream = torch.Stream


def is_accelerator(device: torch.device) -> bool:
    """Return whether what `device` is given is queued, and computed beside the host."""
    return device.type not in _WITHOUT_STREAMS


def why_not(device: torch.device, num_ranks: int = 1) -> str | None:
    """Say why a rank of several cannot train on `device`, and what would help; None: it can.

    Args:
        num_ranks: of the job: one rank exchanges nothing.
    """
    if not is_accelerator(device):
        return None
    if device.type != TYPE:
        return device_names.what_lacks(device.type) or f"zrun does not support {device.type}"
    count = device_count()
    if not count:
        return _why_none()
    if device.index is not None and device.index >= count:
        return f"{device} is not there: torch {torch.__version__} finds {count} here"
    if (failure := _init_failure()) is not None:
        return f"torch {torch.__version__} cannot use the GPUs here: {failure}"
    if num_ranks > 1 and not dist.is_nccl_available():
        return _why_no_nccl()
    return None


def _why_none() -> str:
    """Say why torch finds no device."""
    wheel = f"torch {torch.__version__}"
    release = torch.__version__.partition("+")[0]
    if torch.version.cuda is None and torch.version.hip is None:
        other = _other_kind()
        why = "is a wheel for CPUs" if other is None else f"is one for {other}"
        return (
            f"{wheel} {why}, without CUDA and ROCm: pip install --force-reinstall "
            f"torch=={release} --index-url https://download.pytorch.org/whl/cu130 (cu126 for "
            "NVIDIA's drivers before 580; https://pytorch.org/get-started names others, and ROCm's)"
        )
    if (failure := _init_failure()) is not None:
        return f"{wheel} finds no GPU: {failure}"
    return f"{wheel} finds no GPU that this process may use: see CUDA_VISIBLE_DEVICES"


def _init_failure() -> str | None:
    """Say why torch cannot begin to use GPUs; None: it has begun.

    The driver's library counts boards for torch, also where the driver is too old for it.
    """
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return None


def _why_no_nccl() -> str:
    wheel = f"torch {torch.__version__} has no NCCL, by which the GPUs of several ranks exchange"
    if sys.platform == "win32":
        return (
            f"{wheel}: no wheel for Windows has; install the one for Linux, in WSL 2, or train on "
            "one rank"
        )
    return (
        f"{wheel}: install a wheel of https://pytorch.org/get-started, build torch with "
        "USE_NCCL=1, or train on one rank"
    )


def _other_kind() -> str | None:
    """Return the kind of devices that this torch computes on where it is none of ours."""
    given = torch.accelerator.current_accelerator()
    return None if given is None or given.type == TYPE else given.type


def why_idle() -> str | None:
    """Say why GPUs of this host stay idle where torch finds none to train on; None: none do."""
    if any(_DEVICE_FILES.glob("nvidia[0-9]*")):  # a driver shows them to this process
        return _why_none()
    return why_not_others()


def why_not_others() -> str | None:
    """Say why devices that torch computes on stay idle; None: it has none of another kind.

    A Mac's are not meant: who tries a script there expects the CPU.
    """
    other = _other_kind()
    if other is None or other == "mps" or not torch.accelerator.is_available():
        return None
    return f"torch {torch.__version__} computes on {other}, but {device_names.what_lacks(other)}"


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


def fetch(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in the host's memory, when the device has computed them.

    The thread sleeps meanwhile. Whoever means to wait for numbers asks for them here: `item`,
    `tolist` and `bool` wait too, but do not look like it.
    """
    if not is_accelerator(values.device):
        return values
    on_host = values.to("cpu", non_blocking=True)  # to pinned memory
    Event(values.device).wait_on_host()
    return on_host


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


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device that nobody has taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free


def reset_peak_memory(device: torch.device) -> None:
    """Count the peak from here."""
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> Peak:
    """Return the peak since it was last reset, or since the process began."""
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def traced_kernels(device: torch.device) -> str | None:
    """Return by which name torch's profiler traces the kernels of a device; None: it does not."""
    traces = torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
    return TYPE if is_accelerator(device) and traces else None


_MOST_ENTRIES = 100_000  # of the history of memory: the newest; each takes some kilobytes


def begin_memory_history(device: torch.device) -> None:
    """Have the allocator write down what it gives out and gets back, with Python's stack of each.

    `save_memory_history` ends it.
    """
    torch.cuda.memory._record_memory_history(
        "all",
        context="all",
        stacks="python",
        max_entries=_MOST_ENTRIES,
        device=device,
        clear_history=True,
    )


def save_memory_history(path: str | None) -> None:
    """Write what the allocator has noted, as https://pytorch.org/memory_viz reads it, and end that.

    Args:
        path: of the new file; None: nothing is written.

    Raises:
        OSError: it cannot be written.
    """
    try:
        if path is not None:
            torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(None)


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
