"""The hosts of a run: from their names to agents that are there, and to what they offer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

from zrun.agent.store import url
from zrun.hosts.backend import Backend
from zrun.hosts.cluster import Cluster, HostFacts, probe_host
from zrun.hosts.probe import HostReport
from zrun.launch.rank_assignment import check_slots, group_by_host, merge_facts
from zrun.preflight.host_checks import requirements_of
from zrun.preflight.host_report import Finding, describe
from zrun.preflight.inspection import HELLO_S, check_hosts, inspect_hosts
from zrun.preflight.rpc_client import ask
from zrun.system import processes
from zrun.transport.agent_process import AgentLink
from zrun.transport.frames import Frame
from zrun.transport.join import JoinedAgent, JoiningProcess
from zrun.transport.local import LocalAgent
from zrun.transport.slurm import SrunAgent
from zrun.transport.ssh import SshAgent
from zrun_core.errors import PreflightError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import checkpoint_folder

_STORE_S = 10.0


@dataclass(frozen=True)
class HostAgent:
    """An agent that is there, and what it is to run.

    Attributes:
        host: as the plan calls it.
        interface: of that host, which leads to the others; None: there are no others.
        seat: the one rank of that host that it runs; None: all of them.
        is_remote: it may be cut off from this process, whose silence then tells it so.
    """

    agent: AgentLink
    host: str
    interface: str | None = None
    seat: int | None = None
    is_remote: bool = True


@dataclass(frozen=True)
class ClusterSession:
    """The agents in the order of their ranks, and what their hosts offer.

    Attributes:
        store: where the ranks of several hosts meet.
        dropped: what is wrong with hosts that are done without.
    """

    agents: tuple[HostAgent, ...]  # none on this host alone, if nothing is to run
    cluster: Cluster
    store: str | None = None
    dropped: str = ""


def open_agents(backend: Backend, job: JobConfig) -> list[AgentLink]:
    """Begin to start the agents of all hosts.

    Raises:
        PreflightError: the command that would reach them is not there.
    """
    if backend.kind == "local":
        return [LocalAgent()]
    python = job.launch.python or sys.executable
    processes.allow_files()  # 3 for each host
    agents: list[AgentLink] = []
    for entry in backend.hosts or ():
        if backend.kind == "slurm":
            agents.append(SrunAgent(entry.name, python))
        else:
            agents.append(SshAgent(entry, job.launch.ssh, python))
    return agents


def bring_up(
    agents: Sequence[AgentLink],
    backend: Backend,
    job: JobConfig,
    job_dir: Path,
    run_dir: Path,
    least: int,
) -> ClusterSession:
    """Look at all hosts at once.

    Args:
        run_dir: of the run, or the folder in which it will be made.
        least: hosts that are enough if others cannot be used.

    Raises:
        PreflightError: too many cannot be used; all of them are named.
    """
    if backend.kind == "local":
        here = backend.on_this_host(probe_host())
        return ClusterSession(
            tuple(HostAgent(agent, here.hostname, is_remote=False) for agent in agents),
            Cluster((here,)),
        )
    if backend.kind == "env":
        return _assemble_joined(agents, backend, job, job_dir, run_dir)
    findings = inspect_for_job(agents, backend, job, job_dir, _shared(job, run_dir))
    used = [
        (agent, finding.report)
        for agent, finding in zip(agents, findings, strict=True)
        if finding.report is not None and not finding.problems
    ]
    dropped = describe(findings) if len(used) < len(findings) else ""
    if len(used) < min(least, len(findings)) or not used:
        raise PreflightError(dropped)
    store = _open_store(*used[0]) if len(used) > 1 else None
    posts = tuple(HostAgent(agent, agent.host, report.interface) for agent, report in used)
    return ClusterSession(posts, cluster_of(findings, backend), store, dropped)


def inspect_for_job(
    agents: Sequence[AgentLink],
    backend: Backend,
    job: JobConfig,
    job_dir: Path,
    shared: Sequence[Path],
) -> list[Finding]:
    """What is known of each host, and why it cannot be used for `job`.

    Args:
        shared: folders that must be the same on all hosts: a file lies there meanwhile. Else nothing is changed.
    """
    entries = {str(entry): entry for entry in backend.hosts or ()}
    per_host = max(
        entry.slots or (job.slots if isinstance(job.slots, int) else 1)
        for entry in entries.values()
    )
    needs = requirements_of(job, job_dir, shared, per_host * len(entries), per_host)
    chosen = {name: entry.chosen for name, entry in entries.items() if entry.chosen is not None}
    return inspect_hosts(agents, replace(needs, chosen=chosen))


def cluster_of(findings: Sequence[Finding], backend: Backend) -> Cluster:
    """The hosts that can be used, as the user names them and with the slots that the user gives them."""
    entries = {str(entry): entry for entry in backend.hosts or ()}
    return Cluster(
        tuple(
            each.report.facts.called(each.host, entries[each.host].slots, entries[each.host].chosen)
            for each in findings
            if each.report is not None and not each.problems
        )
    )


def _assemble_joined(
    agents: Sequence[AgentLink], backend: Backend, job: JobConfig, job_dir: Path, run_dir: Path
) -> ClusterSession:
    """Look at the hosts of processes that another launcher started.

    Args:
        agents: of all processes, in order; the first one is of this process.

    Raises:
        PreflightError: one cannot be used, or its processes see it differently.
        JobError: the job asks for other ranks.
    """
    member = backend.cluster_env.member
    assert member is not None
    processes = [JoiningProcess(0, 0, gethostname(), os.getpid())]
    processes += [agent.process for agent in agents if isinstance(agent, JoinedAgent)]
    hosts = group_by_host(processes, member.is_rank)
    per_host = member.slots or 1
    if member.is_rank:
        check_slots(job.slots, hosts)
        per_host = max(len(host.members) for host in hosts)
    first = [agents[host.members[0]] for host in hosts]
    reports: dict[AgentLink, HostReport] = {}
    if len(hosts) > 1:
        shared = _shared(job, run_dir)
        needs = requirements_of(job, job_dir, shared, per_host * len(hosts), per_host)
        reports = dict(zip(first, check_hosts(first, needs), strict=True))
    facts = _facts_of(agents, reports)
    cluster = []
    host_agents = []
    for host, leader in zip(hosts, first, strict=True):
        if member.is_rank:
            cluster.append(merge_facts(host.name, [facts[agents[rank]] for rank in host.members]))
        else:
            cluster.append(facts[leader].called(host.name, member.slots))
        interface = reports[leader].interface if reports else None
        for place in host.members:
            seat = place if member.is_rank else None
            is_remote = len(hosts) > 1 and place > 0
            host_agents.append(HostAgent(agents[place], host.name, interface, seat, is_remote))
    store = _open_store(first[0], reports[first[0]]) if reports else None
    return ClusterSession(tuple(host_agents), Cluster(tuple(cluster)), store)


def _facts_of(
    agents: Sequence[AgentLink], reports: Mapping[AgentLink, HostReport]
) -> dict[AgentLink, HostFacts]:
    """Return what each process sees of its host; those without a report are asked."""
    facts = {agent: report.facts for agent, report in reports.items()}
    question: Frame = {"ask": "facts", "job_dir": None, "folders": {}}
    answers = ask({agent: question for agent in agents if agent not in reports}, HELLO_S)
    for agent, answer in answers.items():
        if isinstance(answer, str) or "error" in answer:
            why = answer if isinstance(answer, str) else answer["error"]
            raise PreflightError(f"{agent.host}: its agent could not look at it ({why})")
        facts[agent] = HostReport.from_json(answer["report"]).facts
    return facts


def _shared(job: JobConfig, run_dir: Path) -> list[Path]:
    """Folders that all hosts must see."""
    return [checkpoint_folder(job, run_dir)] if job.checkpoint is not None else []


def _open_store(agent: AgentLink, report: HostReport) -> str:
    """Let the first host open the door at which all ranks meet.

    Raises:
        PreflightError: it could not.
    """
    answer = ask({agent: {"ask": "store", "address": report.address}}, _STORE_S)[agent]
    if isinstance(answer, str) or "error" in answer:
        why = answer if isinstance(answer, str) else answer["error"]
        raise PreflightError(f"{agent.host}: it cannot listen at {report.address} ({why})")
    return url(str(report.address), answer["port"])
