"""Messages between ranks of one host: the receiver copies them out of the sender's memory.

[Note: one copy]
Over the loopback device a message is copied into the kernel and out of it, in small pieces, by threads that compete
with training for the cores. `process_vm_readv` copies it once, in the thread that needs it: 100 MB each way between two
ranks take 16 ms instead of 75. `benchmarks/comm.py` compares them.

Every rank owns a table in a file without a name, which the others map and only read. There it posts, for each peer and
tag, how many messages it has sent and where the last one lies; and it counts there how many of each peer's messages it
has taken. The next message of a peer and tag is posted once the one before was taken, so a record holds one at a time.

[Note: who moves messages]
No thread does: a rank takes what was posted for it, and posts what is due, whenever it looks after any message of its
own. It may wait for sockets only when it has taken all that it asked for (`take_all`); else two ranks could wait for
each other. So a group uses memory for everything, or for nothing: `CmaTransport.holds`. What is due is posted by then
too: whoever sends the next message of a tag has taken the one before, so taking it also looks after the other way.
A rank may also ask long before the other sends: for that it must not wait, since the other may wait
for the same sockets first. Such messages have tags of their own, of which it takes what is there.

Processes may read each other's memory if they belong to one user and, where the Yama security module restricts it, if
the sender allows it. Each rank allows it to the descendants of its own parent, which started the other ranks too. The
table relies on stores becoming visible in order, as x86-64 promises. Where any of this is missing the ranks find out
together, at the start, and talk through sockets.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zrun_core.errors import HangError, PeerError
from zrun_core.spine.flight_recorder import process_state

SWITCH = "ZRUN_HOST_MEMORY"  # environment variable: "off" makes ranks of a host use sockets

NUM_TAGS = 1 << 16  # messages with higher ones go through sockets
_WORDS = 4  # of a record: messages sent, address of the last, its bytes; messages taken
_SENT, _ADDRESS, _NUM_BYTES, _TAKEN = range(_WORDS)
_SPINS = 5  # looks before the first pause
_PAUSE_S = 20e-6, 500e-6  # shortest and longest
_LOOK_S = 0.25  # between two looks whether the peer is alive
_PR_SET_PTRACER = 0x59616D61  # prctl(2): Yama
_TOKEN_BYTES = 16


class Work(Protocol):
    """A message, or a collective, under way; torch's and ours."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


class _Range(ctypes.Structure):
    """struct iovec of uio.h."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def is_possible() -> bool:
    """Whether this machine and the environment let ranks read each other's memory, as far as one of them can tell."""
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and os.environ.get(SWITCH) != "off"
    )


class _Peer:
    """Another rank's memory, and its table. Every method may raise OSError: this process may not look at them."""

    def __init__(self, pid: int, descriptor: int, num_bytes: int) -> None:
        self.pid = pid
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        pointer, count = ctypes.POINTER(_Range), ctypes.c_ulong
        self._read.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
        table = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            self.table = memoryview(mmap.mmap(table, num_bytes, prot=mmap.PROT_READ)).cast("Q")
        finally:
            os.close(table)

    def copy(self, address: int, num_bytes: int, to: int) -> None:
        """Copy from the peer's memory at `address` into this process's at `to`."""
        done = 0
        while done < num_bytes:  # the kernel moves at most 2 GiB at once
            here = _Range(to + done, num_bytes - done)
            there = _Range(address + done, num_bytes - done)
            count = self._read(self.pid, here, 1, there, 1, 0)
            if count <= 0:
                number = ctypes.get_errno()
                raise OSError(
                    number, f"memory of process {self.pid} cannot be read: {os.strerror(number)}"
                )
            done += count

    @property
    def is_alive(self) -> bool:
        return process_state(self.pid) not in (None, "Z", "X")


class _Channel:
    """The messages of one peer and tag in one direction, in order."""

    def __init__(self, owner: CmaTransport, rank: int, tag: int) -> None:
        self.rank, self.tag, self.peer = rank, tag, owner.peers[rank]
        here, there = owner.ranks.index(rank) * NUM_TAGS, owner.index * NUM_TAGS
        self.table, self.at = owner.table, (here + tag) * _WORDS  # what this rank says to the peer
        self.at_peer = (there + tag) * _WORDS  # what the peer says to this rank
        self.messages: deque[Message] = deque()
        self.count = 0  # that were posted, or taken


class _Sending(_Channel):
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


class _Receiving(_Channel):
    back: _Sending | None = None  # the same peer and tag in the other direction

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def move(self) -> None:
        while self.messages and self.peer.table[self.at_peer + _SENT] > self.count:
            tensor = self.messages[0].tensor
            if (num_bytes := self.peer.table[self.at_peer + _NUM_BYTES]) != tensor.nbytes:
                raise HangError(
                    f"ranks disagree: one sent {num_bytes} bytes where another expected {tensor.nbytes}"
                )
            try:
                self.peer.copy(
                    self.peer.table[self.at_peer + _ADDRESS], num_bytes, tensor.data_ptr()
                )
            except OSError as error:
                raise PeerError(f"another rank has ended ({error}): see what it says") from None
            self.messages.popleft().is_over = True
            self.count += 1
            self.table[self.at + _TAKEN] = self.count
            if self.back is not None:
                self.back.move()


class Message:
    """One message on its way: a `Work`."""

    def __init__(
        self, owner: CmaTransport, line: _Sending | _Receiving, tensor: torch.Tensor
    ) -> None:
        self._owner, self.line, self.tensor = owner, line, tensor
        self.is_over = False

    def is_completed(self) -> bool:
        if not self.is_over:
            self.line.move()
        return self.is_over

    def wait(self) -> None:
        """Return when it is over.

        Raises:
            PeerError: the peer has ended, or does not answer.
        """
        if not self.is_completed():
            self._owner.wait_for(self)


class CmaTransport:
    """This rank's messages to and from the other ranks of its host. Those of one peer and tag arrive in order."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        index: int,
        exchange: Callable[[bytes], Sequence[bytes]],
        patience_s: float,
    ) -> None:
        """Collective over the host's ranks.

        Args:
            ranks: the host's, by the numbers that others know them by.
            index: this rank's place among them.
            exchange: gives every rank's payload, in the order of `ranks`.
            patience_s: that a message may take.

        Raises:
            OSError: not all of them may read the memory of all others.
        """
        self.ranks, self.index = ranks, index
        self.peers: dict[int, _Peer] = {}
        self._patience_s = patience_s
        self._lines: dict[tuple[type[_Channel], int, int], _Sending | _Receiving] = {}
        problem = self._meet(exchange)
        if found := next(filter(None, exchange(problem.encode())), b""):
            raise OSError(found.decode())

    def _meet(self, exchange: Callable[[bytes], Sequence[bytes]]) -> str:
        """Make the own table, open the others', and try to read their memory; what is in the way, if anything."""
        num_bytes = (
            len(self.ranks) * NUM_TAGS * _WORDS * 8
        )  # of which only what is used takes memory
        token = secrets.token_bytes(_TOKEN_BYTES)
        shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
        descriptor: int | None = None
        card: dict[str, Any] = {"problem": f"this machine does not offer it, or {SWITCH}=off"}
        if is_possible():
            try:
                descriptor = os.memfd_create("zrun")
                os.ftruncate(descriptor, num_bytes)
                self.table = memoryview(mmap.mmap(descriptor, num_bytes)).cast("Q")
                card = {
                    "pid": os.getpid(),
                    "table": descriptor,
                    "at": ctypes.addressof(shown),
                    "token": token.hex(),
                }
            except OSError as error:  # the others wait to hear of it
                card = {"problem": f"no table can be made: {error.strerror}"}
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
        cards = [json.loads(each) for each in exchange(json.dumps(card).encode())]
        problem = next((each["problem"] for each in cards if "problem" in each), "")
        if not problem:
            try:
                for rank, found in zip(self.ranks, cards, strict=True):
                    if rank != self.ranks[self.index]:
                        self._open(rank, found, num_bytes)
            except OSError as error:
                problem = str(error)
        exchange(b"")  # everyone has opened what there is to open
        if descriptor is not None:
            os.close(descriptor)
        return problem

    def _open(self, rank: int, card: Mapping[str, Any], num_bytes: int) -> None:
        peer = self.peers[rank] = _Peer(card["pid"], card["table"], num_bytes)
        seen = ctypes.create_string_buffer(_TOKEN_BYTES)
        peer.copy(card["at"], _TOKEN_BYTES, ctypes.addressof(seen))
        if seen.raw.hex() != card["token"]:
            raise OSError(
                f"process {peer.pid} is not rank {rank}: they run in different containers"
            )

    def holds(self, ranks: tuple[int, ...], tag: int) -> bool:
        """Whether all of `ranks` can exchange messages with this tag."""
        return tag < NUM_TAGS and set(ranks) <= set(self.ranks)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Let `rank` take the contiguous `tensor`, which must not change until the message is over."""
        return self._begin(_Sending, tensor, rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Take the next message of `rank` into the contiguous `tensor`."""
        return self._begin(_Receiving, tensor, rank, tag)

    def _begin(
        self, kind: type[_Sending] | type[_Receiving], tensor: torch.Tensor, rank: int, tag: int
    ) -> Message:
        line = self._lines.get((kind, rank, tag))
        if line is None:
            line = self._lines[kind, rank, tag] = kind(self, rank, tag)
            taken, posted = (
                self._lines.get((_Receiving, rank, tag)),
                self._lines.get((_Sending, rank, tag)),
            )
            if isinstance(taken, _Receiving) and isinstance(posted, _Sending):
                taken.back = posted
        message = Message(self, line, tensor)
        line.add(message)
        return message

    def take_all(self, *, but: range) -> None:
        """Return when this rank has taken all that it asked for. See [Note: who moves messages].

        Args:
            but: tags of messages that need not be there yet.

        Raises:
            PeerError: a peer has ended, or does not answer.
        """
        for line in list(self._lines.values()):
            if line.tag in but:
                line.move()
            elif isinstance(line, _Receiving) and line.messages:
                line.messages[-1].wait()

    def wait_for(self, message: Message) -> None:
        """Move messages, this and any other, until this one is over.

        Raises:
            PeerError: the peer has ended, or does not answer.
        """
        pause_s, looks = _PAUSE_S[0], 0
        late = looked = time.monotonic()
        late += self._patience_s
        while not message.is_over:
            for line in self._lines.values():
                line.move()
            looks += 1
            if message.is_over or looks < _SPINS:
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S[1])
            now = time.monotonic()
            if now - looked < _LOOK_S:
                continue
            looked = now
            rank, peer = message.line.rank, message.line.peer
            if not peer.is_alive and not message.is_completed():
                raise PeerError(
                    f"another rank has ended (rank {rank}, process {peer.pid} is gone): see what it says"
                )
            if now > late:
                raise PeerError(
                    f"rank {rank} does not answer within {self._patience_s:g} s: see what it says"
                )
