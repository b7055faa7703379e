"""The server: a thread for each other rank, on the first one, whose own pushes need no message.

    thread of rank r    receive a push | update | wait for the bound, take a share | send the reply

Who updates or takes a share holds one lock; nobody holds it while it sends, receives or computes.
With `staleness` 0 the update is made when all ranks have pushed, of the sum of their gradients in
the order of the ranks; else by each push at once. An update has the step's learning rate times the
part of the step's samples that its gradient is of: all updates of a step together go as far as one.
With 0 the rate follows the updates that were made, as everywhere; else all updates of a step have
one rate, which does not depend on which others were left out meanwhile.

Threads listen to their ranks without a limit: how long a share takes to compute is nobody's wait.
Who waits for it here does so for `limits.collective_s` at most; an answer may take two such waits.

The threads live for a window: between two of them there is nothing to serve, however long a save
or an evaluation takes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.line import NO_LIMIT, Line, with_limit
from zrun_core.distributed.transport import Group
from zrun_core.errors import HangError, PeerError
from zrun_core.parameter_server.messages import (
    OVER,
    OVERDUE,
    Push,
    Reply,
    gradients_by_tag,
    numbers_by_tag,
    parameters_by_tag,
)
from zrun_core.parameter_server.shares import Share, Shares
from zrun_core.zero.push_pull import PushPull
from zrun_core.zero.reduce.nonfinite import UnitNorms

_MARGIN_S = 15.0  # for the server to say who is late, before others stop waiting for it
_MOST_WAITS = 2  # of an answer: until its rank may go on, and at a window's end until all pushed


class WindowPlan(NamedTuple):
    """The steps of a window, as all ranks know them before it begins.

    Attributes:
        sizes: of each step, its samples.
        lr_of: returns the learning rate of a step, counted from 0.
    """

    sizes: Sequence[int]
    lr_of: Callable[[int], float]


class Made(NamedTuple):
    """A push, and the update that was made by it.

    Attributes:
        rank: that pushed.
        share: that it was of.
        pulled: number of the version that its gradient was computed with.
        version: number of the newest one when it came: that many updates were made in the window.
        lead: pushes that its rank was ahead of the slowest when it took the share.
    """

    rank: int
    share: Share
    pulled: int
    version: int
    lead: int

    @property
    def staleness(self) -> int:
        """Updates that were made since the parameters of its gradient."""
        return self.version - self.pulled


class LeftOut(NamedTuple):
    """An update that was not made, since its gradient or loss was not finite.

    Attributes:
        ranks: whose pushes it would have been of.
        parts: of the step's samples, one for each of them.
        norm: of the gradient.
        norms: of its units.
    """

    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    norm: float
    norms: UnitNorms


@dataclass
class WindowRecord:
    """A window as the server has seen it.

    Attributes:
        made: pushes, in the order in which the updates were made, or would have been.
        norms: by step, those of the gradients of its updates.
        left_out: by step, its updates that were not made.
    """

    made: list[Made] = field(default_factory=list)
    norms: dict[int, list[float]] = field(default_factory=dict)
    left_out: dict[int, list[LeftOut]] = field(default_factory=dict)

    def grad_norm(self, step: int) -> float:
        """Return the norm of a step's gradient: of its one update, or their root mean square.

        Where none was made, it is that of what was left out.
        """
        norms = self.norms.get(step) or [each.norm for each in self.left_out.get(step, [])]
        if len(norms) == 1:
            return norms[0]
        return math.sqrt(sum(norm**2 for norm in norms) / len(norms)) if norms else 0.0

    def skipped(self, step: int) -> UnitNorms | None:
        """Return the norms by which a step was skipped whole; None: something came of it."""
        if step in self.norms or step not in self.left_out:
            return None
        return self.left_out[step][-1].norms

    @property
    def num_left_out(self) -> int:
        """Pushes of which no update was made."""
        return sum(len(each.ranks) for of_step in self.left_out.values() for each in of_step)

    @property
    def staleness(self) -> Counter[int]:
        """Return how many pushes had which staleness."""
        return Counter(each.staleness for each in self.made)

    def pushes_of(self, num_ranks: int) -> list[int]:
        """Return by rank how many pushes it made."""
        counts = Counter(each.rank for each in self.made)
        return [counts[rank] for rank in range(num_ranks)]


class Channel(Protocol):
    """How a rank pushes and pulls: through messages, or on the server itself."""

    def begin(self, plan: WindowPlan) -> Share:
        """Begin a window; return this rank's first share."""
        ...

    def exchange(self, push: Push) -> Reply:
        """Push the gradient of a share, and return once the newest parameters are here."""
        ...

    def end(self) -> WindowRecord | None:
        """End the window; return what the server has seen, on its rank."""
        ...


def _overdue(rank: int, limit_s: float) -> HangError:
    return HangError(
        f"others have waited for a push of rank {rank} for more than {limit_s:g} s "
        "(limits.collective_s)"
    )


class Client:
    """A rank's side of the messages."""

    def __init__(self, memory: PushPull, group: Group, comm: Comm, limit_s: float) -> None:
        """
        Args:
            group: of all ranks that compute; the first one serves.
            limit_s: seconds that the server waits for any rank while this one waits for it.
        """
        longest_s = min(_MOST_WAITS * limit_s + _MARGIN_S, NO_LIMIT.total_seconds())
        self._memory = memory
        self._line = Line(with_limit(group, timedelta(seconds=longest_s)), 0)
        self._comm = comm
        self._rank = group.index
        self._limit_s = limit_s

    def begin(self, plan: WindowPlan) -> Share:
        return Share(0, self._rank)

    def exchange(self, push: Push) -> Reply:
        gradients = self._memory.gradients()
        parameters = self._memory.parameters()
        numbers = Reply.room()
        num_bytes = sum(each.nbytes for each in gradients)
        with self._comm.waiting_at(self._line, "send", "gradients", num_bytes):
            self._line.send("small", numbers_by_tag(push.packed()))
            self._line.send("push", gradients_by_tag(gradients))
        num_bytes = sum(each.nbytes for each in parameters)
        with self._comm.waiting_at(self._line, "receive", "parameters", num_bytes):
            self._line.receive("small", numbers_by_tag(numbers))
            reply = Reply.unpacked(numbers)
            if reply.step == OVERDUE:
                raise _overdue(reply.part, self._limit_s)
            self._line.receive("pull", parameters_by_tag(parameters))
        return reply

    def end(self) -> None:
        return None


class _Presence:
    """What other ranks see of the server: it waits for them only while none of its threads works.

    Else they would take a long update, or gradients that take long to arrive, for a hang.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._at_work = 1  # the thread that trains

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work inside, in a thread that listens otherwise."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait inside for other ranks, in a thread that works otherwise."""
        self._add(-1)
        try:
            yield
        finally:
            self._add(1)

    def _add(self, number: int) -> None:
        with self._lock:
            waited = not self._at_work
            self._at_work += number
            waits = not self._at_work
            if waits != waited:
                self._comm.tell_waiting(waits)


class Server:
    """Updates by the pushes of all ranks, and deals out the shares of one window after the other.

    It is the first rank's channel, too.
    """

    def __init__(
        self,
        memory: PushPull,
        group: Group,
        comm: Comm,
        staleness: int | None,
        global_size: int,
        limit_s: float,
    ) -> None:
        """
        Args:
            memory: of the first rank.
            group: of all ranks that compute; this one is the first.
            staleness: as of `Shares`.
            limit_s: seconds that one rank may wait for another to push.
        """
        self._memory = memory
        self._comm = comm
        self._staleness = staleness
        self._global_size = global_size
        self._num_ranks = group.size
        self._limit_s = limit_s
        self._presence = _Presence(comm)
        self._room = memory.take_room(group.size - 1)
        group = with_limit(group, NO_LIMIT)
        self._lines = [Line(group, rank) for rank in range(1, group.size)]
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        # Of the window under way, all guarded by `_changed`.
        self._plan = WindowPlan((), float)
        self._shares = Shares(0, group.size, staleness)
        self._record = WindowRecord()
        self._pulled = [0] * group.size  # by rank, the version that it computes with
        self._version = 0
        self._arrived: dict[int, tuple[Push, Sequence[torch.Tensor]]] = {}  # with `staleness` 0
        self._leads = [0] * group.size  # by rank, how far ahead it was when it took its share
        self._was_skipped = [False] * group.size  # by rank, the update with its newest push
        self._failure: BaseException | None = None
        self._late = 0  # the rank that did not push in time

    def begin(self, plan: WindowPlan) -> Share:
        """Begin a window, and to serve the other ranks."""
        self._plan = plan
        self._shares = Shares(len(plan.sizes), self._num_ranks, self._staleness)
        self._record = WindowRecord()
        self._pulled = [0] * self._num_ranks
        self._version = 0
        self._leads = [0] * self._num_ranks
        first = [self._shares.take(rank) for rank in range(self._num_ranks)]
        assert first[0] is not None
        self._threads = [
            threading.Thread(
                target=self._serve, args=(rank, line), name=f"pushes of rank {rank}", daemon=True
            )
            for rank, line in enumerate(self._lines, start=1)
        ]
        for thread in self._threads:
            thread.start()
        return first[0]

    def exchange(self, push: Push) -> Reply:
        """Update by the first rank's own gradient, as by any other."""
        gradients = self._memory.gradients()
        return self._answer(0, push, gradients, self._memory.refresh, self._waiting)

    def end(self) -> WindowRecord:
        """Return what the window has come to, once all ranks have its parameters.

        Raises:
            PeerError: one of them is gone.
            HangError: one of them does not take them.
        """
        with self._waiting():
            for rank, thread in enumerate(self._threads, start=1):
                thread.join(min(self._limit_s, threading.TIMEOUT_MAX))
                if thread.is_alive():
                    raise HangError(
                        f"rank {rank} has not taken the newest parameters within "
                        f"{self._limit_s:g} s (limits.collective_s)"
                    )
        self._raise_failure()
        for line in self._lines:
            self._comm.count(line)
        return self._record

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Say inside that the thread that trains waits for other ranks, and count it."""
        with self._presence.waiting(), self._comm.waits.counting():
            yield

    # In the thread of another rank

    def _serve(self, rank: int, line: Line) -> None:
        """Answer the pushes of a rank, until the window is over."""
        room = self._room[rank - 1]
        numbers = Push.room(self._memory.num_params)
        pulled = self._memory.parameters_in(room)
        try:
            while True:
                num_bytes = sum(each.nbytes for each in room)
                self._comm.issue_at(line, "receive", "gradients", num_bytes)
                line.receive("small", numbers_by_tag(numbers))
                with self._presence.working():
                    line.receive("push", gradients_by_tag(room))
                    push = Push.unpacked(numbers)
                    pull = partial(self._memory.copy_to, pulled)
                    reply = self._answer(rank, push, room, pull, self._presence.waiting)
                    num_bytes = sum(each.nbytes for each in pulled)
                    self._comm.issue_at(line, "send", "parameters", num_bytes)
                    line.send("small", numbers_by_tag(reply.packed()))
                    line.send("pull", parameters_by_tag(pulled))
                if reply.step == OVER:
                    return
        except BaseException as error:
            if isinstance(error, HangError):  # before the process ends of it
                self._tell_overdue(line)
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _tell_overdue(self, line: Line) -> None:
        """Tell a rank that waits for an answer for whom it waits in vain."""
        reply = Reply(OVERDUE, self._late, 0, False)
        with suppress(PeerError):
            line.send("small", numbers_by_tag(reply.packed()))

    # In the thread of any rank

    def _answer(
        self,
        rank: int,
        push: Push,
        gradients: Sequence[torch.Tensor],
        pull: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> Reply:
        """Update by a push, and find what its rank does next.

        The gradients, of all units, are undefined afterwards. `pull` copies the newest parameters
        for the rank; `waiting` is whatever this thread does around a wait for other ranks.
        """
        with self._changed:
            if push.asks_to_stop:
                self._shares.end_soon()
            self._shares.push(rank)
            self._update_by(rank, push, gradients)
            self._changed.notify_all()
            with waiting():
                self._wait_for(lambda: self._shares.may_go_on(rank))
            share = self._shares.take(rank)
            self._leads[rank] = self._shares.lead(rank)
            if share is None:
                with waiting():
                    self._wait_for(lambda: self._shares.is_pushed)
            pull()
            self._pulled[rank] = self._version
            was_skipped = self._was_skipped[rank]
            if share is None:
                return Reply(OVER, -1, self._shares.num_steps, was_skipped)
            return Reply(*share, 0, was_skipped)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for what other ranks' pushes bring about, without the lock.

        Raises:
            HangError: they do not come in time.
        """
        is_over = self._changed.wait_for(
            lambda: self._failure is not None or condition(),
            min(self._limit_s, threading.TIMEOUT_MAX),
        )
        self._raise_failure()
        if not is_over:
            self._late = self._shares.slowest
            self._failure = _overdue(self._late, self._limit_s)
            self._changed.notify_all()
            raise self._failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _update_by(self, rank: int, push: Push, gradients: Sequence[torch.Tensor]) -> None:
        """Update by a push at once, or by those of all ranks with the last of them."""
        share = Share(push.step, push.part)
        lead = self._leads[rank]
        self._record.made.append(Made(rank, share, self._pulled[rank], self._version, lead))
        self._arrived[rank] = push, gradients
        if self._staleness == 0 and len(self._arrived) < self._num_ranks:
            return
        ranks = sorted(self._arrived)
        arrived = [self._arrived[each] for each in ranks]
        was_made = self._update(ranks, [push for push, _ in arrived], [each for _, each in arrived])
        for each in self._arrived:
            self._was_skipped[each] = not was_made
        self._arrived.clear()

    def _lr_of(self, step: int) -> float:
        """Return the learning rate of a step."""
        if self._staleness == 0:  # all steps before it are over, and those that were made count
            step = len(self._record.norms)
        return self._plan.lr_of(step)

    def _update(
        self,
        ranks: Sequence[int],
        pushes: Sequence[Push],
        gradients: Sequence[Sequence[torch.Tensor]],
    ) -> bool:
        """Update by the sum of some ranks' gradients of one step; return whether it was made."""
        step = pushes[0].step
        weight = sum(push.weight for push in pushes)
        if not weight:
            return False
        size = self._plan.sizes[step]
        samples = sum(push.samples for push in pushes)
        applied = self._memory.apply(
            gradients,
            [push.has_grad for push in pushes],
            self._lr_of(step) * (samples / size),
            weight / self._global_size,
            is_finite=all(math.isfinite(push.loss + push.weight) for push in pushes),
        )
        if applied.skipped:
            parts = tuple(push.part for push in pushes)
            left_out = LeftOut(tuple(ranks), parts, applied.norm, applied.norms)
            self._record.left_out.setdefault(step, []).append(left_out)
            return False
        self._record.norms.setdefault(step, []).append(applied.norm)
        self._version += 1
        return True


def make_channel(
    memory: PushPull,
    group: Group,
    comm: Comm,
    staleness: int | None,
    global_size: int,
    limit_s: float,
) -> Channel:
    """Return how a rank pushes and pulls; the first one serves all others. Collective.

    Args:
        group, comm, staleness, global_size, limit_s: as of `Server`.
    """
    if group.index > 0:
        return Client(memory, group, comm, limit_s)
    return Server(memory, group, comm, staleness, global_size, limit_s)
