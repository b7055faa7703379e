"""A plain DDP script on three hosts under `zrun run`: what ends it early is named as for a job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import faults
import pytest
from rig import Rig
from scripts import ENDLESS, start, wait_for_steps


def end(launch: faults.Launch) -> tuple[int, str]:
    _, report = launch.launcher.communicate(timeout=faults.PATIENCE_S)
    return launch.launcher.returncode, report


def test_ranks_of_three_hosts_meet_and_end(rig: Rig, tmp_path: Path) -> None:
    launch = start(rig, tmp_path / "run-well", "5")
    code, report = end(launch)
    assert code == 0, report
    assert "plain_ddp: 3 ranks on 3 hosts" in report
    assert (launch.folder / "step").read_text() == "4"
    plan = json.loads((launch.folder / "run" / "plan.json").read_text())
    assert [place["host"] for place in plan["ranks"]] == list(rig.hosts)
    address, port = json.loads((launch.folder / "run" / "spec.json").read_text())["script"][
        "master"
    ]
    assert address == rig.hosts["node1"].address
    assert port < 32768  # below those that the kernel gives to connections


def test_a_killed_rank_is_named_and_started_again(rig: Rig, tmp_path: Path) -> None:
    launch = start(rig, tmp_path / "killed", ENDLESS, "restarts=1")
    wait_for_steps(launch)
    faults.kill_worker(launch)
    attempt = launch.folder / "run" / "attempts" / "1"
    launch.wait_for(attempt.exists, "a restart")
    (launch.folder / "step").unlink()
    wait_for_steps(launch)
    launch.launcher.send_signal(signal.SIGINT)
    code, report = end(launch)
    assert code == 130, report
    assert "rank 1 of 3 (node2, cpu) was killed by SIGKILL" in report
    assert "restart 1 of 1 in 5 s, from where the script itself resumes" in report
    assert report.rstrip().endswith("\nstopped")


def test_a_cut_link_is_named(isolated_rig: Rig, tmp_path: Path) -> None:
    """Neither end of it is the launcher's: ranks wait, and the agents see what is unanswered."""
    launch = start(isolated_rig, tmp_path / "cut", ENDLESS, f"limits.hang_s={faults.HANG_S}")
    wait_for_steps(launch)
    faults.part(launch)
    code, report = end(launch)
    assert code == 6, report
    assert "the network between node" in report
    assert "all_reduce" in report  # what ranks wait for


@pytest.mark.thorough
def test_a_rank_that_stands_still_is_named(rig: Rig, tmp_path: Path) -> None:
    launch = start(rig, tmp_path / "stopped", ENDLESS, f"limits.hang_s={faults.HANG_S}")
    wait_for_steps(launch)
    faults.stop_worker(launch)
    code, report = end(launch)
    assert code == 6, report
    assert "rank 1 of 3 (node2, cpu) is stopped by a signal or a debugger" in report


@pytest.mark.thorough
def test_a_lost_host_is_named(rig: Rig, tmp_path: Path) -> None:
    launch = start(rig, tmp_path / "lost", ENDLESS)
    wait_for_steps(launch)
    os.kill(launch.agent("node2"), signal.SIGKILL)
    code, report = end(launch)
    assert code == 6, report
    assert "lost node2: its agent was killed there" in report
