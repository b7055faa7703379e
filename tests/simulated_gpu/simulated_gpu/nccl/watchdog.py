"""The threads by which torch ends a process whose NCCL works hang, with the words that it says.

    [rank1]:[E1124 00:35:12.000000000 ProcessGroupNCCL.cpp:790] [Rank 1] Watchdog caught collective
    operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, ...) ran for 600012 milliseconds before
    timing out.

They are those of `ProcessGroupNCCL` of torch 2.11 to 2.13, and obey the same variables:
TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ENABLE_MONITORING,
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC.
The process ends by SIGABRT; before that, torch lets four times the last of these pass, a minute.
One thread watches all groups of a process, where torch has one for each.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from simulated_gpu.install import extension

_TURN_S = 0.1
_NO_HANDLING, _TEAR_DOWN, _CLEAN_UP_ONLY, _SKIP_CLEAN_UP = range(4)
DUMP_KEY = "exception_dump"


def flag(name: str, default: bool) -> bool:
    """A variable of torch's that is on or off."""
    value = os.environ.get(name, "").lower()
    if not value:
        return default
    return value in ("1", "true", "yes", "on", "y", "t")


def number(name: str, default: int) -> int:
    """A variable of torch's that is a number."""
    return int(os.environ.get(name) or default)


def log(level: str, line: int, text: str) -> None:
    """Write a line as torch's logger does."""
    now = time.time()
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(now)).lstrip("0")
    fraction = f"{int(now % 1 * 1e9):09d}"
    rank = os.environ.get("RANK", "0")
    place = f"{level}{stamp}.{fraction} ProcessGroupNCCL.cpp:{line}"
    print(f"[rank{rank}]:[{place}] {text}", file=sys.stderr, flush=True)


class Watchdog:
    """Watches the works of all groups of this process.

    Attributes:
        is_stuck: as where a call of CUDA never returns; then the monitor ends the process.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._lock = threading.Lock()
        self._works: list[Any] = []
        self._beats = 0
        self._is_running = False
        self._store: Any = None  # that of the default group

    def watch(self, work: Any) -> None:
        """Watch a work until it is over."""
        with self._lock:
            self._works.append(work)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="pt_nccl_watchdg", daemon=True).start()
                threading.Thread(target=self._monitor, name="pt_nccl_heartbt", daemon=True).start()

    def forget(self, group: Any) -> None:
        """Watch no work of `group` any more: it was aborted or shut down."""
        with self._lock:
            self._works = [work for work in self._works if work.group is not group]

    def _run(self) -> None:
        extension().observe_only()  # what it has seen to be over orders nothing
        while True:
            time.sleep(_TURN_S)
            while self.is_stuck:
                time.sleep(_TURN_S)
            self._beats += 1
            with self._lock:
                works = list(self._works)
            over = set()
            for work in works:
                if self._look_at(work):
                    over.add(id(work))
            with self._lock:
                self._works = [work for work in self._works if id(work) not in over]

    def _look_at(self, work: Any) -> bool:
        """Return whether a work is over. If it never will be, the process ends here."""
        group = work.group
        if group.is_terminated:
            return True
        work.check_error()
        if work.error is None and work.finished():
            group.last_completed = max(group.last_completed, work.number)
            return True
        if work.error is None and not work.check_timeout():
            return False
        log(
            "E",
            2397,
            f"{group.prefix} failure detected by watchdog at work sequence id: {work.number} "
            f"PG status: last enqueued work: {group.last_enqueued}, last completed work: "
            f"{group.last_completed}",
        )
        log(
            "E",
            801,
            "Stack trace of the failed collective not found, potentially because FlightRecorder is "
            "disabled. You can enable it by setting TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero "
            "value.",
        )
        dump_ms = number("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 15_000)
        if flag("TORCH_NCCL_DUMP_ON_TIMEOUT", True):
            log("E", 2732, f"{group.prefix}First PG on this rank to signal dumping.")
            group.tell_of_dump()
        time.sleep(4 * dump_ms / 1000)
        handling = number("TORCH_NCCL_ASYNC_ERROR_HANDLING", _SKIP_CLEAN_UP)
        log(
            "E",
            744,
            f"[Rank {group.own_rank}] Some NCCL operations have failed or timed out. Due to the "
            "asynchronous nature of CUDA kernels, subsequent GPU operations might run on "
            "corrupted/incomplete data.",
        )
        if handling in (_TEAR_DOWN, _CLEAN_UP_ONLY):
            group.abort_communicators()
        if handling in (_NO_HANDLING, _CLEAN_UP_ONLY):
            return True
        log(
            "E",
            758,
            f"[Rank {group.own_rank}] To avoid data inconsistency, we are taking the entire "
            "process down.",
        )
        what = (
            f"{group.prefix}Process group watchdog thread terminated with exception: {work.error}"
        )
        log("E", 2197, what)
        print(
            f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "
            f"{what}\n",
            file=sys.stderr,
            flush=True,
        )
        os.abort()

    def _monitor(self) -> None:
        """End the process if the watchdog itself stands still."""
        patience_s = number("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480)
        seen = -1
        while self._beats != seen:
            seen = self._beats
            time.sleep(patience_s)
        prefix = "[PG ID 0 PG GUID 0(default_pg) Rank " + os.environ.get("RANK", "0") + "] "
        log(
            "E",
            1746,
            f"{prefix}ProcessGroupNCCL's watchdog got stuck for {patience_s} seconds without "
            "making progress in monitoring enqueued collectives. This typically indicates a "
            "NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be "
            "triggered by another thread holding the GIL inside a CUDA api (for example, "
            "CudaEventDestroy), or other deadlock-prone behaviors.",
        )
        log("E", 1533, f"{prefix}ProcessGroupNCCL preparing to dump debug info.")
        time.sleep(patience_s)
        if not flag("TORCH_NCCL_ENABLE_MONITORING", True):
            return
        log(
            "F",
            1554,
            f"{prefix}{prefix}Terminating the process after attempting to dump debug info, due to "
            "ProcessGroupNCCL watchdog hang.",
        )
        os.abort()


watchdog = Watchdog()
