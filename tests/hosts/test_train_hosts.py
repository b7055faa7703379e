"""Three hosts train as one, with the same bits; what goes wrong is named, stops everywhere, and can be gone on from."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import faults
import pytest
from rig import Rig


def losses(launch: faults.Launch) -> list[float]:
    return [event["loss"] for event in launch.events("step")]


def end(launch: faults.Launch) -> tuple[int, str]:
    _, report = launch.launcher.communicate(timeout=faults.PATIENCE_S)
    return launch.launcher.returncode, report


QUICK = {"steps": 8, "model": {"call": "wild.py:Net", "args": {}}, "zero": 3}


def test_three_hosts_have_the_bits_of_one(rig: Rig, tmp_path: Path) -> None:
    three = faults.start(rig, tmp_path / "three", **QUICK, checkpoint={"every": 4})
    code, report = end(three)
    assert code == 0, report
    assert "3 hosts, by ssh" in report
    one = faults.start(rig, tmp_path / "one", **QUICK, hosts=None, slots=3)
    assert end(one)[0] == 0
    assert losses(three) == losses(one)
    assert len(losses(one)) == 8
    assert (tmp_path / "three" / "run" / "checkpoints" / "step-00000008" / "manifest.json").exists()


def test_a_run_goes_on_after_a_lost_host_with_the_bits_of_one_that_was_not_disturbed(rig: Rig, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**QUICK, "steps": 30, "checkpoint": {"every": 5}, "zero": 1}
    keys["model"] = {"call": "wild.py:Net", "args": {"pause": 0.05}}
    disturbed = faults.start(rig, tmp_path / "a", **keys, restarts=1)
    disturbed.wait_for(lambda: len(disturbed.events("step")) > 7, "step 8")
    os.kill(disturbed.agent("node2"), signal.SIGKILL)
    code, report = end(disturbed)
    assert code == 0, report
    assert "lost node2: its agent was killed there" in report
    assert "restart 1 of 1 in 5 s, after step" in report
    calm = faults.start(rig, tmp_path / "b", **keys, hosts=None, slots=3)
    assert end(calm)[0] == 0
    last = {event["step"]: event["loss"] for event in disturbed.events("step")}
    assert [last[step] for step in range(1, 31)] == losses(calm)


@pytest.mark.parametrize("name", ["worker killed", "link cut", "wrong host key"])
def test_faults(rig: Rig, tmp_path: Path, name: str) -> None:
    fault = next(each for each in faults.FAULTS if each.name == name)
    found = faults.strike(fault, rig, tmp_path / "job")
    assert (found.code, found.left) == (fault.code, {}), found.report
    assert found.cause, found.report
