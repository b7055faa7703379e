"""A thread that writes down what holds a rank's memory, when the agent of its host asks.

    agent                                   this rank
    ranks hold more than they may
    TESTIFY ->                              the thread wakes, whatever the others do
                                            memory/rank-N.json: `HeldMemory`
    reads it, and ends the ranks

Python calls the handler of a signal in the main thread, between two of its lines: that may sit in
a backward for as long as it takes memory. So the signal is blocked in all threads, and this one
waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from zrun_core.guards.holders import CallsUnderWay
from zrun_core.spine.held_memory import HeldMemory, testimony_file
from zrun_core.spine.stop_signals import TESTIFY

_UNDISTURBED_S = 1.0  # in which the threads that take memory do not get Python's lock


class MemoryWitness:
    """The thread. It is to be made by the main thread, before that has started others."""

    def __init__(
        self, run_dir: Path, rank: int, held: Callable[[CallsUnderWay], HeldMemory]
    ) -> None:
        """Wait for the signal from now on."""
        self._path = testimony_file(run_dir, rank)
        self._held = held
        self._main = threading.get_ident()
        signal.signal(TESTIFY, lambda *_: None)  # for a thread in which it is not blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, {TESTIFY})
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._path.write_text("")  # says that there is somebody to ask
        threading.Thread(target=self._wait, name="zrun-memory", daemon=True).start()

    def _wait(self) -> None:
        while True:
            signal.sigwait({TESTIFY})
            interval_s = sys.getswitchinterval()
            sys.setswitchinterval(_UNDISTURBED_S)
            try:
                self._testify()
            except Exception:  # the rank is ended without it, too
                traceback.print_exc()
            finally:
                sys.setswitchinterval(interval_s)

    def _testify(self) -> None:
        held = self._held(CallsUnderWay.of_thread(self._main))
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(held.to_json()))
        os.replace(part, self._path)
