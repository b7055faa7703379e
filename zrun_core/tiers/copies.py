"""Copies between the device and the host's memory, beside what computes.

    device   ---- down ---->   host memory      gradients, activations
             <---- up ------                    parameters, activations

The copies of one way are made one after the other, in the order in which they were asked for.
Those of the other way pass beside them: a link carries bytes both ways at once, and parameters
need not wait behind a gradient that waits for backward. They are plain bytes: both sides are
contiguous and of one size.

[Note: two ways]
A copy may overtake those of the other way that were asked for before it. So of two copies that
touch the same memory, one of them writing, the second is asked for after somebody has waited for
the first one: by `wait`, in the stream that asks for the second; by `wait_on_host` otherwise. All
homes, slots and keepers do so: what came down is read, or goes up, after a wait, and room is given
to others with the transfer that leaves it.

[Note: no record_stream]
Memory that a side stream still reads or writes must not be given to anybody else. On CUDA who asks
for a copy keeps both sides until it has called `wait`: whatever the current stream does with that
memory from then on comes after the copy. So memory is free again at a point that is the same in
every step, which an allocator that is told by events cannot promise. Where nobody is left who
would wait, as when a model goes after its last step, `Tiers.end` does.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

import torch

from zrun_core.distributed.transport import as_bytes
from zrun_core.errors import lack_of_threads
from zrun_core.hardware import accelerator
from zrun_core.tiers.pinning import pinned_parts
from zrun_core.tiers.transfer import DONE, Transfer


class Way(Enum):
    """The way of a copy."""

    DOWN = "down"
    UP = "up"


class Copier(ABC):
    """Copies bytes between a device and its host. See the module for their order."""

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Begin to copy memory of the device to the host.

        It copies the bytes that `source` has once all work given so far is done.

        Args:
            source: contiguous; it must not change before the transfer is over.
            target: contiguous, of as many bytes.

        Raises:
            ValueError: they differ in size.
            PreflightError: the system gives this process no more threads.
        """
        return self._copy(source, target, Way.DOWN)

    def up(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Begin to copy host memory to the device, like `down`."""
        return self._copy(source, target, Way.UP)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, way: Way) -> Transfer:
        if source.nbytes != target.nbytes:
            raise ValueError(f"a copy of {source.nbytes} bytes to {target.nbytes}")
        if not source.nbytes:
            return DONE
        return self._begin(as_bytes(source.detach()), as_bytes(target.detach()), way)

    @abstractmethod
    def end(self, stream: accelerator.Stream) -> None:
        """Have `stream` wait for all copies, behind which their memory may go to others."""

    @abstractmethod
    def _begin(self, source: torch.Tensor, target: torch.Tensor, way: Way) -> Transfer:
        """Begin a copy of bytes that there are."""


class StreamCopier(Copier):
    """Copies on a stream for each way, after what the current stream has been given.

    See [Note: no record_stream]. Host memory that is not pinned is copied while the caller waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: accelerator.new_stream(device) for way in Way}

    def end(self, stream: accelerator.Stream) -> None:
        for each in self._streams.values():
            accelerator.wait_stream(stream, each)

    def _begin(self, source: torch.Tensor, target: torch.Tensor, way: Way) -> Transfer:
        stream = self._streams[way]
        accelerator.wait_stream(stream, accelerator.current_stream(self._device))
        on_host = target if way is Way.DOWN else source
        with accelerator.on_stream(stream):
            for part in pinned_parts(on_host):
                target[part].copy_(source[part], non_blocking=True)
            return accelerator.Event(self._device)


class _ThreadTransfer:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def wait_on_host(self) -> None:
        self._future.result()


class ThreadCopier(Copier):
    """Copies in a thread for each way, which starts with its first copy and ends with the copier.

    They copy alone, without torch's threads: those compute.
    """

    def __init__(self, delay: Callable[[], float] | None = None) -> None:
        """Take how long to sleep before each copy.

        Args:
            delay: called in the thread, returns seconds. Tests make copies late with it, so that
                whoever does not wait for one is found out.
        """
        self._delay = delay
        self._threads = {
            way: ThreadPoolExecutor(1, thread_name_prefix=f"zrun-copy-{way.value}") for way in Way
        }

    def end(self, stream: accelerator.Stream) -> None:
        pass  # a copy that is under way holds both sides

    def _begin(self, source: torch.Tensor, target: torch.Tensor, way: Way) -> Transfer:
        try:
            future = self._threads[way].submit(self._move, [source, target])
        except RuntimeError as error:
            raise lack_of_threads(error) or error from None
        return _ThreadTransfer(future)

    def _move(self, sides: list[torch.Tensor]) -> None:
        if self._delay is not None:
            time.sleep(self._delay())
        source, target = sides
        sides.clear()  # who has waited may be the last to hold them
        # Without the GIL. A tensor that was asked for `numpy()` could not be resized any more.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
