"""Coordinates and groups of ranks, against slices of an array that has a rank at each place."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import get_args

import numpy as np
import pytest
import torch.distributed as dist

from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import Group
from zrun_core.errors import JobError
from zrun_core.spine.parallel_dims import (
    GroupAxis,
    ParallelDims,
    groups_along,
    resolve_shard_size,
)
from zrun_core.spine.sections.parallel import Axis
from zrun_core.spine.sections.zero import ZeroConfig
from zrun_core.spine.spec import LaunchPlan, RankPlace

ORDERS = list(itertools.permutations(("tp", "dp", "pp")))


def ranks_by_place(dims: ParallelDims) -> np.ndarray:
    """The rank at each [pp, dp, tp]: the axis that changes fastest is the last of an array."""
    slowest_first = dims.order[::-1]
    sizes = {"tp": dims.tp, "dp": dims.dp, "pp": dims.pp}
    grid = np.arange(dims.world_size).reshape([sizes[axis] for axis in slowest_first])
    return grid.transpose([slowest_first.index(axis) for axis in ("pp", "dp", "tp")])


def by_hand(axis: GroupAxis, dims: ParallelDims) -> list[tuple[int, ...]]:
    """The groups along an axis, from slices."""
    grid = ranks_by_place(dims)
    pp, dp, tp = grid.shape
    group = dims.shard_size
    stages, samples, parts = range(pp), range(dp), range(tp)
    match axis:
        case "world":
            found = [grid]
        case "pipe":
            found = [grid[:, d, t] for d in samples for t in parts]
        case "data":
            found = [grid[p, :, t] for p in stages for t in parts]
        case "tensor":
            found = [grid[p, d] for p in stages for d in samples]
        case "shard":
            firsts = range(0, dp, group)
            found = [grid[p, d : d + group, t] for p in stages for t in parts for d in firsts]
        case "replicate":
            places = range(group)
            found = [grid[p, d::group, t] for p in stages for t in parts for d in places]
        case "tied":
            chosen = [0, pp - 1] if pp > 1 else [0]
            found = [grid[chosen, d, t] for d in samples for t in parts]
            found += [grid[p, d, [t]] for p in range(1, pp - 1) for d in samples for t in parts]
    return sorted(tuple(sorted(ranks.ravel().tolist())) for ranks in found)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(4, 4, 2, 2), (4, 2, 4, 4), (8, 4, 1, 1), (1, 1, 6, 1)])
def test_groups_are_the_slices_of_the_grid(
    order: tuple[Axis, Axis, Axis], sizes: tuple[int, int, int, int]
) -> None:
    dp, tp, pp, shard = sizes
    dims = ParallelDims(dp, tp, pp, shard=shard, order=order)
    grid = ranks_by_place(dims)
    for rank in range(dims.world_size):
        assert grid[dims.coordinates(rank)] == rank
    for axis in get_args(GroupAxis):
        assert sorted(dims.groups(axis)) == by_hand(axis, dims), axis


class FakeGroups:
    """torch's process groups of one rank, as names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, ...]] = []
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: "default")

    def new_group(self, ranks: list[int], timeout: object) -> tuple[int, ...]:
        self.asked.append(tuple(ranks))
        return tuple(ranks)


def meshes(
    dims: ParallelDims,
    hosts: list[str],
    groups: FakeGroups,
    **more: bool,
) -> tuple[list[Mesh], list[tuple[int, ...]]]:
    """The mesh of every rank, and the groups that each names to torch, which are the same."""
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    found, asked = [], []
    for rank in range(dims.world_size):
        groups.asked = []
        found.append(Mesh.build(rank, hosts, dims.shard_size, places=places, **more))
        asked.append(groups.asked)
    assert all(each == asked[0] for each in asked), "in one order"
    pipes = [ranks for ranks in dims.groups("pipe") if len(ranks) > 1]
    num_wraps = 2 if more.get("wraps") and dims.pp == 2 else 0
    of_one_use = (Counter(asked[0]) - Counter(pipes * (1 + num_wraps))).values()
    assert set(of_one_use) <= {1}, "each once, but pipes, which have one for each direction"
    assert all(len(ranks) > 1 for ranks in asked[0])
    return found, asked[0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_mesh_follows_the_places_of_ranks(
    order: tuple[Axis, Axis, Axis], monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = ParallelDims(4, 4, 2, shard=2, order=order)
    hosts = [f"host{rank // 8}" for rank in range(32)]
    found, _ = meshes(dims, hosts, FakeGroups(monkeypatch), tied_stages=(0, dims.pp - 1))
    for rank, mesh in enumerate(found):
        place = dims.coordinates(rank)
        assert (mesh.pipe.index, mesh.data.index, mesh.tensor.index) == place
        assert (mesh.shard.index, mesh.replicate.index) == (place.dp % 2, place.dp // 2)
        for axis in get_args(GroupAxis):
            group = getattr(mesh, axis)
            assert rank in group.ranks
            assert group.ranks in by_hand(axis, dims)
            assert group.ranks[group.index] == rank
            assert group.process_group == ("default" if axis == "world" else group.ranks)
        assert mesh.host.ranks == tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))
        assert mesh.tied.ranks == mesh.pipe.ranks, "of two stages both are ends"
        assert mesh.adds_samples == (place.tp == 0 and place.pp == 1)


ONE_HOST, TWO_HOSTS = ["a"] * 8, ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize(
    ("dims", "hosts", "made"),
    [
        (ParallelDims(8), ONE_HOST, 0),
        (ParallelDims(8, shard=1), ONE_HOST, 0),  # stage 0
        (ParallelDims(8, shard=2), ONE_HOST, 2),  # shard, replicate
        (ParallelDims(8), TWO_HOSTS, 1),  # host
        (ParallelDims(8, shard=4), TWO_HOSTS, 2),  # shard = host, replicate
        (ParallelDims(1, tp=8), ONE_HOST, 0),
        (ParallelDims(1, pp=8), ONE_HOST, 1),  # pipe_back
        (ParallelDims(4, tp=2), ONE_HOST, 2),  # data = shard, tensor
        (ParallelDims(2, tp=2, pp=2), ONE_HOST, 4),  # pipe, pipe_back, data = shard, tensor
        (ParallelDims(2, tp=2, pp=2, shard=1), ONE_HOST, 4),  # data = replicate
        (
            ParallelDims(4, pp=2, shard=2),
            TWO_HOSTS,
            5,
        ),  # two pipes, host, shard, replicate
    ],
)
def test_groups_of_the_same_ranks_share_what_is_made(
    dims: ParallelDims, hosts: list[str], made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = meshes(dims, hosts, FakeGroups(monkeypatch))
    for rank, mesh in enumerate(found):
        assert sum(rank in ranks for ranks in asked) == made
        assert mesh.tied.size == 1, "nobody asked for them"
    assert found[0].data is found[0].world or dims.dp < 8
    assert {mesh.shard.axis for mesh in found} == {"shard"}, "what it sends counts as its own"


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_messages_of_both_directions_never_share_a_process_group(
    pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL two ranks that send to each other through one wait for each other."""
    groups = FakeGroups(monkeypatch)
    found, asked = meshes(ParallelDims(1, pp=pp), ["a"] * pp, groups, wraps=True)
    assert len(asked) == (3 if pp == 2 else 1), "pipe is that of all ranks"
    for mesh in found:
        wraps_apart = mesh.pipe_wrap is not mesh.pipe
        assert wraps_apart == (mesh.pipe_back_wrap is not mesh.pipe_back) == (pp == 2)
        assert (mesh.pipe_wrap.axis, mesh.pipe_back_wrap.axis) == ("pipe", "pipe_back")
    plain, asked = meshes(ParallelDims(1, pp=pp), ["a"] * pp, groups)
    assert len(asked) == 1, "pipe_back"
    assert all(mesh.pipe_wrap is mesh.pipe for mesh in plain)


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh.build(0, ["host"], 1)
    groups = [group for group in vars(mesh).values() if isinstance(group, Group)]
    assert len(groups) == len(vars(mesh)) - 1, "and those that only some units have"
    assert mesh.own == {}
    assert {group.size for group in groups} == {1}
    assert {group.process_group for group in groups} == {None}
    assert mesh.adds_samples


def test_shards_that_do_not_divide_the_data_parallel_ranks() -> None:
    places = [ParallelDims(3, tp=2).coordinates(rank) for rank in range(6)]
    alone = Mesh.build(0, ["host"], 1)
    with pytest.raises(JobError, match=r"units on pairs: 2 ranks do not divide the 1 data-par"):
        alone.divide("pairs", 2)
    with pytest.raises(JobError, match=r"zero\.shard_group: 2 ranks do not divide the 3 data"):
        Mesh.build(0, ["host"] * 6, 2, places=places)


# The ranks of a node


def plan_of(dims: ParallelDims, slots: list[int]) -> LaunchPlan:
    """Ranks that fill hosts in their order."""
    hosts = [f"host{number}" for number, count in enumerate(slots) for _ in range(count)]
    places = []
    for rank, host in enumerate(hosts):
        at = dims.coordinates(rank)
        here = RankPlace(
            rank=rank, host=host, local_rank=0, device="cpu", pp=at.pp, dp=at.dp, tp=at.tp
        )
        places.append(here)
    return LaunchPlan(ranks=places)


@pytest.mark.parametrize(
    ("dims", "slots", "size"),
    [
        (ParallelDims(8), [4, 4], 4),
        (ParallelDims(4, tp=2), [4, 4], 2),
        (ParallelDims(4, pp=2), [4, 4], 4),
        (ParallelDims(2, pp=4), [4, 4], 2),
        (ParallelDims(2, pp=4, order=("pp", "dp", "tp")), [4, 4], 1),
        (ParallelDims(4, pp=2, order=("tp", "pp", "dp")), [4, 4], 2),
        (ParallelDims(1, tp=8), [8], 1),
    ],
)
def test_a_node_shares_its_data_parallel_ranks(
    dims: ParallelDims, slots: list[int], size: int
) -> None:
    zero = ZeroConfig(stage=2, shard_group="node")
    plan = plan_of(dims, slots)
    assert plan.shard_size(zero) == size
    assert (plan.dims.dp, plan.dims.tp, plan.dims.pp) == (dims.dp, dims.tp, dims.pp)
    assert resolve_shard_size(zero, dims.dp, dims.dp_per_host(slots[0])) == size, "as planned"
    assert plan.shard_size(ZeroConfig(stage=0, shard_group="node")) == 1
    assert plan.shard_size(ZeroConfig(stage=2)) == dims.dp
    places = [place.coordinates for place in plan.ranks]
    by_host = {tuple(plan.ranks_on(host)) for host in plan.hosts}
    for ranks in groups_along("shard", places, size):
        assert any(set(ranks) <= set(of_host) for of_host in by_host)


def test_nodes_of_several_sizes_share_no_states() -> None:
    plan = plan_of(ParallelDims(4), [2, 1, 1])
    words = (
        r"zero\.shard_group: node, but some hosts have 1 data-parallel ranks and others 2: write "
        r"a number that divides 4, or all"
    )
    with pytest.raises(JobError, match=words):
        plan.shard_size(ZeroConfig(stage=2, shard_group="node"))
    assert plan.shard_size(ZeroConfig(stage=0, shard_group="node")) == 1
    assert plan.shard_size(ZeroConfig(stage=2, shard_group=2)) == 2
