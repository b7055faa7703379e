"""Communicators of NCCL: which ones there are, and in which order ranks make them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from traced_gpt import GPT, planner_of

from zrun.estimate.bars import parts_of
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.communicators import (
    MARGIN_S,
    NCCL_DEFAULTS,
    backend_timeout,
    connect,
    set_defaults,
)
from zrun_core.distributed.mesh import Mesh
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.question.candidate import Candidate
from zrun_core.spine.parallel_dims import ParallelDims

CUDA = torch.device("cuda", 0)
_Made = tuple[Any, str, tuple[int, ...]]  # process group; of all of it or of a pair; ranks


class SeenComm(Comm):
    """Says what a rank issues, and computes nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.device = CUDA
        self.issued: list[_Made] = []

    def all_reduce_small(self, values: torch.Tensor, group: Any, *, name: str) -> torch.Tensor:
        self.issued.append((group.process_group, "all", group.ranks))
        return values

    def send(self, tensor: torch.Tensor, peer: int, group: Any, *, number: int, name: str) -> Any:
        return self._pair(group, peer)

    def receive(
        self, tensor: torch.Tensor, peer: int, group: Any, *, number: int, name: str
    ) -> Any:
        return self._pair(group, peer)

    def _pair(self, group: Any, peer: int) -> Any:
        ranks = sorted((group.ranks[group.index], group.ranks[peer]))
        self.issued.append((group.process_group, "pair", tuple(ranks)))

        class Over:
            def wait(self) -> None:
                pass

        return Over()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What each rank of some axes makes, in order."""

    def found(dims: ParallelDims, per_host: int, tied: tuple[int, ...]) -> list[list[Any]]:
        places = [dims.coordinates(rank) for rank in range(dims.world_size)]
        hosts = [str(rank // per_host) for rank in range(dims.world_size)]
        made = []
        for rank in range(dims.world_size):
            counts = itertools.count()
            # Groups are told apart by the place at which all ranks name them to torch.
            monkeypatch.setattr(
                "torch.distributed.new_group", lambda ranks, *_, c=counts: (next(c), tuple(ranks))
            )
            monkeypatch.setattr(
                "torch.distributed.distributed_c10d._get_default_group", lambda: "world"
            )
            wraps = dims.virtual > 1
            mesh = Mesh.build(
                rank, hosts, dims.shard_size, places=places, tied_stages=tied, wraps=wraps
            )
            comm = SeenComm()
            with monkeypatch.context() as patch:
                patch.setattr(torch, "zeros", lambda *_, **__: torch.empty(1))  # there is no GPU
                connect(comm, mesh, wraps=wraps)
            made.append(comm.issued)
        return made

    return found


def come_through(orders: list[list[_Made]]) -> bool:
    """Whether hosts that wait for all ranks of each communicator come to their ends."""
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            made = order[at[rank]]
            ranks = made[2]
            if all(orders[peer][at[peer] : at[peer] + 1] == [made] for peer in ranks):
                for peer in ranks:
                    at[peer] += 1
                moved = True
    return at == [len(order) for order in orders]


LAYOUTS = [
    ParallelDims(2),
    ParallelDims(4, shard=2),
    ParallelDims(2, tp=2),
    ParallelDims(1, pp=2),
    ParallelDims(1, pp=2, virtual=2),
    ParallelDims(1, pp=4, virtual=2),
    ParallelDims(2, tp=2, pp=3, virtual=2),
    ParallelDims(4, tp=2, pp=2, shard=2),
]


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_host", [2, 8])
def test_all_ranks_make_what_is_planned_in_one_order(
    dims: ParallelDims, per_host: int, orders: Any
) -> None:
    tied = (0, dims.pp - 1) if dims.pp > 1 else ()
    made = orders(dims, per_host, tied)
    assert come_through(made)
    assert all(len(set(each)) == len(each) for each in made), "each once"
    for stage in range(dims.pp):
        rank = next(each for each in range(dims.world_size) if dims.coordinates(each).pp == stage)
        planned = dims.communicators(stage, per_host, tied)
        assert len(made[rank]) == planned.groups + planned.pairs


def test_orders_that_differ_are_found() -> None:
    """The test of the tests: two ranks that meet twice, in two orders."""
    one, two = ("a", "all", (0, 1)), ("b", "all", (0, 1))
    assert come_through([[one, two], [one, two]])
    assert not come_through([[one, two], [two, one]])


def test_torch_waits_longer_than_zrun_where_waits_do_not_fail() -> None:
    assert backend_timeout(torch.device("cpu"), 600.0) == 600.0
    assert backend_timeout(CUDA, 600.0) == 600.0 + MARGIN_S


def test_what_the_user_has_set_stays() -> None:
    environ = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    set_defaults(environ)
    assert environ == NCCL_DEFAULTS | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_what_communicators_take_is_a_part_of_the_plan() -> None:
    """A stage between two others has four neighbours' ends; sums keep."""
    hardware = parse_simulate("2x8xA100-80G")
    planner = planner_of(GPT(8, 1024, 16), hardware, divides=True)
    candidate = Candidate(0, ParallelDims(2, 2, 4), 1, 8)
    estimate = planner.estimate(candidate, all_stages=True)
    device = hardware.device
    for rank in estimate.ranks:
        parts = parts_of(rank)
        assert sum(parts.values()) == rank.device_used
        assert parts["context"] == device.context_bytes
        num_pairs = 4 if rank.role == "middle" else 2
        groups = parts["communicators"] - num_pairs * device.pair_bytes
        assert groups % device.communicator_bytes == 0
        assert 3 <= groups // device.communicator_bytes <= 5, "world, data, tensor, host, tied"
