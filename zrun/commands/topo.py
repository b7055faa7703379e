"""`zrun topo`: how the GPUs of a host are linked, and which belong together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from zrun.launch.cluster import Cluster
    from zrun_core.spec import RankPlace


def topo(
    simulated: Annotated[
        Path | None,
        typer.Option(
            "--simulate", metavar="FILE", help="A description of other machines: docs/topology.md.", show_default=False
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Seat ranks with tp groups of this size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Seat ranks with so many pipeline stages.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the links between GPUs, and the groups that tensor parallelism would get.

    With --tp or --pp, show where each rank would sit, too.

    Example: zrun topo --tp 4
    """
    from zrun.launch.cluster import Cluster, probe_host, simulate
    from zrun.topology.scenario import Scenario
    from zrun.watch.topology import show_topology, topology_facts

    cluster = Cluster((probe_host(),)) if simulated is None else simulate(Scenario.read(simulated))
    ranks = _seats(cluster, tp, pp) if tp * pp > 1 else []
    if as_json:
        print(json.dumps(topology_facts(cluster, ranks), indent=2))
    else:
        show_topology(cluster, ranks, sys.stdout)


def _seats(cluster: Cluster, tp: int, pp: int) -> list[RankPlace]:
    """Where the ranks of a job would sit that takes every GPU."""
    from zrun.launch.plan import make_plan
    from zrun_core.config import JobConfig
    from zrun_core.errors import PreflightError

    without = [host.hostname for host in cluster.hosts if not host.gpus]
    if without:
        raise PreflightError(f"{without[0]} has no usable NVIDIA GPU: leave out --tp and --pp")
    keys = {"name": "topo", "model": "m:f", "data": "m:f", "steps": 1, "batch": {"micro": 1}}
    job = JobConfig.model_validate(keys | {"parallel": {"tp": tp, "pp": pp}})
    return make_plan(job, cluster).plan.ranks
