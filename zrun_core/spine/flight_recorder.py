"""The progress and the collectives of every rank of a host, readable without talking to it.

Each rank owns one page of a shared file. It writes there which step and phase it is in and, before
it issues a collective, its kind, its group and the unit's name, numbered per kind and group:

    header                                      step, phase, waiting, progress: `RankProgress`
    wait for a tier                             since when, for 'its disk (/scratch)'
    record: all_gather over ranks 0, 1          7 'blocks.0'   8 'blocks.1'   9 'head'
    record: send to rank 2                      3 'hidden of 2'
    ...                                         up to 40 records of the last 32 operations
    record of a line: receive from rank 2       81 'gradients'
    ...                                         up to 512 records of the last message

Ranks that wait for each other compare these records, and the host's agent reads the same pages to
find ranks that no longer move: see `flight_view.py`. Writing costs two microseconds and
synchronises nothing. Any thread of the rank may write.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zrun_core.spine.flight_page import PHASES, OpsRoom
from zrun_core.spine.flight_view import LEAF_ADVICE, FlightRecorderView


class RankSet(Protocol):
    """The ranks that something is issued over: a group, or a message's sender and receiver."""

    @property
    def axis(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


@dataclass
class _OwnRecord:
    """A record of this rank.

    Attributes:
        room: where the page has its operations; None: it has no room for it.
        number: of the last operation.
    """

    room: OpsRoom | None
    number: int = 0


class FlightRecorder(FlightRecorderView):
    """This rank's page, and a view of the others'."""

    def __init__(
        self, path: Path, rank: int, ranks: range, world_size: int, advice: str = LEAF_ADVICE
    ) -> None:
        """Begin an empty page.

        Args:
            ranks: of the host, contiguous.
            advice: as of `FlightRecorderView`.
        """
        super().__init__(path, ranks, advice)
        self.rank = rank
        self.has_everyone = len(ranks) == world_size
        self._page = self._pages[rank]
        self._page.clear()
        self._world_size = world_size
        self._own: dict[tuple[str, tuple[int, ...]], _OwnRecord] = {}
        self._num_records = {False: 0, True: 0}  # of lines, and others
        self._lock = threading.RLock()  # a signal's handler may write within a write
        self._step = 0
        self._first = 0
        self._num_waits = 0
        self._progress = 0
        self._phase = 0
        self._order = 0
        self._waiting = False
        self._pid = os.getpid()
        self._write_header()

    def _write_header(self) -> None:
        with self._lock:  # or what another thread has read before might be written after
            self._progress += 1
            self._page.write_progress(
                self._step,
                self._waiting,
                self._num_waits,
                self._progress,
                self._phase,
                self._pid,
                self._first,
            )

    def disagreement(self) -> str | None:
        """Return the first collective on which this rank and another differ, in words."""
        return self._first_difference([self.rank])

    def step(self, step: int) -> None:
        """Say which optimizer step begins."""
        self._step = step
        self._waiting = False
        self._first = self._first or step
        self._write_header()

    def phase(self, phase: str) -> None:
        """Say what begins: one of `PHASES`."""
        self._phase = PHASES.index(phase)
        self._write_header()

    def tick(self) -> None:
        """Say that there is progress which shows nowhere else."""
        self._write_header()

    def issue(
        self,
        kind: str,
        group: RankSet,
        name: str,
        num_bytes: int = 0,
        *,
        in_order: bool = False,
        is_line: bool = False,
    ) -> None:
        """Record what is issued next.

        Args:
            kind: a collective, or send or receive.
            group: of a message the sender and the receiver, in this order.
            name: what it is about, the same on all ranks of `group`.
            num_bytes: that this rank sends, or only receives.
            in_order: as of `FlightRecord`; the same for all of a kind and group.
            is_line: it is a message of a line: a rank may have many, and they take no room from
                what else is issued.
        """
        with self._lock:
            record = self._own.get((kind, group.ranks))
            if record is None:
                over = self._group_in_words(kind, group)
                room = self._page.begin_record(
                    self._num_records[is_line],
                    kind,
                    group.ranks,
                    over,
                    in_order=in_order,
                    is_line=is_line,
                )
                self._num_records[is_line] += 1
                record = self._own[kind, group.ranks] = _OwnRecord(room)
            self._order += 1
            record.number += 1
            if record.room is not None:
                self._page.write_op(record.room, record.number, self._order, num_bytes, name)
            self._write_header()

    def _group_in_words(self, kind: str, group: RankSet) -> str:
        """Return the group as messages name it; nothing where it is all ranks."""
        if kind == "send":
            return f" to rank {group.ranks[1]}"
        if kind == "receive":
            return f" from rank {group.ranks[0]}"
        if len(group.ranks) == self._world_size:
            return ""
        return f" over {group.axis} (ranks {listed(group.ranks)})"

    def waiting(self, is_waiting: bool) -> None:
        """Say that this rank waits for others, or no longer does."""
        if is_waiting:
            self._num_waits += 1
        self._waiting = is_waiting
        self._write_header()

    @contextmanager
    def wait_for_tier(self, what: str) -> Iterator[None]:
        """Say inside that this rank waits for its own copies: others may be waiting for it.

        Meant for the thread that trains. Another one that works for it calls `tick`.

        Args:
            what: it waits for, as in "its disk (/scratch)".
        """
        self._write_tier_wait(time.monotonic_ns(), what)
        try:
            yield
        finally:
            self._write_tier_wait(0, "")

    def _write_tier_wait(self, since: int, what: str) -> None:
        self._page.write_tier_wait(since, what)
        self._write_header()


def listed(ranks: Sequence[int]) -> str:
    """Return the first few of `ranks` as text."""
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        shown.append("...")
    return ", ".join(shown)
