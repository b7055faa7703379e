"""A real Slurm of two nodes, made once; after each test nothing may be left on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import cluster
import pytest
from cluster import Slurm, rigs

LEFT_S = 60.0  # only bounds a failure


@pytest.fixture(scope="session", autouse=True)
def no_estimate() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZRUN_ESTIMATE", "off")
        yield


@pytest.fixture(scope="session")
def slurm_on_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := cluster.missing():
        pytest.skip(f"Slurm: {reason}")
    folder = tmp_path_factory.mktemp("slurm")
    names = folder / "etc-hosts"
    with rigs.build(folder / "rig") as rig:
        entries = "".join(f"{host.address} {name}\n" for name, host in rig.hosts.items())
        names.write_text(f"127.0.0.1 localhost\n{entries}")
        for host in rig.hosts.values():
            host.run("mount", "--bind", str(names), "/etc/hosts")
        with cluster.start(rig, folder / "cluster") as slurm:
            yield slurm


@pytest.fixture
def slurm(slurm_on_hosts: Slurm) -> Iterator[Slurm]:
    yield slurm_on_hosts
    deadline = time.monotonic() + LEFT_S
    while (left := slurm_on_hosts.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a job lies, with the model that it trains."""
    return cluster.write_job(tmp_path / "job")
