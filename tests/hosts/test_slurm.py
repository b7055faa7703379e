"""A job in a Slurm allocation of two nodes, whose `srun` only starts processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import pytest
import scripts
from rig import Rig

from zrun.transport.slurm import SrunAgent

HERE = Path(__file__).parent
NODES = ("node1", "node2")
FAKE = {"name": "fake", "steps": 3, "hosts": None}


@pytest.fixture
def allocation(isolated_rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """This process is the shell of `salloc -N 2`, and the nodes know each other's names."""
    rig, names, tools = isolated_rig, tmp_path / "etc-hosts", tmp_path / "bin"
    names.write_text("".join(f"{host.address} {name}\n" for name, host in rig.hosts.items()))
    tools.mkdir()
    srun = tools / "srun"
    srun.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_srun.py"} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent / "e2e"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv(
        "FAKE_SRUN_NODES", json.dumps({name: rig.hosts[name].sshd.pid for name in NODES})
    )
    for host in rig.hosts.values():
        host.run("mount", "--bind", str(names), "/etc/hosts")
    try:
        yield rig
    finally:
        for host in rig.hosts.values():
            host.run("umount", "/etc/hosts")


def end(launch: faults.Launch) -> tuple[int, str]:
    _, report = launch.launcher.communicate(timeout=faults.PATIENCE_S)
    return launch.launcher.returncode, report


def test_stop_saves_on_both_nodes_and_leaves_nothing(allocation: Rig, tmp_path: Path) -> None:
    """It sends SIGTERM, as `scancel --signal=TERM --batch` does to the script that runs zrun."""
    launch = faults.start(
        allocation, tmp_path / "job", hosts=None, checkpoint={"every": 100}, zero=2
    )
    launch.wait_for(lambda: len(launch.events("step")) > 3, "training")
    assert all(launch.pids(name, "zrun_core") for name in NODES)
    stop = [sys.executable, "-m", "zrun", "stop", "run"]
    stopped = subprocess.run(
        stop, cwd=launch.folder, capture_output=True, text=True, timeout=faults.PATIENCE_S
    )
    code, report = end(launch)
    assert code == 75, report
    assert "SIGTERM: finishing the step" in report
    assert stopped.stdout.startswith("stopped after step ")
    assert stopped.stdout.endswith(", exit code 75, saved: continue with --resume auto\n")
    assert "hosts: 2 hosts, by slurm (Slurm job 7: 2 hosts (SLURM_JOB_NODELIST))" in report
    step = len(launch.events("step"))
    assert f"stopped after step {step}, saved; resume: zrun train" in report
    assert (tmp_path / "job" / "run" / "checkpoints" / f"step-{step:08}" / "manifest.json").exists()
    assert allocation.leftovers() == {}


@pytest.mark.thorough
def test_a_worker_that_dies_ends_both_nodes(allocation: Rig, tmp_path: Path) -> None:
    model = {"call": "fake:model", "args": {"behaviour": {"0": "hang", "1": "kill_itself"}}}
    launch = faults.start(
        allocation, tmp_path / "job", "--worker", "fake_worker", model=model, **FAKE
    )
    code, report = end(launch)
    assert code == 5, report
    assert "rank 1 of 2 (node2, cpu) was killed by SIGKILL" in report
    assert allocation.leftovers() == {}


def down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SRUN_NODES", "{}")


def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (
            down,
            "node2: srun could not start the agent (status 1): srun: error: Task launch failed "
            "on node node2",
        ),
        (
            gone,
            "srun: No such file or directory: launch.backend: slurm needs Slurm's commands on "
            "this host",
        ),
    ],
)
def test_nodes_without_an_agent_are_named(
    allocation: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[pytest.MonkeyPatch], None],
    says: str,
) -> None:
    trouble(monkeypatch)
    if trouble is gone and shutil.which("srun") is not None:
        pytest.skip("a real srun is installed")
    code, report = end(faults.start(allocation, tmp_path / "job", **FAKE))
    assert code == 3
    assert says in report
    assert "Traceback" not in report


def test_another_option_would_be_refused(allocation: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is as strict as Slurm's own."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[2-3]")
    agent = SrunAgent("node1", sys.executable)
    while agent.frames(1.0) is not None:
        pass
    assert "Requested nodes are not in it" in agent.end_reason()
    agent.close()


def test_a_script_runs_on_both_nodes_and_gets_sigterm_when_asked_to_stop(
    allocation: Rig, tmp_path: Path
) -> None:
    launch = scripts.start(allocation, tmp_path / "script", scripts.ENDLESS, by_ssh=False)
    scripts.wait_for_steps(launch)
    assert all(launch.pids(name, "zrun_core.script") for name in NODES)
    stop = [sys.executable, "-m", "zrun", "stop", "run"]
    stopped = subprocess.run(
        stop, cwd=launch.folder, capture_output=True, text=True, timeout=faults.PATIENCE_S
    )
    code, report = end(launch)
    assert code == 143, report
    assert stopped.stdout == "stopped, exit code 143\n"
    assert "hosts: 2 hosts, by slurm (Slurm job 7: 2 hosts (SLURM_JOB_NODELIST))" in report
    assert "SIGTERM: the ranks got SIGTERM" in report
