"""Messages through the memory of the ranks of a host: the same bits as through sockets, in order,
and never a hang.
"""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_comm import CPU, collectives, join, whole
from toys import Net, data, full_state, make_sharded, train_sharded, world

from zrun_core.distributed import cma_transport
from zrun_core.distributed.cma_transport import CmaTransport, Message
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Chains, Handle
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import SMALL_TAG, Group, gather_tag
from zrun_core.errors import HangError, PeerError


def join_memory(timeout_s: float = 60.0) -> tuple[Comm, Group]:
    """A group that has no sockets to fall back on."""
    comm, group = join()
    assert comm.use_cma(group, timeout_s) is None
    return comm, replace(group, process_group=None)


def exchange(shards: list[int], dtypes: list[str]) -> dict[str, Any]:
    comm, group = join_memory()
    return {
        f"{kind} {shard} {name}": tensor.float().tolist()
        for name in dtypes
        for shard in shards
        for kind, tensor in collectives(comm, group, shard, getattr(torch, name)).items()
    }


def exchange_over_sockets(shards: list[int], dtypes: list[str]) -> dict[str, Any]:
    comm, group = join()
    return {
        f"{kind} {shard} {name}": tensor.float().tolist()
        for name in dtypes
        for shard in shards
        for kind, tensor in collectives(comm, group, shard, getattr(torch, name)).items()
    }


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_collectives_have_the_bits_of_those_over_sockets(ranks, world_size):
    cases = [1, 7, 100_000], ["float32", "bfloat16"]
    assert ranks(world_size).run(exchange, *cases) == ranks(world_size).run(
        exchange_over_sockets, *cases
    )


def train(stage: int, in_memory: bool) -> tuple[list[float], dict[str, list[float]]]:
    torch.manual_seed(1)
    os.environ[cma_transport.SWITCH] = "on" if in_memory else "off"
    try:
        sharded = make_sharded(Net(), stage)
    finally:
        del os.environ[cma_transport.SWITCH]
    uses_memory = isinstance(sharded.comm.transport((0, 1), SMALL_TAG), CmaTransport)
    assert uses_memory == in_memory
    losses = train_sharded(sharded, data(4), accumulation=2)
    return losses, {name: value.tolist() for name, value in full_state(sharded).items()}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.at_most(2)
def test_training_has_the_bits_of_that_over_sockets(ranks, stage):
    assert ranks(3).run(train, stage, True) == ranks(3).run(train, stage, False)


def meet_with_files_open(num_files: int) -> dict[Any, int]:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_files)]
    comm, _ = join_memory()
    for file in files:
        os.close(file)
    return dict(comm.sent_bytes)


def test_meeting_sends_as_many_bytes_whatever_is_open(ranks):
    assert ranks(2).run(meet_with_files_open, 0) == ranks(2).run(meet_with_files_open, 100)


def refuse_on_one_rank() -> tuple[str | None, list[float]]:
    comm, group = join()
    if group.index == 1:
        os.environ[cma_transport.SWITCH] = "off"
    try:
        reason = comm.use_cma(group, 60.0)
    finally:
        os.environ.pop(cma_transport.SWITCH, None)
    return reason, comm.all_reduce_small(torch.ones(2), group, name="after").tolist()


def test_one_rank_that_cannot_makes_all_use_sockets(ranks):
    for reason, total in ranks(3).run(refuse_on_one_rank):
        assert "ZRUN_HOST_MEMORY=off" in (reason or "")
        assert total == [3, 3]


def fail_to_make_a_table_on_one_rank() -> tuple[str | None, list[float]]:
    comm, group = join()
    real = os.memfd_create

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if group.index == 1:
        os.memfd_create = refuse
    try:
        reason = comm.use_cma(group, 60.0)
    finally:
        os.memfd_create = real
    return reason, comm.all_reduce_small(torch.ones(2), group, name="after").tolist()


def test_one_rank_without_descriptors_makes_all_use_sockets(ranks):
    for reason, total in ranks(3).run(fail_to_make_a_table_on_one_rank):
        assert reason == "no table can be made: Too many open files"
        assert total == [3, 3]


def meet_a_stranger() -> str | None:
    """Each rank says that another process is it: what is found there is not what was shown."""
    comm, group = join()
    real, own = os.getpid, os.getpid()
    pids = [
        int.from_bytes(each, "little")
        for each in comm.all_gather_bytes(own.to_bytes(8, "little"), group, name="p")
    ]
    os.getpid = lambda: pids[(group.index + 1) % group.size]
    try:
        return comm.use_cma(group, 60.0)
    finally:
        os.getpid = real


def test_another_process_is_not_taken_for_a_rank(ranks):
    for reason in ranks(3).run(meet_a_stranger):
        assert reason is not None


def in_odd_order() -> list[list[float]]:
    """Ranks wait for the same gathers in opposite orders, and use one tag twice."""
    comm, group = join_memory()
    fulls, handles = [], []
    for number, tag in enumerate((2, 4, 2, 6)):
        full = torch.zeros(4 * group.size)
        own = full.view(group.size, -1)[group.index]
        own.fill_(10 * number + group.index)
        handles.append(comm.all_gather(full, own, group, tag=tag, name=str(number)))
        fulls.append(full)
    scattered = whole(8 * group.size, torch.float32, group.index)
    into, recv_buffer = torch.zeros(8), torch.zeros(8 * (group.size - 1))
    reduced = comm.reduce_scatter(
        scattered, recv_buffer, into, group, accumulate=False, tag=3, name="r"
    )
    for handle in [reduced, *handles] if group.index else [*reversed(handles), reduced]:
        handle.wait()
    comm.settle()
    return [full.view(group.size, -1)[:, 0].tolist() for full in fulls]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_wait_in_different_orders_do_not_wait_for_each_other(ranks, world_size):
    for found in ranks(world_size).run(in_odd_order):
        assert found == [[10 * number + peer for peer in range(world_size)] for number in range(4)]


def overtake() -> list[float]:
    """Rank 0 is done with a gather that rank 1 has not looked at; `settle` makes it wait before it
    writes.
    """
    comm, group = join_memory()
    store = dist.distributed_c10d._get_default_store()
    full = torch.zeros(2)
    own = full[group.index : group.index + 1].fill_(group.index + 1)
    handle = comm.all_gather(full, own, group, tag=2, name="a")
    if group.index == 0:
        handle.wait()
        is_read = all(work.is_completed() for work in comm._pairwise.unread)
        store.set(f"overtake/{id(comm)}", "")  # not read by anyone: both sides use the one below
        store.set("overtake", "done")
        assert not is_read, "the gather was over here before the other rank looked"
        comm.settle()
        own.fill_(9)
    else:
        store.wait(["overtake"])
        handle.wait()
    comm.barrier(group)
    if group.index == 0:
        store.delete_key("overtake")
    return full.tolist()


def test_settle_waits_until_others_have_read(ranks):
    assert ranks(2).run(overtake) == [[9, 2], [1, 2]]


PAIR = Group("host", (0, 1), 0, None)
_CALLS = itertools.count()  # the ranks of a pool make the same ones


def owe_a_message() -> list[float]:
    """Rank 0 has a second message behind one not taken yet, and finds all that it asked for at the
    first look.
    """
    comm, group = join_memory(timeout_s=10.0)
    call = next(_CALLS)

    def gather(value: float) -> tuple[torch.Tensor, Handle]:
        full = torch.zeros(2)
        own = full[group.index : group.index + 1].fill_(value + group.index)
        return full, comm.all_gather(full, own, group, tag=2, name="a")

    def meet(place: str) -> None:  # nobody looks at messages here, as in a wait for sockets
        comm.monitored_barrier(group, f"owe {call} {place}", 20.0)

    _, first = gather(10)
    meet("both have sent")
    if group.index == 0:
        first.wait()
        full, second = gather(20)
        meet("the second waits behind the first")
    else:
        meet("the second waits behind the first")
        first.wait()
        full, second = gather(20)
    meet("rank 1 has taken the first, and sent the second")
    second.wait()
    meet("both have all")
    comm.settle()
    return full.tolist()


def test_what_is_due_is_sent_before_a_rank_turns_to_something_else(ranks):
    assert ranks(2).run(owe_a_message) == [[20, 21]] * 2


def settle_while_another_waits_for_a_socket() -> tuple[list[float], list[float]]:
    """Rank 1 has asked for a gather that it needs later; rank 0 must not wait for it in vain."""
    comm, group = join()
    assert comm.use_cma(group, 10.0) is None
    full = torch.zeros(2)
    own = full[group.index : group.index + 1].fill_(group.index + 1)
    gathered = comm.all_gather(full, own, group, tag=2, name="a")
    if group.index == 0:
        comm.settle()
    over_sockets = torch.ones(2)
    comm.all_reduce(over_sockets, torch.zeros(2), group, tag=1 << 16, name="b").wait()
    gathered.wait()
    comm.settle()
    return full.tolist(), over_sockets.tolist()


def test_a_rank_takes_what_it_asked_for_before_it_waits_for_sockets(ranks):
    assert ranks(2).run(settle_while_another_waits_for_a_socket) == [([1, 2], [2, 2])] * 2


def wait_while_another_is_ahead(for_sockets: bool) -> list[list[float]]:
    """Rank 1 sends the sums of a first message before rank 0 looks at that, and waits for those.

    Rank 0 waits for something else by then, to which rank 1 comes later.
    """
    comm, group = join()
    assert comm.use_cma(group, 10.0) is None
    tensors = [torch.full((6,), float(group.index + 1)) for _ in range(2)]
    first = comm.all_reduce(tensors[0], torch.zeros(6), group, tag=2, name="a")
    while group.index == 1 and not first.num_moves:
        first.poll()
    told = torch.full((1,), float(group.index))
    comm.broadcast(told, group, name="rank 0 need not wait")
    if for_sockets:
        comm.broadcast(tensors[1], group, source=1, name="rank 0 waits")
    else:
        comm.all_reduce(tensors[1], torch.zeros(6), group, tag=3, name="b").wait()
    first.wait()
    return [told.tolist(), *(tensor.tolist() for tensor in tensors)]


@pytest.mark.parametrize("for_sockets", [False, True])
def test_a_rank_that_waits_sends_what_follows_in_other_messages(ranks, for_sockets):
    second = [2.0 if for_sockets else 3.0] * 6
    found = ranks(2).run(wait_while_another_is_ahead, for_sockets)
    assert found == [[[0.0], [3.0] * 6, second]] * 2


def gather_over_sockets() -> int:
    comm, group = join()
    for number in range(3):
        comm.all_gather(torch.zeros(2), torch.ones(1), group, tag=2, name=str(number)).wait()
    return len(comm._pairwise.unread)


def test_gathers_over_sockets_leave_nothing_behind(ranks):
    assert ranks(2).run(gather_over_sockets) == [0, 0]


def disagree() -> str:
    comm, group = join_memory()
    full = torch.zeros(4 if group.index else 8)
    handle = comm.all_gather(full, full.chunk(2)[group.index], group, tag=2, name="a")
    try:
        handle.wait()
    except HangError as error:
        return str(error)
    return ""


def test_messages_of_different_sizes_are_refused(ranks):
    assert "where another expected" in "".join(ranks(2).run(disagree))


def lose_a_peer() -> str:
    """Rank 1's place is taken by a child that ends without a word."""
    comm, group = join()
    if group.index == 1:
        comm.all_gather_bytes(b"", group, name="stay")  # until rank 0 has seen the child go
        return ""
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        memory = alone_with(child)
        with pytest.raises(PeerError, match=rf"rank 1, process {child} is gone"):
            memory.receive(torch.zeros(1), PAIR, 1, 2).wait()
        with pytest.raises(PeerError, match="rank 1 does not answer within"):
            alone_with(os.getpid(), timeout_s=0.0).receive(torch.zeros(1), PAIR, 1, 2).wait()
    finally:
        os.waitpid(child, 0)
        comm.all_gather_bytes(b"", group, name="stay")
    return "seen"


def alone_with(pid: int, timeout_s: float = 60.0) -> CmaTransport:
    """The memory of a rank whose peer runs in process `pid` and never posts anything."""
    memory = CmaTransport((0,), 0, lambda payload: [payload], Chains(), timeout_s)
    memory.ranks = (0, 1)
    descriptor = os.memfd_create("peer")
    try:
        os.ftruncate(descriptor, 1 << 23)
        memory.peers[1] = cma_transport._Peer(os.getpid(), descriptor, 1 << 23)
    finally:
        os.close(descriptor)
    memory.peers[1].pid = pid
    return memory


def test_a_peer_that_ends_or_is_silent_is_an_error(ranks):
    assert ranks(2).run(lose_a_peer) == ["seen", ""]


def one_host_of_two() -> list[bool]:
    """Ranks 0 and 1 share a host, and rank 2 is on another."""
    rank, size = world()
    mesh = Mesh.build(rank, ["one", "one", "other"], size)
    comm = Comm(CPU)
    assert comm.use_cma(mesh.host, 10.0) is None
    asked = (((0, 1), 2), ((0, 1, 2), 2), ((0, 1), 1 << 16))
    return [isinstance(comm.transport(ranks, tag), CmaTransport) for ranks, tag in asked]


def test_only_groups_within_the_host_use_it(ranks):
    found = ranks(3).run(one_host_of_two)
    assert found == [[True, False, False], [True, False, False], [False, False, False]]
    assert Comm(CPU).use_cma(Group("host", (0,), 0, None), 1.0) is None


def ask_early() -> tuple[list[float], list[float]]:
    """Ranks 0 and 1 share a host. The one expects what the other sends after two gathers of all."""
    rank, size = world()
    mesh = Mesh.build(rank, ["one", "one", "other"], size)
    comm, group = Comm(CPU), mesh.world
    assert comm.use_cma(mesh.host, 10.0) is None
    arriving = torch.zeros(2)
    if rank == 1:
        early = comm.receive(arriving, 0, group, number=0, name="hidden")
        assert isinstance(early._works[0], Message), "both share memory, if not the whole group"
    full = torch.zeros(size)
    full[rank] = rank + 1.0
    own = full[rank : rank + 1]
    for number in range(2):  # the first is over when all have issued it: nobody has to wait for it
        comm.all_gather(full, own, group, tag=gather_tag(number), name="over sockets").wait()
    if rank == 0:
        comm.send(torch.ones(2), 1, group, number=0, name="hidden").wait()
    if rank == 1:
        early.wait()
    comm.settle()
    comm.barrier(group)
    return full.tolist(), arriving.tolist()


def test_a_message_that_is_expected_later_holds_up_no_socket(ranks):
    found = ranks(3).run(ask_early)
    assert [full for full, _ in found] == [[1, 2, 3]] * 3
    assert found[1][1] == [1, 1]


def send_without_looking() -> list[float]:
    """Rank 0 sends three messages, and looks at none of them before rank 1 has all."""
    comm, group = join_memory(timeout_s=10.0)
    call = next(_CALLS)
    tensors = [torch.full((3,), float(number * (1 - group.index))) for number in (1, 2, 3)]
    if group.index == 0:
        sends = [
            comm.send(tensor, 1, group, number=number, name=f"hidden of {number}")
            for number, tensor in enumerate(tensors)
        ]
        comm.monitored_barrier(group, f"without looking {call}", 20.0)
        for send in sends:
            send.wait()
        return []
    for number, tensor in reversed(list(enumerate(tensors))):
        comm.receive(tensor, 0, group, number=number, name=f"hidden of {number}").wait()
    comm.monitored_barrier(group, f"without looking {call}", 20.0)
    return [float(tensor[0]) for tensor in tensors]


def test_messages_of_different_numbers_do_not_wait_for_each_other(ranks):
    assert ranks(2).run(send_without_looking) == [[], [1, 2, 3]]
