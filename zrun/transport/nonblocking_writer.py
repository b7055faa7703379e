"""Bytes for a reader that may not listen: what its pipe does not take waits here."""

from __future__ import annotations

import os
from collections import deque

_MAX_WAITING = 1 << 20  # bytes, from which on telemetry is left out


class NonblockingWriter:
    """The end of a pipe to write to."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._waiting: deque[memoryview] = deque()
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Return whether what can be left out should be."""
        return self._num_bytes > _MAX_WAITING

    def put(self, data: bytes) -> None:
        """Have `data` follow what waits."""
        self._waiting.append(memoryview(data))
        self._num_bytes += len(data)

    def send(self) -> bool:
        """Write what fits, and return whether that was all.

        What waits for a reader that is gone is dropped.
        """
        try:
            while self._waiting:
                first = self._waiting[0]
                count = os.write(self._descriptor, first)
                self._num_bytes -= count
                if count < len(first):
                    self._waiting[0] = first[count:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            return False
        except OSError:  # the reader is gone, which is noticed elsewhere
            self._waiting.clear()
            self._num_bytes = 0
        return True
