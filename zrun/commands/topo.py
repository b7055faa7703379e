"""`zrun topo`: the links between the GPUs of this host, or of others."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from zrun.flags import HostList, HostsFile


def topo(
    simulated: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="NxMxGPU|FILE",
            help="Simulated machines: 2x8xH100-80G, or a file as in docs/topology.md.",
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
        int, typer.Option(min=1, max=1024, help="Show where ranks go with tp groups of this size.")
    ] = 1,
    pp: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Show where ranks go with this many pipeline stages."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the links between GPUs, and the groups that tensor parallelism would get.

    With --tp or --pp, show where each rank would sit, too. With --hosts or -H,
    show those hosts instead of this one; hosts that are alike share a table.

    Example: zrun topo --tp 4
    """
    from zrun.hosts.cluster import Cluster, probe_host, simulate
    from zrun.hosts.described import described
    from zrun.hosts.hostfile import parse_option, read_hostfile
    from zrun.launch.bring_up import look_at_links
    from zrun.placement.plan import plan_every_gpu
    from zrun.watch.topology import show_topology, topology_facts
    from zrun_core.errors import JobError

    if simulated is not None and (hosts is not None or host_list is not None):
        raise JobError("--simulate describes simulated machines: leave out --hosts and -H")
    if hosts is not None and host_list is not None:
        raise JobError("--hosts and -H both name the hosts: leave one out")
    if hosts is not None:
        cluster = look_at_links(read_hostfile(hosts), ssh, python or sys.executable)
    elif host_list is not None:
        cluster = look_at_links(parse_option(host_list, "-H"), ssh, python or sys.executable)
    elif simulated is not None:
        cluster = simulate(described(simulated))
    else:
        cluster = Cluster((probe_host(),))
    ranks = plan_every_gpu(cluster, tp, pp).ranks if tp * pp > 1 else []
    if as_json:
        print(json.dumps(topology_facts(cluster, ranks), indent=2))
    else:
        show_topology(cluster, ranks, sys.stdout)
