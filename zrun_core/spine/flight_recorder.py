"""The progress and the collectives of every rank of a host, readable without talking to it.

Each rank owns one page of a shared file. It writes there which step and phase it is in and, before
it issues a collective, its kind, its group and the unit's name, numbered per kind and group:

    header                                      step, phase, waiting, progress: `RankProgress`
    wait for a tier                             since when, for 'its disk (/scratch)'
    record: all_gather over ranks 0, 1          7 'blocks.0'   8 'blocks.1'   9 'head'
    record: send to rank 2                      3 'hidden of 2'
    ...                                         up to 40 records of the last 32 operations

Ranks that wait for each other compare these records within each group: the first number at which
two ranks name different units is the disagreement. What ranks of different groups do is never
compared. The host's agent reads the same pages to find ranks that no longer move. Writing costs two
microseconds and synchronises nothing.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from zrun_core.errors import HangError
from zrun_core.sizes import format_size

_PAGE_BYTES = 1 << 17
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
_NUM_RECORDS = 40  # of a page; operations of more kinds and groups are not recorded
_HISTORY = 32  # last operations of a record
_NAME_BYTES = 72
_MEMBERS_BYTES = 32  # a bit for each rank of the host
_OVER_BYTES = 96
_HEADER = struct.Struct("<7Q")  # the fields of `RankProgress`
# A record: its place among the kinds, from 1, or 0 where there is none; key of the group, its
# members on this host, the group in words; then its operations.
_KIND = struct.Struct("<Q")
_GROUP = struct.Struct(f"<Q{_MEMBERS_BYTES}s{_OVER_BYTES}s")
_ENTRY = struct.Struct(f"<QQQ{_NAME_BYTES}s")  # number in the record, number over all, bytes, name
_ENTRIES_AT = _KIND.size + _GROUP.size
_RECORD_BYTES = _ENTRIES_AT + _HISTORY * _ENTRY.size
_TIER_WAIT = struct.Struct("<Q256s")  # since when, 0 where there is none; for what
_TIER_WAIT_AT = _HEADER.size + _NUM_RECORDS * _RECORD_BYTES
LEAF_ADVICE = (
    "Some modules ran on one rank only: name the module that chooses between them in zero.leaf, so "
    "that it is handled as a whole"
)
MEAN_NAME = "mean() in hooks."  # with the key of the hook
HOOK_ADVICE = "A hook called context.mean() on some ranks only: call it on every rank"
assert _TIER_WAIT_AT + _TIER_WAIT.size <= _PAGE_BYTES


def host_file(run_dir: Path, name: str, first_rank: int) -> Path:
    """Return a file of the run directory that belongs to one host.

    Hosts may share the directory itself.

    Args:
        run_dir: of the run.
        name: of the file on the first host.
        first_rank: of the host.
    """
    path = run_dir / name
    if first_rank == 0:
        return path
    return path.with_stem(f"{path.stem}-{first_rank}")


class RankProgress(NamedTuple):
    """The header of a rank's page.

    Attributes:
        step: optimizer step that began last; 0 before the first.
        waiting: for other ranks, or for its device.
        num_waits: how often it has waited.
        progress: counts all that the rank does: steps, phases, collectives.
        phase: one of `PHASES`.
        pid: 0 before the rank's process has written its page.
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
        """Return whether a signal or a debugger has stopped the process: it is not late."""
        return process_state(self.pid) in ("T", "t")


class TierWait(NamedTuple):
    """A wait for a rank's own memory on the host or on a disk.

    Attributes:
        what: it waits for, as in "its disk (/scratch)".
        seconds: since it began.
    """

    what: str
    seconds: float

    def __str__(self) -> str:
        return f"has waited {self.seconds:.0f} s for {self.what}"


class RankSet(Protocol):
    """The ranks that something is issued over: a group, or a message's sender and receiver."""

    @property
    def axis(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


class IssuedOp(NamedTuple):
    """One collective, or one end of a message, that a rank issued.

    Attributes:
        number: from 1, per kind and group.
        over: the group in words; nothing where it is all ranks.
        order: from 1, over all operations of the rank.
        num_bytes: that this rank sends, or only receives; those of other ranks may differ.
        name: of the unit, or of what else it is about.
    """

    kind: str
    number: int
    over: str
    order: int
    num_bytes: int
    name: str

    def __str__(self) -> str:
        return f"{self.what}, {self.name!r} ({format_size(self.num_bytes)})"

    @property
    def what(self) -> str:
        return f"{self.kind} {self.number}{self.over}"

    @property
    def peer(self) -> int:
        """Return the rank at the other end of a message."""
        return int(self.over.rpartition(" ")[2])


class Awaited(NamedTuple):
    """What a rank waits for.

    Attributes:
        op: a message that nobody has sent yet, or a collective.
        ranks: that have not come to it.
    """

    op: IssuedOp
    ranks: tuple[int, ...]


class FlightRecord(NamedTuple):
    """The operations of one kind over one group that a rank issued.

    Attributes:
        key: tells the group from others, the same on all its ranks.
        members: the ranks of this host that are in it.
        ops: the last ones, by number.
    """

    kind: str
    key: int
    members: tuple[int, ...]
    ops: dict[int, IssuedOp]


_Records = dict[int, dict[tuple[str, int], FlightRecord]]  # of each rank, by kind and group


def listed(ranks: Sequence[int]) -> str:
    """Return the first few of `ranks` as text."""
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        shown.append("...")
    return ", ".join(shown)


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of a process (R, S, D, T, ...); None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _read_header(pages: mmap.mmap | bytes, offset: int) -> RankProgress:
    step, waiting, num_waits, progress, place, pid, first = _HEADER.unpack_from(pages, offset)
    phase = PHASES[min(place, len(PHASES) - 1)]
    return RankProgress(step, bool(waiting), num_waits, progress, phase, pid, first)


def read_first_progress(path: Path) -> RankProgress | None:
    """Return the progress of the first rank in a file of pages; None: there is no such file."""
    try:
        with path.open("rb") as pages:
            header = pages.read(_HEADER.size)
    except OSError:
        return None
    if len(header) < _HEADER.size:
        return None
    return _read_header(header, 0)


class FlightRecorderView:
    """The pages of a host's ranks, to be read. The first process that needs the file creates it.

    Attributes:
        ranks: of the host, contiguous.
        advice: what `disagreement` and `stalemate` tell the user to do.
    """

    def __init__(self, path: Path, ranks: range, advice: str = LEAF_ADVICE) -> None:
        self.ranks = ranks
        self.advice = advice
        num_bytes = _PAGE_BYTES * len(ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, num_bytes)  # all processes set the same size
        self._map = mmap.mmap(descriptor, num_bytes)
        os.close(descriptor)

    def _page(self, rank: int) -> int:
        return _PAGE_BYTES * self.ranks.index(rank)

    def state(self, rank: int) -> RankProgress:
        """Return the progress of `rank`."""
        return _read_header(self._map, self._page(rank))

    def tier_wait(self, rank: int) -> TierWait | None:
        """Return what `rank` waits for that is no other rank; None: it does not."""
        since, what = _TIER_WAIT.unpack_from(self._map, self._page(rank) + _TIER_WAIT_AT)
        if not since:
            return None
        return TierWait(_text(what), max(0, time.monotonic_ns() - since) / 1e9)

    def records(self, rank: int) -> dict[tuple[str, int], FlightRecord]:
        """Return what `rank` has issued, by kind and key of the group, in the order of kinds."""
        found = sorted(self._read_records(rank), key=lambda record: _KINDS.index(record.kind))
        return {(record.kind, record.key): record for record in found}

    def _read_records(self, rank: int) -> Iterator[FlightRecord]:
        for place in range(_NUM_RECORDS):
            at = self._page(rank) + _HEADER.size + place * _RECORD_BYTES
            (number,) = _KIND.unpack_from(self._map, at)
            if not number:
                return
            kind = _KINDS[number - 1]
            key, member_bits, words = _GROUP.unpack_from(self._map, at + _KIND.size)
            bits = int.from_bytes(member_bits, "little")
            members = tuple(each for index, each in enumerate(self.ranks) if bits >> index & 1)
            ops = self._read_ops(at + _ENTRIES_AT, kind, _text(words))
            yield FlightRecord(kind, key, members, ops)

    def _read_ops(self, at: int, kind: str, over: str) -> dict[int, IssuedOp]:
        found = {}
        for place in range(_HISTORY):
            entry = _ENTRY.unpack_from(self._map, at + place * _ENTRY.size)
            number, order, num_bytes, name = entry
            if number:
                found[number] = IssuedOp(kind, number, over, order, num_bytes, _text(name))
        return found

    def last(self, rank: int) -> IssuedOp | None:
        """Return what `rank` issued last."""
        ops = [op for record in self.records(rank).values() for op in record.ops.values()]
        return max(ops, key=lambda op: op.order, default=None)

    def awaited(self) -> dict[int, Awaited]:
        """Return what ranks wait for: a message, or else the first collective, as far as known."""
        records = {rank: self.records(rank) for rank in self.ranks}
        found = {}
        for rank in self.ranks:
            if self.state(rank).waiting:
                first = _awaited_message(rank, records) or _awaited_collective(rank, records)
                if first is not None:
                    found[rank] = first
        return found

    def disagreement(self) -> str | None:
        """Return the first collective on which two ranks differ, in words; None: there is none."""
        return self._first_difference(self.ranks)

    def _first_difference(self, ranks: Sequence[int]) -> str | None:
        """Return the first collective on which one of `ranks` and any other differ, in words."""
        records = {rank: self.records(rank) for rank in self.ranks}
        for rank in ranks:
            text = self._difference(rank, records)
            if text is not None:
                return text
        return None

    def _difference(self, rank: int, records: _Records) -> str | None:
        for at, mine in records[rank].items():
            if mine.kind not in _COLLECTIVES:  # messages may be issued ahead, in any order
                continue
            for peer in mine.members:
                theirs = records[peer].get(at, mine)
                for number in sorted(mine.ops.keys() & theirs.ops.keys()):
                    own_op = mine.ops[number]
                    peer_op = theirs.ops[number]
                    if own_op.name != peer_op.name:
                        return self._describe_difference(own_op, rank, peer_op, peer)
        return None

    def _describe_difference(
        self, own_op: IssuedOp, rank: int, peer_op: IssuedOp, peer: int
    ) -> str:
        step = self.state(rank).step
        when = f" of step {step}" if step else ""  # a user's own loop does not say its steps
        return (
            f"ranks disagree on {own_op.what}{when}: rank {rank} is at {own_op.name!r} "
            f"({format_size(own_op.num_bytes)}), rank {peer} at {peer_op.name!r} "
            f"({format_size(peer_op.num_bytes)}). {self._advice(own_op.name, peer_op.name)}"
        )

    def stalemate(self) -> str | None:
        """Return what one rank waits for and another never issued, in words.

        Meant for when all ranks have stopped. A rank that a signal halted may still issue it. Where
        other hosts have ranks too, all may wait for those.
        """
        states = {rank: self.state(rank) for rank in self.ranks}
        if any(state.is_halted for state in states.values()):
            return None
        records = {rank: self.records(rank) for rank in self.ranks}
        missed = list(_missed_collectives(records)) or list(_missed_messages(records))
        if not missed:
            return None
        # What a hook alone waits for explains all others.
        op, ahead, behind = min(missed, key=lambda each: not each[0].name.startswith(MEAN_NAME))
        step = states[ahead].step
        when = f" in step {step}" if step else ""
        advice = f" {self._advice(op.name)}" if op.kind in _COLLECTIVES else ""
        return (
            f"all ranks wait{when}: rank {ahead} for {op.what}, {op.name!r}, to which rank "
            f"{behind} does not come.{advice}"
        )

    def _advice(self, *names: str) -> str:
        """Return what to do where ranks do not meet in the collectives of these names."""
        is_of_hook = any(name.startswith(MEAN_NAME) for name in names)
        return HOOK_ADVICE if is_of_hook else self.advice


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _last_number(record: FlightRecord | None) -> int:
    """Return the number of what was issued last."""
    return 0 if record is None else max(record.ops, default=0)


def _awaited_message(rank: int, records: _Records) -> Awaited | None:
    """Return the message that a rank waits for; None: there is none, or it has been sent."""
    ops = [op for record in records[rank].values() for op in record.ops.values()]
    last = max(ops, key=lambda op: op.order, default=None)
    if last is None or last.kind != "receive":
        return None
    if last.peer in records:
        own = next(record for record in records[rank].values() if last in record.ops.values())
        if _last_number(records[last.peer].get(("send", own.key))) >= last.number:
            return None
    return Awaited(last, (last.peer,))


def _awaited_collective(rank: int, records: _Records) -> Awaited | None:
    """Return the first collective to which a rank has come and another one has not."""
    found = []
    for at, record in records[rank].items():
        if record.kind not in _COLLECTIVES:
            continue
        last = {peer: _last_number(records[peer].get(at)) for peer in record.members}
        op = record.ops.get(min(last.values(), default=0) + 1)
        if op is not None:
            found.append(Awaited(op, tuple(peer for peer in last if last[peer] < op.number)))
    return min(found, key=lambda each: each.op.order, default=None)


def _missed_collectives(records: _Records) -> Iterator[tuple[IssuedOp, int, int]]:
    """Yield collectives that one rank has issued and another of its group has not: both ranks."""
    found = {at: record for of_rank in records.values() for at, record in of_rank.items()}
    for at, record in sorted(found.items(), key=lambda each: _KINDS.index(each[1].kind)):
        if record.kind not in _COLLECTIVES:
            continue
        last = {rank: _last_number(records[rank].get(at)) for rank in record.members}
        ahead = max(last, key=last.__getitem__)
        behind = min(last, key=last.__getitem__)
        if last[ahead] != last[behind]:
            yield records[ahead][at].ops[last[ahead]], ahead, behind


def _missed_messages(records: _Records) -> Iterator[tuple[IssuedOp, int, int]]:
    """Yield the first message of a pair that one rank sends or expects, and the other does not."""
    for rank, of_rank in records.items():
        for record in of_rank.values():
            if record.kind in _COLLECTIVES:
                continue
            answer = (_ANSWERS[record.kind], record.key)
            for other in set(record.members) - {rank}:
                number = _last_number(records[other].get(answer)) + 1
                if number in record.ops:
                    yield record.ops[number], rank, other


@dataclass
class _OwnRecord:
    """A record of this rank.

    Attributes:
        at: where its entries begin in the file; None: the page has no room for it.
        number: of the last operation.
    """

    at: int | None
    number: int = 0


class FlightRecorder(FlightRecorderView):
    """This rank's page, and a view of the others'."""

    def __init__(
        self, path: Path, rank: int, ranks: range, world_size: int, advice: str = LEAF_ADVICE
    ) -> None:
        """Begin an empty page.

        Args:
            path: of the host's file.
            rank: this one.
            ranks: of the host, contiguous.
            world_size: ranks of all hosts.
            advice: as of `FlightRecorderView`.
        """
        super().__init__(path, ranks, advice)
        self.rank = rank
        self.has_everyone = len(ranks) == world_size
        self._base = self._page(rank)
        self._map[self._base : self._base + _PAGE_BYTES] = bytes(_PAGE_BYTES)  # an earlier run's
        self._world_size = world_size
        self._own: dict[tuple[str, tuple[int, ...]], _OwnRecord] = {}
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

    def issue(self, kind: str, group: RankSet, name: str, num_bytes: int = 0) -> None:
        """Record what is issued next.

        Args:
            kind: a collective, or send or receive.
            group: of a message the sender and the receiver, in this order.
            name: what it is about, the same on all ranks of `group`.
            num_bytes: that this rank sends, or only receives.
        """
        record = self._own.get((kind, group.ranks))
        if record is None:
            record = self._own[kind, group.ranks] = self._begin_record(kind, group)
        self._order += 1
        record.number += 1
        if record.at is not None:
            at = record.at + record.number % _HISTORY * _ENTRY.size
            short = name.encode()[:_NAME_BYTES]
            _ENTRY.pack_into(self._map, at, record.number, self._order, num_bytes, short)
        self._write_header()

    def _begin_record(self, kind: str, group: RankSet) -> _OwnRecord:
        place = len(self._own)
        if place >= _NUM_RECORDS:
            return _OwnRecord(None)
        at = self._base + _HEADER.size + place * _RECORD_BYTES
        bits = sum(1 << index for index, rank in enumerate(self.ranks) if rank in group.ranks)
        bits %= 1 << 8 * _MEMBERS_BYTES
        member_bits = bits.to_bytes(_MEMBERS_BYTES, "little")
        words = self._group_in_words(kind, group).encode()[:_OVER_BYTES]
        key = zlib.crc32(repr(group.ranks).encode())
        _GROUP.pack_into(self._map, at + _KIND.size, key, member_bits, words)
        _KIND.pack_into(self._map, at, _KINDS.index(kind) + 1)  # last: now others read it
        return _OwnRecord(at + _ENTRIES_AT)

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
        _TIER_WAIT.pack_into(self._map, self._base + _TIER_WAIT_AT, since, what.encode())
        self._write_header()


class Watchdog:
    """A thread that looks at all pages when this rank has waited long.

    On a disagreement it ends the process. It cannot raise in the waiting thread, which sits in a
    collective, so it calls `stop(error)`, which must not return.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        stop: Callable[[HangError], None],
        patience_s: float = 2.0,
        *,
        late: Callable[[list[int]], None] | None = None,
        late_s: float = math.inf,
    ) -> None:
        """Watch from now on.

        Args:
            recorder: of this rank.
            stop: ends the process.
            patience_s: seconds that a rank waits before it is looked at.
            late: told which ranks of this host do not wait, once each time that the others have
                waited for them, and nothing has moved, for `late_s` seconds. None of them: all wait
                for another host.
            late_s: see `late`.
        """
        self._recorder = recorder
        self._stop = stop
        self._patience_s = patience_s
        self._late = late
        self._late_s = late_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zrun-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        recorder = self._recorder
        moved_at = stopped_at = waits_since = time.monotonic()
        states: list[RankProgress] = []  # at the last look at which one had moved
        num_waits = -1
        is_late_told = False
        seen: str | None = None
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
            own = recorder.state(recorder.rank)
            if not own.waiting or own.num_waits != num_waits:
                waits_since = now
                num_waits = own.num_waits
            elif now - waits_since > self._patience_s:
                text = self._find_problem(now - stopped_at)
                if text is not None and text == seen:  # twice: the other rank may have been writing
                    self._stop(HangError(text))
                seen = text

    def _find_problem(self, stopped_s: float) -> str | None:
        """Return why this rank waits, as far as the pages tell.

        Args:
            stopped_s: seconds for which all ranks of the host have waited without any move.
        """
        text = self._recorder.disagreement()
        if text is not None:
            return text
        is_stuck = stopped_s > 4 * self._patience_s  # no message takes that long
        if self._recorder.has_everyone and is_stuck:
            return self._recorder.stalemate()
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
        self._closed.set()
        self._thread.join()
