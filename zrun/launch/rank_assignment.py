"""Who runs which ranks, where another launcher started a process for each rank or host. Pure.

That launcher has decided on which hosts the ranks are, in which order, and perhaps which cores and GPUs each one has.
What is planned then keeps to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zrun.hosts.cluster import HostFacts, listed
from zrun.transport.join import JoiningProcess
from zrun_core.errors import JobError, PreflightError


@dataclass(frozen=True)
class JoinedHost:
    """A host, and the places in the list of all processes of those that are on it."""

    name: str
    members: tuple[int, ...]


def group_by_host(callers: Sequence[JoiningProcess], is_rank: bool) -> list[JoinedHost]:
    """The hosts in the order of their ranks. `callers` are all processes, in order.

    Raises:
        PreflightError: ranks of a host do not follow each other.
    """
    if not is_rank:
        names = [caller.host for caller in callers]
        return [
            JoinedHost(name if names.count(name) == 1 else f"{name}-{number}", (number,))
            for number, name in enumerate(names)
        ]
    ranks: dict[str, list[int]] = {}
    for caller in callers:
        ranks.setdefault(caller.host, []).append(caller.index)
    for host, found in ranks.items():
        if found != list(range(found[0], found[0] + len(found))):
            raise PreflightError(
                f"{host} has the ranks {listed([str(rank) for rank in found])}: those of a host must follow each "
                "other, as with mpirun --map-by slot or srun --distribution=block"
            )
        local = [callers[rank].local_index for rank in found]
        if local != list(range(len(found))):
            raise PreflightError(
                f"{host} has {len(found)} ranks, whose launcher numbers them {listed([str(each) for each in local])} "
                "on their host: let each host have a name of its own"
            )
    return [JoinedHost(host, tuple(found)) for host, found in ranks.items()]


def check_slots(slots: int | str, hosts: Sequence[JoinedHost]) -> None:
    """Ranks are as many as that other launcher started.

    Raises:
        JobError: the job asks for another number on each host.
    """
    if slots == "auto":
        return
    for host in hosts:
        if len(host.members) != slots:
            raise JobError(
                f"slots: {slots}, and {len(host.members)} ranks were started on {host.name}: leave slots out where "
                "another launcher starts the ranks"
            )


def merge_facts(name: str, facts: Sequence[HostFacts]) -> HostFacts:
    """What a host offers its ranks together, from what each of their processes sees.

    Raises:
        PreflightError: some, but not all, see the same GPUs.
    """
    first = replace(facts[0], hostname=name, slots=len(facts))
    merge_facts = _with_cpus(first, facts)
    seen = [tuple(gpu.uuid for gpu in each.gpus) for each in facts]
    if len(set(seen)) == 1:
        return merge_facts
    if len({uuid for uuids in seen for uuid in uuids}) < sum(map(len, seen)) or not all(seen):
        raise PreflightError(
            f"{name}: its ranks see different GPUs, and not each one of its own "
            f"({', '.join(str(len(uuids)) for uuids in seen)}): give all of them all GPUs, or one to each"
        )
    return replace(merge_facts, gpus=tuple(each.gpus[0] for each in facts), links=None, apart=True)


def _with_cpus(host: HostFacts, facts: Sequence[HostFacts]) -> HostFacts:
    """`host` with the cores that all of its processes have together."""
    sets = [frozenset(each.cpus) for each in facts]
    if len(set(sets)) == 1:
        return host
    cores = min(sum(each.cores for each in facts), len(frozenset().union(*sets)))
    return replace(
        host, cores=cores, nodes=(), unbound="the launcher of the ranks gave each one its cores"
    )
