"""zrun under a real mpirun, of Open MPI, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from cluster import PATIENCE_S, TRAIN, steps, wait_for

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
ALONE = {"OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_plm_rsh_agent": "false"}

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="there is no mpirun (make test-slurm)"
)


def mpirun(folder: Path, *more: str) -> subprocess.Popen[str]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    command = [*MPIRUN, *TRAIN, "slots=auto", *more]
    return subprocess.Popen(command, cwd=folder, env=os.environ | ALONE, text=True, **quiet)


def test_ranks_of_mpirun_train_together(folder: Path) -> None:
    launch = mpirun(folder, "steps=5")
    _, report = launch.communicate(timeout=2 * PATIENCE_S)
    assert launch.returncode == 0, report
    assert steps(folder) == 5
    assert "2 ranks" in report


def test_a_killed_rank_ends_all_of_them(folder: Path) -> None:
    launch = mpirun(folder)
    wait_for(lambda: steps(folder) > 3 or launch.poll() is not None, "training")
    family = psutil.Process(launch.pid).children(recursive=True)
    workers = [each for each in family if "zrun_core.train.worker" in " ".join(each.cmdline())]
    workers[-1].send_signal(signal.SIGKILL)
    _, report = launch.communicate(timeout=2 * PATIENCE_S)
    assert launch.returncode == 5, report
    assert "was killed by SIGKILL" in report
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
