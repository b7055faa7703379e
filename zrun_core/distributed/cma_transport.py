"""Messages between ranks of one host: the receiver copies them out of the sender's memory.

[Note: one copy]
Over the loopback device a message is copied into the kernel and out of it, in small pieces, by
threads that compete with training for the cores. `process_vm_readv` (cross-memory attach) copies it
once, in the thread that needs it: 100 MB each way between two ranks take 16 ms instead of 75.
`benchmarks/comm.py` compares them.

Every rank owns a table in a file without a name, which the others map and only read. It has a
record of four words for each peer and tag:

    sent        messages posted to the peer, written last: the peer looks at it
    address     of the last one
    bytes       of the last one
    taken       messages of the peer that this rank has copied

    sender's table          receiver's table
    sent 0 taken 0          sent 0 taken 0
    sent 1 taken 0                              posted: address and bytes are valid
    sent 1 taken 0          sent 0 taken 1      copied: the sender may post the next one

The next message of a peer and tag is posted once the one before was taken, so a record holds one at
a time.

[Note: who moves messages]
No thread does: a rank takes what was posted for it, and posts what is due, whenever it looks after
any message of its own; that includes the next parts of what is under way (`handle.Chains`). It may
wait for sockets only when it has started all of those, and taken all that it asked for
(`prepare_to_wait`); else two ranks could wait for each other. So a group uses memory for
everything, or for nothing: `Comm.transport`. What is due is posted by then too: a rank that sends
the next message of a tag has taken the one before, so taking it also looks after the other way. A
rank may also ask long before the other sends: for that it must not wait, since the other may wait
for the same sockets first. Such messages have tags of their own, of which it takes what is there.

[Note: permission]
Processes may read each other's memory if they belong to one user and, where the Yama security
module restricts it, if the sender allows it. Each rank allows it to the descendants of its own
parent, which started the other ranks too. The table relies on stores becoming visible in order, as
x86-64 promises. Where any of this is missing the ranks find out together, at the start, and talk
through sockets.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from zrun_core.distributed.handle import Chains
from zrun_core.distributed.transport import MESSAGE_TAGS, NUM_TAGS, Group, Transport, Work
from zrun_core.errors import HangError, PeerError
from zrun_core.spine.flight_page import process_state

SWITCH = "ZRUN_HOST_MEMORY"  # environment variable: "off" makes ranks of a host use sockets

_WORDS = 4  # of a record, 8 bytes each
_SENT, _ADDRESS, _NUM_BYTES, _TAKEN = range(_WORDS)
_WORD_BYTES = 8
_SPINS = 5  # looks before the first pause
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6
_LIVENESS_CHECK_S = 0.25  # between two looks whether the peer is alive
_PR_SET_PTRACER = 0x59616D61  # prctl(2): Yama
_TOKEN_BYTES = 16
_CARD = struct.Struct(f"<iiQ{_TOKEN_BYTES}s")  # of the traits of a `_Card` without a problem


class _Range(ctypes.Structure):
    """struct iovec of uio.h."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def is_possible() -> bool:
    """Return whether ranks may read each other's memory, as far as one of them can tell."""
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and os.environ.get(SWITCH) != "off"
    )


class _Card(NamedTuple):
    """Says where another process finds a rank's table and memory.

    Attributes:
        pid: of the rank.
        table: descriptor of its table.
        address: of `token` in its memory.
        token: by which it is known.
        problem: why the rank cannot take part; empty if it can.
    """

    pid: int = 0
    table: int = 0
    address: int = 0
    token: bytes = b""
    problem: str = ""

    def pack(self) -> bytes:
        """Return it as bytes: as many of them whatever the numbers are, since they are counted."""
        numbers = _CARD.pack(self.pid, self.table, self.address, self.token)
        return numbers + self.problem.encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        pid, table, address, token = _CARD.unpack_from(packed)
        return cls(pid, table, address, token, packed[_CARD.size :].decode())


class _Peer:
    """Another rank's memory, and its table.

    Every method may raise OSError: this process may not look at them.
    """

    def __init__(self, pid: int, descriptor: int, num_bytes: int) -> None:
        """Map the table that process `pid` has open as `descriptor`."""
        self.pid = pid
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        ranges = ctypes.POINTER(_Range)
        count = ctypes.c_ulong
        self._read.argtypes = [ctypes.c_int, ranges, count, ranges, count, count]
        table = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            self.table = memoryview(mmap.mmap(table, num_bytes, prot=mmap.PROT_READ)).cast("Q")
        finally:
            os.close(table)

    def copy(self, address: int, num_bytes: int, to: int) -> None:
        """Copy from the peer's memory into this process's.

        `address` is in the peer's memory, `to` in this process's.
        """
        done = 0
        while done < num_bytes:  # the kernel moves at most 2 GiB at once
            here = _Range(to + done, num_bytes - done)
            there = _Range(address + done, num_bytes - done)
            count = self._read(self.pid, here, 1, there, 1, 0)
            if count <= 0:
                number = ctypes.get_errno()
                reason = os.strerror(number)
                raise OSError(number, f"memory of process {self.pid} cannot be read: {reason}")
            done += count

    @property
    def is_alive(self) -> bool:
        return process_state(self.pid) not in (None, "Z", "X")


class _Channel(ABC):
    """The messages of one peer and tag in one direction, in order.

    Attributes:
        table: this rank's, in which its record for the peer and tag begins at word `at`.
        at_peer: where in the peer's table its record for this rank and the tag begins.
        messages: not yet over, the oldest first.
        count: messages that were posted, or taken.
    """

    def __init__(self, owner: CmaTransport, rank: int, tag: int) -> None:
        self.rank = rank
        self.tag = tag
        self.peer = owner.peers[rank]
        self.table = owner.table
        self.at = (owner.ranks.index(rank) * NUM_TAGS + tag) * _WORDS
        self.at_peer = (owner.index * NUM_TAGS + tag) * _WORDS
        self.messages: deque[Message] = deque()
        self.count = 0

    @abstractmethod
    def add(self, message: Message) -> None:
        """Let a message follow those that are here."""

    @abstractmethod
    def move(self) -> None:
        """Do what can be done without waiting."""


class _SendChannel(_Channel):
    """The first message is posted; the next one follows when it was taken."""

    def add(self, message: Message) -> None:
        self.move()
        self.messages.append(message)
        if len(self.messages) == 1:
            self._post()

    def move(self) -> None:
        if self.messages and self.peer.table[self.at_peer + _TAKEN] == self.count:
            self.messages.popleft().is_over = True
            if self.messages:
                self._post()

    def _post(self) -> None:
        tensor = self.messages[0].tensor
        self.table[self.at + _ADDRESS] = tensor.data_ptr()
        self.table[self.at + _NUM_BYTES] = tensor.nbytes
        self.count += 1
        self.table[self.at + _SENT] = self.count  # last: now the peer looks at the others


class _ReceiveChannel(_Channel):
    """A message is copied as soon as a look finds that it was posted."""

    back: _SendChannel | None = None  # the same peer and tag in the other direction

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def move(self) -> None:
        while self.messages and self.peer.table[self.at_peer + _SENT] > self.count:
            tensor = self.messages[0].tensor
            num_bytes = self.peer.table[self.at_peer + _NUM_BYTES]
            if num_bytes != tensor.nbytes:
                raise HangError(
                    f"ranks disagree: one sent {num_bytes} bytes where another expected "
                    f"{tensor.nbytes}"
                )
            address = self.peer.table[self.at_peer + _ADDRESS]
            try:
                self.peer.copy(address, num_bytes, tensor.data_ptr())
            except OSError as error:
                raise PeerError(f"another rank has ended ({error}): see its log") from None
            self.messages.popleft().is_over = True
            self.count += 1
            self.table[self.at + _TAKEN] = self.count
            if self.back is not None:
                self.back.move()


class Message:
    """One message in flight: a `Work`."""

    def __init__(self, owner: CmaTransport, channel: _Channel, tensor: torch.Tensor) -> None:
        self._owner = owner
        self.channel = channel
        self.tensor = tensor
        self.is_over = False

    def is_completed(self) -> bool:
        if not self.is_over:
            self.channel.move()
        return self.is_over

    def wait(self) -> None:
        """Return when it is over.

        Raises:
            PeerError: the peer has ended, or does not answer.
        """
        if not self.is_completed():
            self._owner.wait_for(self)


class CmaTransport(Transport):
    """This rank's messages to and from the other ranks of its host, by cross-memory attach."""

    observes_completion = True
    completes_sends = False  # the receiver's thread copies them

    def __init__(
        self,
        ranks: tuple[int, ...],
        index: int,
        exchange: Callable[[bytes], Sequence[bytes]],
        chains: Chains,
        timeout_s: float,
    ) -> None:
        """Open the other ranks' tables. Collective over the host's ranks.

        Args:
            ranks: the host's, by their global numbers.
            exchange: returns every rank's payload, in the order of `ranks`.

        Raises:
            OSError: not all of them may read the memory of all others.
        """
        self.ranks = ranks
        self.index = index
        self.peers: dict[int, _Peer] = {}
        self._chains = chains
        self._timeout_s = timeout_s
        self._channels: dict[tuple[type[_Channel], int, int], _Channel] = {}
        problem = self._meet(exchange)
        for told in exchange(problem.encode()):
            if told:
                raise OSError(told.decode())

    def _meet(self, exchange: Callable[[bytes], Sequence[bytes]]) -> str:
        """Make the own table, open the others', and try to read their memory.

        Returns:
            The problem of any rank; "" if there is none.
        """
        # Of this range of addresses only what is used takes memory.
        num_bytes = len(self.ranks) * NUM_TAGS * _WORDS * _WORD_BYTES
        token = secrets.token_bytes(_TOKEN_BYTES)
        shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
        descriptor: int | None = None
        own = _Card(problem=f"this machine does not offer it, or {SWITCH}=off")
        if is_possible():
            try:
                descriptor = os.memfd_create("zrun")
                os.ftruncate(descriptor, num_bytes)
                self.table = memoryview(mmap.mmap(descriptor, num_bytes)).cast("Q")
                own = _Card(os.getpid(), descriptor, ctypes.addressof(shown), token)
            except OSError as error:  # the others wait to hear of it
                own = _Card(problem=f"no table can be made: {error.strerror}")
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
        cards = [_Card.unpack(each) for each in exchange(own.pack())]
        problem = next((card.problem for card in cards if card.problem), "")
        if not problem:
            try:
                for rank, card in zip(self.ranks, cards, strict=True):
                    if rank != self.ranks[self.index]:
                        self._open(rank, card, num_bytes)
            except OSError as error:
                problem = str(error)
        exchange(b"")  # every rank has opened what there is to open
        if descriptor is not None:
            os.close(descriptor)
        return problem

    def _open(self, rank: int, card: _Card, num_bytes: int) -> None:
        """Map the table of `rank`, and make sure that its process is the one that showed `card`."""
        peer = self.peers[rank] = _Peer(card.pid, card.table, num_bytes)
        seen = ctypes.create_string_buffer(_TOKEN_BYTES)
        peer.copy(card.address, _TOKEN_BYTES, ctypes.addressof(seen))
        if seen.raw != card.token:
            raise OSError(
                f"process {peer.pid} is not rank {rank}: they run in different containers"
            )

    def send(self, tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Message:
        """Let rank `peer` of `group` take the contiguous `tensor`."""
        return self._begin(_SendChannel, tensor, group.ranks[peer], tag)

    def receive(self, tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Message:
        """Take the next message of rank `peer` of `group` into the contiguous `tensor`."""
        return self._begin(_ReceiveChannel, tensor, group.ranks[peer], tag)

    def _begin(
        self,
        kind: type[_SendChannel] | type[_ReceiveChannel],
        tensor: torch.Tensor,
        rank: int,
        tag: int,
    ) -> Message:
        channel = self._channels.get((kind, rank, tag))
        if channel is None:
            channel = self._channels[kind, rank, tag] = kind(self, rank, tag)
            self._join_directions(rank, tag)
        message = Message(self, channel, tensor)
        channel.add(message)
        return message

    def _join_directions(self, rank: int, tag: int) -> None:
        """Let a channel from `rank` know the one to it, once there are both."""
        receives = self._channels.get((_ReceiveChannel, rank, tag))
        sends = self._channels.get((_SendChannel, rank, tag))
        if isinstance(receives, _ReceiveChannel) and isinstance(sends, _SendChannel):
            receives.back = sends

    def prepare_to_wait(self, works: Sequence[Work]) -> None:
        """Take all that this rank has asked for, if it is about to wait for sockets.

        Messages between two ranks may be asked for long before they are sent: of those it takes
        what is there. See [Note: who moves messages].

        Raises:
            PeerError: a peer has ended, or does not answer.
        """
        if all(isinstance(work, Message) for work in works):
            return
        self._chains.catch_up()
        for channel in list(self._channels.values()):
            if channel.tag in MESSAGE_TAGS:
                channel.move()
            elif isinstance(channel, _ReceiveChannel) and channel.messages:
                channel.messages[-1].wait()

    def wait_for(self, message: Message) -> None:
        """Move messages, this and any other, until this one is over.

        Raises:
            PeerError: the peer has ended, or does not answer.
        """
        start_s = time.monotonic()
        last_check_s = start_s
        pause_s = _FIRST_PAUSE_S
        num_looks = 0
        while not message.is_over:
            for channel in list(self._channels.values()):
                channel.move()
            self._chains.poll()
            num_looks += 1
            if message.is_over or num_looks < _SPINS:
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            now_s = time.monotonic()
            if now_s - last_check_s < _LIVENESS_CHECK_S:
                continue
            last_check_s = now_s
            rank = message.channel.rank
            peer = message.channel.peer
            if not peer.is_alive and not message.is_completed():
                raise PeerError(
                    f"another rank has ended (rank {rank}, process {peer.pid} is gone): see its log"
                )
            if now_s > start_s + self._timeout_s:
                raise PeerError(
                    f"rank {rank} does not answer within {self._timeout_s:g} s: see its log"
                )
