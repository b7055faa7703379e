"""A central parameter server instead of the ring: the same numbers, and traffic that grows with the
ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import Exact, Net, data, full_state, make_sharded, train_sharded, world

from zrun_core.distributed.comm import Comm, TrafficKey
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import DivergedError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.zero.account import allocated_memory, expected_traffic, planned_memory
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.server import ParameterServer

P = Exact.NUMEL
OPTIONS: list[dict[str, Any]] = [
    {},
    {"optim": {"clip": 0.05}},
    {"optim": {"name": "lamb", "no_decay": ["bias"]}},
    {"precision": "bf16"},
    {
        "precision": {"compute": "bf16", "reduce": "compute"},
        "optim": {"name": "lamb", "moments": "bf16"},
    },
    {"precision": "fp16"},
]


def exchange_by(server: bool) -> Exchange:
    return ParameterServer() if server else Exchange()


def train(server: bool, options: dict[str, Any], accumulation: int = 1) -> dict[str, Any]:
    torch.manual_seed(1)
    sharded = make_sharded(Net(), 0, exchange=exchange_by(server), **options)
    losses = train_sharded(sharded, data(5), accumulation=accumulation)
    assert planned_memory(sharded).by_kind == allocated_memory(sharded).by_kind
    expected = expected_traffic(sharded, 5, 5 * accumulation)
    assert {kind: sent_by(sharded.comm, kind) for kind in expected} == expected
    optim_bytes = sum(
        size for kind, size in allocated_memory(sharded).by_kind.items() if kind.value == "optim"
    )
    state = {name: value.float().numpy() for name, value in full_state(sharded).items()}
    return {"losses": losses, "state": state, "optim_bytes": optim_bytes}


def sent_by(comm: Comm, kind: str) -> int:
    return sum(size for key, size in comm.sent_bytes.items() if key.kind == kind)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.at_most(3)
def test_the_numbers_are_the_rings(ranks, world_size, options):
    ring, server = (ranks(world_size).run(train, by_server, options) for by_server in (False, True))
    for run in server:
        assert run["losses"] == ring[0]["losses"]
        assert all((value == ring[0]["state"][name]).all() for name, value in run["state"].items())
    assert [bool(run["optim_bytes"]) for run in server] == [True] + [False] * (world_size - 1)


def test_accumulation_is_local(ranks):
    ring, server = (ranks(2).run(train, by_server, {}, 3) for by_server in (False, True))
    assert server[0]["losses"] == ring[0]["losses"]


def count(server: bool) -> tuple[int, int]:
    """Bytes that this rank sends and receives in the gradients and parameters of one step."""
    torch.manual_seed(0)
    sharded = make_sharded(Exact(), 0, bucket=96 * 1024 * 2, exchange=exchange_by(server))
    batches = data(2, 36, 1024)
    train_sharded(sharded, batches[:1])
    comm = sharded.comm
    before = comm.sent_bytes.copy(), comm.received_bytes.copy()
    train_sharded(sharded, batches[1:])
    of_step = [
        after - then
        for after, then in zip((comm.sent_bytes, comm.received_bytes), before, strict=True)
    ]
    sent, received = (sum(n for key, n in part.items() if key.kind != "small") for part in of_step)
    return sent, received


def test_traffic_at_the_server_grows_with_the_ranks_and_the_rings_does_not(ranks):
    for n in (2, 3, 4):
        server, *others = ranks(n).run(count, True)
        assert server == (4 * P * (n - 1), 4 * P * (n - 1))
        assert others == [(4 * P, 4 * P)] * (n - 1)
        ring = ranks(n).run(count, False)
        assert ring == [(8 * P * (n - 1) // n, 8 * P * (n - 1) // n)] * n
        assert ring[0][0] < 8 * P


def compare_replicas() -> list[str]:
    """After an update, once the parameters have arrived, with a flipped bit on the last rank."""
    torch.manual_seed(1)
    sharded = make_sharded(Net(), 0, exchange=ParameterServer(), precision="bf16")
    train_sharded(sharded, data(2))
    guard, found = ReplicaGuard(sharded), []
    rank, size = world()
    for number in range(3):
        if number == 1:
            with sharded.evaluation():
                sharded.module(*data(1)[0])
        if number == 2 and rank == size - 1:
            sharded.units[0].param.full[:1].view(torch.int16)[0] ^= 1
        try:
            guard.check(2, {"updates": 2.0})
            found.append("")
        except DivergedError as error:
            found.append(str(error))
    return found


def test_replicas_are_what_the_server_sent(ranks):
    for run in ranks(2).run(compare_replicas):
        assert run[:2] == ["", ""]
        assert "rank 1 has another parameter" in run[2]


def push_and_pull(numel: int) -> dict[str, Any]:
    rank, size = world()
    comm, group = Comm(torch.device("cpu")), Mesh.build(rank, ["host"] * size, 1).replicate
    mine = torch.arange(numel, dtype=torch.float32) + 0.1 * rank
    recv_buffer = torch.empty((size - 1) * numel) if rank == 0 else torch.empty(0)
    comm.push(full := mine.clone(), recv_buffer, group, tag=3, name="a").wait()
    comm.pull(pulled := full.clone(), group, tag=2, name="a").wait()
    kept = bool((full == mine).all())
    calls = {key.kind: number for key, number in comm.calls.items()}
    return {
        "pulled": pulled.tolist(),
        "kept": kept,
        "calls": calls,
        "received": comm.received_bytes,
    }


@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_the_first_rank_sums_and_the_others_take_its_values(ranks, numel):
    runs = ranks(3).run(push_and_pull, numel)
    start = torch.arange(numel, dtype=torch.float32)
    total = ((start + 0.0) + (start + 0.1)) + (start + 0.2)
    for rank, run in enumerate(runs):
        assert run["pulled"] == total.tolist()
        assert run["kept"] is (rank > 0 or numel == 0)
        assert run["calls"] == ({"push": 1, "pull": 1} if numel else {})
        got = {
            key.kind: size
            for key, size in run["received"].items()
            if isinstance(key, TrafficKey) and size
        }
        assert (
            got == ({"push": 8 * numel} if rank == 0 else {"pull": 4 * numel}) if numel else not got
        )
