"""A rank's page of the flight recorder: what is in it, and where.

    page = Page(pages, ranks, rank)             in a map of the file of a host
    page.progress(), page.records()             read
    page.write_progress(...)                    and write

Nothing else knows at which offsets a page has what.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zrun_core.sizes import format_size

COLLECTIVES = (
    *("all_gather", "reduce_scatter", "all_reduce"),
    *("push", "pull", "broadcast", "small"),
)
ANSWERS = {"send": "receive", "receive": "send"}  # what the other rank does about a message
KINDS = (*COLLECTIVES, *ANSWERS)
PHASES = (  # in the order in which they come
    *("start", "import", "rendezvous", "build", "shard", "load"),
    *("data", "forward", "backward", "update", "hook", "evaluation", "save", "profile", "end"),
    "script",  # of the user's own: it tells no more
)
BESIDE_STEPS = frozenset({"hook", "evaluation", "save", "profile"})  # of the phases
_PAGE_BYTES = 1 << 18
_NUM_RECORDS = 40  # of a page; operations of more kinds and groups are not recorded
_HISTORY = 32  # last operations of a record
# Records of lines: one for each direction of each of 256 ranks that are served. They have the last
# message alone, since nobody sends the next one before it was answered.
_NUM_LINES = 512
_NAME_BYTES = 72
_MEMBERS_BYTES = 32  # a bit for each rank of the host
_OVER_BYTES = 96
_HEADER = struct.Struct("<7Q")  # the fields of `RankProgress`
# A record: its place among the kinds, from 1, or 0 where there is none, with a mark where kinds
# follow each other in one order; key of the group, its members on this host, the group in words;
# then its operations.
_KIND = struct.Struct("<Q")
_IN_ORDER = 1 << 8
_GROUP = struct.Struct(f"<Q{_MEMBERS_BYTES}s{_OVER_BYTES}s")
_ENTRY = struct.Struct(f"<QQQ{_NAME_BYTES}s")  # number in the record, number over all, bytes, name
_ENTRIES_AT = _KIND.size + _GROUP.size
_RECORD_BYTES = _ENTRIES_AT + _HISTORY * _ENTRY.size
_PLACES = ((False, _NUM_RECORDS), (True, _NUM_LINES))  # whether of lines, and how many
_TIER_WAIT = struct.Struct("<Q256s")  # since when, 0 where there is none; for what
_TIER_WAIT_AT = _HEADER.size + _NUM_RECORDS * _RECORD_BYTES
_LINES_AT = _TIER_WAIT_AT + _TIER_WAIT.size
_LINE_BYTES = _ENTRIES_AT + _ENTRY.size
assert _LINES_AT + _NUM_LINES * _LINE_BYTES <= _PAGE_BYTES


def host_file(run_dir: Path, name: str, first_rank: int) -> Path:
    """Return a file of the run directory that belongs to one host.

    Hosts may share the directory itself.

    Args:
        name: of the file on the first host.
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

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended; one that has not begun yet is not gone."""
        return self.pid != 0 and process_state(self.pid) in (None, "Z", "X")


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


class FlightRecord(NamedTuple):
    """The operations of one kind over one group that a rank issued.

    Attributes:
        key: tells the group from others, the same on all its ranks.
        members: the ranks of this host that are in it.
        ops: the last ones, by number.
        in_order: all ranks issue it and other such kinds of the group in one order.
    """

    kind: str
    key: int
    members: tuple[int, ...]
    ops: dict[int, IssuedOp]
    in_order: bool


class Records(dict[tuple[str, int], FlightRecord]):
    """What a rank has issued, by kind and key of the group, in the order of kinds.

    Attributes:
        is_full: the page has no room for more of them: the rank may have issued others, too.
    """

    is_full = False


class OpsRoom(NamedTuple):
    """Where a page has the operations of a record.

    Attributes:
        at: in the map of the file.
        history: how many it has; the next one takes the place of the oldest.
    """

    at: int
    history: int


class Page:
    """The page of one rank, in a map of the file of its host."""

    def __init__(self, pages: mmap.mmap, ranks: range, rank: int) -> None:
        """
        Args:
            pages: those of the host, as `map_pages` returns them.
            ranks: of the host, contiguous.
        """
        self._map = pages
        self._ranks = ranks
        self._base = _PAGE_BYTES * ranks.index(rank)

    # Reading

    def progress(self) -> RankProgress:
        """Return the header."""
        return _read_header(self._map, self._base)

    def tier_wait(self) -> TierWait | None:
        """Return what the rank waits for that is no other rank; None: it does not."""
        since, what = _TIER_WAIT.unpack_from(self._map, self._base + _TIER_WAIT_AT)
        if not since:
            return None
        return TierWait(_text(what), max(0, time.monotonic_ns() - since) / 1e9)

    def records(self) -> Records:
        """Return what the rank has issued."""
        found = sorted(self._read_records(), key=lambda record: KINDS.index(record.kind))
        records = Records({(record.kind, record.key): record for record in found})
        records.is_full = any(
            self._is_used(num_places - 1, is_line=is_line) for is_line, num_places in _PLACES
        )
        return records

    def _read_records(self) -> Iterator[FlightRecord]:
        for is_line, num_places in _PLACES:
            for place in range(num_places):
                found = self._read_record(place, is_line=is_line)
                if found is None:
                    break
                yield found

    def _read_record(self, place: int, *, is_line: bool) -> FlightRecord | None:
        """Return the record of a place; None: there is none, nor in those behind it."""
        at = self._record_at(place, is_line=is_line)
        (number,) = _KIND.unpack_from(self._map, at)
        if not number:
            return None
        in_order = bool(number & _IN_ORDER)
        kind = KINDS[number % _IN_ORDER - 1]
        key, member_bits, words = _GROUP.unpack_from(self._map, at + _KIND.size)
        bits = int.from_bytes(member_bits, "little")
        members = tuple(each for index, each in enumerate(self._ranks) if bits >> index & 1)
        ops = self._read_ops(_ops_room(at, is_line=is_line), kind, _text(words))
        return FlightRecord(kind, key, members, ops, in_order)

    def _read_ops(self, room: OpsRoom, kind: str, over: str) -> dict[int, IssuedOp]:
        found = {}
        for place in range(room.history):
            entry = _ENTRY.unpack_from(self._map, room.at + place * _ENTRY.size)
            number, order, num_bytes, name = entry
            if number:
                found[number] = IssuedOp(kind, number, over, order, num_bytes, _text(name))
        return found

    def _is_used(self, place: int, *, is_line: bool) -> bool:
        return any(_KIND.unpack_from(self._map, self._record_at(place, is_line=is_line)))

    def _record_at(self, place: int, *, is_line: bool) -> int:
        if is_line:
            return self._base + _LINES_AT + place * _LINE_BYTES
        return self._base + _HEADER.size + place * _RECORD_BYTES

    # Writing

    def clear(self) -> None:
        """Remove what an earlier run has written."""
        self._map[self._base : self._base + _PAGE_BYTES] = bytes(_PAGE_BYTES)

    def write_progress(
        self,
        step: int,
        waiting: bool,
        num_waits: int,
        progress: int,
        phase: int,
        pid: int,
        first: int,
    ) -> None:
        """Write the header: the fields of `RankProgress`, of the phase its place in `PHASES`."""
        _HEADER.pack_into(
            self._map, self._base, step, waiting, num_waits, progress, phase, pid, first
        )

    def begin_record(
        self,
        place: int,
        kind: str,
        ranks: tuple[int, ...],
        over: str,
        *,
        in_order: bool,
        is_line: bool,
    ) -> OpsRoom | None:
        """Begin the record of operations of one kind over one group.

        Args:
            place: among the records of this page that are of lines, or that are not, from 0.
            kind: one of `KINDS`.
            ranks: of the group, on all hosts.
            over: the group in words.
            in_order: as of `FlightRecord`.
            is_line: its operations are messages of a line, of which each is answered.

        Returns:
            Where `write_op` finds it; None: the page has no room for it.
        """
        if place >= (_NUM_LINES if is_line else _NUM_RECORDS):
            return None
        at = self._record_at(place, is_line=is_line)
        bits = sum(1 << index for index, rank in enumerate(self._ranks) if rank in ranks)
        bits %= 1 << 8 * _MEMBERS_BYTES
        member_bits = bits.to_bytes(_MEMBERS_BYTES, "little")
        key = zlib.crc32(repr(ranks).encode())
        words = over.encode()[:_OVER_BYTES]
        _GROUP.pack_into(self._map, at + _KIND.size, key, member_bits, words)
        number = KINDS.index(kind) + 1 + in_order * _IN_ORDER
        _KIND.pack_into(self._map, at, number)  # last: now others read it
        return _ops_room(at, is_line=is_line)

    def write_op(self, record: OpsRoom, number: int, order: int, num_bytes: int, name: str) -> None:
        """Write an operation over the oldest one of its record.

        Args:
            record: as `begin_record` returned it.
            number: and the rest, as of `IssuedOp`.
        """
        at = record.at + number % record.history * _ENTRY.size
        short = name.encode()[:_NAME_BYTES]
        _ENTRY.pack_into(self._map, at, number, order, num_bytes, short)

    def write_tier_wait(self, since: int, what: str) -> None:
        """Write what the rank waits for, since when on the monotonic clock; 0: for nothing."""
        _TIER_WAIT.pack_into(self._map, self._base + _TIER_WAIT_AT, since, what.encode())


def _ops_room(record_at: int, *, is_line: bool) -> OpsRoom:
    return OpsRoom(record_at + _ENTRIES_AT, 1 if is_line else _HISTORY)


def map_pages(path: Path, ranks: range) -> mmap.mmap:
    """Return the pages of a host's ranks in memory; the first process creates the file."""
    num_bytes = _PAGE_BYTES * len(ranks)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, num_bytes)  # all processes set the same size
    pages = mmap.mmap(descriptor, num_bytes)
    os.close(descriptor)
    return pages


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


def _read_header(pages: mmap.mmap | bytes, offset: int) -> RankProgress:
    step, waiting, num_waits, progress, place, pid, first = _HEADER.unpack_from(pages, offset)
    phase = PHASES[min(place, len(PHASES) - 1)]
    return RankProgress(step, bool(waiting), num_waits, progress, phase, pid, first)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of a process (R, S, D, T, ...); None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
