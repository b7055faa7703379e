"""Copies between the device and the host's memory, beside what computes.

A copier makes its copies one after the other, in the order in which they were asked for. They are
plain bytes: both sides are contiguous and of one size.

[Note: no record_stream]
Memory that a side stream still reads or writes must not be given to anybody else. On CUDA who asks
for a copy keeps both sides until it has called `wait`: whatever the current stream does with that
memory from then on comes after the copy. So memory is free again at a point that is the same in
every step, which an allocator that is told by events cannot promise.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zrun_core.distributed.transport import as_bytes
from zrun_core.errors import lack_of_threads
from zrun_core.hardware import accelerator
from zrun_core.tiers.transfer import DONE, Transfer


class Copier(ABC):
    """Copies bytes from one memory to another, in the order of the calls."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Begin a copy, of the bytes that `source` has once all work given so far is done.

        Args:
            source: contiguous; it must not change before the transfer is over.
            target: contiguous, of as many bytes.

        Raises:
            ValueError: they differ in size.
            PreflightError: the system gives this process no more threads.
        """
        if source.nbytes != target.nbytes:
            raise ValueError(f"a copy of {source.nbytes} bytes to {target.nbytes}")
        if not source.nbytes:
            return DONE
        return self._begin(as_bytes(source.detach()), as_bytes(target.detach()))

    @abstractmethod
    def _begin(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Begin a copy of bytes that there are."""


class StreamCopier(Copier):
    """Copies on a stream of its own, after what the current stream has been given.

    See [Note: no record_stream]. Host memory that is not pinned is copied while the caller waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = accelerator.new_stream(device)

    def _begin(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        accelerator.wait_stream(self._stream, accelerator.current_stream(self._device))
        with accelerator.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
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
    """Copies in one thread, which starts with the first copy and ends with the copier.

    It copies alone, without torch's threads: those compute.
    """

    def __init__(self, delay: Callable[[], float] | None = None) -> None:
        """Take how long to sleep before each copy.

        Args:
            delay: called in the thread, returns seconds. Tests make copies late with it, so that
                whoever does not wait for one is found out.
        """
        self._delay = delay
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zrun-copy")

    def _begin(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        try:
            future = self._thread.submit(self._copy, [source, target])
        except RuntimeError as error:
            raise lack_of_threads(error) or error from None
        return _ThreadTransfer(future)

    def _copy(self, sides: list[torch.Tensor]) -> None:
        if self._delay is not None:
            time.sleep(self._delay())
        source, target = sides
        sides.clear()  # who has waited may be the last to hold them
        # Without the GIL. A tensor that was asked for `numpy()` could not be resized any more.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
