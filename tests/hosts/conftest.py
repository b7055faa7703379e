"""The three hosts of `rig.py`, made once; after each test nothing may be left on them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import rig as rigs

LEFT_S = 120.0  # only bounds a failure


@pytest.fixture(scope="session", autouse=True)
def no_estimate() -> Iterator[None]:
    """No process beside each run that imports torch and traces its model.

    What it finds is not looked at here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZRUN_ESTIMATE", "off")
        yield


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rigs.Rig]:
    if reason := rigs.missing():
        pytest.skip(f"three hosts: {reason}")
    with rigs.build(tmp_path_factory.mktemp("hosts") / "rig") as rig:
        yield rig
    if rig.isolated:
        assert [name for name in rigs.interfaces() if name.startswith(rig.mark)] == []


@pytest.fixture
def rig(three_hosts: rigs.Rig) -> Iterator[rigs.Rig]:
    yield three_hosts
    deadline = time.monotonic() + LEFT_S
    while (left := three_hosts.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == {}


@pytest.fixture
def isolated_rig(rig: rigs.Rig) -> rigs.Rig:
    """For a test that does something to one host alone."""
    if not rig.isolated:
        pytest.skip(f"hosts without namespaces: {rigs.not_isolated()}")
    return rig
