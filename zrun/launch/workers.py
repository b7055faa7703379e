"""The workers of one host: a process for each rank, started with the variables of torchrun.

This is what torch's elastic agent does for one generation of workers whose places are known beforehand. Ours imports no
torch, which would hold up every launch and 220 MB of every host before the first worker starts.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

from zrun.topology.cpus import USER_BINDING, parse_cpus

Workers = dict[int, "Popen[bytes]"]  # by rank


def seen_alone(places: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The one GPU that each rank of a host may see, by rank, where several are to take their first: none elsewhere.

    Those are slices of MIG, of which CUDA shows a process one, and GPUs that another launcher gave to one rank each.

    Args:
        places: of all ranks of the host, as in a plan.
    """
    if sum(place["device"] == "cuda:0" for place in places) < 2:
        return {}
    return {place["rank"]: place["uuid"] for place in places if place.get("uuid")}


@dataclass(frozen=True)
class Command:
    """What runs on this host: `python -u -m module argument`, once per rank."""

    run_id: str
    module: str
    argument: str
    env: Mapping[str, str]
    world_size: int
    host: tuple[int, int]  # which of how many hosts this is
    ranks: range  # of this host
    logs: Mapping[int, Path]  # of those that are started
    cpus: Mapping[int, str] = field(default_factory=dict)  # that ranks keep to, as Linux writes sets
    alone: Mapping[int, str] = field(default_factory=dict)  # UUIDs of GPUs, or of slices, that the rank alone sees
    store: socket.socket | None = None  # listens for the ranks of several hosts; rank 0 inherits it

    def start(self) -> Workers:
        """Start the workers, each in a session of its own, so that what it starts can be ended with it.

        To be called by the main thread: the kernel ends a worker with the thread that started it.
        """
        port = _free_port()
        return {rank: self._start(rank, rank - self.ranks.start, port) for rank in sorted(self.logs)}

    def _start(self, rank: int, local_rank: int, port: int) -> Popen[bytes]:
        log = os.open(self.logs[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        by_hand = not self.env.keys().isdisjoint(USER_BINDING)
        try:
            with _bound(None if by_hand else self.cpus.get(rank)):
                return Popen(
                    [sys.executable, "-u", "-m", self.module, self.argument],
                    env={**self.env, **self._variables(rank, local_rank, port)},
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                    pass_fds=[self.store.fileno()] if self.store is not None and rank == 0 else [],
                )
        finally:
            os.close(log)

    def _variables(self, rank: int, local_rank: int, port: int) -> dict[str, str]:
        """What a script of torchrun's finds in its environment."""
        own = {"CUDA_VISIBLE_DEVICES": self.alone[rank]} if rank in self.alone else {}
        if self.store is not None and rank == 0:
            own["ZRUN_STORE_FD"] = str(self.store.fileno())
        return own | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.host[0]),
            "GROUP_WORLD_SIZE": str(self.host[1]),
            "ROLE_NAME": "worker",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            # For code that calls `init_process_group("gloo")` by itself: ours meets in the file that ZRUN_STORE names.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


@contextmanager
def _bound(cpus: str | None) -> Iterator[None]:
    """Processes that are started meanwhile keep to `cpus`, from their first instruction on.

    They inherit it from this thread: a process that binds itself comes too late for threads that its imports start.
    """
    before = os.sched_getaffinity(0)
    try:
        if cpus is not None:
            os.sched_setaffinity(0, parse_cpus(cpus))
    except OSError:  # the host has changed since it was looked at: a rank that may run anywhere is slower, not wrong
        pass
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
