"""`zrun train --detach`, `ps`, `logs` and `stop` of a run on two hosts,
the second of which has a disk of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import faults
from rig import Rig

from zrun.runs import run_lock


def zrun(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zrun", *argv]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=faults.PATIENCE_S,
    )


def test_a_run_on_two_hosts_goes_on_by_itself_until_it_is_stopped(
    isolated_rig: Rig, tmp_path: Path
) -> None:
    rig, run, node2 = isolated_rig, tmp_path / "run", isolated_rig.hosts["node2"]
    run.mkdir()
    (tmp_path / "job.yaml").write_text(
        "name: far\nmodel: {call: 'fake:model', args: {behaviour: {'0': steps_then_hang, '1': "
        "hang}}}\n"
        "data: fake:data\nsteps: 3\n"
        f"batch: 4\ndevice: cpu\nlog: {{ranks: all}}\nhosts: [node1:1, node2:1]\nlaunch: "
        f"{{ssh: '{rig.ssh}'}}\n"
        f"env: {{PYTHONPATH: {faults.WILD.parent}}}\n"
    )
    node2.run("mount", "-t", "tmpfs", "tmpfs", str(run))
    try:
        done = zrun(
            tmp_path, "train", "job.yaml", "--run-dir", "run", "--detach", "--worker", "fake_worker"
        )
        assert done.returncode == 0, done.stderr
        (told,) = (
            each
            for each in json.loads(zrun(tmp_path, "ps", "--json").stdout)
            if each["path"] == str(run)
        )
        assert (told["state"], told["ranks"], told["hosts"]) == ("running", 2, ["node1", "node2"])
        logs = zrun(tmp_path, "logs", "run")
        assert logs.stderr == (
            f"rank 1: no log {run}/logs/rank-1.log; it is on node2: ssh node2 cat "
            f"{run}/logs/rank-1.log\n"
        )
        assert (node2.run("ls", f"{run}/logs").stdout.split()) == ["agent-node2.log", "rank-1.log"]
        assert all(host.commands() for host in (rig.hosts["node1"], node2))
        stopped = zrun(tmp_path, "stop", "run")
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout == "stopped after step 1, exit code 143, not saved\n"
        assert rig.leftovers() == {}
        log = (run / "launcher.log").read_text()
        for rank, behaves in enumerate(
            ("steps_then_hang", "hang")
        ):  # the second one printed to its own disk
            assert f"rank {rank}: rank {rank} behaves: {behaves}\nrank {rank}: on stderr\n" in log
    finally:
        holder = run_lock.last_holder(run)
        if holder is not None and holder.process is not None:
            os.kill(holder.pid, signal.SIGKILL)
        node2.run("umount", str(run))
