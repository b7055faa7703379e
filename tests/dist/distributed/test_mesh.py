"""Process groups of a mesh with several axes, made and used by real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import job, run
from toys import world

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.spine.parallel_dims import ParallelDims

AXES = ("world", "pipe", "data", "tensor", "shard", "replicate", "tied", "host")


def sums_by_axis(sizes: dict[str, Any], hosts: list[str]) -> tuple[dict[str, float], int]:
    """The sum of 10^rank over each of this rank's groups, and how many groups were made for it."""
    rank, _ = world()
    # A group of the user's own, which only some ranks are in.
    dist.new_group([0, 1])
    before = len(dist.distributed_c10d._world.pg_names)
    dims = ParallelDims(**sizes)
    places = [dims.coordinates(number) for number in range(dims.world_size)]
    mesh = Mesh.build(
        rank, hosts, dims.shard_size, places=places, tied_stages=(0, dims.pp - 1), timeout_s=20
    )
    made = len(dist.distributed_c10d._world.pg_names) - before
    comm = Comm(torch.device("cpu"))
    own = torch.tensor([10.0**rank], dtype=torch.float64)
    found = {}
    for axis in AXES:
        group = getattr(mesh, axis)
        found[axis] = comm.all_reduce_small(own, group, name=axis).item()
        seen = own.clone()
        comm.broadcast(seen, group, name=axis)  # through torch's group, by the number of a rank
        assert seen.item() == 10.0 ** group.ranks[0]
    return found, made


def total(*ranks: int) -> float:
    return float(sum(10**rank for rank in ranks))


def test_stages_of_two_data_parallel_ranks(ranks: Any) -> None:
    """Hosts have different numbers of ranks, so that groups differ in how many each rank is in."""
    found = ranks(4).run(sums_by_axis, {"dp": 2, "pp": 2}, ["a", "a", "a", "b"])
    sums = [sums for sums, _ in found]
    assert [each["world"] for each in sums] == [total(0, 1, 2, 3)] * 4
    assert [each["data"] for each in sums] == [total(0, 1)] * 2 + [total(2, 3)] * 2
    assert [each["shard"] for each in sums] == [each["data"] for each in sums]
    assert [each["pipe"] for each in sums] == [total(0, 2), total(1, 3)] * 2
    assert [each["tied"] for each in sums] == [each["pipe"] for each in sums]
    assert [each["tensor"] for each in sums] == [total(rank) for rank in range(4)]
    assert [each["host"] for each in sums] == [total(0, 1, 2)] * 3 + [total(3)]
    assert [made for _, made in found] == [4, 4, 4, 3], "two of pipe, data, host"


def test_ends_of_longer_pipelines(ranks: Any) -> None:
    sizes = {"dp": 1, "pp": 4, "shard": 1}
    found = ranks(4).run(sums_by_axis, sizes, ["a", "b", "b", "b"])
    assert [sums["tied"] for sums, _ in found] == [total(0, 3), total(1), total(2), total(0, 3)]
    assert [made for _, made in found] == [2, 2, 2, 3], "pipe_back, tied, host"


def test_another_order_of_the_axes(ranks: Any) -> None:
    sizes = {"dp": 2, "tp": 2, "order": ("dp", "tp", "pp")}
    found = ranks(4).run(sums_by_axis, sizes, ["a"] * 4)
    assert [sums["data"] for sums, _ in found] == [total(0, 1)] * 2 + [total(2, 3)] * 2
    assert [sums["tensor"] for sums, _ in found] == [total(0, 2), total(1, 3)] * 2


@pytest.mark.parametrize(
    "dims",
    [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "order": ("dp", "tp", "pp")}],
    ids=["tp", "another order"],
)
@pytest.mark.at_most(1)
def test_samples_count_once_where_several_ranks_read_them(
    dims: dict[str, Any], ranks: Any, tmp_path: Path
) -> None:
    """Both ranks along `tensor` train the whole model: as two ranks train it."""
    keys = job(
        model={"call": "runs.py:Speaker", "args": {"dropout": 0.0}},
        optim={"lr": 1e-2},
        steps=3,
        eval={"data": "runs.py:Tokens", "every": 2},
        guards={"replica_every": 1},
        zero=2,
    )
    keys.pop("checkpoint"), keys.pop("hooks")
    two = ranks(2).run(run, keys, str(tmp_path / "two"))
    four = ranks(4).run(run, keys, str(tmp_path / "four"), None, None, None, dims)

    def told(found: dict[str, Any]) -> list[Any]:
        keys = ("step", "loss", "samples", "tokens", "total_samples", "metrics")
        kinds = ("step", "eval")
        return [
            [event.get(key) for key in keys] for event in found["events"] if event["type"] in kinds
        ]

    assert len(told(two[0])) == 5
    assert told(four[0]) == told(two[0])
    for rank, found in enumerate(four):
        dp = ParallelDims(**dims).coordinates(rank).dp
        assert found["seen"] == two[dp]["seen"]
        for key, value in two[dp]["parts"].items():
            if rank == 0 or not key[0].startswith(("norm.running", "norm.num")):  # its buffers
                assert (value == found["parts"][key]).all(), (rank, key)
