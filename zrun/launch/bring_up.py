"""From agents that were just started to connected ones, and to what each host has.

`bring_up` looks at all hosts at once, and leaves out those that cannot be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

from zrun.hosts.backend import Backend, HostEntry
from zrun.hosts.cluster import Cluster, HostFacts, probe_host
from zrun.hosts.offload_disk import SwapFolder, find_problem
from zrun.hosts.probe import HostReport
from zrun.launch.rank_assignment import check_slots, group_by_host, merge_facts
from zrun.preflight.host_checks import HostRequirements, requirements_of
from zrun.preflight.host_report import Finding, describe
from zrun.preflight.inspection import HELLO_S, check_hosts, inspect_hosts
from zrun.preflight.rpc_client import ask
from zrun.transport.agent_process import AgentLink, close_all
from zrun.transport.frames import Frame
from zrun.transport.join import JoinedAgent, JoiningProcess
from zrun.transport.open_agents import open_agents, open_ssh_agents
from zrun_core.errors import PreflightError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import checkpoint_folder

_STORE_S = 10.0


@dataclass(frozen=True)
class HostAgent:
    """A connected agent, and what it is to run.

    Attributes:
        host: its name in the plan.
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
    """The agents of a run in the order of their ranks, and what their hosts offer.

    Attributes:
        agents: none on this host alone, if nothing is to run.
        store: address at which the ranks of several hosts meet; None: there is one host.
        dropped: message about hosts that cannot be used, and are left out; empty: none.
    """

    agents: tuple[HostAgent, ...]
    cluster: Cluster
    store: str | None = None
    dropped: str = ""


def bring_up(
    agents: Sequence[AgentLink],
    backend: Backend,
    job: JobConfig,
    job_dir: Path,
    run_dir: Path,
    least: int,
    *,
    for_script: bool = False,
) -> ClusterSession:
    """Look at all hosts at once.

    Args:
        agents: of all hosts, as `open_agents` has begun to start them.
        job_dir: whose Python files must be the same on all hosts.
        run_dir: of the run, or the folder in which it will be made.
        least: number of hosts that are enough if others cannot be used.
        for_script: the ranks open the store by themselves.

    Raises:
        PreflightError: too many cannot be used; all of them are named.
    """
    swap = SwapFolder.of(job, job_dir, run_dir)
    if backend.kind == "local":
        here = backend.on_this_host(look_here(swap))
        local = tuple(HostAgent(agent, here.hostname, is_remote=False) for agent in agents)
        return ClusterSession(local, Cluster((here,)))
    if backend.kind == "env":
        return _assemble_joined(agents, backend, job, job_dir, run_dir, swap, for_script=for_script)
    findings = _inspect_for_job(agents, backend, job, job_dir, _shared(job, run_dir), swap)
    used = [
        (agent, finding.report)
        for agent, finding in zip(agents, findings, strict=True)
        if finding.report is not None and not finding.problems
    ]
    dropped = describe(findings) if len(used) < len(findings) else ""
    if not used or len(used) < min(least, len(findings)):
        raise PreflightError(dropped)
    store = _open_store(*used[0], for_script=for_script) if len(used) > 1 else None
    remote = tuple(HostAgent(agent, agent.host, report.interface) for agent, report in used)
    return ClusterSession(remote, cluster_of(findings, backend), store, dropped)


def look_here(swap: SwapFolder | None) -> HostFacts:
    """Return what this machine offers a job.

    Args:
        swap: for states that the job keeps on a disk; None: it keeps none there.

    Raises:
        PreflightError: none can lie there.
    """
    here = probe_host(swap)
    problem = None if here.disk is None else find_problem(here.disk)
    if problem is not None:
        raise PreflightError(problem)
    return here


def look_at_hosts(backend: Backend, job: JobConfig, job_dir: Path) -> list[Finding]:
    """Look at the hosts of a job without running anything there. Nothing is changed on them.

    Args:
        backend: hosts that are reached by ssh or srun.
        job_dir: whose Python files must be the same on all hosts.

    Raises:
        PreflightError: the command that would reach them is missing.
    """
    agents = open_agents(backend, job)
    try:
        swap = SwapFolder.of(job, job_dir, Path("runs") / job.name)
        return _inspect_for_job(agents, backend, job, job_dir, (), swap)
    finally:
        close_all(agents)


def look_at_links(hosts: Sequence[HostEntry], ssh: str, python: str) -> Cluster:
    """Return what `hosts` have, over ssh. Nothing is changed there.

    Args:
        ssh: the client, with options.
        python: the interpreter on those hosts.

    Raises:
        PreflightError: some cannot be looked at; all of them are named.
    """
    agents = open_ssh_agents(hosts, ssh, python)
    try:
        findings = inspect_hosts(agents, HostRequirements())
    finally:
        close_all(agents)
    facts: list[HostFacts] = []
    for entry, finding in zip(hosts, findings, strict=True):
        if finding.report is not None:
            facts.append(finding.report.facts.called(finding.host, entry.slots, entry.chosen))
    if len(facts) < len(hosts):
        # Whatever else is wrong with the hosts that answered, they have links.
        told = [each if each.report is None else replace(each, problems=()) for each in findings]
        raise PreflightError(describe(told))
    return Cluster(tuple(facts))


def _inspect_for_job(
    agents: Sequence[AgentLink],
    backend: Backend,
    job: JobConfig,
    job_dir: Path,
    shared: Sequence[Path],
    swap: SwapFolder | None,
) -> list[Finding]:
    """Return what is known of each host, and why it cannot be used for `job`.

    The Python files in `job_dir` must be the same on all hosts. So must the folders of `shared` and
    that of `swap`: a file is written there for a moment.
    """
    entries = {str(entry): entry for entry in backend.hosts or ()}
    usual = job.slots if isinstance(job.slots, int) else 1
    per_host = max(entry.slots or usual for entry in entries.values())
    needs = requirements_of(job, job_dir, shared, per_host * len(entries), per_host, swap)
    chosen = {name: entry.chosen for name, entry in entries.items() if entry.chosen is not None}
    return inspect_hosts(agents, replace(needs, chosen=chosen))


def cluster_of(findings: Sequence[Finding], backend: Backend) -> Cluster:
    """Return the hosts that can be used, with the names and slots that the user gives them."""
    entries = {str(entry): entry for entry in backend.hosts or ()}
    hosts: list[HostFacts] = []
    for finding in findings:
        if finding.report is not None and not finding.problems:
            entry = entries[finding.host]
            hosts.append(finding.report.facts.called(finding.host, entry.slots, entry.chosen))
    return Cluster(tuple(hosts))


def _assemble_joined(
    agents: Sequence[AgentLink],
    backend: Backend,
    job: JobConfig,
    job_dir: Path,
    run_dir: Path,
    swap: SwapFolder | None,
    *,
    for_script: bool,
) -> ClusterSession:
    """Look at the hosts of processes that another launcher started.

    `agents` are those of all processes, in order; the first one is of this process. With
    `for_script` the ranks open the store by themselves.

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
        needs = requirements_of(job, job_dir, shared, per_host * len(hosts), per_host, swap)
        reports = dict(zip(first, check_hosts(first, needs), strict=True))
    facts = _facts_of(agents, reports)
    if not reports:
        facts[first[0]] = replace(facts[first[0]], disk=look_here(swap).disk)
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
    store = None
    if reports:
        store = _open_store(first[0], reports[first[0]], for_script=for_script)
    return ClusterSession(tuple(host_agents), Cluster(tuple(cluster)), store)


def _facts_of(
    agents: Sequence[AgentLink], reports: Mapping[AgentLink, HostReport]
) -> dict[AgentLink, HostFacts]:
    """Return what each process sees of its host; those without a report are asked."""
    facts = {agent: report.facts for agent, report in reports.items()}
    question: Frame = {"ask": "facts", "job_dir": None, "folders": {}, "swap": None}
    answers = ask({agent: question for agent in agents if agent not in reports}, HELLO_S)
    for agent, answer in answers.items():
        if isinstance(answer, str) or "error" in answer:
            why = answer if isinstance(answer, str) else answer["error"]
            raise PreflightError(f"{agent.host}: its agent could not inspect it ({why})")
        facts[agent] = HostReport.from_json(answer["report"]).facts
    return facts


def _shared(job: JobConfig, run_dir: Path) -> list[Path]:
    """Return the folders that all hosts must share."""
    return [checkpoint_folder(job, run_dir)] if job.checkpoint is not None else []


def _open_store(agent: AgentLink, report: HostReport, *, for_script: bool) -> str:
    """Let the first host open the store at which all ranks meet.

    Returns:
        Its address, as workers find it in ZRUN_STORE.

    Raises:
        PreflightError: it could not.
    """
    question: Frame = {"ask": "store", "address": report.address, "for_script": for_script}
    answer = ask({agent: question}, _STORE_S)[agent]
    if isinstance(answer, str) or "error" in answer:
        why = answer if isinstance(answer, str) else answer["error"]
        raise PreflightError(f"{agent.host}: it cannot listen at {report.address} ({why})")
    address = str(report.address)
    if ":" in address:
        address = f"[{address}]"
    return f"tcp://{address}:{answer['port']}"
