"""`zrun train` on each of two hosts, as torchrun and pods start it: one run, led by the first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from rig import Rig

E2E = Path(__file__).parents[1] / "e2e"
NODES = ("node1", "node2")
JOB = "name: joined\nbatch: 4\ndevice: cpu\nlog: {every: 1}\nlimits: {start_s: 60}\n"


class Pods:
    """A process on each of two hosts."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, job: str, *argv: str, environ: dict[str, str]) -> None:
        """`{node}` and `{address}` in the values are the number of each host,
        and the address of the first.
        """
        (self.folder / "job.yaml").write_text(JOB + job)
        for number, name in enumerate(NODES):
            host = self.rig.hosts[name]
            given = {"node": str(number), "address": self.rig.hosts["node1"].address}
            values = {key: value.format(**given) for key, value in environ.items()}
            command = [each.format(**given) for each in argv]
            enter = ["nsenter", "-t", str(host.sshd.pid), "-n", "-m", "-u", f"--wd={self.folder}"]
            self.processes.append(
                subprocess.Popen(
                    [*enter, sys.executable, *command, "job.yaml", "--run-dir", "run"],
                    env=os.environ | {"PYTHONPATH": str(E2E)} | values,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def end(self) -> list[tuple[int, str, str]]:
        told = [process.communicate(timeout=faults.PATIENCE_S) for process in self.processes]
        return [(each.returncode, *text) for each, text in zip(self.processes, told, strict=True)]


@pytest.fixture
def pods(isolated_rig: Rig, tmp_path: Path) -> Iterator[Pods]:
    found = Pods(isolated_rig, tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_torchrun_on_two_hosts(pods: Pods) -> None:
    shutil.copy(E2E / "wild.py", pods.folder)
    pods.start(
        "model: {call: wild.py:Net}\ndata: wild.py:data\nsteps: 4\nzero: 3\ncheckpoint: {every: "
        "4}\n",
        *(
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            "{node}",
            "--nproc-per-node",
            "1",
        ),
        *("--master-addr", "{address}", "-m", "zrun", "train"),
        environ={"GLOO_SOCKET_IFNAME": "eth0"},
    )
    first, second = pods.end()
    assert (first[0], second[0]) == (0, 0), (first[2], second[2])
    assert [step["step"] for step in pods.events("step")] == [1, 2, 3, 4]
    plan = json.loads((pods.folder / "run" / "plan.json").read_text())
    assert [place["host"] for place in plan["ranks"]] == list(NODES)
    assert (pods.folder / "run" / "checkpoints" / "step-00000004" / "manifest.json").exists()


PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "{node}",
    "PET_MASTER_ADDR": "{address}",
    "PET_NPROC_PER_NODE": "2",
}


def test_a_process_on_each_host_runs_its_ranks_and_the_end_of_one_is_the_end_of_all(
    pods: Pods,
) -> None:
    hang = json.dumps(dict.fromkeys("0123", "hang"))
    pods.start(
        f"model: {{call: 'fake:model', args: {{behaviour: {hang}}}}}\ndata: fake:data\nsteps: 3\n",
        *("-m", "zrun", "train", "--worker", "fake_worker"),
        environ=PET,
    )
    launch = faults.Launch(pods.rig, pods.folder, pods.processes[0])
    launch.wait_for(lambda: len(pods.events("log")) == 4, "all ranks")
    assert [len(launch.pids(name, "-m fake_worker")) for name in NODES] == [2, 2]
    os.kill(launch.pids("node2", "zrun.agent.main joined")[0], signal.SIGKILL)
    first, second = pods.end()
    assert (first[0], second[0]) == (6, -signal.SIGKILL)
    assert "hosts: env (host 0 of 2 (PET_NODE_RANK, PET_NNODES))" in first[2]
    assert "lost node2: its process" in first[2]
