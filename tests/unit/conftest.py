from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as Python does for its scripts

_DEFAULTS = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}  # a busy machine is no bug
hypothesis.settings.register_profile("repeatable", derandomize=True, **_DEFAULTS)
hypothesis.settings.register_profile(
    "random", **_DEFAULTS
)  # other examples each time: --hypothesis-profile=random
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)  # tensors here are small: a second thread would mostly wait


def pytest_collection_finish() -> None:
    """Spare the collector of garbage what stays until the end: torch's modules, and the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Have the library in use by this process as the only rank, and leave no trace of it."""
    import zrun_core  # not for all tests: it takes half a second
    from zrun_core.library import run as library

    threads, current = torch.get_num_threads(), library._current
    library._current = None
    zrun_core.init(device="cpu", threads=1)
    yield
    library._current = current
    torch.set_num_threads(threads)
