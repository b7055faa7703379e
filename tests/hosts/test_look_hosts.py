"""`zrun check` and `zrun topo` look at other hosts, and change nothing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from rig import Rig

JOB = """name: far
model: {call: "m:f"}
data: m:d
steps: 1
batch: 12
hosts: [node1:2, node2:2]
"""


def zrun(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zrun", *argv]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=faults.PATIENCE_S
    )


def test_check_plans_on_the_hosts_of_the_job(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        JOB + f"launch: {{ssh: '{rig.ssh}'}}\ncheckpoint: {{every: 1}}\n"
    )
    done = zrun(tmp_path, "check", "job.yaml", "--no-import", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [place["host"] for place in told["plan"]["ranks"]] == [
        "node1",
        "node1",
        "node2",
        "node2",
    ]
    assert (told["batch"]["ranks"], told["no_plan"]) == (4, None)
    assert os.listdir(tmp_path) == ["job.yaml"]
    done = zrun(tmp_path, "check", "job.yaml", "hosts=[node3, refusing]", "--no-import")
    assert done.returncode == 3, done.stderr
    assert "plan: none: 1 of 2 hosts cannot be used:" in done.stdout
    assert "refusing: the connection was refused" in done.stdout
    assert done.stdout.endswith("structure: not checked\n")


@pytest.mark.thorough
def test_topo_shows_the_hosts_of_a_list(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("node2\nnode1 slots=4\n")
    done = zrun(tmp_path, "topo", "--hosts", "hostfile", "--ssh", rig.ssh, "--json")
    assert done.returncode == 0, done.stderr
    assert [host["host"] for host in json.loads(done.stdout)["hosts"]] == ["node2", "node1"]
    done = zrun(tmp_path, "topo", "-H", "node1,unseen", "--ssh", rig.ssh)
    assert done.returncode == 3
    assert "unseen: its host key is not known here" in done.stderr
