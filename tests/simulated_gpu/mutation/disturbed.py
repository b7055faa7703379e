"""A runtime one of whose waits does nothing, while all that is waited for comes late.

    with disturbed(site, seed) as reached:
        train()

What there is to wait for: an event, by a stream or by the host; another stream; work of NCCL; a
task of the thread that updates; a transfer of the disk; a stream, by the allocator. On CPUs, whose
ranks read each other's memory: a message, by memory or a socket; a copy that a thread makes; an
event or a condition of threads. Where one of these waits is begun below the call of `site`, it
returns at once. Collectives, messages, copies, updates and reads of the disk take some milliseconds
now and then, and kernels the delays of the device, so that who does not wait computes with what was
there before. Numbers that the host fetches are wrong until the device has sent them.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from simulated_gpu import python_kernels
from simulated_gpu.nccl import communicator, process_group

from mutation.sites import ENDS, ROOT, Site
from zrun_core.distributed import cma_transport, transport
from zrun_core.hardware import accelerator
from zrun_core.tiers import copies, swap_file, worker

LATE_S = 0.006  # the most that something is late by
SHARE = 0.5  # of what is late at all
KINDS = ("copy", "update", "disk", "message")  # each seed has one that is later than the others
LATEST = 4  # times as late
NOT_YET = 77  # about what numbers are that the device has not sent yet

_WAITS: list[tuple[Any, str]] = [
    (accelerator, "wait_stream"),
    (accelerator, "synchronize"),
    (accelerator.Event, "wait"),
    (accelerator.Event, "wait_on_host"),
    (accelerator.TimingEvent, "wait_on_host"),
    (torch.Tensor, "record_stream"),
    (process_group.Work, "wait"),
    (worker._Task, "wait"),
    (swap_file._BlockTransfer, "wait"),
    (copies._ThreadTransfer, "wait"),
    (copies._ThreadTransfer, "wait_on_host"),
    (cma_transport.Message, "wait"),
    (cma_transport.CmaTransport, "wait_for"),
    (threading.Event, "wait"),
    (threading.Condition, "wait_for"),
]


class _Work:
    """A message through a socket, whose wait can be taken out: torch's own is of C++."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()


def _waited_for_in_python(message: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(message)
    def begin(*args: Any) -> _Work:
        return _Work(message(*args))

    return begin


class Reached(NamedTuple):
    """Lines of `zrun_core`: file below it, and number.

    Attributes:
        above: below which something was waited for.
        innermost: of these, the ones that have asked for it themselves.
    """

    above: set[tuple[str, int]]
    innermost: set[tuple[str, int]]


class _Late:
    """Draws how late something is: the same for each seed, as far as threads take turns alike."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._latest = KINDS[seed % len(KINDS)]

    def sleep(self, kind: str) -> None:
        with self._lock:
            is_late = self._random.random() < SHARE
            seconds = LATE_S * self._random.random()
        if kind == self._latest:
            seconds *= LATEST
        if is_late:
            time.sleep(seconds)

    def before(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` that may come late."""

        @functools.wraps(function)
        def late(*args: Any, **kwargs: Any) -> Any:
            self.sleep(kind)
            return function(*args, **kwargs)

        return late

    def launching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the communicator's `launch`, whose kernels may come late."""

        @functools.wraps(function)
        def launch(
            own: Any, name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            return function(own, name, self.before("message", kernel), *args, **kwargs)

        return launch

    def following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `wait_stream` after which the stream may be late."""

        @functools.wraps(function)
        def wait_stream(stream: torch.Stream, other: torch.Stream) -> None:
            function(stream, other)
            with accelerator.on_stream(stream):
                self._hold_up(stream.device)

        return wait_stream

    def fetching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fetch` whose numbers come late. It waits as `function` does, from this module.

        Before they come there are others, on each rank and in each place: old ones may be right.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0

        @functools.wraps(function)
        def fetch(values: torch.Tensor) -> torch.Tensor:
            if not accelerator.is_accelerator(values.device):
                return values
            self._hold_up(values.device)
            on_host = torch.empty_like(values, device="cpu", pin_memory=True)
            if values.dtype is torch.bool:
                on_host.fill_(True)
            else:
                not_yet = torch.arange(values.numel()) % 17 + NOT_YET + rank
                on_host.copy_(not_yet.view(values.shape))
            on_host.copy_(values, non_blocking=True)
            accelerator.Event(values.device).wait_on_host()
            return on_host

        return fetch

    def _hold_up(self, device: torch.device) -> None:
        """Let the current stream be late."""
        of_stream = torch.empty(1, device=device)
        python_kernels.launch(lambda _: self.sleep("copy"), writes=[of_stream], name="late")


def _above(frame: Any) -> Iterator[tuple[str, int]]:
    """Yield the lines of the runtime that are being executed, from the innermost one."""
    root = str(ROOT)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(root):
            yield file[len(root) + 1 :], frame.f_lineno
        frame = frame.f_back


def _asker(frame: Any) -> Iterator[tuple[str, int]]:
    """Yield the line that has called what waits, if it is one of the runtime."""
    ends = {__file__, *(str(ROOT / end) for end in ENDS)}
    while frame is not None and frame.f_code.co_filename in ends:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(str(ROOT)):
        yield from itertools.islice(_above(frame), 1)


def _unless(site: Site | None, wait: Callable[..., Any], reached: Reached) -> Callable[..., Any]:
    @functools.wraps(wait)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_pause(wait, args, kwargs):
            return wait(*args, **kwargs)
        frame = sys._getframe(1)
        lines = list(_above(frame))
        reached.above.update(lines)
        reached.innermost.update(_asker(frame))
        if site is not None and any(
            file == site.file and site.first <= line <= site.last for file, line in lines
        ):
            return None
        return wait(*args, **kwargs)

    return called


def _is_pause(wait: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a thread waits for so many seconds, between two looks: see `sites.py`."""
    return wait.__qualname__ == "Event.wait" and (len(args) > 1 or "timeout" in kwargs)


@contextmanager
def disturbed(site: Site | None, seed: int) -> Iterator[Reached]:
    """Take out the waits below a call; None: none, and all else is the same.

    Yields:
        Where something was waited for, as it happens.
    """
    late = _Late(seed)
    reached = Reached(set(), set())
    with ExitStack() as stack:

        def put(owner: Any, name: str, function: Any) -> None:
            stack.enter_context(patch.object(owner, name, function))

        put(worker.Worker, "_run", late.before("update", worker.Worker._run))
        for name in ("_read", "_write"):
            put(swap_file.SwapFile, name, late.before("disk", getattr(swap_file.SwapFile, name)))
        launch = communicator.Communicator.launch
        put(communicator.Communicator, "launch", late.launching(launch))
        put(copies.ThreadCopier, "_move", late.before("copy", copies.ThreadCopier._move))
        put(cma_transport._Peer, "copy", late.before("message", cma_transport._Peer.copy))
        sockets = transport.ProcessGroupTransport
        put(sockets, "send", _waited_for_in_python(sockets.send))
        put(sockets, "receive", _waited_for_in_python(late.before("message", sockets.receive)))
        put(accelerator, "wait_stream", late.following(accelerator.wait_stream))
        put(accelerator, "fetch", late.fetching(accelerator.fetch))
        for owner, name in [*_WAITS, (_Work, "wait")]:
            put(owner, name, _unless(site, getattr(owner, name), reached))
        try:
            yield reached
        finally:
            torch.accelerator.synchronize()
