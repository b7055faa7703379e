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

from zrun_core.errors import ExitCode
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


TOKENS = """
import torch

def data(**_):
    rows = torch.randint(64, (4096, 17), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
"""


@pytest.mark.thorough
def test_layers_are_divided_within_hosts_and_stages_lie_across_them(
    rig: Rig, tmp_path: Path
) -> None:
    args = {"vocab_size": 64, "dim": 32, "depth": 4, "heads": 4, "seq_len": 16, "tied": True}
    keys: dict[str, Any] = {
        "model": {"call": "zrun_core.models.gpt:gpt", "args": args},
        "data": "tokens.py:data",
        "batch": {"global": 8, "micro": 2},
        "optim": {"lr": 1e-3, "clip": 1.0},
    }
    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokens.py").write_text(TOKENS)
    parallel = {"tp": 2, "pp": 2}
    hosts = ["node1", "node2"]
    two = faults.start(rig, tmp_path / "two", **keys, hosts=hosts, slots=2, parallel=parallel)
    two.wait_for(lambda: len(two.events("step")) > 5, "step 6")
    os.kill(two.agent("node2"), signal.SIGKILL)
    code, report = end(two)
    assert code == 6, report
    assert "lost node2: its agent was killed there" in report
    one = faults.start(rig, tmp_path / "one", **keys, hosts=None, steps=6)
    assert end(one)[0] == 0
    losses = [[event["loss"] for event in launch.events("step")[:6]] for launch in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("name", ["worker killed", "link cut", "wrong host key"])
@pytest.mark.at_most(1)
def test_faults(rig: Rig, tmp_path: Path, name: str) -> None:
    """On two of the hosts; the table of `faults.py` has them on three."""
    fault = next(each for each in faults.FAULTS if each.name == name)
    found = faults.strike(replace(fault, hosts=fault.hosts[:2]), rig, tmp_path / "job")
    assert (found.code, found.left) == (fault.code, {}), found.report
    assert found.cause, found.report


@pytest.mark.thorough
def test_an_asynchronous_server_serves_another_host(rig: Rig, tmp_path: Path) -> None:
    """Without staleness it has the bits of the synchronous one on one host."""
    hosts = ["node1", "node2"]
    keys: dict[str, Any] = {"steps": 30, "zero": 0}
    late = faults.start(rig, tmp_path / "two", **keys, hosts=hosts, sync="async_server")
    code, report = end(late)
    assert code == 0, report
    one = faults.start(rig, tmp_path / "one", **keys, hosts=None, slots=2, sync="server")
    assert end(one)[0] == 0
    steps = [
        {event["step"]: event["loss"] for event in launch.events("step")} for launch in (late, one)
    ]
    assert steps[0] == steps[1]
    assert sorted(steps[0]) == list(range(1, 31))


@pytest.mark.parametrize("name", ["worker killed", "agent killed"])
@pytest.mark.thorough
def test_an_asynchronous_server_misses_who_is_killed(rig: Rig, tmp_path: Path, name: str) -> None:
    fault = next(each for each in faults.FAULTS if each.name == name)
    apart = {"sync": "async_server", "staleness": "any"}
    found = faults.strike(
        replace(fault, hosts=fault.hosts[:2], keys=lambda _: apart), rig, tmp_path / "job"
    )
    assert (found.code, found.left) == (fault.code, {}), found.report
    assert found.cause, found.report


ASYNC: dict[str, Any] = {"sync": "async_server", "staleness": "any", "checkpoint": {"every": 5}}


def is_counted_once(launch: faults.Launch) -> bool:
    """Of six samples per step, each in one step that stayed."""
    steps = {event["step"]: event["total_samples"] for event in launch.events("step")}
    return steps == {step: 6 * step for step in range(1, max(steps) + 1)}


@pytest.mark.thorough
def test_a_run_goes_on_after_its_asynchronous_server_is_killed(rig: Rig, tmp_path: Path) -> None:
    """Rank 0, from another host's point of view; by itself, and by hand after a signal."""
    hosts = ["node1", "node2"]
    launch = faults.start(rig, tmp_path / "job", **ASYNC, hosts=hosts, steps=300, restarts=1)
    launch.wait_for(lambda: len(launch.events("step")) > 6, "step 7")
    os.kill(launch.pids("node1", "zrun_core")[0], signal.SIGKILL)
    launch.wait_for(lambda: launch.events("step")[-1]["step"] > 60, "step 61")
    launch.launcher.send_signal(signal.SIGTERM)
    code, report = end(launch)
    assert "rank 0 of 2 (node1, cpu) was killed by SIGKILL" in report
    assert "restart 1 of 1" in report
    assert code == ExitCode.STOPPED, report
    last = launch.events("step")[-1]["step"]
    assert f"stopped after step {last}" in report
    assert rig.leftovers() == {}
    rest = {**ASYNC, "hosts": hosts, "steps": last + 20}
    rest_of = faults.start(rig, tmp_path / "job", "--resume", "auto", **rest)
    code, report = end(rest_of)
    assert code == 0, report
    assert f"continues after step {last}" in report
    assert max(event["step"] for event in rest_of.events("step")) == last + 20
    assert is_counted_once(rest_of)
