"""`zrun doctor --hosts`, from the shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from rig import Rig

from zrun.preflight.calibration import Calibration


def doctor(rig: Rig, folder: Path, hostfile: str, *argv: str) -> subprocess.CompletedProcess[str]:
    (folder / "hostfile").write_text(hostfile)
    command = [
        sys.executable,
        "-m",
        "zrun",
        "doctor",
        "--hosts",
        "hostfile",
        "--ssh",
        rig.ssh,
        *argv,
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=faults.PATIENCE_S
    )


@pytest.mark.thorough
def test_hosts_are_looked_at_and_measured(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    done = doctor(
        rig,
        tmp_path,
        "node1\nnode2 slots=2\n",
        "--bench",
        "--disk",
        "fast",
        "--save",
        "rates.json",
    )
    assert done.returncode == 0, done.stderr
    rates = Calibration.read(tmp_path / "rates.json")
    assert list(rates.hosts) == ["node1", "node2"]
    assert all(
        host.cpu.fp32_flops > 1e9 and host.copy_bytes_per_s > 1e8 for host in rates.hosts.values()
    )
    assert all(
        host.disk.folder == str(tmp_path / "fast") and host.disk.error is None
        for host in rates.hosts.values()
    )
    assert {(link.source, link.target) for link in rates.links} == {
        ("node1", "node2"),
        ("node2", "node1"),
    }
    assert all(link.bytes_per_s > 1e7 and link.round_trip_s > 0 for link in rates.links)
    assert done.stdout.splitlines()[0].split()[:2] == ["host", "address"]
    assert sum("TFLOP/s" in line for line in done.stdout.splitlines()) == 2
    assert list((tmp_path / "fast").iterdir()) == []


def test_bad_hosts_are_named_with_exit_code_3(rig: Rig, tmp_path: Path) -> None:
    done = doctor(rig, tmp_path, "node1\nrefusing\nnode3\nunseen\n", "--json", "--bench")
    assert done.returncode == 3
    hosts = json.loads(done.stdout)["hosts"]
    assert [bool(host["problems"]) for host in hosts] == [False, True, False, True]
    assert hosts[0]["report"]["address"] == rig.hosts["node1"].address
    assert json.loads(done.stdout)["rates"] is None  # hosts that cannot be used are not measured
    assert "Traceback" not in done.stderr


def test_a_host_file_that_is_wrong_has_exit_code_2(rig: Rig, tmp_path: Path) -> None:
    done = doctor(rig, tmp_path, "-oProxyCommand=x slots=1\n")
    assert done.returncode == 2
    assert "hostfile:1:1" in done.stderr
