"""The output of a rank that the launcher's screen shows: `output` events from the end of its log.

    echo = Echo(log, rank=0)            # before anything is written to it
    events = echo.look(now)             # every half second
    events = echo.last_look(now, note)  # once the rank has ended

A rank prints into a file, so nothing here makes it wait, however much it prints. Of a burst the
first lines are shown and the last ones; those between are counted. A line that is not finished,
such as a progress bar, is shown now and then in the state that it is in.

    lines per second   100 at once, then 10   more, for 10 s          more, for 20 s
    shown              all of them            "N left out", last 3    the same every 10 s
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zrun.system.tail_file import LineSplitter, as_text
from zrun_core.spine.events import Event

_BURST = 100  # lines of all ranks together
_PER_S = 10.0
_LAST = 3  # lines of a burst that are shown after what was left out
_PAUSE_S = 10.0  # between two words on a rank that does not stop printing
_WIDEST = 1000  # characters of a line that are shown
_CUT_BYTES = 1 << 14  # at either end of much that is new, which are cut into lines
_READ_BYTES = 1 << 20
# Seconds after which a line that has not ended is shown as it is. The pause doubles.
_UNFINISHED_S = 5.0
_UNFINISHED_MOST_S = 60.0


class Portion(NamedTuple):
    """Lines to be shown.

    Attributes:
        left_out: how many that came before them are not.
    """

    left_out: int
    lines: list[bytes]


class LineBudget:
    """A token bucket for the lines of a stream: a burst of them is shown, then so many a second.

    Once there are too many, nothing is shown until there are few again, or for `_PAUSE_S` seconds.
    Then the number of those left out is shown, and the last ones.
    """

    def __init__(self, share: int = 1) -> None:
        """Begin with a full bucket.

        Args:
            share: number of streams that share one screen.
        """
        self._burst = max(1.0, _BURST / share)
        self._per_s = _PER_S / share
        self._tokens = self._burst
        self._asked_at = 0.0
        self._held: deque[bytes] = deque(maxlen=_LAST)
        self._num_held = 0  # also those that are not kept
        self._held_since = 0.0

    def admit(
        self, now: float, head: Sequence[bytes], num_uncut: int = 0, tail: Sequence[bytes] = ()
    ) -> list[Portion]:
        """Return what may be shown now.

        Args:
            now: seconds, by any clock.
            head: the next lines of the stream.
            num_uncut: lines after them, of which no more is known.
            tail: lines after these.
        """
        elapsed = now - self._asked_at
        self._asked_at = now
        is_quiet = len(head) + num_uncut <= self._per_s * elapsed
        if is_quiet or not self._num_held:  # a stream that goes on and on earns nothing
            self._tokens = min(self._burst, self._tokens + self._per_s * elapsed)
        portions = []
        if self._num_held and (is_quiet or now - self._held_since >= _PAUSE_S):
            portions += self.release()
        num_shown = 0
        if not self._num_held:  # else lines would change places
            num_shown = min(len(head), int(self._tokens))
        if num_shown:
            self._tokens -= num_shown
            portions.append(Portion(0, list(head[:num_shown])))
        num_held = len(head) - num_shown + num_uncut + len(tail)
        if num_held and not self._num_held:
            self._held_since = now
        self._num_held += num_held
        self._held.extend([*head[num_shown:], *tail])
        return portions

    def release(self) -> list[Portion]:
        """Return what was held back."""
        if not self._num_held:
            return []
        portion = Portion(self._num_held - len(self._held), list(self._held))
        self._held.clear()
        self._num_held = 0
        return [portion]


class Echo:
    """A reader of the log of one rank, as it grows."""

    def __init__(
        self, log: Path, rank: int, *, share: int = 1, place: str = "", note: Path | None = None
    ) -> None:
        """Begin at the end of the log, which need not exist yet.

        Args:
            share: number of ranks that are shown.
            place: where a person finds the log, if not at its path.
            note: the file in which the rank says why it fails, before it prints the same.
        """
        self._log = log
        self._rank = rank
        self._place = place or str(log)
        self._note = note
        self._position = self._end()
        self._budget = LineBudget(share)
        self._cutter = LineSplitter()
        self._shown_unfinished = b""
        self._unfinished_since = 0.0
        self._patience_s = _UNFINISHED_S

    def look(self, now: float) -> list[Event]:
        """Return `output` events for what is new."""
        end = self._end()
        # Looked for after the end of the log: nothing before that end belongs to the note.
        if self._note is not None and self._note.exists():
            return []
        head, num_uncut, tail = self._read(end)
        lines = [*head, *self._unfinished(now, is_new=bool(head or num_uncut))]
        return self._events(self._budget.admit(now, lines, num_uncut, tail))

    def last_look(self, now: float, size: int | None = None) -> list[Event]:
        """Return `output` events for the rest.

        Args:
            now: seconds, by the clock of `look`.
            size: bytes of the log before the rank printed why it failed, which the launcher shows
                by itself; None: it did not fail.
        """
        end = self._end()
        if size is not None:
            end = min(end, max(size, self._position))
        head, num_uncut, tail = self._read(end)
        rest = self._cutter.rest()
        if rest and num_uncut:
            tail.append(rest)
        elif rest:
            head.append(rest)
        portions = self._budget.admit(now, head, num_uncut, tail)
        return self._events([*portions, *self._budget.release()])

    def _end(self) -> int:
        with suppress(OSError):
            return self._log.stat().st_size
        return 0

    def _read(self, end: int) -> tuple[list[bytes], int, list[bytes]]:
        """Return the lines that are new up to `end`.

        Of many, only those at both ends are cut: the first, the number of those between, the last.
        """
        start = min(self._position, end)  # the file may have been emptied
        self._position = end
        if start == end:
            return [], 0, []
        with suppress(OSError), self._log.open("rb", buffering=0) as log:
            log.seek(start)
            if end - start <= 2 * _CUT_BYTES:
                return list(self._cutter.feed(log.read(end - start))), 0, []
            head = list(self._cutter.feed(log.read(_CUT_BYTES)))
            self._cutter.rest()
            num_uncut = 0
            left = end - _CUT_BYTES - log.tell()
            while left > 0:
                data = log.read(min(left, _READ_BYTES))
                if not data:
                    break
                num_uncut += data.count(b"\n")
                left -= len(data)
            return head, num_uncut, list(self._cutter.feed(log.read(_CUT_BYTES)))
        return [], 0, []

    def _unfinished(self, now: float, *, is_new: bool) -> list[bytes]:
        """Return the line that has not ended, if it has changed and it is time to show it."""
        line = self._cutter.pending
        if is_new or not line:
            self._unfinished_since = now
            self._patience_s = _UNFINISHED_S
        elif line != self._shown_unfinished and now - self._unfinished_since >= self._patience_s:
            self._shown_unfinished = line
            self._unfinished_since = now
            self._patience_s = min(2 * self._patience_s, _UNFINISHED_MOST_S)
            return [line]
        return []

    def _events(self, portions: list[Portion]) -> list[Event]:
        return [
            {
                "type": "output",
                "time": time.time(),
                "rank": self._rank,
                "lines": [_shortened(as_text(line)) for line in portion.lines],
                "left_out": portion.left_out,
                "log": self._place,
            }
            for portion in portions
        ]


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDEST else f"{line[:_WIDEST]} ..."
