"""Two hosts with simulated GPUs and NCCL between them: they train as one, and either may be lost.

Hosts are network namespaces, each with a real sshd (`tests/hosts/rig.py`); NCCL goes over TCP.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_faults
import pytest
from gpu_faults import ON_TWO_HOSTS, Fault, TwoHosts, rigs


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rigs.Rig]:
    if reason := rigs.missing() or rigs.not_isolated():
        pytest.skip(f"two hosts: {reason}")
    with rigs.build(tmp_path_factory.mktemp("hosts") / "rig") as rig:
        yield rig


def losses(launched: Any) -> dict[int, float]:
    """Return the loss of each step, once the run is over."""
    _, said = launched.launcher.communicate(timeout=gpu_faults.PATIENCE_S)
    assert launched.launcher.returncode == 0, said
    return {event["step"]: event["loss"] for event in launched.events("step")}


@pytest.mark.parametrize("keys", [{"zero": 3}, {"zero": 1, "parallel": {"pp": 2}}], ids=str)
def test_two_hosts_have_the_bits_of_one(
    rig: rigs.Rig, tmp_path: Path, keys: dict[str, Any]
) -> None:
    hosts = TwoHosts(rig, tmp_path / "hosts")
    keys = {**keys, "steps": 8, "optim": {"lr": 1e-2, "clip": 1.0}}
    two = losses(hosts.start("two", **keys))
    one = losses(hosts.start("one", **keys, hosts=None, slots=4))
    assert two == one
    assert sorted(two) == list(range(1, 9))
    assert two[8] < two[1]
    assert hosts.left() == {}


@pytest.mark.parametrize("fault", ON_TWO_HOSTS, ids=lambda fault: fault.name)
def test_what_goes_wrong_is_named_and_nothing_is_left(
    rig: rigs.Rig, tmp_path: Path, fault: Fault
) -> None:
    found = gpu_faults.strike(fault, tmp_path, rig)
    print(f"{fault.name}: {found.seconds:.1f} s from the fault to the end")
    assert (found.code, found.left) == (fault.code, {}), found.said
    assert gpu_faults.cause(fault, found), found.said
    assert gpu_faults.is_in_time(fault, found)
    assert found.failure["exit_code"] == fault.code
    if found.failure["kind"] == "lost host":
        assert [each["rank"] for each in found.failure["lost_ranks"]] == [2, 3]
        assert {each["rank"] for each in found.failure["ranks"]} <= {0, 1}
