"""What every rank of a host is doing, readable by the others without talking to them.

Each rank owns one page of a shared file and writes there, before it issues a collective, the collective's kind and the
unit's name, numbered per kind. Ranks that wait for each other compare these lists: the first number at which two ranks
name different units is the disagreement. Writing costs a microsecond and synchronises nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zrun_core.errors import HangError

_PAGE = 16384
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "small")
_HISTORY = 32  # last collectives of each kind that are remembered
_NAME_BYTES = 88
_ENTRY = struct.Struct(f"<Q{_NAME_BYTES}s")  # number from 1, name
_HEADER = struct.Struct("<QQQ")  # step, 1 while waiting, number of waits
_ADVICE = (
    "Some modules ran on one rank only: name the module that chooses between them in zero.leaf, so that it is handled "
    "as a whole"
)
assert _HEADER.size + len(_KINDS) * _HISTORY * _ENTRY.size <= _PAGE


class Issue(NamedTuple):
    """One collective that a rank issued."""

    kind: str
    number: int  # from 1, per kind
    name: str


class Board:
    """This rank's page, and a view of the others'. The file is created by whoever comes first."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _PAGE * world_size)  # the same size from everyone: harmless to repeat
        self._map = mmap.mmap(descriptor, _PAGE * world_size)
        os.close(descriptor)
        self._map[_PAGE * rank : _PAGE * (rank + 1)] = bytes(_PAGE)  # an earlier run's
        self._base = _PAGE * rank
        self._numbers = dict.fromkeys(_KINDS, 0)
        self._step = self._num_waits = 0

    def _write_header(self, waiting: bool) -> None:
        _HEADER.pack_into(self._map, self._base, self._step, waiting, self._num_waits)

    def step(self, step: int) -> None:
        """Say which optimizer step begins."""
        self._step = step
        self._write_header(False)

    def issue(self, kind: str, name: str) -> None:
        """Say which collective is issued next."""
        number = self._numbers[kind] = self._numbers[kind] + 1
        place = _KINDS.index(kind) * _HISTORY + number % _HISTORY
        _ENTRY.pack_into(
            self._map, self._base + _HEADER.size + place * _ENTRY.size, number, name.encode()[:_NAME_BYTES]
        )

    def waiting(self, is_waiting: bool) -> None:
        """Say that this rank waits for others, or no longer does."""
        self._num_waits += is_waiting
        self._write_header(is_waiting)

    def state(self, rank: int) -> tuple[int, bool, int]:
        """(step, waiting, number of waits) of `rank`."""
        step, waiting, num_waits = _HEADER.unpack_from(self._map, _PAGE * rank)
        return step, bool(waiting), num_waits

    def history(self, rank: int, kind: str) -> dict[int, str]:
        """The last collectives of one kind that `rank` issued: number -> name."""
        found = {}
        for place in range(_HISTORY):
            at = _PAGE * rank + _HEADER.size + (_KINDS.index(kind) * _HISTORY + place) * _ENTRY.size
            number, name = _ENTRY.unpack_from(self._map, at)
            if number:
                found[number] = name.rstrip(b"\0").decode(errors="replace")
        return found

    def disagreement(self) -> str | None:
        """The first collective on which this rank and another differ, in words; None if there is none."""
        for kind in _KINDS:
            mine = self.history(self.rank, kind)
            for peer in range(self.world_size):
                theirs = self.history(peer, kind)
                for number in sorted(mine.keys() & theirs.keys()):
                    if mine[number] != theirs[number]:
                        return (
                            f"ranks disagree on {kind} {number} of step {self._step}: rank {self.rank} is at "
                            f"{mine[number]!r}, rank {peer} at {theirs[number]!r}. {_ADVICE}"
                        )
        return None

    def stalemate(self) -> str | None:
        """What one rank is waiting for and another never came to, in words. Meant for when all ranks have stopped."""
        for kind in _KINDS:
            last = [max(self.history(rank, kind), default=0) for rank in range(self.world_size)]
            ahead, behind = last.index(max(last)), last.index(min(last))
            if last[ahead] != last[behind]:
                name = self.history(ahead, kind)[last[ahead]]
                return (
                    f"all ranks wait in step {self._step}: rank {ahead} for {kind} {last[ahead]}, {name!r}, to which "
                    f"rank {behind} does not come. {_ADVICE}"
                )
        return None


class Watchdog:
    """A thread that looks at the board when this rank has waited long, and ends the process on a disagreement.

    It cannot raise in the waiting thread, which sits in a collective, so it calls `stop(error)`, which must not return.
    """

    def __init__(self, board: Board, stop: Callable[[HangError], None], patience_s: float = 2.0) -> None:
        self._board, self._stop, self._patience_s = board, stop, patience_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zrun-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        board = self._board
        since = stopped_since = time.monotonic()
        last, everyone, seen = -1, [(0, False, 0)], None
        while not self._closed.wait(self._patience_s / 4):
            now = time.monotonic()
            states = [board.state(rank) for rank in range(board.world_size)]
            if states != everyone or not all(waiting for _, waiting, _ in states):
                stopped_since, everyone = now, states
            _, waiting, num_waits = states[board.rank]
            if not waiting or num_waits != last:
                since, last = now, num_waits
            elif now - since > self._patience_s:
                text = board.disagreement()
                if text is None and now - stopped_since > 4 * self._patience_s:  # no message takes that long
                    text = board.stalemate()
                if text is not None and text == seen:  # twice: the other rank may have been writing
                    self._stop(HangError(text))
                seen = text

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
