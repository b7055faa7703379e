"""What every rank of a host is doing, readable by the others without talking to them.

Each rank owns one page of a shared file. It writes there which step and phase it is in and, before it issues a
collective, the collective's kind and the unit's name, numbered per kind. Ranks that wait for each other compare these
lists: the first number at which two ranks name different units is the disagreement. The host's agent reads the same
pages to find ranks that no longer move. Writing costs two microseconds and synchronises nothing.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zrun_core.errors import HangError
from zrun_core.sizes import format_size

_PAGE = 32768
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "push", "pull", "broadcast", "small")
PHASES = (  # in the order in which they come
    *("start", "import", "rendezvous", "build", "shard", "load"),
    *("data", "forward", "backward", "update", "hook", "evaluation", "save", "end"),
)
_HISTORY = 32  # last collectives of each kind that are remembered
_NAME_BYTES = 72
_ENTRY = struct.Struct(f"<QQQ{_NAME_BYTES}s")  # number from 1 per kind, number over all kinds, bytes, name
_HEADER = struct.Struct("<7Q")  # the fields of `RankState`
LEAF_ADVICE = (
    "Some modules ran on one rank only: name the module that chooses between them in zero.leaf, so that it is handled "
    "as a whole"
)
MEAN_NAME = "mean() in hooks."  # with the key of the hook
HOOK_ADVICE = "A hook called context.mean() on some ranks only: call it on every rank"
assert _HEADER.size + len(_KINDS) * _HISTORY * _ENTRY.size <= _PAGE


def host_file(run_dir: Path, name: str, first_rank: int) -> Path:
    """A file of the run directory that belongs to one host, whose ranks begin with `first_rank`.

    Hosts may share the directory itself.
    """
    path = run_dir / name
    return path.with_stem(f"{path.stem}-{first_rank}") if first_rank else path


class RankState(NamedTuple):
    """What a rank says of itself.

    Attributes:
        step: optimizer step that began last; 0 before the first.
        waiting: for other ranks, or for its device.
        num_waits: how often it has waited.
        progress: counts whatever the rank does: steps, phases, collectives.
        phase: one of `PHASES`.
        pid: 0 before the rank's process has come so far.
        first: the step that began first; a resumed run does not begin with step 1.
    """

    step: int
    waiting: bool
    num_waits: int
    progress: int
    phase: str
    pid: int
    first: int

    @property
    def is_halted(self) -> bool:
        """Whether the process is stopped by a signal or a debugger: it is not late, it does not run."""
        return process_state(self.pid) in ("T", "t")


class Issue(NamedTuple):
    """One collective that a rank issued."""

    kind: str
    number: int  # from 1, per kind
    order: int  # from 1, over all kinds
    num_bytes: int  # that this rank sends; other ranks may send another number
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.number}, {self.name!r} ({format_size(self.num_bytes)})"


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does (R, S, D, T, ...); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _state(pages: mmap.mmap | bytes, offset: int) -> RankState:
    step, waiting, num_waits, progress, phase, pid, first = _HEADER.unpack_from(pages, offset)
    return RankState(step, bool(waiting), num_waits, progress, PHASES[min(phase, len(PHASES) - 1)], pid, first)


def peek(path: Path) -> RankState | None:
    """What the first rank of a board says of itself, for whoever knows no more of the run; None: there is no board."""
    try:
        with path.open("rb") as board:
            header = board.read(_HEADER.size)
    except OSError:
        return None
    return _state(header, 0) if len(header) == _HEADER.size else None


class BoardView:
    """The pages of a host's ranks, to be read. The file is created by whoever comes first.

    Attributes:
        ranks: of the host, contiguous.
        rank: whose point of view `disagreement` takes.
        advice: what `disagreement` and `stalemate` tell the user to do.
    """

    def __init__(self, path: Path, ranks: range, rank: int | None = None, advice: str = LEAF_ADVICE) -> None:
        self.ranks, self.advice = ranks, advice
        self.rank = ranks.start if rank is None else rank
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _PAGE * len(ranks))  # the same size from everyone: harmless to repeat
        self._map = mmap.mmap(descriptor, _PAGE * len(ranks))
        os.close(descriptor)

    def _page(self, rank: int) -> int:
        return _PAGE * self.ranks.index(rank)

    def state(self, rank: int) -> RankState:
        return _state(self._map, self._page(rank))

    def history(self, rank: int, kind: str) -> dict[int, Issue]:
        """The last collectives of one kind that `rank` issued, by their number."""
        found = {}
        for place in range(_HISTORY):
            at = self._page(rank) + _HEADER.size + (_KINDS.index(kind) * _HISTORY + place) * _ENTRY.size
            number, order, num_bytes, name = _ENTRY.unpack_from(self._map, at)
            if number:
                found[number] = Issue(kind, number, order, num_bytes, name.rstrip(b"\0").decode(errors="replace"))
        return found

    def last(self, rank: int) -> Issue | None:
        """The collective that `rank` issued last."""
        issues = [issue for kind in _KINDS for issue in self.history(rank, kind).values()]
        return max(issues, key=lambda issue: issue.order, default=None)

    def disagreement(self) -> str | None:
        """The first collective on which this rank and another differ, in words; None if there is none."""
        for kind in _KINDS:
            mine = self.history(self.rank, kind)
            for peer in self.ranks:
                theirs = self.history(peer, kind)
                for number in sorted(mine.keys() & theirs.keys()):
                    ours, other = mine[number], theirs[number]
                    if ours.name != other.name:
                        step = self.state(self.rank).step
                        when = f" of step {step}" if step else ""  # nobody tells the steps of a user's own loop
                        return (
                            f"ranks disagree on {kind} {number}{when}: rank {self.rank} "
                            f"is at {ours.name!r} ({format_size(ours.num_bytes)}), rank {peer} at {other.name!r} "
                            f"({format_size(other.num_bytes)}). {self._advice(ours.name, other.name)}"
                        )
        return None

    def stalemate(self) -> str | None:
        """What one rank is waiting for and another never came to, in words. Meant for when all ranks have stopped.

        A rank that a signal halted may still come. Where other hosts have ranks too, they may be what all wait for.
        """
        states = {rank: self.state(rank) for rank in self.ranks}
        if any(state.is_halted for state in states.values()):
            return None
        missed = []
        for kind in _KINDS:
            last = {rank: max(self.history(rank, kind), default=0) for rank in self.ranks}
            ahead, behind = max(last, key=last.__getitem__), min(last, key=last.__getitem__)
            if last[ahead] != last[behind]:
                missed.append((self.history(ahead, kind)[last[ahead]], ahead, behind))
        if not missed:
            return None
        # What a hook alone waits for explains all others.
        issue, ahead, behind = min(missed, key=lambda each: not each[0].name.startswith(MEAN_NAME))
        step = states[ahead].step
        return (
            f"all ranks wait{f' in step {step}' if step else ''}: "
            f"rank {ahead} for {issue.kind} {issue.number}, {issue.name!r}, "
            f"to which rank {behind} does not come. {self._advice(issue.name)}"
        )

    def _advice(self, *names: str) -> str:
        """What to do where ranks do not meet in the collectives of these names."""
        return HOOK_ADVICE if any(name.startswith(MEAN_NAME) for name in names) else self.advice


class Board(BoardView):
    """This rank's page, and a view of the others'."""

    def __init__(self, path: Path, rank: int, ranks: range, world_size: int, advice: str = LEAF_ADVICE) -> None:
        super().__init__(path, ranks, rank, advice)
        self.has_everyone = len(ranks) == world_size
        self._base = self._page(rank)
        self._map[self._base : self._base + _PAGE] = bytes(_PAGE)  # an earlier run's
        self._numbers = dict.fromkeys(_KINDS, 0)
        self._step = self._first = self._num_waits = self._progress = self._phase = self._order = 0
        self._waiting = False
        self._pid = os.getpid()
        self._write_header()

    def _write_header(self) -> None:
        self._progress += 1
        fields = (self._step, self._waiting, self._num_waits, self._progress, self._phase, self._pid, self._first)
        _HEADER.pack_into(self._map, self._base, *fields)

    def step(self, step: int) -> None:
        """Say which optimizer step begins."""
        self._step, self._waiting = step, False
        self._first = self._first or step
        self._write_header()

    def phase(self, phase: str) -> None:
        """Say what begins: one of `PHASES`."""
        self._phase = PHASES.index(phase)
        self._write_header()

    def tick(self) -> None:
        """Say that there is progress which shows nowhere else."""
        self._write_header()

    def issue(self, kind: str, name: str, num_bytes: int = 0) -> None:
        """Say which collective is issued next."""
        number = self._numbers[kind] = self._numbers[kind] + 1
        self._order += 1
        at = self._base + _HEADER.size + (_KINDS.index(kind) * _HISTORY + number % _HISTORY) * _ENTRY.size
        _ENTRY.pack_into(self._map, at, number, self._order, num_bytes, name.encode()[:_NAME_BYTES])
        self._write_header()

    def waiting(self, is_waiting: bool) -> None:
        """Say that this rank waits for others, or no longer does."""
        self._num_waits += is_waiting
        self._waiting = is_waiting
        self._write_header()


class Watchdog:
    """A thread that looks at the board when this rank has waited long, and ends the process on a disagreement.

    It cannot raise in the waiting thread, which sits in a collective, so it calls `stop(error)`, which must not return.
    """

    def __init__(
        self,
        board: Board,
        stop: Callable[[HangError], None],
        patience_s: float = 2.0,
        *,
        late: Callable[[list[int]], None] | None = None,
        late_s: float = math.inf,
    ) -> None:
        """Watch from now on.

        Args:
            patience_s: seconds that a rank waits before it is looked at.
            late: told which ranks of this host do not wait, once each time that the others have waited for them, and
                nothing has moved, for `late_s` seconds. None of them: all wait for another host.
        """
        self._board, self._stop, self._patience_s = board, stop, patience_s
        self._late, self._late_s = late, late_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zrun-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        board = self._board
        since = still_since = stopped_since = time.monotonic()
        last, seen, is_told = -1, None, False
        everyone: list[RankState] = []
        while not self._closed.wait(self._patience_s / 4):
            now = time.monotonic()
            states = [board.state(rank) for rank in board.ranks]
            if states != everyone:
                still_since, is_told = now, False
            elif now - still_since > self._late_s and not is_told:
                is_told = True
                self._tell_late(states)
            if states != everyone or not all(state.waiting for state in states):
                stopped_since, everyone = now, states
            own = board.state(board.rank)
            if not own.waiting or own.num_waits != last:
                since, last = now, own.num_waits
            elif now - since > self._patience_s:
                text = board.disagreement()
                if (
                    text is None and board.has_everyone and now - stopped_since > 4 * self._patience_s
                ):  # no message takes that long
                    text = board.stalemate()
                if text is not None and text == seen:  # twice: the other rank may have been writing
                    self._stop(HangError(text))
                seen = text

    def _tell_late(self, states: list[RankState]) -> None:
        """Nothing has moved for a while; where nobody waits, everyone computes."""
        ranks = zip(self._board.ranks, states, strict=True)
        late = [rank for rank, state in ranks if not state.waiting or state.is_halted]
        if self._late is not None and len(late) < len(states) and (late or not self._board.has_everyone):
            self._late(late)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
