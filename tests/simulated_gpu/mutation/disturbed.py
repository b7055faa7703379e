"""A runtime one of whose waits does nothing, while all that is waited for comes late.

    with disturbed(site, seed) as reached:
        train()

What there is to wait for: an event, by a stream or by the host; another stream; work of NCCL; a
task of the thread that updates; a transfer of the disk. Where one of these waits is begun below the
call of `site`, it returns at once. Collectives, copies, updates and reads of the disk take some
milliseconds now and then, and kernels the delays of the device, so that who does not wait computes
with what was there before.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from simulated_gpu import python_kernels
from simulated_gpu.nccl import communicator, process_group

from mutation.sites import ROOT, Site
from zrun_core.hardware import accelerator
from zrun_core.tiers import swap_file, worker

LATE_S = 0.006  # the most that something is late by
SHARE = 0.5  # of what is late at all
KINDS = ("copy", "update", "disk", "message")  # each seed has one that is later than the others
LATEST = 4  # times as late

_WAITS: list[tuple[Any, str]] = [
    (accelerator, "wait_stream"),
    (accelerator, "synchronize"),
    (accelerator.Event, "wait"),
    (accelerator.Event, "wait_on_host"),
    (accelerator.TimingEvent, "wait_on_host"),
    (process_group.Work, "wait"),
    (worker._Task, "wait"),
    (swap_file._BlockTransfer, "wait"),
]


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
                of_stream = torch.empty(1, device=stream.device)
                python_kernels.launch(lambda _: self.sleep("copy"), writes=[of_stream], name="late")

        return wait_stream


def _above(frame: Any) -> Iterator[tuple[str, int]]:
    """Yield the lines of the runtime that are being executed, from the innermost one."""
    root = str(ROOT)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(root):
            yield file[len(root) + 1 :], frame.f_lineno
        frame = frame.f_back


def _unless(site: Site | None, wait: Callable[..., Any], reached: set[Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def called(*args: Any, **kwargs: Any) -> Any:
        lines = list(_above(sys._getframe(1)))
        reached.update(lines)
        if site is not None and any(
            file == site.file and site.first <= line <= site.last for file, line in lines
        ):
            return None
        return wait(*args, **kwargs)

    return called


@contextmanager
def disturbed(site: Site | None, seed: int) -> Iterator[set[tuple[str, int]]]:
    """Take out the waits below a call; None: none, and all else is the same.

    Yields:
        The lines of `zrun_core` below which something was waited for, as they are reached.
    """
    late = _Late(seed)
    reached: set[tuple[str, int]] = set()
    with ExitStack() as stack:

        def put(owner: Any, name: str, function: Any) -> None:
            stack.enter_context(patch.object(owner, name, function))

        put(worker.Worker, "_run", late.before("update", worker.Worker._run))
        for name in ("_read", "_write"):
            put(swap_file.SwapFile, name, late.before("disk", getattr(swap_file.SwapFile, name)))
        launch = communicator.Communicator.launch
        put(communicator.Communicator, "launch", late.launching(launch))
        put(accelerator, "wait_stream", late.following(accelerator.wait_stream))
        for owner, name in _WAITS:
            put(owner, name, _unless(site, getattr(owner, name), reached))
        try:
            yield reached
        finally:
            torch.accelerator.synchronize()
