"""What every rank of a host is doing, readable by the others without talking to them.

Each rank owns one page of a shared file. It writes there which step and phase it is in and, before
it issues a collective, its kind, its group and the unit's name, numbered per kind and group. Ranks
that wait for each other compare these lists within each group: the first number at which two ranks
name different units is the disagreement. What ranks of different groups do is never compared. The
host's agent reads the same pages to find ranks that no longer move. Writing costs two microseconds
and synchronises nothing.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from zrun_core.errors import HangError
from zrun_core.spine.sizes import format_size

_PAGE = 1 << 17
_COLLECTIVES = (
    *("all_gather", "reduce_scatter", "all_reduce"),
    *("push", "pull", "broadcast", "small"),
)
_ANSWERS = {"send": "receive", "receive": "send"}  # what the other rank does about a message
_KINDS = (*_COLLECTIVES, *_ANSWERS)
PHASES = (  # in the order in which they come
    *("start", "import", "rendezvous", "build", "shard", "load"),
    *("data", "forward", "backward", "update", "hook", "evaluation", "save", "end"),
)
_NUM_LINES = 40  # of a page: what was issued of one kind over one group; more are not recorded
_HISTORY = 32  # last issues of a line that are remembered
_NAME_BYTES = 72
_MEMBERS_BYTES = 32  # a bit for each rank of the host
_OVER_BYTES = 96
_HEADER = struct.Struct("<7Q")  # the fields of `RankProgress`
_KIND = struct.Struct("<Q")  # of a line: place among the kinds, from 1; 0: there is no such line
_GROUP = struct.Struct(f"<Q{_MEMBERS_BYTES}s{_OVER_BYTES}s")  # of a line: key, members here, words
_ENTRY = struct.Struct(f"<QQQ{_NAME_BYTES}s")  # number in the line, number over all, bytes, name
_ENTRIES_AT = _KIND.size + _GROUP.size
_LINE_BYTES = _ENTRIES_AT + _HISTORY * _ENTRY.size
LEAF_ADVICE = (
    "Some modules ran on one rank only: name the module that chooses between them in zero.leaf, so that it is handled "
    "as a whole"
)
MEAN_NAME = "mean() in hooks."  # with the key of the hook
HOOK_ADVICE = "A hook called context.mean() on some ranks only: call it on every rank"
assert _HEADER.size + _NUM_LINES * _LINE_BYTES <= _PAGE


def host_file(run_dir: Path, name: str, first_rank: int) -> Path:
    """A file of the run directory that belongs to one host, whose ranks begin with `first_rank`.

    Hosts may share the directory itself.
    """
    path = run_dir / name
    return path.with_stem(f"{path.stem}-{first_rank}") if first_rank else path


class RankProgress(NamedTuple):
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


class RankSet(Protocol):
    """The ranks that something is issued over: a group, or a message's sender and receiver."""

    @property
    def axis(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


class IssuedOp(NamedTuple):
    """One collective, or one end of a message, that a rank issued."""

    kind: str
    number: int  # from 1, per kind and group
    over: str  # which group, in words; nothing where it is all ranks
    order: int  # from 1, over everything
    num_bytes: int  # that this rank sends; other ranks may send another number
    name: str

    def __str__(self) -> str:
        return f"{self.what}, {self.name!r} ({format_size(self.num_bytes)})"

    @property
    def what(self) -> str:
        return f"{self.kind} {self.number}{self.over}"


class FlightRecord(NamedTuple):
    """What a rank issued of one kind over one group.

    Attributes:
        key: tells the group from others, the same on all its ranks.
        members: the ranks of this host that are in it.
        issues: the last ones, by number.
    """

    kind: str
    key: int
    members: tuple[int, ...]
    issues: dict[int, IssuedOp]


_Lines = dict[int, dict[tuple[str, int], FlightRecord]]  # of each rank, by kind and group


def listed(ranks: Sequence[int]) -> str:
    """Return the first few of `ranks` as text."""
    shown = [str(rank) for rank in ranks[:8]] + ["..."] * (len(ranks) > 8)
    return ", ".join(shown)


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does (R, S, D, T, ...); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _state(pages: mmap.mmap | bytes, offset: int) -> RankProgress:
    step, waiting, num_waits, progress, phase, pid, first = _HEADER.unpack_from(pages, offset)
    return RankProgress(
        step, bool(waiting), num_waits, progress, PHASES[min(phase, len(PHASES) - 1)], pid, first
    )


def read_first_progress(path: Path) -> RankProgress | None:
    """What the first rank of a board says of itself, for whoever knows no more of the run; None: there is no board."""
    try:
        with path.open("rb") as board:
            header = board.read(_HEADER.size)
    except OSError:
        return None
    return _state(header, 0) if len(header) == _HEADER.size else None


class FlightRecorderView:
    """The pages of a host's ranks, to be read. The file is created by whoever comes first.

    Attributes:
        ranks: of the host, contiguous.
        advice: what `disagreement` and `stalemate` tell the user to do.
    """

    def __init__(self, path: Path, ranks: range, advice: str = LEAF_ADVICE) -> None:
        self.ranks, self.advice = ranks, advice
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(
            descriptor, _PAGE * len(ranks)
        )  # the same size from everyone: harmless to repeat
        self._map = mmap.mmap(descriptor, _PAGE * len(ranks))
        os.close(descriptor)

    def _page(self, rank: int) -> int:
        return _PAGE * self.ranks.index(rank)

    def state(self, rank: int) -> RankProgress:
        return _state(self._map, self._page(rank))

    def lines(self, rank: int) -> dict[tuple[str, int], FlightRecord]:
        """What `rank` has issued, by kind and key of the group: in the order of kinds."""
        found = sorted(self._read_lines(rank), key=lambda line: _KINDS.index(line.kind))
        return {(line.kind, line.key): line for line in found}

    def _read_lines(self, rank: int) -> Iterator[FlightRecord]:
        for place in range(_NUM_LINES):
            at = self._page(rank) + _HEADER.size + place * _LINE_BYTES
            (number,) = _KIND.unpack_from(self._map, at)
            if not number:
                return
            kind = _KINDS[number - 1]
            key, bits, words = _GROUP.unpack_from(self._map, at + _KIND.size)
            here = int.from_bytes(bits, "little")
            members = tuple(r for place, r in enumerate(self.ranks) if here >> place & 1)
            yield FlightRecord(
                kind, key, members, self._read_issues(at + _ENTRIES_AT, kind, _text(words))
            )

    def _read_issues(self, at: int, kind: str, over: str) -> dict[int, IssuedOp]:
        found = {}
        for place in range(_HISTORY):
            entry = _ENTRY.unpack_from(self._map, at + place * _ENTRY.size)
            number, order, num_bytes, name = entry
            if number:
                found[number] = IssuedOp(kind, number, over, order, num_bytes, _text(name))
        return found

    def last(self, rank: int) -> IssuedOp | None:
        """What `rank` issued last."""
        issues = [issue for line in self.lines(rank).values() for issue in line.issues.values()]
        return max(issues, key=lambda issue: issue.order, default=None)

    def disagreement(self) -> str | None:
        """The first collective on which two ranks differ, in words; None if there is none."""
        return self._first_difference(self.ranks)

    def _first_difference(self, ranks: Sequence[int]) -> str | None:
        """The first collective on which one of `ranks` and any other differ, in words."""
        lines = {rank: self.lines(rank) for rank in self.ranks}
        found = (self._difference(rank, lines) for rank in ranks)
        return next((text for text in found if text is not None), None)

    def _difference(self, rank: int, lines: _Lines) -> str | None:
        for at, mine in lines[rank].items():
            if mine.kind not in _COLLECTIVES:  # messages may be issued ahead, in any order
                continue
            for peer in mine.members:
                theirs = lines[peer].get(at, mine)
                for number in sorted(mine.issues.keys() & theirs.issues.keys()):
                    ours, other = mine.issues[number], theirs.issues[number]
                    if ours.name != other.name:
                        return self._in_words(ours, rank, other, peer)
        return None

    def _in_words(self, ours: IssuedOp, rank: int, other: IssuedOp, peer: int) -> str:
        step = self.state(rank).step
        when = f" of step {step}" if step else ""  # nobody tells the steps of a user's own loop
        return (
            f"ranks disagree on {ours.what}{when}: rank {rank} is at {ours.name!r} "
            f"({format_size(ours.num_bytes)}), rank {peer} at {other.name!r} "
            f"({format_size(other.num_bytes)}). {self._advice(ours.name, other.name)}"
        )

    def stalemate(self) -> str | None:
        """What one rank is waiting for and another never came to, in words. Meant for when all ranks have stopped.

        A rank that a signal halted may still come. Where other hosts have ranks too, they may be what all wait for.
        """
        states = {rank: self.state(rank) for rank in self.ranks}
        if any(state.is_halted for state in states.values()):
            return None
        lines = {rank: self.lines(rank) for rank in self.ranks}
        missed = [*_missed_collectives(lines)] or [*_missed_messages(lines)]
        if not missed:
            return None
        # What a hook alone waits for explains all others.
        issue, ahead, behind = min(missed, key=lambda each: not each[0].name.startswith(MEAN_NAME))
        step = states[ahead].step
        advice = f" {self._advice(issue.name)}" if issue.kind in _COLLECTIVES else ""
        return (
            f"all ranks wait{f' in step {step}' if step else ''}: rank {ahead} for {issue.what}, "
            f"{issue.name!r}, to which rank {behind} does not come.{advice}"
        )

    def _advice(self, *names: str) -> str:
        """What to do where ranks do not meet in the collectives of these names."""
        return HOOK_ADVICE if any(name.startswith(MEAN_NAME) for name in names) else self.advice


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _last(line: FlightRecord | None) -> int:
    """Return the number of what was issued last."""
    return 0 if line is None else max(line.issues, default=0)


def _missed_collectives(everyones: _Lines) -> Iterator[tuple[IssuedOp, int, int]]:
    """Yield collectives that one rank has come to and another of its group has not: both ranks."""
    found = {at: line for lines in everyones.values() for at, line in lines.items()}
    for at, line in sorted(found.items(), key=lambda each: _KINDS.index(each[1].kind)):
        if line.kind in _COLLECTIVES:
            last = {rank: _last(everyones[rank].get(at)) for rank in line.members}
            ahead, behind = max(last, key=last.__getitem__), min(last, key=last.__getitem__)
            if last[ahead] != last[behind]:
                yield everyones[ahead][at].issues[last[ahead]], ahead, behind


def _missed_messages(everyones: _Lines) -> Iterator[tuple[IssuedOp, int, int]]:
    """Yield the first message of a pair that one rank sends or expects, and the other does not."""
    for rank, lines in everyones.items():
        for line in lines.values():
            if line.kind in _COLLECTIVES:
                continue
            for other in set(line.members) - {rank}:
                number = _last(everyones[other].get((_ANSWERS[line.kind], line.key))) + 1
                if number in line.issues:
                    yield line.issues[number], rank, other


@dataclass
class _OwnLine:
    """Where a line's entries lie, if it has a place on the page, and how many issues it has had."""

    at: int | None
    number: int = 0


class FlightRecorder(FlightRecorderView):
    """This rank's page, and a view of the others'."""

    def __init__(
        self, path: Path, rank: int, ranks: range, world_size: int, advice: str = LEAF_ADVICE
    ) -> None:
        super().__init__(path, ranks, advice)
        self.rank = rank
        self.has_everyone = len(ranks) == world_size
        self._base = self._page(rank)
        self._map[self._base : self._base + _PAGE] = bytes(_PAGE)  # an earlier run's
        self._world_size = world_size
        self._own: dict[tuple[str, tuple[int, ...]], _OwnLine] = {}
        self._step = self._first = self._num_waits = self._progress = self._phase = self._order = 0
        self._waiting = False
        self._pid = os.getpid()
        self._write_header()

    def _write_header(self) -> None:
        self._progress += 1
        fields = (
            self._step,
            self._waiting,
            self._num_waits,
            self._progress,
            self._phase,
            self._pid,
            self._first,
        )
        _HEADER.pack_into(self._map, self._base, *fields)

    def disagreement(self) -> str | None:
        """The first collective on which this rank and another differ, in words."""
        return self._first_difference([self.rank])

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

    def issue(self, kind: str, group: RankSet, name: str, num_bytes: int = 0) -> None:
        """Say what is issued next.

        Args:
            kind: one of collectives, or send or receive.
            group: of a message the sender and the receiver, in this order.
            name: what it is about, the same on all ranks of `group`.
            num_bytes: that this rank sends.
        """
        line = self._own.get((kind, group.ranks))
        if line is None:
            line = self._own[kind, group.ranks] = self._begin_line(kind, group)
        self._order += 1
        line.number += 1
        if line.at is not None:
            at = line.at + line.number % _HISTORY * _ENTRY.size
            short = name.encode()[:_NAME_BYTES]
            _ENTRY.pack_into(self._map, at, line.number, self._order, num_bytes, short)
        self._write_header()

    def _begin_line(self, kind: str, group: RankSet) -> _OwnLine:
        place = len(self._own)
        if place >= _NUM_LINES:
            return _OwnLine(None)
        at = self._base + _HEADER.size + place * _LINE_BYTES
        here = sum(1 << place for place, rank in enumerate(self.ranks) if rank in group.ranks)
        bits = (here % (1 << 8 * _MEMBERS_BYTES)).to_bytes(_MEMBERS_BYTES, "little")
        words = self._over(kind, group).encode()[:_OVER_BYTES]
        key = zlib.crc32(repr(group.ranks).encode())
        _GROUP.pack_into(self._map, at + _KIND.size, key, bits, words)
        _KIND.pack_into(self._map, at, _KINDS.index(kind) + 1)  # last: now it is there for others
        return _OwnLine(at + _ENTRIES_AT)

    def _over(self, kind: str, group: RankSet) -> str:
        """Which group; nothing where it is all ranks: there is no other then."""
        if kind == "send":
            return f" to rank {group.ranks[1]}"
        if kind == "receive":
            return f" from rank {group.ranks[0]}"
        if len(group.ranks) == self._world_size:
            return ""
        return f" over {group.axis} (ranks {listed(group.ranks)})"

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
        board: FlightRecorder,
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
        everyone: list[RankProgress] = []
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
                    text is None
                    and board.has_everyone
                    and now - stopped_since > 4 * self._patience_s
                ):  # no message takes that long
                    text = board.stalemate()
                if text is not None and text == seen:  # twice: the other rank may have been writing
                    self._stop(HangError(text))
                seen = text

    def _tell_late(self, states: list[RankProgress]) -> None:
        """Nothing has moved for a while; where nobody waits, everyone computes."""
        ranks = zip(self._board.ranks, states, strict=True)
        late = [rank for rank, state in ranks if not state.waiting or state.is_halted]
        if (
            self._late is not None
            and len(late) < len(states)
            and (late or not self._board.has_everyone)
        ):
            self._late(late)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
