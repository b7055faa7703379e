"""Which rank sits where. Pure: a function of what the job asks and what the hosts are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from zrun.launch.cluster import Cluster
from zrun_core.spec import RankPlace


def seats(
    cluster: Cluster, device: Literal["cpu", "cuda"], slots: Mapping[str, int], threads: Mapping[str, int]
) -> list[RankPlace]:
    """Ranks in the order of the hosts, so that those of a host are contiguous.

    Args:
        slots: ranks by host.
        threads: CPU threads of a rank by host.
    """
    places: list[RankPlace] = []
    for host in cluster.hosts:
        gpus = host.gpus if host.chosen is None else [host.gpus[slot] for slot in host.chosen if device == "cuda"]
        for local_rank in range(slots[host.hostname]):
            places.append(
                RankPlace(
                    rank=len(places),
                    host=host.hostname,
                    local_rank=local_rank,
                    device=f"cuda:{local_rank}" if device == "cuda" else "cpu",
                    uuid=gpus[local_rank].uuid if device == "cuda" else None,
                    threads=threads[host.hostname],
                )
            )
    return places
