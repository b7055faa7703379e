"""`zrun topo`: how the GPUs of this host, or of others, are linked, and which belong together."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zrun.flags import HostList, HostsFile

if TYPE_CHECKING:
    from zrun.hosts.cluster import Cluster
    from zrun_core.spine.spec import RankPlace


def topo(
    simulated: Annotated[
        Path | None,
        typer.Option(
            "--simulate",
            metavar="FILE",
            help="A description of other machines: docs/topology.md.",
            show_default=False,
        ),
    ] = None,
    hosts: HostsFile = None,
    host_list: HostList = None,
    ssh: Annotated[
        str, typer.Option(help="The ssh client, with options; as launch.ssh of a job.")
    ] = "ssh",
    python: Annotated[
        str | None,
        typer.Option(
            help="The Python on the hosts; as launch.python of a job.", show_default="this one"
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, max=1024, help="Seat ranks with tp groups of this size.")
    ] = 1,
    pp: Annotated[
        int, typer.Option(min=1, max=1024, help="Seat ranks with so many pipeline stages.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the links between GPUs, and the groups that tensor parallelism would get.

    With --tp or --pp, show where each rank would sit, too. With --hosts or -H,
    show those hosts instead of this one; hosts that are alike share a table.

    Example: zrun topo --tp 4
    """
    from zrun.hosts.cluster import Cluster, probe_host, simulate
    from zrun.topology.scenario import Scenario
    from zrun.watch.topology import show_topology, topology_facts
    from zrun_core.errors import JobError

    if simulated is not None and (hosts is not None or host_list is not None):
        raise JobError("--simulate describes machines that are not there: leave out --hosts and -H")
    if hosts is not None or host_list is not None:
        cluster = _look(hosts, host_list, ssh, python or sys.executable)
    else:
        cluster = (
            Cluster((probe_host(),)) if simulated is None else simulate(Scenario.read(simulated))
        )
    ranks = _seats(cluster, tp, pp) if tp * pp > 1 else []
    if as_json:
        print(json.dumps(topology_facts(cluster, ranks), indent=2))
    else:
        show_topology(cluster, ranks, sys.stdout)


def _look(hosts: Path | None, host_list: str | None, ssh: str, python: str) -> Cluster:
    """Those hosts, over ssh. Nothing is changed there.

    Raises:
        JobError: the list of hosts is wrong.
        PreflightError: some cannot be looked at; all of them are named.
    """
    from zrun.hosts.cluster import Cluster
    from zrun.hosts.hostfile import parse_option, read_hostfile
    from zrun.preflight.host_checks import HostRequirements
    from zrun.preflight.host_report import describe
    from zrun.preflight.inspection import inspect_hosts
    from zrun.transport.agent_process import close_all
    from zrun.transport.ssh import SshAgent
    from zrun_core.errors import JobError, PreflightError

    if hosts is not None and host_list is not None:
        raise JobError("--hosts and -H both name the hosts: leave one out")
    entries = read_hostfile(hosts) if hosts is not None else parse_option(host_list or "", "-H")
    agents = [SshAgent(entry, ssh, python) for entry in entries]
    try:
        findings = inspect_hosts(agents, HostRequirements())
    finally:
        close_all(agents)
    if any(
        finding.report is None for finding in findings
    ):  # whatever else is wrong with a host, it has links
        told = [each if each.report is None else replace(each, problems=()) for each in findings]
        raise PreflightError(describe(told))
    return Cluster(
        tuple(
            finding.report.facts.called(finding.host, entry.slots, entry.chosen)
            for entry, finding in zip(entries, findings, strict=True)
            if finding.report is not None
        )
    )


def _seats(cluster: Cluster, tp: int, pp: int) -> list[RankPlace]:
    """Where the ranks of a job would sit that takes every GPU."""
    from zrun.placement.plan import make_plan
    from zrun_core.errors import PreflightError
    from zrun_core.spine.config import JobConfig

    without = [host.hostname for host in cluster.hosts if not host.gpus]
    if without:
        raise PreflightError(f"{without[0]} has no usable NVIDIA GPU: leave out --tp and --pp")
    keys = {"name": "topo", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    job = JobConfig.model_validate(keys | {"parallel": {"tp": tp, "pp": pp}})
    return make_plan(job, cluster).plan.ranks
