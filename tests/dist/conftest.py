from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool import RankPool, end

pytest.register_assert_rewrite("distances", "elsewhere", "zoo_runs")  # which compare for tests
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


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a job comes to on one rank."""
    from small_jobs import on_axes  # not before asserts of what it imports are rewritten

    made: dict[str, Any] = {}

    def found(keys: dict[str, Any]) -> list[dict[str, Any]]:
        keys = {key: value for key, value in keys.items() if key != "parallel"}
        name = repr(sorted(keys.items(), key=str))
        if name not in made:
            made[name] = on_axes(keys, tmp_path_factory.mktemp("alone"), ranks)
        return made[name]

    return found
