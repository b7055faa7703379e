"""Three hosts train as one, with the same bits.

What goes wrong is named, stops everywhere, and can be gone on from.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import pytest
from rig import Rig

from zrun_core.spine.stop_signals import SAVE


def end(launch: faults.Launch) -> tuple[int, str]:
    _, report = launch.launcher.communicate(timeout=faults.PATIENCE_S)
    return launch.launcher.returncode, report


def test_three_hosts_have_the_bits_of_one_even_if_one_of_them_was_lost(
    rig: Rig, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"steps": 30, "checkpoint": {"every": 5}, "zero": 3}
    three = faults.start(rig, tmp_path / "three", **keys, restarts=1)
    three.wait_for(lambda: len(three.events("step")) > 2, "step 3")
    three.launcher.send_signal(SAVE)  # over ssh, to the one host with rank 0
    three.wait_for(
        lambda: [event for event in three.events("save") if event["reason"] == "asked"],
        "a save on request",
    )
    three.wait_for(lambda: len(three.events("step")) > 7, "step 8")
    os.kill(three.agent("node2"), signal.SIGKILL)
    code, report = end(three)
    assert code == 0, report
    assert "3 hosts, by ssh" in report
    assert "lost node2: its agent was killed there" in report
    assert "restart 1 of 1 in 5 s, after step" in report
    one = faults.start(rig, tmp_path / "one", **keys, hosts=None, slots=3)
    assert end(one)[0] == 0
    steps = [
        {event["step"]: event["loss"] for event in launch.events("step")} for launch in (three, one)
    ]
    assert steps[0] == steps[1]
    assert sorted(steps[0]) == list(range(1, 31))
    assert (tmp_path / "three" / "run" / "checkpoints" / "step-00000030" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["worker killed", "link cut", "wrong host key"])
def test_faults(rig: Rig, tmp_path: Path, name: str) -> None:
    """On two of the hosts; the table of `faults.py` has them on three."""
    fault = next(each for each in faults.FAULTS if each.name == name)
    found = faults.strike(replace(fault, hosts=fault.hosts[:2]), rig, tmp_path / "job")
    assert (found.code, found.left) == (fault.code, {}), found.report
    assert found.cause, found.report
