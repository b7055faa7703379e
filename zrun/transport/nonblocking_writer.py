"""Bytes for a reader that may not listen: what its pipe does not take waits here, and nobody waits for it."""

from __future__ import annotations

import os
from collections import deque

_ROOM = 1 << 20  # bytes that may wait before less is said


class NonblockingWriter:
    """The end of a pipe to write to."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._waiting: deque[memoryview] = deque()
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether what can be left out should be."""
        return self._num_bytes > _ROOM

    def put(self, data: bytes) -> None:
        """Have `data` follow what waits."""
        self._waiting.append(memoryview(data))
        self._num_bytes += len(data)

    def send(self) -> bool:
        """Write what fits, and say whether that was all. What nobody can read any more is dropped."""
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
