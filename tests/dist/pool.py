"""Ranks that stay alive between tests.

`RankPool(2).run(function, *args)` calls `function(*args)` on every rank. `RankPool(2, "cuda")` has
two ranks with a GPU each, over NCCL; functions ask `toys.own_device` for theirs. Where there are
fewer, ranks share them: NCCL from 2.30 on lets them with NCCL_MULTI_RANK_GPU_ENABLE=1.

Ranks are forked from one process that has imported what they need, and meet through a file, so no
port is ever taken. A test that takes too long has every rank's Python stack dumped to the test's
output, and the pool is rebuilt for the next one.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing as mp
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
DEVICE = "ZRUN_TESTS_DEVICE"  # environment variable: the type of a rank's device
# Imported once for all ranks. Oracles need torch's compiler: its optimizers and DDP import it.
WARM = ["torch", "torch._dynamo", "pytest", "zrun_core.train.worker", "zrun_core.library"]
WARM += ["zrun_core.train.stage_building", "zrun_core.verification.witness"]
if "PYTEST_XDIST_WORKER" in os.environ:  # one test alone may not need it
    WARM += ["transformers.modeling_utils", "transformers.generation.utils"]

_Key = tuple[tuple[int, ...], timedelta | None]


class _Groups:
    """`new_group` that gives the groups of earlier tasks again.

    Each has a thread that looks a hundred times a second.

    Within a task every group is another one, so that messages of two never meet.
    """

    def __init__(self, new_group: Callable[..., Any]) -> None:
        self._new_group = new_group
        self._made: dict[_Key, list[Any]] = {}
        self._taken: Counter[_Key] = Counter()

    def begin(self) -> None:
        self._taken.clear()

    def __call__(self, ranks: list[int], timeout: timedelta | None = None, **options: Any) -> Any:
        if options:
            return self._new_group(ranks, timeout, **options)
        key = tuple(ranks), timeout
        made = self._made.setdefault(key, [])
        if self._taken[key] == len(made):
            made.append(self._new_group(ranks, timeout))
        self._taken[key] += 1
        return made[self._taken[key] - 1]


def _serve(rank: int, world_size: int, device: str, store: str, pipe: Connection) -> None:
    gc.freeze()  # what was imported stays
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    mp.set_start_method(
        "fork", force=True
    )  # for a loader's processes, as in a worker; ours is inherited otherwise
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A thread of gloo's that is woken while ours holds their lock tries again and again until it is
    # let go; where it took our core for that, for a whole time slice. With this policy, which its
    # threads inherit, nobody takes a core.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ[DEVICE] = device
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "nccl"
    if world_size > 1:
        dist.init_process_group(
            backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
    groups = _Groups(dist.new_group)
    dist.new_group = groups
    loaded: dict[str, Any] = {}
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)  # destroying a gloo group sometimes aborts
        path, name, args = task
        groups.begin()
        try:
            if path not in loaded:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                assert spec is not None
                assert spec.loader is not None
                loaded[path] = importlib.util.module_from_spec(spec)
                sys.modules[Path(path).stem] = loaded[path]
                spec.loader.exec_module(loaded[path])
            pipe.send((True, getattr(loaded[path], name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def forks() -> mp.context.ForkServerContext:
    """Starts processes that have imported what they need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    return context


class RanksHangError(AssertionError):
    """Ranks did not return in time; `results` are those of the others, by rank."""

    def __init__(self, hung: list[int], results: dict[int, Any]) -> None:
        super().__init__(f"ranks {hung} hang")
        self.results = results


class RankPool:
    """`world_size` processes with a group of gloo, or of NCCL."""

    def __init__(self, world_size: int, device: str = "cpu", alone_s: float = TIMEOUT_S) -> None:
        """Start the processes.

        Args:
            alone_s: seconds that a task may take once one rank has returned an error.
        """
        self.world_size = world_size
        self.device = device
        self._alone_s = alone_s
        self._start()

    def _start(self) -> None:
        context = forks()
        self._dir = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self.device, f"{self._dir.name}/store", theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(*args)` by rank.

        Its module is loaded from its file on every rank.
        """
        path = sys.modules[function.__module__].__file__
        for pipe in self._pipes:
            pipe.send((path, function.__name__, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        failures = []
        while len(results) < self.world_size and not failures:
            left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._restart(dump_stacks=not results)
                hung = [rank for rank in range(self.world_size) if rank not in results]
                raise RanksHangError(hung, results)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, f"died with exit code {self._processes[rank].exitcode}"
                if good:
                    results[rank] = value
                    has_failed = isinstance(value, dict) and bool(value.get("error"))
                    if has_failed:  # the others may wait for it
                        deadline = min(deadline, time.monotonic() + self._alone_s)
                else:
                    failures.append(f"rank {rank}: {value}")
        if failures:
            self._restart(dump_stacks=False)
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(self.world_size)]

    def _restart(self, dump_stacks: bool) -> None:
        for process in self._processes:
            if dump_stacks and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # to stderr
                time.sleep(0.3)
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._dir.cleanup()


def end() -> None:
    """End the process that ranks are forked from, once all of them are gone."""
    server = mp.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
