from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_estimate() -> Iterator[None]:
    """No process beside each run that imports torch and traces its model: what it finds is not
    looked at here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZRUN_ESTIMATE", "off")
        yield
