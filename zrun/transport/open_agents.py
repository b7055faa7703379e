"""Start the agents of all hosts: a child process here, over ssh, or by srun.

A new way to start processes on hosts is an `AgentLink` beside `ssh.py` and `slurm.py`, a case here,
and its name in `zrun.hosts.backend`, which chooses among them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zrun.hosts.backend import Backend, HostEntry
from zrun.system import processes
from zrun.transport.agent_process import AgentLink, LocalAgent
from zrun.transport.slurm import SrunAgent
from zrun.transport.ssh import SshAgent
from zrun_core.spine.config import JobConfig


def open_agents(backend: Backend, job: JobConfig) -> list[AgentLink]:
    """Begin to start the agents of all hosts.

    Raises:
        PreflightError: the command that would reach them is missing.
    """
    python = job.launch.python or sys.executable
    hosts = backend.hosts or ()
    match backend.kind:
        case "local":
            return [LocalAgent()]
        case "slurm":
            processes.allow_files()  # 3 for each host
            return [SrunAgent(entry.name, python) for entry in hosts]
        case _:
            return open_ssh_agents(hosts, job.launch.ssh, python)


def open_ssh_agents(hosts: Sequence[HostEntry], ssh: str, python: str) -> list[AgentLink]:
    """Begin to start an agent on each of `hosts`.

    Args:
        ssh: the client, with options.
        python: the interpreter on those hosts.

    Raises:
        PreflightError: there is no such client.
    """
    processes.allow_files()  # 3 for each host
    return [SshAgent(entry, ssh, python) for entry in hosts]
