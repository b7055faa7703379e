from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from pool import RankPool, end

torch.set_num_threads(1)  # as the ranks do, with which plain loops are compared


def pytest_collection_finish() -> None:
    """Spare the collector of garbage what stays until the end: torch's modules, and the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., RankPool]]:
    """`ranks(2).run(f, ...)` runs f on two ranks, `ranks(2, "cuda")` on two GPUs."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world_size: int, device: str = "cpu") -> RankPool:
        key = world_size, device
        if key not in pools:
            pools[key] = RankPool(world_size, device)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()
    end()
