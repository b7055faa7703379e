"""The only user of collectives: gathers, reductions and broadcasts over named groups, counted as they are issued.

[Note: direct exchange]
gloo's reduce-scatter is an all-reduce whose surplus is thrown away, and its all-gather copies twice. Up to
`DIRECT_MAX_RANKS` ranks, each pair exchanges exactly what it owes instead (`benchmarks/comm.py` compares them).
Contributions are always added in rank order, so the sum of an element does not depend on which rank owns it: that is
what makes the ZeRO stages bit-equal on any number of ranks. Messages carry a tag that names their unit: ranks that
disagree wait for each other, and the watchdog says about what, instead of mixing two units of one size. Where all ranks
of a group are on one host, what they exchange goes through their memory (`cma_transport.py`), else through sockets.

[Note: messages]
`send` and `receive` move one tensor between two ranks, under a number that both give it. Messages
of different numbers do not wait for each other, so a receive may be issued long before the rank
needs it, and before the other sends. Those of one number between two ranks arrive in order. Through
memory a `send` is over when the receiver has looked, which it does whenever it waits: no rank may
wait for that before it does what the receiver waits for.

[Note: chains]
What was issued may have to be followed by more: sums, once the parts have arrived, or a reduction
over another group. Among ranks that exchange pairwise each message finds its own receiver, so
`Handle.poll` starts what follows as soon as it sees that it can, which is so through memory.
Backends instead pair up what all ranks issue one after the other, and a part is over earlier on one
rank than on another; and messages through sockets do not say that they are over. There only
`advance` and `wait` start what follows, and all ranks call them at the same points of what they
issue.

[Note: one stream on CUDA]
NCCL work is issued asynchronously from the compute stream: its own stream waits for what was queued before, and `wait`
makes the compute stream wait for it. Buffers are held until `wait`, so no `record_stream` is needed and memory is
reused in a fixed order.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from zrun_core.distributed.cma_transport import NUM_TAGS, CmaTransport, Message, Work
from zrun_core.errors import PEER_IS_GONE, HangError, PeerError
from zrun_core.spine.flight_recorder import FlightRecorder, listed

DIRECT_MAX_RANKS = 8


def direct_up_to(device: str) -> int:
    """Ranks of a group that exchange pairwise, at most, on devices of this type. See [Note: direct exchange]."""
    return DIRECT_MAX_RANKS if device == "cpu" else 0


class CommPhase(Enum):
    """When traffic was issued."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class TrafficKey(NamedTuple):
    """What one line of the traffic account is about."""

    # all_gather | reduce_scatter | all_reduce | push | pull | broadcast | small | send | receive
    kind: str
    axis: str
    phase: CommPhase


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the mesh that this rank belongs to. Size 1 is not special: it moves nothing."""

    axis: str
    ranks: tuple[int, ...]  # global ranks, in the group's order
    index: int  # this rank's place in it
    process_group: dist.ProcessGroup | None  # None only where nothing is ever sent

    @property
    def size(self) -> int:
        return len(self.ranks)


class _Pair(NamedTuple):
    """The sender and the receiver of a message."""

    axis: str
    ranks: tuple[int, int]


class _Step(NamedTuple):
    """What follows a part of a `Handle`, and may be communication itself."""

    start: Callable[[], Handle | None]
    in_order: bool  # all ranks must start it at the same point of what they issue


class Handle:
    """Communication under way: parts that follow each other. See [Note: chains]."""

    def __init__(
        self,
        comm: Comm,
        works: Sequence[Work],
        then: Callable[[], Handle | None] | None = None,
    ) -> None:
        """Follow `works`; `then` comes once they are over, at any time on each rank."""
        self._comm = comm
        self._works = list(works)
        self._steps = deque([] if then is None else [_Step(then, in_order=False)])

    def then(self, start: Callable[[], Handle | None], over: Group) -> Handle:
        """Let `start` follow, which communicates over group `over`; return this handle.

        It starts at once where there is nothing to wait for.
        """
        self._steps.append(_Step(start, in_order=not self._comm.observes_completion(over)))
        while self._steps and not self._works:
            self._move_on()
        return self

    def poll(self) -> bool:
        """Move on where that takes no waiting and no order among ranks; return whether it is over.

        That is as far as can be told without waiting: see `Comm.observes_completion`.
        """
        while all(work.is_completed() for work in self._works):
            if self._steps and self._steps[0].in_order:
                return False
            if not self._works and not self._steps:
                return True
            self._move_on()
        return False

    def advance(self) -> None:
        """Wait for what precedes the next part that ranks start in one order, and start that."""
        while any(step.in_order for step in self._steps):
            is_started = self._steps[0].in_order
            self._move_on()
            if is_started:
                return

    def wait(self) -> None:
        """Finish it."""
        while self._works or self._steps:
            self._move_on()

    def _move_on(self) -> None:
        """Finish this part, and start the next one."""
        works, self._works = self._works, []
        if works:
            self._comm.wait_for(works)
        following = self._steps.popleft().start() if self._steps else None
        if following is not None:
            self._works = following._works
            self._steps.extendleft(reversed(following._steps))


class Comm:
    """Collectives of one rank. Sends are counted in bytes, per kind, axis and phase, without any synchronisation.

    Attributes:
        phase: what the traffic that is issued from now on belongs to.
        sent_bytes: bytes that this rank sent, by `TrafficKey`.
        received_bytes: bytes that it received, by `TrafficKey`.
        calls: how often, by `TrafficKey`.
        waited_s: seconds that the host spent waiting for other ranks.
    """

    def __init__(self, device: torch.device, board: FlightRecorder | None = None) -> None:
        self.device = device
        self.phase = CommPhase.SETUP
        self.sent_bytes: Counter[TrafficKey] = Counter()
        self.received_bytes: Counter[TrafficKey] = Counter()
        self.calls: Counter[TrafficKey] = Counter()
        self.waited_s = 0.0
        self._board = board
        self._memory: CmaTransport | None = None
        self._unread: list[Work] = []  # sends that nobody has waited for
        self._roll_calls: Counter[str] = Counter()

    def use_cma(self, host: Group, patience_s: float) -> str | None:
        """Exchange messages among the ranks of `host` through their memory. Collective.

        Args:
            patience_s: seconds that another rank may take to answer.

        Returns:
            why that cannot be, where it cannot: they go on through sockets.
        """
        if self.device.type != "cpu" or host.size == 1:
            return None
        try:
            exchange = functools.partial(self.all_gather_bytes, group=host, name="host memory")
            self._memory = CmaTransport(host.ranks, host.index, exchange, patience_s)
        except OSError as error:
            return str(error)
        return None

    def settle(self) -> None:
        """Return when other ranks have taken all that this one has sent: from now on it may change."""
        unread, self._unread = self._unread, []
        if unread:
            self.wait_for(unread)

    def is_direct(self, group: Group) -> bool:
        """Whether ranks of `group` exchange pairwise. See [Note: direct exchange]."""
        return group.size <= direct_up_to(self.device.type)

    def observes_completion(self, group: Group) -> bool:
        """Whether ranks of `group` may start what follows a message as soon as they see its end.

        Not so where they must start it in one order, and not through gloo's sockets, which do not
        say what has arrived.
        """
        is_seen = group.size == 1 or self._in_memory(group.ranks, _SMALL_TAG)
        return self.is_direct(group) and is_seen

    def num_recv_shards(self, group: Group) -> int:
        """Shards of scratch that a reduce-scatter needs for what arrives."""
        return group.size - 1 if self.is_direct(group) else 1

    def _count(
        self,
        kind: str,
        group: Group | _Pair,
        num_bytes: int,
        name: str,
        received: int | None = None,
    ) -> None:
        """`num_bytes` are sent, and as many received unless `received` says otherwise."""
        key = TrafficKey(kind, group.axis, self.phase)
        self.calls[key] += 1
        self.sent_bytes[key] += num_bytes
        self.received_bytes[key] += num_bytes if received is None else received
        if self._board is not None:
            self._board.issue(kind, group, name, num_bytes)

    def wait_for(self, works: Sequence[Work]) -> None:
        """Wait for other ranks; on CUDA this only makes the compute stream wait.

        Raises:
            PeerError: one of them is no more, or the time limit of the process group is over.
        """
        start = time.perf_counter()
        if self._board is not None:
            self._board.waiting(True)
        try:
            if self._memory is not None and not all(isinstance(work, Message) for work in works):
                self._memory.take_all(but=MESSAGE_TAGS)
            for work in works:
                work.wait()
        except RuntimeError as error:
            if PEER_IS_GONE.search(str(error)) is None:
                raise
            reason = str(error).splitlines()[0]
            raise PeerError(
                f"another rank has ended, or does not answer ({reason}): see what it says"
            ) from None
        finally:
            if self._board is not None:
                self._board.waiting(False)
        self.waited_s += time.perf_counter() - start

    def send(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        *,
        number: int,
        name: str,
    ) -> Handle:
        """Send the contiguous `tensor` to rank `peer` of `group`. See [Note: messages].

        Args:
            number: of the message, such as that of its micro-batch; the receiver gives the same.

        Returns:
            what is over when `tensor` may change.
        """
        pair = _Pair(group.axis, (group.ranks[group.index], group.ranks[peer]))
        self._count("send", pair, _bytes(tensor), name, received=0)
        return Handle(self, [self._send(tensor, peer, group, message_tag(number), pair.ranks)])

    def receive(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        *,
        number: int,
        name: str,
    ) -> Handle:
        """Receive the contiguous `tensor` from rank `peer` of `group`. See [Note: messages].

        Args:
            number: that the sender gives to the message.

        Returns:
            what is over when `tensor` is there.
        """
        pair = _Pair(group.axis, (group.ranks[peer], group.ranks[group.index]))
        self._count("receive", pair, 0, name, received=_bytes(tensor))
        return Handle(self, [self._receive(tensor, peer, group, message_tag(number), pair.ranks)])

    def _in_memory(self, ranks: tuple[int, ...], tag: int) -> bool:
        """Whether messages with this tag go through the memory of `ranks`."""
        return self._memory is not None and self._memory.holds(ranks, tag)

    def _send(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        tag: int,
        among: tuple[int, ...] | None = None,
    ) -> Work:
        """Send `tensor` to rank `peer` of `group`; in memory if `among`, or the group, share it."""
        if self._memory is not None and self._in_memory(among or group.ranks, tag):
            return self._memory.send(tensor, group.ranks[peer], tag)
        assert group.process_group is not None
        return _work(group.process_group.send([_raw(tensor)], peer, tag))

    def _receive(
        self,
        tensor: torch.Tensor,
        peer: int,
        group: Group,
        tag: int,
        among: tuple[int, ...] | None = None,
    ) -> Work:
        """Receive `tensor` from rank `peer` of `group`, as it is sent."""
        if self._memory is not None and self._in_memory(among or group.ranks, tag):
            return self._memory.receive(tensor, group.ranks[peer], tag)
        assert group.process_group is not None
        return _work(group.process_group.recv([_raw(tensor)], peer, tag))

    def _exchange(
        self,
        outgoing: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor],
        group: Group,
        tag: int,
    ) -> tuple[list[Work], list[Work]]:
        """Send `outgoing[k]` to, and receive `arriving[k]` from, the k-th other rank of `group`: receipts and sends."""
        others = [peer for peer in range(group.size) if peer != group.index]
        receipts = [
            self._receive(t, peer, group, tag) for peer, t in zip(others, arriving, strict=True)
        ]
        return receipts, [
            self._send(t, peer, group, tag) for peer, t in zip(others, outgoing, strict=True)
        ]

    def _exchange_all(
        self,
        outgoing: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor],
        group: Group,
        tag: int,
    ) -> list[Work]:
        """As `_exchange`; once all is over, what was sent may change."""
        receipts, sends = self._exchange(outgoing, arriving, group, tag)
        return [*receipts, *sends]

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: Group, *, tag: int, name: str
    ) -> Handle:
        """Fill `full` [size * n] with every rank's `shard` [n]. `shard` may be, or equal, the own slice of `full`.

        Through memory, other ranks may read `shard` until `settle`, although the gather is over here.
        """
        size = group.size
        if size == 1 or not full.numel():
            return Handle(self, [])
        self._count("all_gather", group, (size - 1) * _bytes(shard), name)
        if self.is_direct(group):
            slices = full.view(size, -1).unbind()
            arriving = [s for peer, s in enumerate(slices) if peer != group.index]
            receipts, sends = self._exchange([shard] * (size - 1), arriving, group, tag)
            # Sockets deliver by themselves: sends are over when receipts are.
            if not self._in_memory(group.ranks, tag):
                return Handle(self, [*receipts, *sends])
            self._unread = [*(work for work in self._unread if not work.is_completed()), *sends]
            return Handle(self, receipts)
        work = _all_gather_single(full, shard, group.process_group)
        return Handle(self, [work])

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
        """Sum `full` [size * n] over ranks in rank order; this rank's slice goes, or is added, `into` [n] at `wait`.

        `recv_buffer` [arrival_shards * n or more] is scratch, as is `full` afterwards. `into` may be
        the own slice of `full`.
        """
        size, index = group.size, group.index
        slices = full.view(size, -1).unbind()
        own = slices[index]
        if size == 1:
            return Handle(self, [], lambda: _store([own], into, accumulate))
        self._count("reduce_scatter", group, (size - 1) * _bytes(own), name)
        if self.is_direct(group):
            arriving = list(recv_buffer[: (size - 1) * own.numel()].view(size - 1, -1).unbind())
            outgoing = [s for peer, s in enumerate(slices) if peer != index]
            parts = [*arriving[:index], own, *arriving[index:]]
            works = self._exchange_all(outgoing, arriving, group, tag)
            return Handle(self, works, lambda: _store(parts, into, accumulate))
        total = recv_buffer[: own.numel()]
        work = _reduce_scatter_single(total, full, group.process_group)
        return Handle(self, [work], lambda: _store([total], into, accumulate))

    def all_reduce(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, *, tag: int, name: str
    ) -> Handle:
        """Sum `full` [any length] over ranks, in place, in rank order. `recv_buffer` is scratch, as in `reduce_scatter`.

        Each rank adds up one of `size` slices, of which the last may be shorter.
        """
        size, index = group.size, group.index
        if size == 1 or not full.numel():
            return Handle(self, [])
        borders = [slice_start(full.numel(), size, peer) for peer in range(size + 1)]
        slices = [full[start:stop] for start, stop in pairwise(borders)]
        own = slices[index]
        self._count("all_reduce", group, _bytes(full) + (size - 2) * _bytes(own), name)
        if not self.is_direct(group):
            return Handle(
                self, [_work(dist.all_reduce(full, group=group.process_group, async_op=True))]
            )
        arriving = list(recv_buffer[: (size - 1) * own.numel()].view(size - 1, -1).unbind())
        others = [s for peer, s in enumerate(slices) if peer != index]
        parts = [*arriving[:index], own, *arriving[index:]]

        def spread() -> Handle:
            _store(parts, own, accumulate=False)
            return Handle(self, self._exchange_all([own] * (size - 1), others, group, tag))

        return Handle(self, self._exchange_all(others, arriving, group, tag)).then(spread, group)

    def push(
        self, full: torch.Tensor, recv_buffer: torch.Tensor, group: Group, *, tag: int, name: str
    ) -> Handle:
        """Sum `full` [n] of all ranks on the first one, in place, in rank order; the others' stay as they are.

        `recv_buffer` [(size - 1) * n] is scratch of the first rank. This is how workers send their gradients to a
        parameter server (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server").
        """
        size, num_bytes = group.size, _bytes(full)
        if size == 1 or not full.numel():
            return Handle(self, [])
        if group.index:
            self._count("push", group, num_bytes, name, received=0)
            return Handle(self, [self._send(full, 0, group, tag)])
        self._count("push", group, 0, name, received=(size - 1) * num_bytes)
        arriving = list(recv_buffer.view(size - 1, -1).unbind())
        works = [self._receive(part, peer, group, tag) for peer, part in enumerate(arriving, 1)]
        return Handle(self, works, lambda: _store([full, *arriving], full, accumulate=False))

    def pull(self, tensor: torch.Tensor, group: Group, *, tag: int, name: str) -> Handle:
        """Overwrite `tensor` on every rank with that of the first one, which sends it to each of the others."""
        size, num_bytes = group.size, _bytes(tensor)
        if size == 1 or not tensor.numel():
            return Handle(self, [])
        if group.index:
            self._count("pull", group, 0, name, received=num_bytes)
            return Handle(self, [self._receive(tensor, 0, group, tag)])
        self._count("pull", group, (size - 1) * num_bytes, name, received=0)
        return Handle(self, [self._send(tensor, peer, group, tag) for peer in range(1, size)])

    def all_reduce_small(self, values: torch.Tensor, group: Group, *, name: str) -> torch.Tensor:
        """The sum of a short vector over `group`, the same bits on every rank."""
        if group.size == 1:
            return values
        self._count("small", group, (group.size - 1) * _bytes(values), name)
        if not self.is_direct(group):
            total = values.clone()
            self.wait_for([_work(dist.all_reduce(total, group=group.process_group, async_op=True))])
            return total
        everyone = torch.empty(group.size, values.numel(), dtype=values.dtype)
        everyone[group.index] = values
        arriving = [row for peer, row in enumerate(everyone.unbind()) if peer != group.index]
        self.wait_for(
            self._exchange_all(
                [values.contiguous()] * (group.size - 1), arriving, group, _SMALL_TAG
            )
        )
        return everyone.sum(0)

    def all_equal(self, number: int, group: Group, *, name: str) -> bool:
        """Whether all ranks of `group` name the same `number`, as far as its last 20 bits tell."""
        if group.size == 1:
            return True
        own = torch.tensor(equality_terms(number), dtype=torch.float64, device=self.device)
        return bool(terms_agree(self.all_reduce_small(own, group, name=name), group.size))

    def broadcast(self, tensor: torch.Tensor, group: Group, *, name: str, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with that of the group's rank `source`."""
        if group.size == 1:
            return
        is_source, num_bytes = group.index == source, _bytes(tensor)
        self._count(
            "broadcast",
            group,
            num_bytes * (group.size - 1) * is_source,
            name,
            num_bytes * (not is_source),
        )
        payload = tensor if tensor.is_contiguous() else tensor.contiguous()
        raw = _raw(payload)  # gloo has no bool and few integers; bytes need no arithmetic
        self.wait_for(
            [
                _work(
                    dist.broadcast(
                        raw, group.ranks[source], group=group.process_group, async_op=True
                    )
                )
            ]
        )
        if payload is not tensor:
            once = tuple(
                slice(1) if stride == 0 else slice(None) for stride in tensor.stride()
            )  # an expanded tensor
            tensor[once].copy_(payload[once])

    def all_gather_bytes(self, payload: bytes, group: Group, *, name: str) -> list[bytes]:
        """Every rank's `payload`, in the order of the group. For short messages: each rank gets all of them."""
        size, index = group.size, group.index
        if size == 1:
            return [payload]
        lengths = torch.zeros(size, dtype=torch.float64, device=self.device)
        lengths[index] = len(payload)
        counts = [int(count) for count in self.all_reduce_small(lengths, group, name=name).tolist()]
        if not (longest := max(counts)):
            return [b""] * size
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(payload)] = torch.frombuffer(bytearray(payload + b"\0"), dtype=torch.uint8)[:-1]
        everyone = torch.empty(size * longest, dtype=torch.uint8, device=self.device)
        everyone.view(size, -1)[index] = own
        self._count("small", group, (size - 1) * longest, name)
        rows = everyone.view(size, -1).unbind()
        if self.is_direct(group):
            arriving = [row for peer, row in enumerate(rows) if peer != index]
            works = self._exchange_all([rows[index]] * (size - 1), arriving, group, _SMALL_TAG)
        else:
            works = [_all_gather_single(everyone, rows[index].clone(), group.process_group)]
        self.wait_for(works)
        return [
            row[:n].numpy().tobytes()
            for row, n in zip(everyone.cpu().view(size, -1), counts, strict=True)
        ]

    def barrier(self, group: Group) -> None:
        """Return when every rank of `group` is here."""
        if group.size > 1:
            self.all_reduce_small(torch.zeros(1, device=self.device), group, name="barrier")

    def monitored_barrier(self, group: Group, what: str, patience_s: float) -> None:
        """Return when every rank of `group` has come to `what`, through the store in which the ranks first met.

        Raises:
            HangError: some have not come within `patience_s` seconds; it names them.
        """
        if group.size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        number = self._roll_calls[what] = self._roll_calls[what] + 1
        keys = [f"zrun/{what}/{number}/{rank}" for rank in group.ranks]
        store.set(keys[group.index], "here")
        deadline, pause_s = time.monotonic() + patience_s, 0.0005
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [
                    rank
                    for rank, key in zip(group.ranks, keys, strict=True)
                    if not store.check([key])
                ]
                if missing:
                    store.delete_key(
                        keys[group.index]
                    )  # who comes later must not take this rank to be here
                    self._roll_calls[what] -= 1
                    names = listed(missing)
                    who = f"rank {names} has" if len(missing) == 1 else f"ranks {names} have"
                    raise HangError(
                        f"{what}: {who} not called it within {patience_s:g} s; call it on every rank"
                    )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def drain(self) -> Counter[TrafficKey]:
        """Bytes sent since the last call."""
        counted, self.sent_bytes = self.sent_bytes, Counter()
        return counted

    def take_waited(self) -> float:
        """Seconds waited since the last call."""
        waited, self.waited_s = self.waited_s, 0.0
        return waited


NUM_EQUALITY_TERMS = 2  # numbers that `equality_terms` adds to a message


def equality_terms(number: int) -> tuple[float, float]:
    """Return what each rank adds to a message that is summed, if all ranks must name one `number`.

    It is x and its square, of the last 20 bits: the square of the sum is the sum of the squares
    times the number of ranks only if all x are equal. Both are exact in float64 for up to 8192
    ranks.
    """
    x = float(number % (1 << 20))
    return x, x**2


def terms_agree(summed: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return whether all ranks named one number: 0-d bool on the device.

    Args:
        summed: [2] what `equality_terms` gave, summed over ranks.
    """
    return summed[0] ** 2 == summed[1] * num_ranks


def slice_start(numel: int, parts: int, index: int) -> int:
    """Where part `index` of `numel` elements cut into `parts` begins; the last ones may be shorter, or empty."""
    return min(numel, index * -(-numel // parts))


# What travels between two ranks at the same time has different tags. Units have all others.
_SMALL_TAG = 1
MESSAGE_TAGS = range(NUM_TAGS - 256, NUM_TAGS)  # the last that memory has


def message_tag(number: int) -> int:
    return MESSAGE_TAGS[number % len(MESSAGE_TAGS)]


def gather_tag(unit_index: int) -> int:
    return _unit_tag(2 * unit_index)


def reduce_tag(unit_index: int) -> int:
    return _unit_tag(2 * unit_index + 1)


def _unit_tag(number: int) -> int:
    tag = _SMALL_TAG + 1 + number
    return tag if tag < MESSAGE_TAGS.start else tag + len(MESSAGE_TAGS)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: point-to-point messages need no number format."""
    return tensor.view(-1).view(torch.uint8)


def _store(parts: list[torch.Tensor], into: torch.Tensor, accumulate: bool) -> None:
    """`into` (+)= the sum of `parts` from left to right. One part may be `into` itself; the others are scratch."""
    total = parts[0]
    for part in parts[1:-1]:
        total.add_(part)
    if accumulate:
        if len(parts) > 1:
            total.add_(parts[-1])
        into.add_(total)
    elif len(parts) > 1:
        torch.add(total, parts[-1], out=into)
    elif total.data_ptr() != into.data_ptr():
        into.copy_(total)


def _work(work: dist.Work | None) -> Work:
    assert work is not None  # async_op=True on a member of the group
    return work


def _all_gather_single(
    full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> Work:
    collective = getattr(
        dist, "all_gather_single", dist.all_gather_into_tensor
    )  # renamed in torch 2.13
    return _work(collective(full, shard, group=group, async_op=True))


def _reduce_scatter_single(
    out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None
) -> Work:
    collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return _work(collective(out, full, group=group, async_op=True))
