"""Collectives of activations: the numbers of plain sums and concatenations, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toys import world

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.spine.parallel_dims import Coordinates
from zrun_core.tensor_parallel.tensor_comm import TensorComm

Ranks = Callable[[int], Any]


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return numbers.to(dtype).mT  # not contiguous


def exchange(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    rank, size = world()
    comm = Comm(torch.device("cpu"))
    places = [Coordinates(tp=number) for number in range(size)]
    mesh = Mesh.build(rank, ["here"] * size, 1, places=places)
    comm.use_cma(mesh.host, 30.0)
    comm.drain()
    tensor_comm = TensorComm(comm, mesh.tensor)
    own = of_rank(rank, shape, dtype)
    found = []
    for _ in range(2):
        found = [
            tensor_comm.all_reduce(own, "sum"),
            tensor_comm.all_reduce_max(own, "max"),
            tensor_comm.all_gather(own, 1, "gather"),
            tensor_comm.reduce_scatter(own, 0, "scatter"),
        ]
    assert torch.equal(own, of_rank(rank, shape, dtype))
    assert {key.axis for key in comm.sent_bytes} == {"tensor"}
    return found, sum(comm.sent_bytes.values()) // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_of_activations(ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> None:
    shape = (4, 5, 8)
    alike = [of_rank(rank, shape, dtype) for rank in range(num_ranks)]
    total = alike[0].clone()
    for each in alike[1:]:
        total += each
    num_bytes = total.nbytes
    others = num_ranks - 1
    # A sum goes out in parts and comes back; all other ranks get what is gathered; of what is
    # scattered, each gets its part.
    expected = 2 * others * num_bytes // num_ranks + 2 * others * num_bytes
    expected += others * num_bytes // num_ranks
    for rank, (found, sent) in enumerate(ranks(num_ranks).run(exchange, shape, dtype)):
        assert torch.equal(found[0], total)
        assert torch.equal(found[1], torch.stack(alike).amax(0))
        assert torch.equal(found[2], torch.cat(alike, 1))
        assert torch.equal(found[3], total.chunk(num_ranks, 0)[rank])
        assert sent == expected
