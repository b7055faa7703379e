from __future__ import annotations

import pytest
import simulated_gpu


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """Skip where there can be no simulated GPU, and say why."""
    reason = simulated_gpu.why_not()
    if reason is not None:
        pytest.skip(reason)
