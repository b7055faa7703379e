"""A real Slurm of two nodes in this machine.

munged, slurmctld, and a slurmd in the namespaces of two hosts.

    with hosts.build(folder) as rig, cluster.start(rig, folder / "slurm") as slurm:
        subprocess.run(["salloc", "-N", "2", "hostname"], env=slurm.environ)

Its controller and its clients are on this machine, as on a login node. Everything lies in its
folder, and all processes end with it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "hosts"))

import rig as rigs

NODES = ("node1", "node2")
WILD = Path(__file__).parents[1] / "e2e" / "wild.py"
TRAIN = [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", "run", "--ui", "plain"]
PATIENCE_S = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs, with the environment in which its commands find it."""

    folder: Path
    environ: dict[str, str]
    rig: rigs.Rig

    def leftovers(self) -> list[str]:
        """What still runs on the nodes beside Slurm's own daemon."""
        return [
            line
            for node in NODES
            for line in self.rig.hosts[node].commands().values()
            if not line.startswith("slurmd")
        ]

    def pids(self, node: str, text: str) -> list[int]:
        """Processes on a node whose command line has `text`."""
        return sorted(pid for pid, line in self.rig.hosts[node].commands().items() if text in line)

    def run(self, *argv: str) -> str:
        """Run one of Slurm's commands, and return what it printed."""
        done = subprocess.run(argv, env=self.environ, capture_output=True, text=True, check=True)
        return done.stdout


def write_job(folder: Path, **keys: Any) -> Path:
    """Write a job that trains for as long as nobody stops it, and return its folder."""
    folder.mkdir(exist_ok=True)
    shutil.copy(WILD, folder)
    given = {
        "name": "wild",
        "model": {"call": "wild.py:Net", "args": {"pause": 0.02}},
        "data": "wild.py:data",
        "steps": 100_000,
        "batch": 4,
        "slots": 1,
        "device": "cpu",
        "threads": 1,
        "log": {"every": 1},
        "checkpoint": {"every": 1000},
        "limits": {"hang_s": 600, "stop_s": 600},
        **keys,
    }
    lines = (f"{key}: {json.dumps(value)}\n" for key, value in given.items())
    (folder / "job.yaml").write_text("".join(lines))
    return folder


def steps(folder: Path) -> int:
    """How many steps the job's events tell of."""
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(json.loads(line)["type"] == "step" for line in lines)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came to be"
        time.sleep(0.1)


def missing() -> str | None:
    """Why there can be no cluster on this machine."""
    if reason := rigs.missing() or rigs.not_isolated():
        return reason
    for program in PROGRAMS:
        if shutil.which(program, path=_PATH) is None:
            return f"there is no {program} (make test-slurm installs it)"
    return None


@contextmanager
def start(rig: rigs.Rig, folder: Path) -> Iterator[Slurm]:
    """Start the daemons, wait until both nodes are idle, and end them."""
    folder.mkdir(mode=0o755)
    for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    config = folder / "slurm.conf"
    config.write_text(_config(rig, folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = os.environ | {"PATH": _PATH, "SLURM_CONF": str(config)}
    with ExitStack() as stack:
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        munged = [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge/socket",
        ]
        munged += [f"--pid-file={folder}/munge/pid", f"--seed-file={folder}/munge/seed"]
        _daemon(stack, munged, environ, folder / "munged.log")
        _wait_for((folder / "munge" / "socket").exists, folder)
        _daemon(stack, ["slurmctld", "-D"], environ, folder / "slurmctld.log")
        for node in NODES:
            enter = ["nsenter", "-t", str(rig.hosts[node].sshd.pid), "-n", "-m", "-u"]
            _daemon(
                stack, [*enter, "slurmd", "-D", "-N", node], environ, folder / f"slurmd-{node}.log"
            )
        slurm = Slurm(folder, environ, rig)
        _wait_for(lambda: _are_idle(slurm), folder)
        yield slurm


def _config(rig: rigs.Rig, folder: Path) -> str:
    with (
        socket.create_server((rig.address, 0)) as one,
        socket.create_server((rig.address, 0)) as other,
    ):
        ports = one.getsockname()[1], other.getsockname()[1]
    nodes = "".join(
        f"NodeName={node} NodeAddr={rig.hosts[node].address} NodeHostname={node} CPUs=2 "
        "RealMemory=4000\n"
        for node in NODES
    )
    return f"""ClusterName=zrun
SlurmctldHost={socket.gethostname()}({rig.address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE \\
OverSubscribe=FORCE State=UP
"""


def _daemon(stack: ExitStack, argv: list[str], environ: dict[str, str], log: Path) -> None:
    program = shutil.which(argv[0], path=_PATH) or argv[0]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, *argv[1:]], env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _are_idle(slurm: Slurm) -> bool:
    try:
        return slurm.run("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(NODES)
    except subprocess.CalledProcessError:  # the controller is not there yet
        return False


def _wait_for(is_there: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log"))
            )
            raise AssertionError(f"the Slurm cluster never came up:\n{logs}")
        time.sleep(0.1)
