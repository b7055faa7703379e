"""An `srun` that only starts processes: it takes the options that zrun passes, and no others.

FAKE_SRUN_NODES names a process in the namespaces of each node: {"node1": 4711}. A node without one
is down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from zrun.hosts.nodelist import expand

FLAGS = {"--nodes=1", "--ntasks=1", "--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--quiet"}


def refuse(text: str) -> None:
    sys.exit(f"srun: error: {text}")


def main() -> None:
    options, node = sys.argv[1 : sys.argv.index("--")], ""
    command = sys.argv[sys.argv.index("--") + 1 :]
    for option in options:
        if option.startswith("--nodelist="):
            node = option.removeprefix("--nodelist=")
        elif option not in FLAGS:
            refuse(f"unrecognized option '{option}'")
    if "SLURM_JOB_ID" not in os.environ:
        refuse("Unable to allocate resources: there is no allocation")
    if node not in expand(os.environ["SLURM_JOB_NODELIST"]):
        refuse(
            f"Unable to create step for job {os.environ['SLURM_JOB_ID']}: Requested nodes are "
            "not in it"
        )
    pid = json.loads(os.environ["FAKE_SRUN_NODES"]).get(node)
    if pid is None:
        refuse(f"Task launch failed on node {node}: Communication connection failure")
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": node,
        "SLURM_STEP_NODELIST": node,
    }
    # The task has our stdin and stdout, which Slurm would relay.
    task = subprocess.Popen(
        ["nsenter", "-t", str(pid), "-n", "-m", "-u", *command], env=os.environ | step
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: task.kill())
    status = task.wait()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
