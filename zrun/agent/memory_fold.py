"""`memory` events of a host's ranks wait here for each other, and go up as one.

Which of them a launch records is for the launcher to say, which hears of all hosts:
`zrun.watch.rank_windows`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from zrun.transport.memories import together
from zrun_core.spine.events import Event, encode

_PATIENCE_S = 1.0  # that what ranks told of a step waits for those that have not
_BEGINNING = b'{"type":"memory",'


class MemoryFold:
    """Folds the lines of one step, once all running ranks have told of it, or after a second.

    A rank that comes later is one by itself. Steps go up in their order, so that what a rank tells
    does too. Rank 0's lines are passed on at once, as they are.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Wait for these ranks of a host."""
        self._ranks = set(ranks) - {0}
        self._waiting: dict[int, dict[int, Event]] = {}  # by step and rank
        self._since: dict[int, float] = {}  # by step

    def take(self, line: bytes, now: float) -> Iterator[bytes]:
        """Take in what a rank has said; yield the lines that are to be sent now.

        Args:
            now: seconds of a clock.
        """
        event = _event(line) if line.startswith(_BEGINNING) else None
        if event is None or event["rank"] not in self._ranks:
            yield line
            return
        step, rank = event["step"], event["rank"]
        if any(rank in told for each, told in self._waiting.items() if each >= step):
            yield from self._fold_up_to(max(self._waiting))  # it makes steps again
        self._since.setdefault(step, now)
        told = self._waiting.setdefault(step, {})
        told[rank] = event
        if self._ranks <= told.keys():
            yield from self._fold_up_to(step)

    def due(self, now: float) -> Iterator[bytes]:
        """Yield the lines of what has waited long enough."""
        late = [step for step, since in self._since.items() if now - since > _PATIENCE_S]
        if late:
            yield from self._fold_up_to(max(late))

    def end_of(self, rank: int) -> Iterator[bytes]:
        """Yield the lines of all that waits: this rank has ended, and no other waits for it."""
        self._ranks.discard(rank)
        if self._waiting:
            yield from self._fold_up_to(max(self._waiting))

    def _fold_up_to(self, last: int) -> Iterator[bytes]:
        for step in sorted(step for step in self._waiting if step <= last):
            del self._since[step]
            told = self._waiting.pop(step)
            yield encode(together([told[rank] for rank in sorted(told)]))


def _event(line: bytes) -> Event | None:
    """Return the event of a line; None: it has no rank or no step."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict):
        return None
    is_whole = all(type(event.get(name)) is int for name in ("rank", "step")) and "time" in event
    return event if is_whole else None
