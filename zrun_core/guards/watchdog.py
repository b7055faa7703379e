"""A thread that ends a rank which waits for what never comes, and tells of ranks that are late.

[Note: waits that nothing ends]
Through gloo a wait fails when a rank ends, and when the time of the process group is over. On NCCL
it does not: kernels of a communicator spin until somebody aborts them, and torch's own watchdog
ends the process by SIGABRT, after the time is over and without a word of what it waited for. So
this thread looks for itself, at what does not hang with a communicator: the pages of the host's
ranks, and their processes.

                                  found after        the rank ends with
    ranks disagree                2 looks            HangError
    a process of the host ended   2 looks            PeerError
    a wait is longer than it may  `limit_s`          HangError, with what it waited for

There the host runs ahead of its device, and the one that waits is the device: the host may be in
code of the user's that reads a loss, of which nobody knows. So a wait of the device counts too,
which it shows by the marks around it: it has passed the first one, and not the second.

Collectives that the user's code issues by itself have no marks, and are on no page. torch ends
those: its limit is later, by `communicators.MARGIN_S`.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable

from zrun_core.errors import HangError, PeerError, ZrunError
from zrun_core.hardware.clock import Stretch, Unpassed
from zrun_core.spine.flight_page import RankProgress
from zrun_core.spine.flight_recorder import FlightRecorder, listed


class Watchdog:
    """A thread that looks at all pages when this rank has waited long.

    Where what the rank waits for never comes it ends the process. It cannot raise in the waiting
    thread, which sits in a collective, so it calls `stop(error)`, which must not return. See
    [Note: waits that nothing ends].
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        stop: Callable[[ZrunError], None],
        patience_s: float = 2.0,
        *,
        limit_s: float = math.inf,
        limit_key: str = "",
        late: Callable[[list[int]], None] | None = None,
        late_s: float = math.inf,
        device_waits: Unpassed | None = None,
    ) -> None:
        """Watch from now on.

        Args:
            patience_s: seconds that a rank waits before it is looked at.
            limit_s: seconds that one wait may take.
            limit_key: what sets `limit_s`, for the message.
            late: told which ranks of this host do not wait, once each time that the others have
                waited for them, and nothing has moved, for `late_s` seconds. None of them: all wait
                for another host.
            device_waits: of the rank's device for other ranks.
        """
        self._recorder = recorder
        self._stop = stop
        self._patience_s = patience_s
        self._limit_s = limit_s
        self._limit_key = limit_key
        self._late = late
        self._late_s = late_s
        self._device_waits = Unpassed() if device_waits is None else device_waits
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zrun-watchdog", daemon=True)
        self._thread.start()
        # A thread that looks at a device when the interpreter ends would end in C++, which aborts.
        atexit.register(self.close)

    def _watch(self) -> None:
        recorder = self._recorder
        moved_at = stopped_at = waits_since = time.monotonic()
        states: list[RankProgress] = []  # at the last look at which one had moved
        wait: Stretch | int | None = None
        is_late_told = False
        seen = ""
        while not self._closed.wait(self._patience_s / 4):
            now = time.monotonic()
            found = [recorder.state(rank) for rank in recorder.ranks]
            has_moved = found != states
            if has_moved:
                moved_at = now
                is_late_told = False
            elif now - moved_at > self._late_s and not is_late_told:
                is_late_told = True
                self._tell_late(found)
            if has_moved or not all(state.waiting for state in found):
                stopped_at = now
                states = found
            current = self._current_wait()
            if current is None or current != wait:
                waits_since = now
                wait = current
            elif now - waits_since > self._patience_s:
                problem = self._find_problem(now - stopped_at, now - waits_since)
                text = "" if problem is None else str(problem)
                if problem is not None and text == seen:  # twice: another may have been writing
                    self._stop(problem)
                seen = text

    def _current_wait(self) -> Stretch | int | None:
        """Return what no other wait of this rank equals; None: neither device nor host waits."""
        stretch = self._device_waits.current()
        if stretch is not None:
            return stretch
        own = self._recorder.state(self._recorder.rank)
        return own.num_waits if own.waiting else None

    def _find_problem(self, stopped_s: float, waited_s: float) -> ZrunError | None:
        """Return why this rank waits in vain, as far as can be told.

        All ranks of the host have waited for `stopped_s` seconds without any move; this wait has
        taken `waited_s` seconds.
        """
        recorder = self._recorder
        text = recorder.disagreement()
        if text is not None:
            return HangError(text)
        gone = [rank for rank in recorder.ranks if recorder.state(rank).is_gone]
        if gone:
            who = f"rank {gone[0]} has" if len(gone) == 1 else f"ranks {listed(gone)} have"
            awaits = recorder.awaits_in_words(recorder.rank)
            log = "its log" if len(gone) == 1 else "their logs"
            return PeerError(f"{who} ended (see {log}), and this rank waits {awaits}")
        is_stuck = stopped_s > 4 * self._patience_s  # no message takes that long
        if recorder.has_everyone and is_stuck:
            text = recorder.stalemate()
            if text is not None:
                return HangError(text)
        if waited_s > self._limit_s:
            awaits = recorder.awaits_in_words(recorder.rank)
            limit = f"{self._limit_s:g} s ({self._limit_key})"
            return HangError(f"rank {recorder.rank} has waited for more than {limit} {awaits}")
        return None

    def _tell_late(self, states: list[RankProgress]) -> None:
        """Call `late`: nothing has moved for a while."""
        if self._late is None:
            return
        ranks = zip(self._recorder.ranks, states, strict=True)
        late = [rank for rank, state in ranks if not state.waiting or state.is_halted]
        if len(late) == len(states):
            return  # all of them compute
        if not late and self._recorder.has_everyone:
            return  # all wait, and there is no other host to wait for
        self._late(late)

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join()
