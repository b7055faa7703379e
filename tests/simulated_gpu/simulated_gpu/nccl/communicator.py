"""A communicator of simulated NCCL: a stream of one device, and a wire to the other ranks.

Kernels on it run one after the other, also those that were put on other streams. One whose peer
never comes runs until the communicator is aborted, and blocks what is behind it on its stream.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from simulated_gpu import cuda, python_kernels
from simulated_gpu.nccl.collectives import Kernels
from simulated_gpu.nccl.settings import settings
from simulated_gpu.nccl.wire import Aborted, MismatchError, PeerLostError, Wire

VERSION = "2.28.9"
_TURN_S = 0.05

Kernel = Callable[..., object]  # of a `Kernels`, and the tensors that it reads and writes


class Communicator:
    """One rank's end of a communicator.

    Attributes:
        name: for messages.
        stream: its own.
        error: what NCCL tells of it, once something was found; None: nothing.
    """

    def __init__(
        self, wire: Wire, name: str, device: torch.device, *, is_high_priority: bool
    ) -> None:
        self.name = name
        self.stream = cuda.Stream(device, priority=-1 if is_high_priority else 0)
        self.error: str | None = None
        self._wire = wire
        self._kernels = Kernels(wire)
        self._device = device
        self._last: Any = None  # event behind the kernel that was launched last

    @property
    def is_aborted(self) -> bool:
        return self._wire.is_aborted

    @property
    def is_idle(self) -> bool:
        """Whether all its kernels have run."""
        return self._last is None or self._last.query()

    def abort(self) -> None:
        """End its kernels: what they were to write is anything."""
        self._wire.abort()

    def launch(
        self,
        name: str,
        kernel: Kernel,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        is_collective: bool,
        on_current: bool = False,
    ) -> Any:
        """Queue a kernel behind what the current stream was given.

        Args:
            kernel: called with the `Kernels` of this communicator and the tensors.
            is_collective: it takes its turn with those of other communicators.
            on_current: it runs on the current stream.

        Returns:
            The event behind it.
        """
        stream = cuda.current_stream(self._device) if on_current else self.stream
        if not on_current:
            stream.wait_stream(cuda.current_stream(self._device))
        if self._last is not None:
            stream.wait_event(self._last)

        turn = _turns(self._device.index).draw() if is_collective and settings.concurrent else None

        def run(*sides: torch.Tensor) -> None:
            try:
                with self._in(turn):
                    kernel(self._kernels, *sides)
            except Aborted:
                pass
            except PeerLostError as error:
                self.error = (
                    f"Call to recv from rank {error.peer} failed : Connection reset by peer"
                )
                self._hang()
            except MismatchError as error:
                print(f"simulated NCCL: {self.name}: {error}", file=sys.stderr, flush=True)
                self._hang()

        with cuda.stream(stream):
            python_kernels.launch(run, reads=reads, writes=writes, name=f"nccl:{name} {self.name}")
        event = cuda.Event()
        event.record(stream)
        self._last = event
        return event

    def _hang(self) -> None:
        """Run on until the communicator is aborted, as a kernel does that nobody answers."""
        with suppress(Aborted):
            self._wire.hang()

    @contextmanager
    def _in(self, turn: int | None) -> Iterator[None]:
        """Run inside when it is the kernel's turn.

        Raises:
            Aborted: the communicator was aborted before.
        """
        turns = _turns(self._device.index)
        try:
            while turn is not None and not turns.wait(turn):
                if self._wire.is_aborted:
                    break
            if self._wire.is_aborted:
                raise Aborted
            yield
        finally:
            if turn is not None:
                turns.end(turn)


class _Turns:
    """The collectives of a device in the order in which they were launched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: set[int] = set()
        self._next = 0

    def draw(self) -> int:
        """Return the turn of a kernel that is launched now."""
        with self._changed:
            self._next += 1
            self._left.add(self._next)
            return self._next

    def wait(self, turn: int) -> bool:
        """Wait a moment for a turn; return whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_come(turn), _TURN_S)

    def end(self, turn: int) -> None:
        """Let the next kernel run."""
        with self._changed:
            self._left.discard(turn)
            self._changed.notify_all()

    def _has_come(self, turn: int) -> bool:
        return sum(each < turn for each in self._left) < settings.concurrent


_all_turns: dict[int, _Turns] = {}
_lock = threading.Lock()


def _turns(device: int) -> _Turns:
    with _lock:
        return _all_turns.setdefault(device, _Turns())
