"""The server: a thread for each other rank, on the first one, whose own pushes need no message.

    thread of rank r    receive a push | update | wait for the bound, take a share | send the reply

Who updates or takes a share holds one lock; nobody holds it while it sends, receives or computes.
With `staleness` 0 the update is made when all ranks have pushed, of the sum of their gradients in
the order of the ranks; else by each push at once. An update has the step's learning rate times the
part of the step's samples that its gradient is of: all updates of a step together go as far as one.

The threads live for a window: between two of them there is nothing to serve, however long a save
or an evaluation takes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.line import Line
from zrun_core.distributed.transport import Group
from zrun_core.parameter_server.messages import (
    Push,
    Reply,
    gradients_by_tag,
    numbers_by_tag,
    parameters_by_tag,
)
from zrun_core.parameter_server.shares import Share, Shares
from zrun_core.zero.nonfinite import UnitNorms
from zrun_core.zero.push_pull import PushPull


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
        lead: pushes that its rank was ahead of the slowest, with this one.
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


@dataclass
class WindowRecord:
    """A window as the server has seen it.

    Attributes:
        made: pushes, in the order in which the updates were made.
        norms: by step, those of the gradients of its updates.
        skipped: by step that had an update which was not made, the norms of its units.
    """

    made: list[Made] = field(default_factory=list)
    norms: dict[int, list[float]] = field(default_factory=dict)
    skipped: dict[int, UnitNorms] = field(default_factory=dict)

    def grad_norm(self, step: int) -> float:
        """Return the norm of a step's gradient: of its one update, or their root mean square."""
        norms = self.norms.get(step, [])
        if len(norms) == 1:
            return norms[0]
        return math.sqrt(sum(norm**2 for norm in norms) / len(norms)) if norms else 0.0

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


class Client:
    """A rank's side of the messages."""

    def __init__(self, memory: PushPull, group: Group, comm: Comm) -> None:
        """
        Args:
            group: of all ranks that compute; the first one serves.
        """
        self._memory = memory
        self._line = Line(group, 0)
        self._comm = comm
        self._rank = group.index

    def begin(self, plan: WindowPlan) -> Share:
        return Share(0, self._rank)

    def exchange(self, push: Push) -> Reply:
        gradients = self._memory.gradients()
        parameters = self._memory.parameters()
        numbers = Reply.room()
        num_bytes = sum(each.nbytes for each in gradients)
        with self._comm.waiting_at(self._line, "push", "gradients of a share", num_bytes):
            self._line.send("small", numbers_by_tag(push.packed()))
            self._line.send("push", gradients_by_tag(gradients))
        num_bytes = sum(each.nbytes for each in parameters)
        with self._comm.waiting_at(self._line, "pull", "parameters", num_bytes):
            self._line.receive("small", numbers_by_tag(numbers))
            self._line.receive("pull", parameters_by_tag(parameters))
        return Reply.unpacked(numbers)

    def end(self) -> None:
        return None


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
    ) -> None:
        """
        Args:
            memory: of the first rank.
            group: of all ranks that compute; this one is the first.
            staleness: as of `Shares`.
        """
        self._memory = memory
        self._comm = comm
        self._staleness = staleness
        self._global_size = global_size
        self._num_ranks = group.size
        self._room = memory.take_room(group.size - 1)
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
        self._was_skipped = [False] * group.size  # by rank, the update with its newest push
        self._failure: BaseException | None = None

    def begin(self, plan: WindowPlan) -> Share:
        """Begin a window, and to serve the other ranks."""
        self._plan = plan
        self._shares = Shares(len(plan.sizes), self._num_ranks, self._staleness)
        self._record = WindowRecord()
        self._pulled = [0] * self._num_ranks
        self._version = 0
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
        """
        with self._waiting():
            for thread in self._threads:
                thread.join()
        self._raise_failure()
        for line in self._lines:
            self._comm.count(line)
        return self._record

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Say inside that the thread that trains waits for other ranks, and count it."""
        with self._comm.waiting(), self._comm.waits.counting():
            yield

    # In the thread of another rank

    def _serve(self, rank: int, line: Line) -> None:
        """Answer the pushes of a rank, until the window is over."""
        room = self._room[rank - 1]
        numbers = Push.room(self._memory.num_params)
        pulled = self._memory.parameters_in(room)
        try:
            while True:
                line.receive("small", numbers_by_tag(numbers))
                line.receive("push", gradients_by_tag(room))
                push = Push.unpacked(numbers)
                reply = self._answer(rank, push, room, partial(self._memory.copy_to, pulled))
                line.send("small", numbers_by_tag(reply.packed()))
                line.send("pull", parameters_by_tag(pulled))
                if reply.step < 0:
                    return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    # In the thread of any rank

    def _answer(
        self,
        rank: int,
        push: Push,
        gradients: Sequence[torch.Tensor],
        pull: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
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
            if share is None:
                with waiting():
                    self._wait_for(lambda: self._shares.is_pushed)
            pull()
            self._pulled[rank] = self._version
            was_skipped = self._was_skipped[rank]
            if share is None:
                return Reply(-1, -1, self._shares.num_steps, was_skipped)
            return Reply(*share, 0, was_skipped)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for what other ranks' pushes bring about, without the lock."""
        self._changed.wait_for(lambda: self._failure is not None or condition())
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _update_by(self, rank: int, push: Push, gradients: Sequence[torch.Tensor]) -> None:
        """Update by a push at once, or by those of all ranks with the last of them."""
        share = Share(push.step, push.part)
        lead = self._shares.lead(rank)
        self._record.made.append(Made(rank, share, self._pulled[rank], self._version, lead))
        self._arrived[rank] = push, gradients
        if self._staleness == 0 and len(self._arrived) < self._num_ranks:
            return
        arrived = [self._arrived[each] for each in sorted(self._arrived)]
        was_made = self._update([push for push, _ in arrived], [each for _, each in arrived])
        for each in self._arrived:
            self._was_skipped[each] = not was_made
        self._arrived.clear()

    def _update(self, pushes: Sequence[Push], gradients: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Update by the sum of some gradients of one step; return whether it was made."""
        step = pushes[0].step
        weight = sum(push.weight for push in pushes)
        if not weight:
            return False
        size = self._plan.sizes[step]
        samples = sum(push.samples for push in pushes)
        applied = self._memory.apply(
            gradients,
            [push.has_grad for push in pushes],
            self._plan.lr_of(step) * (samples / size),
            weight / self._global_size,
            is_finite=all(math.isfinite(push.loss + push.weight) for push in pushes),
        )
        self._record.norms.setdefault(step, []).append(applied.norm)
        if applied.skipped:
            self._record.skipped[step] = applied.norms
            return False
        self._version += 1
        return True


def make_channel(
    memory: PushPull, group: Group, comm: Comm, staleness: int | None, global_size: int
) -> Channel:
    """Return how a rank pushes and pulls; the first one serves all others.

    Args:
        group, comm, staleness, global_size: as of `Server`.
    """
    if group.index > 0:
        return Client(memory, group, comm)
    return Server(memory, group, comm, staleness, global_size)
