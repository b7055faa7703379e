"""zrun under a real Slurm.

In a shell of salloc's, in a batch script, as tasks of srun, and when Slurm's parts die.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

from cluster import PATIENCE_S, TRAIN, Slurm, steps, wait_for

Launch = subprocess.Popen[str]


def salloc(slurm: Slurm, folder: Path, *argv: str) -> Launch:
    """Run a command in an allocation of both nodes."""
    command = ["salloc", "-Q", "-N", "2", *argv]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=slurm.environ, text=True, **quiet)


def end(launch: Launch) -> tuple[int, str]:
    _, report = launch.communicate(timeout=2 * PATIENCE_S)
    return launch.returncode, report


def trains(launch: Launch, folder: Path) -> None:
    wait_for(lambda: steps(folder) > 3 or launch.poll() is not None, "training")
    assert launch.poll() is None, end(launch)


def test_a_shell_of_salloc_trains_on_both_nodes(slurm: Slurm, folder: Path) -> None:
    code, report = end(salloc(slurm, folder, *TRAIN, "steps=5"))
    assert code == 0, report
    assert "hosts: 2 hosts, by slurm" in report
    assert steps(folder) == 5


def test_a_killed_worker_is_named_with_its_node(slurm: Slurm, folder: Path) -> None:
    launch = salloc(slurm, folder, *TRAIN)
    trains(launch, folder)
    os.kill(slurm.pids("node2", "zrun_core.train.worker")[0], signal.SIGKILL)
    code, report = end(launch)
    assert code == 5
    assert "rank 1 of 2 (node2, cpu) was killed by SIGKILL" in report


def test_a_killed_slurmstepd_is_a_lost_host(slurm: Slurm, folder: Path) -> None:
    """srun notices it half a minute later,
    and what its death leaves would be a rank that felt it.
    """
    launch = salloc(slurm, folder, *TRAIN)
    trains(launch, folder)
    for pid in slurm.pids("node2", "slurmstepd"):
        os.kill(pid, signal.SIGKILL)
    code, report = end(launch)
    assert code == 6, report
    assert "lost node2: " in report


def test_a_batch_script_that_is_warned_saves_and_goes_on(slurm: Slurm, folder: Path) -> None:
    script = f"#!/bin/bash\nexec {shlex.join(TRAIN)} --resume auto $STEPS >out.txt 2>&1\n"
    (folder / "script.sh").write_text(script)
    number = slurm.run(
        "sbatch", "--parsable", "-N2", f"--chdir={folder}", str(folder / "script.sh")
    ).strip()
    wait_for(lambda: steps(folder) > 3, "training")
    slurm.run("scancel", "--signal=USR1", "--batch", number)
    said = folder / "out.txt"
    wait_for(lambda: "saved; resume:" in said.read_text(), "the save")
    wait_for(lambda: number not in slurm.run("squeue", "-h", "-o", "%i"), "the end of the job")
    before = steps(folder)
    assert f"stopped after step {before}, saved" in said.read_text()
    slurm.environ["STEPS"] = f"steps={before + 3}"
    try:
        number = slurm.run(
            "sbatch", "--parsable", "-N2", f"--chdir={folder}", str(folder / "script.sh")
        ).strip()
        wait_for(lambda: number not in slurm.run("squeue", "-h", "-o", "%i"), "the end of the job")
    finally:
        del slurm.environ["STEPS"]
    assert f"{before + 3} steps" in said.read_text()


def test_a_cancelled_job_leaves_nothing(slurm: Slurm, folder: Path) -> None:
    launch = salloc(slurm, folder, *TRAIN)
    trains(launch, folder)
    slurm.run("scancel", *slurm.run("squeue", "-h", "-o", "%i").split())
    code, _ = end(launch)
    assert code != 0
    wait_for(lambda: not slurm.leftovers(), "the end of all processes")


def test_tasks_of_srun_are_ranks(slurm: Slurm, folder: Path) -> None:
    code, report = end(
        salloc(slurm, folder, "srun", "--ntasks-per-node=1", *TRAIN, "slots=auto", "steps=5")
    )
    assert code == 0, report
    assert steps(folder) == 5
    assert "2 ranks on 2 hosts" in report
