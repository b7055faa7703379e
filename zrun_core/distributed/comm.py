"""The only way to other ranks: gathers, reductions and messages over groups, counted as issued.

    comm = Comm(device, flight_recorder)
    comm.use_cma(mesh.host, timeout_s)                    CPUs: through memory within the host
    handle = comm.all_gather(full, shard, mesh.shard, tag=gather_tag(0), name="embed")
    ...
    handle.wait()

Two things are chosen, each once for the ranks of a group: who does its collectives (pairs of ranks
or the backend, see `collectives.py`), and what carries messages (see `transport.py`).

[Note: messages]
`send` and `receive` move one tensor between two ranks, under a number that both give it. Messages
of different numbers do not wait for each other, so a receive may be issued long before the rank
needs it, and before the other sends. Those of one number between two ranks arrive in order. Through
memory a `send` is over when the receiver has looked, which it does whenever it waits: no rank may
wait for that before it does what the receiver waits for.

[Note: one stream on CUDA]
NCCL work is issued asynchronously from the current stream: its own stream waits for what was queued
there before, and `wait` makes the current stream wait for it. That is the compute stream, except
where a reduction moves on beside backward: see the note in `zero/reduce/reductions.py`. Buffers are
held until `wait`, so no `record_stream` is needed and memory is reused in a fixed order.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zrun_core.distributed.cma_transport import CmaTransport
from zrun_core.distributed.collectives import (
    BackendCollectives,
    Collectives,
    PairwiseCollectives,
    store_sum,
)
from zrun_core.distributed.handle import Chains, Handle
from zrun_core.distributed.line import Line, telling_of_peers
from zrun_core.distributed.transport import (
    NUM_TAGS,
    SMALL_TAG,
    Group,
    ProcessGroupTransport,
    Transport,
    Work,
    message_tag,
)
from zrun_core.errors import HangError
from zrun_core.hardware import accelerator
from zrun_core.hardware.clock import Unpassed, Waits
from zrun_core.hardware.spans import NOTHING, Issued, Spans
from zrun_core.spine.flight_recorder import FlightRecorder, listed

DIRECT_MAX_RANKS = 8
_VALUE_BYTES = 4 << 20  # of one in the store of the process group: torch's takes 8 MiB at most


def direct_up_to(device: str) -> int:
    """Return the most ranks of a group that exchange pairwise on devices of this type.

    See [Note: direct exchange] in `collectives.py`.
    """
    return DIRECT_MAX_RANKS if device == "cpu" else 0


class CommPhase(Enum):
    """The part of a step that issued traffic."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"

    __hash__ = object.__hash__  # as good as that of its name, and not made in Python


class TrafficKey(NamedTuple):
    """One line of the traffic account.

    Attributes:
        kind: all_gather | reduce_scatter | all_reduce | push | pull | broadcast | small | gather |
            send | receive.
    """

    kind: str
    axis: str
    phase: CommPhase


class _Pair(NamedTuple):
    """The sender and the receiver of a message."""

    axis: str
    ranks: tuple[int, int]


class Comm:
    """Collectives and messages of one rank, counted in bytes without any synchronisation.

    Attributes:
        phase: what the traffic that is issued from now on belongs to.
        sent_bytes: bytes that this rank sent, by `TrafficKey`.
        received_bytes: bytes that it received, by `TrafficKey`.
        calls: how often, by `TrafficKey`.
        waits: of the device for other ranks, until somebody takes them.
        device_waits: those of them that the device has not passed, which the host may have.
        spans: names what this rank does, while a profile is taken.
    """

    def __init__(self, device: torch.device, flight_recorder: FlightRecorder | None = None) -> None:
        self.device = device
        self.phase = CommPhase.SETUP
        self.sent_bytes: Counter[TrafficKey] = Counter()
        self.received_bytes: Counter[TrafficKey] = Counter()
        self.calls: Counter[TrafficKey] = Counter()
        self.device_waits = Unpassed()
        self.waits = Waits(device, self.device_waits)
        self.spans = Spans(device)
        self._flight_recorder = flight_recorder
        self._process_groups = ProcessGroupTransport()
        self._within_host: Transport = self._process_groups
        self._chains = Chains()
        self._is_waiting = False  # and others know it
        self._is_counted = False  # as part of the wait that goes on
        self._host_ranks: frozenset[int] = frozenset()
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._pairwise = PairwiseCollectives(self)
        self._backend = BackendCollectives(self)
        self._num_barriers: Counter[str] = Counter()

    # What moves what

    def use_cma(self, host: Group, timeout_s: float) -> str | None:
        """Let the ranks of `host` exchange messages through their memory. Collective.

        Args:
            timeout_s: seconds that another rank may take to answer.

        Returns:
            Why that is impossible, where it is: they go on through sockets.
        """
        if self.device.type != "cpu" or host.size == 1:
            return None
        exchange = functools.partial(self.all_gather_bytes, group=host, name="host memory")
        try:
            self._within_host = CmaTransport(
                host.ranks, host.index, exchange, self._chains, timeout_s
            )
        except OSError as error:
            return str(error)
        self._host_ranks = frozenset(host.ranks)
        self._transports.clear()
        return None

    def transport(self, ranks: tuple[int, ...], tag: int) -> Transport:
        """Return what carries messages with this tag among `ranks`: one choice for all of them.

        A group uses memory for everything, or for nothing, so that no two of its ranks wait for
        each other in different places.
        """
        if tag >= NUM_TAGS:
            return self._process_groups
        chosen = self._transports.get(ranks)
        if chosen is None:
            is_within_host = self._host_ranks.issuperset(ranks)
            chosen = self._within_host if is_within_host else self._process_groups
            self._transports[ranks] = chosen
        return chosen

    def is_direct(self, group: Group) -> bool:
        """Return whether ranks of `group` exchange pairwise."""
        return group.size <= direct_up_to(self.device.type)

    def _collectives(self, group: Group) -> Collectives:
        return self._pairwise if self.is_direct(group) else self._backend

    def observes_completion(self, group: Group) -> bool:
        """Return whether ranks of `group` may start what follows a message once they see its end.

        Not so where they must start it in one order, and not through gloo's sockets, which do not
        say what has arrived.
        """
        if not self.is_direct(group):
            return False
        return group.size == 1 or self.transport(group.ranks, SMALL_TAG).observes_completion

    def num_recv_shards(self, group: Group) -> int:
        """Return how many shards of scratch a reduction over `group` needs for what arrives."""
        return self._collectives(group).num_recv_shards(group)

    def follow(self, handle: Handle) -> None:
        """Start what follows in a chain while this rank waits. See [Note: chains]."""
        if self._within_host is not self._process_groups:
            self._chains.add(handle)

    # Waiting and counting

    @property
    def in_words(self) -> Issued | None:
        """What is being issued, in words; None where no profile is taken."""
        return self.spans.issued

    def wait_for(self, works: Sequence[Work], issued: Issued | None = None) -> None:
        """Wait for other ranks; on CUDA this only makes the compute stream wait.

        Args:
            issued: the same in words, if a profile is taken.

        Raises:
            PeerError: one of them has ended, or the time limit of the process group is over.
        """
        if self._is_counted:  # within another wait, which starts what follows in a chain
            self._wait_for(works)
            return
        self._is_counted = True
        try:
            with self._named_wait(issued), self.waiting(), self.waits.counting():
                self._wait_for(works)
        finally:
            self._is_counted = False

    def _named_wait(self, issued: Issued | None) -> AbstractContextManager[None]:
        if not self.spans.is_on:
            return NOTHING
        return self.spans.waiting(issued, self.phase.value)

    def _wait_for(self, works: Sequence[Work]) -> None:
        with telling_of_peers():
            self._within_host.prepare_to_wait(works)
            for work in works:
                work.wait()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell others inside that this rank waits for them.

        On CUDA `wait_for` makes a stream wait, and the host waits where it reads what has come.
        """
        if self._is_waiting:
            yield
            return
        self.tell_waiting(True)
        try:
            yield
        finally:
            self.tell_waiting(False)

    def tell_waiting(self, is_waiting: bool) -> None:
        """Tell others that this rank waits for them from now on, or no longer does."""
        self._is_waiting = is_waiting
        if self._flight_recorder is not None:
            self._flight_recorder.waiting(is_waiting)

    def read(self, tensor: torch.Tensor) -> list[float]:
        """Return the numbers of a tensor [n] that other ranks have a part in. The host waits."""
        with self.waiting():
            numbers: list[float] = accelerator.fetch(tensor).tolist()
        return numbers

    @property
    def flight_recorder(self) -> FlightRecorder | None:
        """Shows what this rank waits for; None outside of a run."""
        return self._flight_recorder

    def wait_for_tier(self, what: str) -> AbstractContextManager[None]:
        """Return a context that tells others that this rank waits for its own copies.

        Args:
            what: it waits for, as in "its disk (/scratch)".
        """
        if self._flight_recorder is None:
            return nullcontext()
        return self._flight_recorder.wait_for_tier(what)

    def settle(self) -> None:
        """Wait until other ranks have read all that this one has sent: from now on it may change.

        Through memory a gather completes on a rank before the others have read its shard.
        """
        unread = self._pairwise.unread
        self._pairwise.unread = []
        if unread:
            self.wait_for(unread)

    def drain(self) -> Counter[TrafficKey]:
        """Return the bytes sent since the last call."""
        counted = self.sent_bytes
        self.sent_bytes = Counter()
        return counted

    def _issuing(
        self,
        kind: str,
        group: Group | _Pair,
        name: str,
        *,
        sent: int,
        received: int,
    ) -> AbstractContextManager[None]:
        """Count bytes that are about to move, and record them in flight.

        Returns:
            What names the issue that follows inside, if a profile is taken.
        """
        key = TrafficKey(kind, group.axis, self.phase)
        self.calls[key] += 1
        self.sent_bytes[key] += sent
        self.received_bytes[key] += received
        if self._flight_recorder is not None:
            in_order = isinstance(group, Group) and self._is_in_order(kind, group)
            self._flight_recorder.issue(kind, group, name, sent or received, in_order=in_order)
        if not self.spans.is_on:
            return NOTHING
        shown = "message" if kind == "small" else kind
        return self.spans.issuing(shown, name, self.phase.value, group.axis)

    def _is_in_order(self, kind: str, group: Group) -> bool:
        """Return whether backends pair up what ranks issue by its order alone."""
        return kind not in ("push", "pull") and not self.is_direct(group)

    # Of all ranks of a group

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: Group, *, tag: int, name: str
    ) -> Handle:
        """Fill `full` with every rank's `shard`.

        Args:
            full: [size * n], filled once the handle is over; of one rank it is the shard itself.
            shard: [n], or the own slice of `full`. Through memory, other ranks may read it until
                `settle`, although the gather is over here.
            tag: see [Note: tags].
            name: what it is about, the same on all ranks.
        """
        if group.size == 1 or not full.numel():
            return Handle(self, [])
        num_bytes = (group.size - 1) * shard.nbytes
        with self._issuing("all_gather", group, name, sent=num_bytes, received=num_bytes):
            return self._collectives(group).all_gather(full, shard, group, tag)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        recv_buffer: torch.Tensor,
        into: torch.Tensor,
        group: Group,
        *,
        accumulate: bool,
        tag: int,
        name: str,
    ) -> Handle:
        """Sum `full` over ranks, in rank order where they exchange pairwise.

        Args:
            full: [size * n], scratch afterwards.
            recv_buffer: [num_recv_shards * n or more], scratch, if it is needed.
            into: [n], this rank's slice of the sum, which may be its slice of `full`.
            accumulate: add to `into` instead of overwriting it.
            tag: see [Note: tags].
            name: what it is about, the same on all ranks.
        """
        if group.size == 1:
            return Handle(self, [], lambda: store_sum([full.view(-1)], into, accumulate))
        num_bytes = (group.size - 1) * (full.nbytes // group.size)
        with self._issuing("reduce_scatter", group, name, sent=num_bytes, received=num_bytes):
            return self._collectives(group).reduce_scatter(
                full, recv_buffer, into, group, accumulate=accumulate, tag=tag
            )

    def all_reduce(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, *, tag: int, name: str
    ) -> Handle:
        """Sum `full` over ranks, in place, in rank order where they exchange pairwise.

        Args:
            full: [any length]. Each rank adds up one of `size` slices; the last may be shorter.
            recv_buffer: [num_recv_shards * length of a slice, or more], scratch.
            tag: see [Note: tags].
            name: what it is about, the same on all ranks.
        """
        size = group.size
        numel = full.numel()
        if size == 1 or not numel:
            return Handle(self, [])
        slice_numel = -(-numel // size)
        own_numel = min(slice_numel, max(0, numel - group.index * slice_numel))
        num_bytes = full.nbytes + (size - 2) * own_numel * full.element_size()
        with self._issuing("all_reduce", group, name, sent=num_bytes, received=num_bytes):
            return self._collectives(group).all_reduce(full, recv_buffer, group, tag)

    def all_reduce_small(self, values: torch.Tensor, group: Group, *, name: str) -> torch.Tensor:
        """Return the sum of a short vector over `group`, the same bits on every rank.

        Args:
            values: [n].
            name: what it is about, the same on all ranks.
        """
        if group.size == 1:
            return values
        num_bytes = (group.size - 1) * values.nbytes
        with self._issuing("small", group, name, sent=num_bytes, received=num_bytes):
            return self._collectives(group).all_reduce_small(values, group)

    def all_gather_bytes(self, payload: bytes, group: Group, *, name: str) -> list[bytes]:
        """Return every rank's `payload`, in the order of the group.

        Args:
            payload: short: each rank gets all of them, and waits for them.
            name: what it is about, the same on all ranks.
        """
        size = group.size
        if size == 1:
            return [payload]
        lengths = torch.zeros(size, dtype=torch.float64, device=self.device)
        lengths[group.index] = len(payload)
        told = self.read(self.all_reduce_small(lengths, group, name=name))
        counts = [int(count) for count in told]
        longest = max(counts)
        if not longest:
            return [b""] * size
        rows = torch.empty(size, longest, dtype=torch.uint8, device=self.device)
        rows[group.index] = _padded(payload, longest)
        num_bytes = (size - 1) * longest
        with self._issuing("small", group, name, sent=num_bytes, received=num_bytes):
            self._collectives(group).all_gather_rows(rows, group)
        with self.waiting():
            on_host = rows.cpu()
        return [row[:count].numpy().tobytes() for row, count in zip(on_host, counts, strict=True)]

    def gather_bytes(self, payload: bytes, group: Group, *, name: str) -> list[bytes]:
        """Return every rank's `payload` on the first rank of the group; nothing on the others.

        They meet in the store of the process group: no memory of devices is taken, and only the
        first rank takes any for what others tell. It returns when all have called it.

        Args:
            name: what it is about, the same on all ranks.
        """
        if group.size == 1:
            return [payload]
        store = dist.distributed_c10d._get_default_store()
        keys = [f"zrun/gather/{rank}" for rank in group.ranks]
        key = TrafficKey("gather", group.axis, self.phase)
        self.calls[key] += 1
        if group.index:
            _put(store, keys[group.index], payload)
            self.sent_bytes[key] += len(payload)
        self._meet(group, name)
        found = []
        if not group.index:
            found = [payload, *(_get(store, each) for each in keys[1:])]
            self.received_bytes[key] += sum(map(len, found[1:]))
        self._meet(group, name)  # now the keys may be used again
        return found

    def share_bytes(self, payload: bytes, group: Group, *, name: str) -> bytes:
        """Return the first rank's `payload` on every rank: through the store, as `gather_bytes`.

        Args:
            payload: of the first rank, of any length; that of others does not matter.
            name: what it is about, the same on all ranks.
        """
        if group.size == 1:
            return payload
        store = dist.distributed_c10d._get_default_store()
        where = f"zrun/share/{group.ranks[0]}"
        key = TrafficKey("gather", group.axis, self.phase)
        self.calls[key] += 1
        if not group.index:
            _put(store, where, payload)
            self.sent_bytes[key] += len(payload)
        self._meet(group, name)
        found = payload
        if group.index:
            found = _get(store, where)
            self.received_bytes[key] += len(found)
        self._meet(group, name)  # now the key may be used again
        return found

    def _meet(self, group: Group, name: str) -> None:
        """Return when every rank of `group` is here."""
        all_here = self.all_reduce_small(torch.ones(1, device=self.device), group, name=name)
        self.read(all_here)

    def all_equal(self, number: int, group: Group, *, name: str) -> bool:
        """Return whether all ranks name the same number.

        Args:
            number: of which the last 20 bits are compared.
            name: what it is about, the same on all ranks.
        """
        if group.size == 1:
            return True
        own = torch.tensor(equality_terms(number), dtype=torch.float64, device=self.device)
        summed = torch.tensor(self.read(self.all_reduce_small(own, group, name=name)))
        return bool(terms_agree(summed, group.size))

    def broadcast(self, tensor: torch.Tensor, group: Group, *, name: str, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with that of one of them, and wait for it.

        Args:
            tensor: of any shape, stride and dtype, the same on all ranks.
            name: what it is about, the same on all ranks.
            source: place of the sender in the group.
        """
        if group.size == 1:
            return
        num_bytes = tensor.numel() * tensor.element_size()
        sent, received = 0, num_bytes
        if group.index == source:
            sent, received = (group.size - 1) * num_bytes, 0
        payload = tensor.contiguous()
        with self._issuing("broadcast", group, name, sent=sent, received=received):
            self._backend.broadcast(payload, source, group)
        if not tensor.is_contiguous():
            # An expanded dimension has stride 0: its elements share memory, and are written once.
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[once].copy_(payload[once])

    def barrier(self, group: Group) -> None:
        """Return when every rank of `group` has called it: the host waits, on every device."""
        if group.size > 1:
            ones = torch.ones(1, device=self.device)
            arrived = self.all_reduce_small(ones, group, name="barrier")
            self.read(arrived)  # on CUDA until here only the stream has waited

    # Through a line of one thread: see `line.py`

    def issue_at(self, line: Line, kind: str, name: str, num_bytes: int) -> None:
        """Record a message of `line` in flight. Its thread calls it before it sends or receives.

        It is one of two ranks: each makes as many as it needs, and nobody compares them with those
        of a third.

        Args:
            kind: send or receive.
        """
        if self._flight_recorder is None:
            return
        group = line.group
        own, other = group.ranks[group.index], group.ranks[line.peer]
        pair = _Pair(group.axis, (own, other) if kind == "send" else (other, own))
        self._flight_recorder.issue(kind, pair, name, num_bytes, is_line=True)

    @contextmanager
    def waiting_at(self, line: Line, kind: str, name: str, num_bytes: int) -> Iterator[None]:
        """Wait inside for a message of `line`, in the thread that trains, and count it.

        Args:
            kind: send or receive.
        """
        self.issue_at(line, kind, name, num_bytes)
        with self._named_wait(self.in_words), self.waiting(), self.waits.counting():
            yield
        self.count(line)

    def count(self, line: Line) -> None:
        """Count what `line` has moved since the last call. The thread that trains calls it."""
        for (kind, is_sent), (calls, num_bytes) in line.take_moved().items():
            key = TrafficKey(kind, line.group.axis, self.phase)
            self.calls[key] += calls
            moved = self.sent_bytes if is_sent else self.received_bytes
            moved[key] += num_bytes

    def monitored_barrier(self, group: Group, what: str, timeout_s: float) -> None:
        """Return when every rank of `group` has come to `what`.

        They meet in the store of the process group, not in a collective, so that a rank that does
        not come can be named.

        Args:
            what: the same on all ranks, such as "zrun_core.save".
            timeout_s: seconds to wait for the others.

        Raises:
            HangError: some have not come in time; it names them.
        """
        if group.size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        self._num_barriers[what] += 1
        number = self._num_barriers[what]
        keys = [f"zrun/{what}/{number}/{rank}" for rank in group.ranks]
        store.set(keys[group.index], "here")
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0005
        while not store.check(keys):
            if time.monotonic() > deadline:
                absent = [
                    rank
                    for rank, key in zip(group.ranks, keys, strict=True)
                    if not store.check([key])
                ]
                if absent:
                    # A rank that comes later must not take this one to be here.
                    store.delete_key(keys[group.index])
                    self._num_barriers[what] -= 1
                    raise _absence(absent, what, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    # Between two ranks

    def send(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        *,
        number: int,
        name: str,
    ) -> Handle:
        """Send a tensor to rank `peer` of `group`. See [Note: messages].

        Args:
            tensor: contiguous; it may change when the handle is over.
            peer: place of the receiver in the group.
            number: of the message, such as that of its micro-batch; the receiver gives the same.
        """
        pair = _Pair(group.axis, (group.ranks[group.index], group.ranks[peer]))
        tag = message_tag(number)
        with self._issuing("send", pair, name, sent=tensor.nbytes, received=0):
            return Handle(self, [self.transport(pair.ranks, tag).send(tensor, group, peer, tag)])

    def receive(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        *,
        number: int,
        name: str,
    ) -> Handle:
        """Receive a tensor from rank `peer` of `group`. See [Note: messages].

        Args:
            tensor: contiguous, filled when the handle is over.
            peer: place of the sender in the group.
            number: that the sender gives to the message.
        """
        pair = _Pair(group.axis, (group.ranks[peer], group.ranks[group.index]))
        tag = message_tag(number)
        transport = self.transport(pair.ranks, tag)
        with self._issuing("receive", pair, name, sent=0, received=tensor.nbytes):
            return Handle(self, [transport.receive(tensor, group, peer, tag)])

    # Between the first rank of a group and each other one: a parameter server
    # (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server")

    def push(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, *, tag: int, name: str
    ) -> Handle:
        """Sum a tensor of all ranks on the first one, in place, in rank order.

        Args:
            full: [n]; that of the other ranks stays as it is.
            recv_buffer: [(size - 1) * n], scratch of the first rank.
            tag: see [Note: tags].
            name: what it is about, the same on all ranks.
        """
        size = group.size
        if size == 1 or not full.numel():
            return Handle(self, [])
        transport = self.transport(group.ranks, tag)
        if group.index > 0:
            with self._issuing("push", group, name, sent=full.nbytes, received=0):
                return Handle(self, [transport.send(full, group, 0, tag)])
        received = list(recv_buffer.view(size - 1, -1).unbind())
        peers = enumerate(received, 1)
        with self._issuing("push", group, name, sent=0, received=(size - 1) * full.nbytes):
            works = [transport.receive(part, group, peer, tag) for peer, part in peers]
            return Handle(self, works, lambda: store_sum([full, *received], full, accumulate=False))

    def pull(self, tensor: torch.Tensor, group: Group, *, tag: int, name: str) -> Handle:
        """Overwrite a tensor on every rank with that of the first one, which sends it to each.

        Args:
            tensor: [n].
            tag: see [Note: tags].
            name: what it is about, the same on all ranks.
        """
        size = group.size
        if size == 1 or not tensor.numel():
            return Handle(self, [])
        transport = self.transport(group.ranks, tag)
        if group.index > 0:
            with self._issuing("pull", group, name, sent=0, received=tensor.nbytes):
                return Handle(self, [transport.receive(tensor, group, 0, tag)])
        with self._issuing("pull", group, name, sent=(size - 1) * tensor.nbytes, received=0):
            works = [transport.send(tensor, group, peer, tag) for peer in range(1, size)]
            return Handle(self, works)


NUM_EQUALITY_TERMS = 2  # numbers that `equality_terms` adds to a message


def equality_terms(number: int) -> tuple[float, float]:
    """Return what each rank adds to a message that is summed, if all ranks must name one `number`.

    It is x and its square, of the last 20 bits: the square of the sum is the sum of the squares
    times the number of ranks only if all x are equal (Cauchy-Schwarz). Of two ranks that name 3 and
    5, the sums are 8 and 34, and 64 is not 68. Both are exact in float64 for up to 8192 ranks.
    """
    x = float(number % (1 << 20))
    return x, x**2


def terms_agree(summed: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return whether all ranks named one number: 0-d bool on the device.

    Args:
        summed: [2] what `equality_terms` gave, summed over ranks.
    """
    return summed[0] ** 2 == summed[1] * num_ranks


def _put(store: dist.distributed_c10d.Store, key: str, payload: bytes) -> None:
    """Put bytes of any length into a store, in as many values as they need."""
    starts = range(0, max(1, len(payload)), _VALUE_BYTES)
    for place, start in enumerate(starts):
        piece = payload[start : start + _VALUE_BYTES]
        value: Any = piece if place else b"%d\n%b" % (len(starts), piece)  # torch says str
        store.set(f"{key}/{place}", value)


def _get(store: dist.distributed_c10d.Store, key: str) -> bytes:
    """Return what `_put` has put there."""
    number, _, first = store.get(f"{key}/0").partition(b"\n")
    others = [store.get(f"{key}/{place}") for place in range(1, int(number))]
    return b"".join([first, *others])


def _padded(payload: bytes, num_bytes: int) -> torch.Tensor:
    """Return `payload`, then zeros: [num_bytes] uint8 on the CPU."""
    return torch.frombuffer(bytearray(payload.ljust(num_bytes, b"\0")), dtype=torch.uint8)


def _absence(ranks: Sequence[int], what: str, timeout_s: float) -> HangError:
    names = listed(ranks)
    who = f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"
    return HangError(f"{what}: {who} not called it within {timeout_s:g} s; call it on every rank")
