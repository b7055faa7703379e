"""The thread that adds gradients and updates units on the host, beside training."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from zrun_core.hardware import accelerator
from zrun_core.tiers.transfer import Transfer


class _Task:
    """A task of the worker, as a transfer."""

    def __init__(self, future: Future[None], before_wait: Callable[[], None]) -> None:
        self._future = future
        self._before_wait = before_wait

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        if not self._future.done():
            self._before_wait()
        self._future.result()

    def wait_on_host(self) -> None:
        self.wait()


class Worker:
    """Runs tasks in a thread of its own, in the order of the calls.

    Attributes:
        is_in_step: what training asks for is of a step, and not of an evaluation or of whoever
            looks between two steps.
    """

    def __init__(self, device: torch.device, before_wait: Callable[[], None]) -> None:
        """
        Args:
            before_wait: called by whoever is about to wait for a task.
        """
        self._device = device
        self._before_wait = before_wait
        self._ident = 0  # of the thread
        self._pool: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None
        self._task_is_of_step = False
        self.is_in_step = False

    def check(self) -> None:
        """Raise the first error of a task, if there is one."""
        if self._failure is not None:
            raise self._failure

    @property
    def is_current(self) -> bool:
        """True in the thread itself."""
        return threading.get_ident() == self._ident

    def submit(self, task: Callable[[], None]) -> Transfer:
        """Have `task` run after those before it. Whoever waits for it gets its error."""
        if self._pool is None:  # not before there is something to do: the rank may fork until then
            threads = torch.get_num_threads()
            # The thread lives as long as the pool, and must not keep what would end it.
            begin = partial(_begin, weakref.WeakMethod(self._begin), threads)
            self._pool = ThreadPoolExecutor(1, "zrun-update", begin)
        future = self._pool.submit(self._run, task, self.is_in_step)
        return _Task(future, self._before_wait)

    def _run(self, task: Callable[[], None], is_of_step: bool) -> None:
        self._task_is_of_step = is_of_step
        try:
            task()
        except BaseException as error:
            self._failure = self._failure or error
            raise

    @property
    def is_for_step(self) -> bool:
        """True if who asks, a task or training, works for a step."""
        return self._task_is_of_step if self.is_current else self.is_in_step

    def _begin(self, num_threads: int) -> None:
        self._ident = threading.get_ident()
        # Each thread of Python has a number of its own. The same one: the parts that threads divide
        # a chunk into then end where they end in the thread that trains, and have the same bits.
        torch.set_num_threads(num_threads)
        if accelerator.is_accelerator(self._device):
            # Copies to the device follow what this thread has given it, not all of training.
            accelerator.use_stream(accelerator.new_stream(self._device))


def _begin(begin: weakref.WeakMethod[Callable[[int], None]], num_threads: int) -> None:
    """Begin the thread of a worker, if that is still there."""
    method = begin()
    if method is not None:
        method(num_threads)
