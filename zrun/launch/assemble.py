"""The hosts of a run: from their names to agents that are there, and to what they offer."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zrun.launch.agent_process import AgentProcess
from zrun.launch.cluster import Cluster, probe_host
from zrun.launch.findings import describe
from zrun.launch.hosts import Backend
from zrun.launch.local import LocalAgent
from zrun.launch.preflight import HostReport, inspect
from zrun.launch.questions import ask
from zrun.launch.slurm import SrunAgent
from zrun.launch.ssh import SshAgent
from zrun.launch.store import url
from zrun.launch.verdict import needs_of
from zrun_core.config import JobConfig
from zrun_core.errors import PreflightError
from zrun_core.spec import checkpoint_folder

_STORE_S = 10.0


@dataclass(frozen=True)
class Assembly:
    """Agents that are there, in the order of their hosts' ranks, and what they offer.

    Attributes:
        interfaces: by host, the one that leads to the others; none where there are no others.
        store: where the ranks of several hosts meet.
        dropped: what is wrong with hosts that are done without.
    """

    agents: tuple[AgentProcess, ...]
    cluster: Cluster
    interfaces: Mapping[str, str | None]
    store: str | None = None
    dropped: str = ""


def open_agents(backend: Backend, job: JobConfig) -> list[AgentProcess]:
    """Begin to start the agents of all hosts.

    Raises:
        PreflightError: the command that would reach them is not there.
    """
    if backend.kind == "local":
        return [LocalAgent()]
    python = job.launch.python or sys.executable
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most) if limit < most else (limit, most))  # 3 for each host
    agents: list[AgentProcess] = []
    for entry in backend.hosts or ():
        if backend.kind == "slurm":
            agents.append(SrunAgent(entry.name, python))
        else:
            agents.append(SshAgent(entry, job.launch.ssh, python))
    return agents


def assemble(
    agents: Sequence[AgentProcess], backend: Backend, job: JobConfig, job_dir: Path, run_dir: Path, least: int
) -> Assembly:
    """Look at all hosts at once.

    Args:
        run_dir: of the run, or the folder in which it will be made.
        least: hosts that are enough if others cannot be used.

    Raises:
        PreflightError: too many cannot be used; all of them are named.
    """
    if backend.kind == "local":
        here = backend.on_this_host(probe_host())
        return Assembly(tuple(agents), Cluster((here,)), {here.hostname: None})
    entries = {str(entry): entry for entry in backend.hosts or ()}
    shared = [checkpoint_folder(job, run_dir)] if job.checkpoint is not None else []
    per_host = max(entry.slots or (job.slots if isinstance(job.slots, int) else 1) for entry in entries.values())
    needs = needs_of(job, job_dir, shared, per_host * len(entries), per_host)
    chosen = {name: entry.chosen for name, entry in entries.items() if entry.chosen is not None}
    findings = inspect(agents, replace(needs, chosen=chosen))
    used = [
        (agent, finding.report)
        for agent, finding in zip(agents, findings, strict=True)
        if finding.report is not None and not finding.problems
    ]
    dropped = describe(findings) if len(used) < len(findings) else ""
    if len(used) < min(least, len(findings)) or not used:
        raise PreflightError(dropped)
    hosts = [
        report.facts.called(agent.host, entries[agent.host].slots, entries[agent.host].chosen) for agent, report in used
    ]
    interfaces = {agent.host: report.interface for agent, report in used}
    store = _open_store(*used[0]) if len(used) > 1 else None
    return Assembly(tuple(agent for agent, _ in used), Cluster(tuple(hosts)), interfaces, store, dropped)


def _open_store(agent: AgentProcess, report: HostReport) -> str:
    """Let the first host open the door at which all ranks meet.

    Raises:
        PreflightError: it could not.
    """
    answer = ask({agent: {"ask": "store", "address": report.address}}, _STORE_S)[agent]
    if isinstance(answer, str) or "error" in answer:
        why = answer if isinstance(answer, str) else answer["error"]
        raise PreflightError(f"{agent.host}: it cannot listen at {report.address} ({why})")
    return url(str(report.address), answer["port"])
