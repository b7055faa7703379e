"""Ranks of hosts, where another launcher started a process for each rank or host. Pure.

That launcher has decided on which hosts the ranks are, in which order, and perhaps which cores and
GPUs each one has. What is planned then keeps to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zrun.hosts.cluster import HostFacts, listed
from zrun.transport.join import JoiningProcess
from zrun_core.errors import JobError, PreflightError


@dataclass(frozen=True)
class JoinedHost:
    """A host, and the places of its processes in the list of all of them."""

    name: str
    members: tuple[int, ...]


def group_by_host(processes: Sequence[JoiningProcess], is_rank: bool) -> list[JoinedHost]:
    """Return the hosts in the order of their ranks.

    Args:
        processes: all of them, in order.
        is_rank: each is one rank; else each is a host, whatever it calls itself.

    Raises:
        PreflightError: ranks of a host do not follow each other.
    """
    if not is_rank:
        return _name_apart([process.host for process in processes])
    ranks: dict[str, list[int]] = {}
    for process in processes:
        ranks.setdefault(process.host, []).append(process.index)
    for host, found in ranks.items():
        if found != list(range(found[0], found[0] + len(found))):
            raise PreflightError(
                f"{host} has the ranks {listed(list(map(str, found)))}: those of a host must "
                "follow each other, as with mpirun --map-by slot or srun --distribution=block"
            )
        local = [processes[rank].local_index for rank in found]
        if local != list(range(len(found))):
            raise PreflightError(
                f"{host} has {len(found)} ranks, whose launcher numbers them "
                f"{listed(list(map(str, local)))} on their host: let each host have a name of its "
                "own"
            )
    return [JoinedHost(host, tuple(found)) for host, found in ranks.items()]


def _name_apart(names: Sequence[str]) -> list[JoinedHost]:
    hosts = []
    for index, name in enumerate(names):
        if names.count(name) > 1:  # pods of a template
            hosts.append(JoinedHost(f"{name}-{index}", (index,)))
        else:
            hosts.append(JoinedHost(name, (index,)))
    return hosts


def check_slots(slots: int | str, hosts: Sequence[JoinedHost]) -> None:
    """Check that the job asks for the ranks that the other launcher started.

    Raises:
        JobError: it asks for another number on each host.
    """
    if slots == "auto":
        return
    for host in hosts:
        if len(host.members) != slots:
            raise JobError(
                f"slots: {slots}, and {len(host.members)} ranks were started on {host.name}: leave "
                "slots out where another launcher starts the ranks"
            )


def merge_facts(name: str, facts: Sequence[HostFacts]) -> HostFacts:
    """Return what a host offers its ranks together.

    Args:
        facts: what each process of the host sees.

    Raises:
        PreflightError: some, but not all, see the same GPUs.
    """
    host = replace(facts[0], hostname=name, slots=len(facts))
    sets = [frozenset(each.cpus) for each in facts]
    if len(set(sets)) > 1:
        num_cpus = len(frozenset().union(*sets))
        host = replace(
            host,
            cores=min(sum(each.cores for each in facts), num_cpus),
            nodes=(),
            unbound="the launcher of the ranks gave each one its cores",
        )
    seen = [tuple(gpu.uuid for gpu in each.gpus) for each in facts]
    if len(set(seen)) == 1:
        return host
    num_gpus = len({uuid for uuids in seen for uuid in uuids})
    if num_gpus < sum(map(len, seen)) or not all(seen):
        numbers = ", ".join(str(len(uuids)) for uuids in seen)
        raise PreflightError(
            f"{name}: its ranks see different GPUs, and not each one of its own ({numbers}): give "
            "all of them all GPUs, or one to each"
        )
    return replace(host, gpus=tuple(each.gpus[0] for each in facts), links=None, apart=True)
