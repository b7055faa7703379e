"""What a host's flight recorders tell together: where its ranks wait, and where they disagree.

    view = FlightRecorderView(path, ranks)
    view.state(3).phase
    view.disagreement()             "ranks disagree on all_gather 9 of step 4: rank 0 is at ..."

Ranks that wait for each other compare their records within each group: the first number at which
two ranks name different units is the disagreement. What ranks of different groups do is never
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zrun_core.sizes import format_size
from zrun_core.spine.flight_page import (
    ANSWERS,
    COLLECTIVES,
    KINDS,
    FlightRecord,
    IssuedOp,
    Page,
    RankProgress,
    Records,
    TierWait,
    map_pages,
)

LEAF_ADVICE = (
    "Some modules ran on one rank only: name the module that chooses between them in zero.leaf, so "
    "that it is handled as a whole"
)
MEAN_NAME = "mean() in hooks."  # with the key of the hook
HOOK_ADVICE = "A hook called context.mean() on some ranks only: call it on every rank"


class Awaited(NamedTuple):
    """What a rank waits for.

    Attributes:
        op: a message that nobody has sent yet, or a collective.
        ranks: that have not come to it.
    """

    op: IssuedOp
    ranks: tuple[int, ...]


_Records = dict[int, Records]  # of each rank


class FlightRecorderView:
    """The pages of a host's ranks, to be read. The first process that needs the file creates it.

    Attributes:
        ranks: of the host, contiguous.
        advice: what `disagreement` and `stalemate` tell the user to do.
    """

    def __init__(self, path: Path, ranks: range, advice: str = LEAF_ADVICE) -> None:
        self.ranks = ranks
        self.advice = advice
        pages = map_pages(path, ranks)
        self._pages = {rank: Page(pages, ranks, rank) for rank in ranks}

    def state(self, rank: int) -> RankProgress:
        """Return the progress of `rank`."""
        return self._pages[rank].progress()

    def tier_wait(self, rank: int) -> TierWait | None:
        """Return what `rank` waits for that is no other rank; None: it does not."""
        return self._pages[rank].tier_wait()

    def records(self, rank: int) -> Records:
        """Return what `rank` has issued."""
        return self._pages[rank].records()

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
                first = _first_awaited(rank, records)
                if first is not None:
                    found[rank] = first
        return found

    def awaits_in_words(self, rank: int) -> str:
        """Return what a rank waits for: "for all_gather 9, 'head' (2 MiB), which ...".

        Meant for one that does not move, also where it does not say that it waits.
        """
        awaited = _first_awaited(rank, {each: self.records(each) for each in self.ranks})
        if awaited is None:
            last = self.last(rank)
            return "for other ranks" if last is None else f"for other ranks, last: {last}"
        who = f"rank {awaited.ranks[0]} has"
        if len(awaited.ranks) > 1:
            who = f"ranks {', '.join(map(str, awaited.ranks[:8]))} have"
        if awaited.op.kind == "receive":
            return f"for {awaited.op}, which {who} not sent"
        return f"for {awaited.op}, which {who} not reached"

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
            if mine.kind not in COLLECTIVES:  # messages may be issued ahead, in any order
                continue
            for peer in mine.members:
                theirs = records[peer].get(at, mine)
                for number in sorted(mine.ops.keys() & theirs.ops.keys()):
                    own_op = mine.ops[number]
                    peer_op = theirs.ops[number]
                    if own_op.name != peer_op.name:
                        return self._describe_difference(own_op, rank, peer_op, peer)
        return self._difference_of_order(rank, records)

    def _difference_of_order(self, rank: int, records: _Records) -> str | None:
        """Return the first two operations that this rank and another issue in different orders.

        Where backends pair them up by their order alone, that is on NCCL, neither comes through.
        """
        for key in {record.key for record in records[rank].values() if record.in_order}:
            own = _in_order(records[rank], key)
            for peer in {each for _, members in own for each in members} - {rank}:
                theirs = _in_order(records[peer], key)
                found = _swapped([op for op, _ in own], [op for op, _ in theirs])
                if found is not None:
                    first, second = found
                    return (
                        f"ranks disagree on the order of {first.what} and {second.what}"
                        f"{self._when(rank)}: rank {rank} is at {first.name!r} first, rank {peer} "
                        f"at {second.name!r}. {self._advice(first.name, second.name)}"
                    )
        return None

    def _when(self, rank: int) -> str:
        step = self.state(rank).step
        return f" of step {step}" if step else ""  # a user's own loop does not say its steps

    def _describe_difference(
        self, own_op: IssuedOp, rank: int, peer_op: IssuedOp, peer: int
    ) -> str:
        return (
            f"ranks disagree on {own_op.what}{self._when(rank)}: rank {rank} is at {own_op.name!r} "
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
        advice = f" {self._advice(op.name)}" if op.kind in COLLECTIVES else ""
        return (
            f"all ranks wait{when}: rank {ahead} for {op.what}, {op.name!r}, which rank "
            f"{behind} does not reach.{advice}"
        )

    def _advice(self, *names: str) -> str:
        """Return what to do where ranks do not meet in the collectives of these names."""
        is_of_hook = any(name.startswith(MEAN_NAME) for name in names)
        return HOOK_ADVICE if is_of_hook else self.advice


def _last_number(of_rank: Records, at: tuple[str, int]) -> int | None:
    """Return the number of what a rank has issued last of a kind in a group.

    Returns:
        0 if that is nothing; None where its page had no room for it: nobody knows.
    """
    record = of_rank.get(at)
    if record is None:
        return None if of_rank.is_full else 0
    return max(record.ops, default=0)


def _last_of_members(
    record: FlightRecord, records: _Records, at: tuple[str, int]
) -> dict[int, int]:
    """Return the last number of each rank in the group of `record`, as far as it is known."""
    found = {}
    for peer in record.members:
        number = _last_number(records[peer], at)
        if number is not None:
            found[peer] = number
    return found


def _in_order(of_rank: Records, key: int) -> list[tuple[IssuedOp, tuple[int, ...]]]:
    """Return what a rank has issued in a group, in order, with the members of the group."""
    found = [
        (op, record.members)
        for record in of_rank.values()
        if record.in_order and record.key == key
        for op in record.ops.values()
    ]
    return sorted(found, key=lambda each: each[0].order)


def _swapped(own: list[IssuedOp], theirs: list[IssuedOp]) -> tuple[IssuedOp, IssuedOp] | None:
    """Return the first operation that others have issued after a later one, or not yet; and that.

    `own` and `theirs` are in the order in which they were issued.
    """
    there = {(op.kind, op.number): place for place, op in enumerate(theirs)}
    last, own_last = _last_of_kinds(theirs), _last_of_kinds(own)
    to_come = [op for op in theirs if op.number > own_last.get(op.kind, 0)]
    earliest: tuple[int, IssuedOp] | None = None  # where they have what comes later here
    found = None
    for op in reversed([*own, *to_come]):
        place = there.get((op.kind, op.number))
        is_forgotten = place is None and op.number <= last.get(op.kind, 0)
        if is_forgotten:
            continue
        if earliest is not None and (place is None or place > earliest[0]):
            found = op, earliest[1]
        if place is not None and (earliest is None or place < earliest[0]):
            earliest = place, op
    return found


def _last_of_kinds(ops: list[IssuedOp]) -> dict[str, int]:
    """Return the number of the last operation of each kind."""
    return {op.kind: op.number for op in ops}


def _first_awaited(rank: int, records: _Records) -> Awaited | None:
    """Return what a rank waits for: its last message, or the first of what it has issued.

    On a CPU a rank waits for the message that it has issued last. On a GPU the host runs ahead: it
    may have issued much behind a message that does not come.
    """
    message = _awaited_message(rank, records)
    if message is not None:
        return message
    found = [_awaited_collective(rank, records), _missing_message(rank, records)]
    known = [each for each in found if each is not None]
    return min(known, key=lambda each: each.op.order, default=None)


def _missing_message(rank: int, records: _Records) -> Awaited | None:
    """Return the first message that a rank expects and another of its host has not sent."""
    found = []
    for record in records[rank].values():
        if record.kind != "receive":
            continue
        for sender in set(record.members) - {rank}:
            sent = _last_number(records[sender], ("send", record.key))
            if sent is not None and sent + 1 in record.ops:
                found.append(Awaited(record.ops[sent + 1], (sender,)))
    return min(found, key=lambda each: each.op.order, default=None)


def _awaited_message(rank: int, records: _Records) -> Awaited | None:
    """Return the message that a rank waits for; None: there is none, or it has been sent."""
    ops = [op for record in records[rank].values() for op in record.ops.values()]
    last = max(ops, key=lambda op: op.order, default=None)
    if last is None or last.kind != "receive":
        return None
    if last.peer in records:
        own = next(record for record in records[rank].values() if last in record.ops.values())
        sent = _last_number(records[last.peer], ("send", own.key))
        if sent is None or sent >= last.number:
            return None
    return Awaited(last, (last.peer,))


def _awaited_collective(rank: int, records: _Records) -> Awaited | None:
    """Return the first collective to which a rank has come and another one has not."""
    found = []
    for at, record in records[rank].items():
        if record.kind not in COLLECTIVES:
            continue
        last = _last_of_members(record, records, at)
        op = record.ops.get(min(last.values(), default=0) + 1)
        if op is not None:
            found.append(Awaited(op, tuple(peer for peer in last if last[peer] < op.number)))
    return min(found, key=lambda each: each.op.order, default=None)


def _missed_collectives(records: _Records) -> Iterator[tuple[IssuedOp, int, int]]:
    """Yield collectives that one rank has issued and another of its group has not: both ranks."""
    found = {at: record for of_rank in records.values() for at, record in of_rank.items()}
    for at, record in sorted(found.items(), key=lambda each: KINDS.index(each[1].kind)):
        if record.kind not in COLLECTIVES:
            continue
        last = _last_of_members(record, records, at)
        ahead = max(last, key=last.__getitem__)
        behind = min(last, key=last.__getitem__)
        if last[ahead] != last[behind]:
            yield records[ahead][at].ops[last[ahead]], ahead, behind


def _missed_messages(records: _Records) -> Iterator[tuple[IssuedOp, int, int]]:
    """Yield the first message of a pair that one rank sends or expects, and the other does not."""
    for rank, of_rank in records.items():
        for record in of_rank.values():
            if record.kind in COLLECTIVES:
                continue
            answer = (ANSWERS[record.kind], record.key)
            for other in set(record.members) - {rank}:
                answered = _last_number(records[other], answer)
                if answered is not None and answered + 1 in record.ops:
                    yield record.ops[answered + 1], rank, other
