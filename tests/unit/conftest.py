from __future__ import annotations

import gc

import hypothesis
import torch

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
