"""A line between two ranks for a thread that does not train: messages for which it waits.

    line = Line(group, peer)
    line.send("push", {tag: tensor, ...})
    line.receive("pull", {tag: tensor, ...})

What ranks send each other otherwise is issued by the thread that trains, and counted by `Comm`. A
line may belong to another thread, so it takes torch's process group, which is safe there, and
counts by itself; `Comm.count` adds that up later.

Lines have a process group of their own (`with_limit`): whoever serves others listens while they
compute, for as long as that takes, where a wait of the thread that trains has a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from zrun_core.distributed.transport import Group, ProcessGroupTransport
from zrun_core.errors import PEER_IS_GONE, PeerError

NO_LIMIT = timedelta(days=365)


def with_limit(group: Group, limit: timedelta) -> Group:
    """Return the same ranks with a process group of their own. Collective of all ranks.

    Args:
        limit: of this rank's waits there; others may have another one.
    """
    if group.size == 1:
        return group
    return replace(
        group, process_group=dist.new_group(list(group.ranks), limit, group_desc="lines")
    )


class Moved(NamedTuple):
    """The messages of one kind in one direction."""

    calls: int
    num_bytes: int


class Line:
    """Messages with another rank of a group, by one thread at a time.

    Attributes:
        group: of both ranks.
        peer: place of the other one.
    """

    def __init__(self, group: Group, peer: int) -> None:
        """
        Args:
            peer: place of the other one.
        """
        self.group = group
        self.peer = peer
        self._transport = ProcessGroupTransport()
        self._moved: dict[tuple[str, bool], Moved] = {}

    def send(self, kind: str, tensors: Mapping[int, torch.Tensor]) -> None:
        """Send tensors, and return when they may change.

        Args:
            tensors: contiguous, by tag.
        """
        with telling_of_peers():
            works = [
                self._transport.send(tensor, self.group, self.peer, tag)
                for tag, tensor in tensors.items()
            ]
            for work in works:
                work.wait()
        self._count(kind, True, tensors)

    def receive(self, kind: str, tensors: Mapping[int, torch.Tensor]) -> None:
        """Wait for tensors of the other rank.

        Args:
            tensors: contiguous, by tag; filled on return.
        """
        with telling_of_peers():
            works = [
                self._transport.receive(tensor, self.group, self.peer, tag)
                for tag, tensor in tensors.items()
            ]
            for work in works:
                work.wait()
        self._count(kind, False, tensors)

    def _count(self, kind: str, is_sent: bool, tensors: Mapping[int, torch.Tensor]) -> None:
        calls, num_bytes = self._moved.get((kind, is_sent), (0, 0))
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        self._moved[kind, is_sent] = Moved(calls + 1, num_bytes)

    def take_moved(self) -> Mapping[tuple[str, bool], Moved]:
        """Return what has moved since the last call, by kind and whether it was sent."""
        moved, self._moved = self._moved, {}
        return moved


@contextmanager
def telling_of_peers() -> Iterator[None]:
    """Say inside that another rank is gone where torch says that a connection is.

    Raises:
        PeerError: one of them has ended, or the time limit of the process group is over.
    """
    try:
        yield
    except RuntimeError as error:
        if PEER_IS_GONE.search(str(error)) is None:
            raise
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"another rank has ended, or does not answer ({reason}): see its log"
        ) from None
