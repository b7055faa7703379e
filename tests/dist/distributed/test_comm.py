"""Direct exchange against the backend's own collectives, uneven slices, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import world

import zrun_core.distributed.comm
from zrun_core.distributed.collectives import slice_start
from zrun_core.distributed.comm import Comm, CommPhase, TrafficKey
from zrun_core.distributed.handle import Handle
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import (
    ACTIVATION_TAG,
    MESSAGE_TAGS,
    NUM_TAGS,
    SMALL_TAG,
    Group,
    ProcessGroupTransport,
    gather_tag,
    message_tag,
    reduce_tag,
)
from zrun_core.spine.flight_recorder import FlightRecorder

CPU = torch.device("cpu")


def join() -> tuple[Comm, Group]:
    rank, size = world()
    return Comm(CPU), Mesh.build(rank, ["host"] * size, size).world


def whole(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def exchange(sizes: list[int], dtype_names: list[str], direct: bool) -> dict[str, Any]:
    """Every collective on every size and dtype; results as float32 lists."""
    comm, group = join()
    zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8 if direct else 1
    found: dict[str, Any] = {}
    try:
        for name in dtype_names:
            dtype = getattr(torch, name)
            for shard in sizes:
                for kind, tensor in collectives(comm, group, shard, dtype).items():
                    found[f"{kind} {shard} {name}"] = tensor.float().tolist()
    finally:
        zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8
    return found


def collectives(
    comm: Comm, group: Group, shard: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    index, numel = group.index, shard * group.size
    own = slice(index * shard, (index + 1) * shard)
    recv_buffer = torch.empty(comm.num_recv_shards(group) * shard, dtype=dtype)
    gathered = torch.zeros(numel, dtype=dtype)
    gathered[own] = whole(shard, dtype, index)
    comm.all_gather(gathered, gathered[own], group, tag=2, name="a").wait()

    apart = torch.zeros(shard, dtype=dtype)
    full = whole(numel, dtype, index)
    comm.reduce_scatter(full, recv_buffer, apart, group, accumulate=False, tag=3, name="b").wait()
    added = torch.ones(shard, dtype=dtype)
    full = whole(numel, dtype, index)
    comm.reduce_scatter(full, recv_buffer, added, group, accumulate=True, tag=3, name="b").wait()
    inside = whole(numel, dtype, index)
    comm.reduce_scatter(
        inside, recv_buffer, inside[own], group, accumulate=False, tag=3, name="b"
    ).wait()

    total = whole(numel, dtype, index)
    comm.all_reduce(total, recv_buffer, group, tag=5, name="c").wait()
    return {
        "gather": gathered,
        "scatter": torch.cat([apart, added, inside[own]]),
        "reduce": total,
        "small": comm.all_reduce_small(whole(5, torch.float64, index), group, name="d"),
    }


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_direct_exchange_equals_sums_in_rank_order_and_the_backend(ranks, world_size):
    sizes = [1, 7, 1024]
    direct = ranks(world_size).run(exchange, sizes, ["float32", "bfloat16", "float16"], True)
    native = ranks(world_size).run(exchange, sizes, ["float32"], False)
    for rank, found in enumerate(direct):
        for shard in sizes:
            for name in ("float32", "bfloat16", "float16"):
                dtype = getattr(torch, name)
                total = whole(shard * world_size, dtype, 0)
                for peer in range(1, world_size):
                    total = total + whole(shard * world_size, dtype, peer)
                own = total[rank * shard : (rank + 1) * shard]
                gathered = torch.cat([whole(shard, dtype, peer) for peer in range(world_size)])
                assert found[f"gather {shard} {name}"] == gathered.float().tolist()
                assert found[f"reduce {shard} {name}"] == total.float().tolist(), (
                    "left to right, to the bit"
                )
                expected = torch.cat([own, torch.ones_like(own) + own, own])
                assert found[f"scatter {shard} {name}"] == expected.float().tolist()
    for ours, theirs in zip(direct, native, strict=True):
        for key, values in theirs.items():
            assert ours[key] == pytest.approx(values, abs=1e-5), key


@pytest.mark.parametrize("direct", [True, False])
def test_a_gather_brings_the_own_shard_too(ranks, direct):
    assert ranks(3).run(gathered_from_apart, direct) == [[0.0] * 5 + [1.0] * 5 + [2.0] * 5] * 3


def gathered_from_apart(direct: bool) -> list[float]:
    comm, group = join()
    zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8 if direct else 1
    full = torch.full((15,), float("nan"))
    try:
        comm.all_gather(full, torch.full((5,), float(group.index)), group, tag=2, name="a").wait()
        comm.settle()
    finally:
        zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8
    return full.tolist()


def test_what_the_backend_sums_is_where_it_goes(ranks):
    """gloo itself copies what it has summed, once."""
    for found in ranks(2).run(operators_of_the_backend):
        assert found["gather"] == []
        assert found["scatter"] == ["aten.copy_.default"]
        assert found["add"] == ["aten.copy_.default", "aten.add_.Tensor"]


def operators_of_the_backend() -> dict[str, list[str]]:
    comm, group = join()
    zrun_core.distributed.comm.DIRECT_MAX_RANKS = 1
    full, shard, scratch = torch.ones(16), torch.ones(8), torch.empty(8)
    try:
        with Operators() as operators:
            comm.all_gather(full, shard, group, tag=2, name="a").wait()
        found = {"gather": operators.names}
        for name, accumulate in (("scatter", False), ("add", True)):
            with Operators() as operators:
                comm.reduce_scatter(
                    full, scratch, shard, group, accumulate=accumulate, tag=3, name="b"
                ).wait()
            found[name] = operators.names
    finally:
        zrun_core.distributed.comm.DIRECT_MAX_RANKS = 8
    passes = ("aten.copy_", "aten.add")
    return {
        key: [each for each in names if each.startswith(passes)] for key, names in found.items()
    }


class Operators(TorchDispatchMode):
    """Notes which operators run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def reduce_uneven(numels: list[int]) -> list[dict[str, Any]]:
    comm, group = join()
    found = []
    for numel in numels:
        values = whole(numel, torch.float32, group.index)
        recv_buffer = torch.empty(comm.num_recv_shards(group) * slice_start(numel, group.size, 1))
        comm.all_reduce(values, recv_buffer, group, tag=5, name="x").wait()
        found.append({"values": values.tolist(), "sent": sum(comm.drain().values())})
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_of_lengths_that_do_not_divide(ranks, world_size):
    numels = [0, 1, 2, 3, 5, 8, 1000, 1024]
    runs = ranks(world_size).run(reduce_uneven, numels)
    for number, numel in enumerate(numels):
        total = whole(numel, torch.float32, 0)
        for peer in range(1, world_size):
            total = total + whole(numel, torch.float32, peer)
        for run in runs:
            assert run[number]["values"] == total.tolist()
        assert sum(run[number]["sent"] for run in runs) == 2 * (world_size - 1) * numel * 4, (
            "no byte more than needed"
        )


@pytest.mark.parametrize(("numel", "parts"), [(0, 3), (1, 3), (7, 3), (9, 3), (5, 4), (1024, 3)])
def test_slices_tile_what_they_cut(numel, parts):
    borders = [slice_start(numel, parts, index) for index in range(parts + 1)]
    assert borders == sorted(borders)
    assert (borders[0], borders[-1]) == (0, numel)
    assert max(stop - start for start, stop in pairwise(borders)) == -(-numel // parts)


def broadcast_all() -> list[list[float]]:
    comm, group = join()
    mine = group.index == 1
    tensors = [
        torch.full((3,), float(mine)),
        torch.full((2, 2), mine),
        torch.tensor(7 * mine, dtype=torch.int64),
        torch.full((2, 3), float(mine)).t(),
        torch.full((2,), 1j * mine, dtype=torch.complex64),
        torch.empty(0),
    ]
    for tensor in tensors:
        comm.broadcast(tensor, group, name="buffer", source=1)
    return [
        torch.view_as_real(t).sum().item() if t.is_complex() else t.double().sum().item()
        for t in tensors
    ]


def test_broadcast_of_any_dtype_and_layout(ranks):
    for found in ranks(2).run(broadcast_all):
        assert found == [3, 4, 7, 6, 2, 0]


def count() -> tuple[dict[TrafficKey, int], dict[TrafficKey, int], int]:
    comm, group = join()
    comm.phase = CommPhase.FORWARD
    collectives(comm, group, 10, torch.float32)
    comm.phase = CommPhase.STEP
    comm.all_reduce_small(torch.zeros(3), group, name="d")
    calls, sent = dict(comm.calls), dict(comm.drain())
    assert not comm.drain(), "a second look finds nothing"
    return calls, sent, group.index


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_sent_is_counted_by_kind_and_phase(ranks, world_size):
    n = world_size
    for calls, sent, _ in ranks(n).run(count):
        if n == 1:
            assert not sent
            continue
        assert calls == {
            TrafficKey("all_gather", "world", CommPhase.FORWARD): 1,
            TrafficKey("reduce_scatter", "world", CommPhase.FORWARD): 3,
            TrafficKey("all_reduce", "world", CommPhase.FORWARD): 1,
            TrafficKey("small", "world", CommPhase.FORWARD): 1,
            TrafficKey("small", "world", CommPhase.STEP): 1,
        }
        assert sent == {
            TrafficKey("all_gather", "world", CommPhase.FORWARD): (n - 1) * 40,
            TrafficKey("reduce_scatter", "world", CommPhase.FORWARD): 3 * (n - 1) * 40,
            TrafficKey("all_reduce", "world", CommPhase.FORWARD): 2 * (n - 1) * 40,
            TrafficKey("small", "world", CommPhase.FORWARD): (n - 1) * 40,
            TrafficKey("small", "world", CommPhase.STEP): (n - 1) * 12,
        }


class Work:
    def __init__(self) -> None:
        self.is_done = self.was_waited_for = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.was_waited_for = True


def test_a_handle_moves_on_by_polling_and_finishes_once():
    comm, first, second, log = Comm(CPU), Work(), Work(), []

    def follow() -> Handle:
        log.append("second part")
        return Handle(comm, [second], lambda: log.append("over"))  # type: ignore[list-item, func-returns-value]

    handle = Handle(comm, [first], follow)  # type: ignore[list-item]
    assert not handle.poll()
    assert log == []
    first.is_done = True
    assert not handle.poll()
    assert log == ["second part"]
    second.is_done = True
    assert handle.poll()
    handle.wait()
    assert log == ["second part", "over"]


def chain(over: Group) -> tuple[Handle, list[Work], list[str]]:
    """A reduction over one group, what is done with it, and then another one over `over`."""
    comm, works, log = Comm(CPU), [Work(), Work()], []

    def reduce_over_copies() -> Handle:
        log.append("second")
        return Handle(comm, [works[1]], lambda: log.append("over"))  # type: ignore[list-item, func-returns-value]

    first = Handle(comm, [works[0]], lambda: log.append("stored"))  # type: ignore[list-item, func-returns-value]
    return first.then(reduce_over_copies, over), works, log


def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all ranks to be on one host."""
    monkeypatch.setattr(ProcessGroupTransport, "observes_completion", True)


def test_polling_starts_what_follows_among_ranks_that_exchange_pairwise(monkeypatch):
    in_memory(monkeypatch)
    handle, (first, second), log = chain(Group("replicate", (0, 1), 0, None))
    handle.advance()
    assert log == [], "nothing needs an order"
    first.is_done = True
    assert not handle.poll()
    assert log == ["stored", "second"]
    second.is_done = True
    assert handle.poll()
    assert log == ["stored", "second", "over"]


@pytest.mark.parametrize("polled", [True, False])
@pytest.mark.parametrize("through", ["backend", "sockets"])
def test_where_order_matters_only_fixed_points_start_what_follows(monkeypatch, polled, through):
    num_ranks = 2
    if through == "backend":
        in_memory(monkeypatch)
        num_ranks = zrun_core.distributed.comm.DIRECT_MAX_RANKS + 1
    handle, (first, second), log = chain(Group("replicate", tuple(range(num_ranks)), 0, None))
    first.is_done = second.is_done = True
    if polled:
        assert not handle.poll()
        assert not handle.poll()
        assert log == ["stored"], "on another rank the first part may not be over yet"
    handle.advance()
    assert log == ["stored", "second"]
    handle.advance()
    assert log == ["stored", "second"], "what is under way is not waited for"
    assert not second.was_waited_for
    assert handle.poll()
    handle.wait()
    assert log == ["stored", "second", "over"]


def test_a_chain_is_finished_by_waiting():
    handle, (first, second), log = chain(Group("replicate", (0, 1), 0, None))
    handle.wait()
    assert (first.was_waited_for, second.was_waited_for) == (True, True)
    assert log == ["stored", "second", "over"]


def test_fixed_points_start_one_part_at_a_time():
    comm, works, log = Comm(CPU), [Work(), Work(), Work()], []
    over = Group("replicate", (0, 1), 0, None)

    def start(number: int) -> Handle:
        log.append(number)
        return Handle(comm, [works[number]])

    handle = Handle(comm, [works[0]]).then(lambda: start(1).then(lambda: start(2), over), over)
    handle.advance()
    assert log == [1]
    assert not works[1].was_waited_for
    handle.advance()
    assert log == [1, 2]
    assert works[1].was_waited_for
    assert not works[2].was_waited_for


def test_what_follows_nothing_starts_at_once():
    """At stage 0 there is no reduce-scatter ahead of the all-reduce."""
    comm, log = Comm(CPU), []
    over = Group("replicate", (0, 1), 0, None)

    def follow() -> Handle:
        log.append("second")
        return Handle(comm, [Work()])

    handle = Handle(comm, [], lambda: log.append("stored")).then(follow, over)
    assert log == ["stored", "second"]
    assert not handle.poll()


def pass_on(folder: str, in_memory: bool, laps: int) -> dict[str, Any]:
    """Ranks in a ring send to the next one, more messages under one number than there are tags."""
    rank, size = world()
    board = FlightRecorder(Path(folder) / "board", rank, range(size), size)
    comm, group = Comm(CPU, board), Mesh.build(rank, ["host"] * size, size).world
    group = replace(group, axis="pipe")
    if in_memory:
        assert comm.use_cma(group, 60.0) is None
    comm.phase = CommPhase.FORWARD
    step = len(MESSAGE_TAGS)  # so that all have one tag
    received = []
    for lap in range(laps):
        arriving = torch.zeros(3, dtype=torch.bfloat16)
        receive = comm.receive(
            arriving, (rank - 1) % size, group, number=lap * step, name=f"hidden of {lap}"
        )
        outgoing = torch.full((3,), float(10 * lap + rank), dtype=torch.bfloat16)
        send = comm.send(
            outgoing, (rank + 1) % size, group, number=lap * step, name=f"hidden of {lap}"
        )
        received.append((receive, send, arriving))
    for receive, send, _ in received:
        receive.wait()
        send.wait()
    return {
        "values": [arriving.tolist() for *_, arriving in received],
        "calls": dict(comm.calls),
        "sent": dict(comm.sent_bytes),
        "received": dict(comm.received_bytes),
        "last": str(board.last(rank)),
    }


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_messages_go_from_one_rank_to_another_and_are_counted(ranks, tmp_path, size, in_memory):
    laps = 3
    for rank, found in enumerate(ranks(size).run(pass_on, str(tmp_path), in_memory, laps)):
        before = (rank - 1) % size
        assert found["values"] == [[10 * lap + before] * 3 for lap in range(laps)]
        kinds = {kind: TrafficKey(kind, "pipe", CommPhase.FORWARD) for kind in ("send", "receive")}
        counts = {key: n for key, n in found["calls"].items() if key.kind != "small"}
        assert counts == dict.fromkeys(kinds.values(), laps)
        assert found["sent"][kinds["send"]] == laps * 3 * 2
        assert found["sent"][kinds["receive"]] == 0
        assert found["received"][kinds["receive"]] == laps * 3 * 2
        assert found["received"][kinds["send"]] == 0
        assert found["last"] == f"send 3 to rank {(rank + 1) % size}, 'hidden of 2' (6 B)"


def test_what_is_under_way_between_two_ranks_has_tags_of_its_own():
    units = {tag(number) for number in range(40_000) for tag in (gather_tag, reduce_tag)}
    messages = {message_tag(number) for number in range(5000)}
    assert len(units) == 80_000
    assert len(messages) == len(MESSAGE_TAGS)
    assert max(messages) < NUM_TAGS < max(units), "messages can go through memory"
    assert not units & messages
    assert not (units | messages) & {SMALL_TAG, ACTIVATION_TAG}


def test_a_wait_within_a_wait_ends_with_it() -> None:
    """What others see, and what is counted, is the outer one: a chain goes on within it."""
    told: list[bool] = []
    comm = Comm(CPU, SimpleNamespace(waiting=told.append))  # type: ignore[arg-type]
    inner = SimpleNamespace(wait=lambda: told.append(comm.waits.seconds() == 0.0))
    outer = SimpleNamespace(wait=lambda: (comm.wait_for([inner]), told.append(True)))
    comm.wait_for([outer])
    # It waits; inside, nothing is counted yet, nor after the inner wait; it no longer waits.
    assert told == [True, True, True, False]
    assert comm.waits.seconds() > 0


def report_of(rank: int, turn: int) -> bytes:
    """Nothing, what fits into one value of the store with 3,000 bytes, or what needs three."""
    return bytes([0, 10, rank]) * (1000 * turn * rank)


def gather_in_turns() -> dict[str, Any]:
    """What the first rank is told, three times at once, and what that sends."""
    rank, _ = world()
    comm, group = join()
    whole_value = zrun_core.distributed.comm._VALUE_BYTES
    zrun_core.distributed.comm._VALUE_BYTES = 3000
    try:
        found = [
            comm.gather_bytes(report_of(rank, turn), group, name="report") for turn in (0, 1, 2)
        ]
        shared = [
            comm.share_bytes(report_of(rank + 1, turn), group, name="report") for turn in (0, 1, 2)
        ]
    finally:
        zrun_core.distributed.comm._VALUE_BYTES = whole_value
    key = TrafficKey("gather", "world", CommPhase.SETUP)
    small = TrafficKey("small", "world", CommPhase.SETUP)
    return {
        "found": found,
        "shared": shared,
        "sent": comm.sent_bytes[key],
        "received": comm.received_bytes[key],
        "small": comm.sent_bytes[small],
    }


def test_reports_reach_the_first_rank_alone(ranks):
    """And nothing of them goes through the memory of any device: 8 bytes do, to meet."""
    first, *others = ranks(3).run(gather_in_turns)
    told = [[report_of(rank, turn) for rank in range(3)] for turn in (0, 1, 2)]
    shared = [report_of(1, turn) for turn in (0, 1, 2)]
    shared_bytes = sum(map(len, shared))
    assert first["found"] == told
    assert first["shared"] == shared
    assert first["sent"] == shared_bytes
    assert first["received"] == sum(len(each) for turn in told for each in turn[1:])
    for rank, other in enumerate(others, 1):
        assert other["found"] == [[], [], []]
        assert other["sent"] == sum(len(turn[rank]) for turn in told)
        assert other["shared"] == shared
        assert other["received"] == shared_bytes
        assert other["small"] == 6 * 2 * 2 * 4


def test_one_rank_gathers_from_itself():
    comm = Comm(CPU)
    assert comm.gather_bytes(b"own", Group("world", (0,), 0, None), name="report") == [b"own"]
