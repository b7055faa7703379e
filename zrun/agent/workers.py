"""The workers of one host: a process for each rank, with the variables of torchrun.

This is what torch's elastic agent does for one generation of workers whose places are known
beforehand. Ours imports no torch, which would hold up every launch and 220 MB of every host before
the first worker starts: a fork server does so, once for all of them, and becomes them. See
`zrun.agent.fork_server`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

from zrun.agent import fork_server
from zrun.agent.fork_server import BEGIN, BEGIN_ANEW, ForkReply, ForkRequest, RankSlot
from zrun.system.ports import free_port
from zrun.topology.cpus import USER_BINDING
from zrun.topology.visible import environment_of


class WorkerProcess:
    """A rank's process, a child of this one. Two threads may wait for it.

    Attributes:
        pidfd: becomes readable when it ends.
        status: with which it ended, negative for a signal; None: it runs, or `poll` has not looked.
    """

    def __init__(self, pid: int, pidfd: int, status: int | None = None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.status = status
        self._polling = threading.Lock()

    def poll(self) -> int | None:
        """Return its status, if it has ended."""
        with self._polling:
            if self.status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self) -> int:
        """Return its status, once it has ended."""
        while True:
            status = self.poll()
            if status is not None:
                return status
            with suppress(ChildProcessError):  # the other thread has just collected it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


Workers = dict[int, WorkerProcess]  # by rank


class ForkServer:
    """The process that imports for all workers of a host, and becomes them.

    Attributes:
        pid: its number.
    """

    def __init__(self, process: Popen[bytes], told: int, begin: int, ranks: Sequence[int]) -> None:
        """Take over a fork server that was started.

        Args:
            told: descriptor of the pipe up, see `zrun.agent.fork_server`.
            begin: descriptor of the pipe down.
        """
        self.pid = process.pid
        self._process = process
        self._told = told
        self._begin = begin
        self._ranks = ranks

    def workers(self) -> Workers:
        """Wait for the ranks and let them begin.

        This process adopts orphans: they are its children then. If the fork server failed, none
        begins, and each is given with the fork server's status.
        """
        pidfd = os.pidfd_open(self.pid)
        with open(self._told, "rb") as told:
            text = told.read()
        status = self._process.wait()
        # Ranks that wait at its end and get no byte end too.
        with open(self._begin, "wb", buffering=0) as begin:
            if not text:
                return {
                    rank: WorkerProcess(self.pid, os.dup(pidfd), status) for rank in self._ranks
                }
            reply: ForkReply = json.loads(text)
            workers = {
                int(rank): WorkerProcess(pid, os.pidfd_open(pid))
                for rank, pid in reply["pids"].items()
            }
            word = BEGIN
            if reply["threads"]:
                threads = ", ".join(sorted(reply["threads"]))
                print(
                    f"importing the workers' modules started threads ({threads}), so each worker "
                    "imports on its own",
                    flush=True,
                )
                word = BEGIN_ANEW
            with suppress(BrokenPipeError):  # all of them have been killed already
                begin.write(word * len(workers))
        return workers


def isolated_gpus(places: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the one GPU that each rank of a host may see, by rank; {} where all may see all.

    Several ranks that take their first GPU are on slices of MIG, of which CUDA shows a process one,
    or on GPUs that another launcher gave to one rank each.

    Args:
        places: of all ranks of the host, as in a plan.
    """
    if sum(place["device"] == "cuda:0" for place in places) < 2:
        return {}
    return {place["rank"]: place["uuid"] for place in places if place.get("uuid")}


@dataclass(frozen=True)
class WorkerCommand:
    """A command for this host: run `main` of a module once per rank.

    Attributes:
        module, argument: that `main` finds in `sys.argv`.
        env: of all ranks.
        host: which of how many hosts this is.
        ranks: of this host.
        logs: of the ranks that are started, by rank.
        cpus: that ranks keep to, as Linux writes sets.
        alone: UUIDs of GPUs, or of slices, that only this rank sees.
        store: listens for the ranks of several hosts; rank 0 inherits it.
        meeting: address and port at which a script's ranks meet; None: it is no script.
        restart, max_restarts: how often the run was started again, and may be.
    """

    run_id: str
    module: str
    argument: str
    env: Mapping[str, str]
    world_size: int
    host: tuple[int, int]
    ranks: range
    logs: Mapping[int, Path]
    cpus: Mapping[int, str] = field(default_factory=dict)
    alone: Mapping[int, str] = field(default_factory=dict)
    store: socket.socket | None = None
    meeting: tuple[str, int] | None = None
    restart: int = 0
    max_restarts: int = 0

    def start(self) -> ForkServer:
        """Start what becomes the workers.

        Each has a session of its own, so that what it starts can be ended with it. To be called by
        the main thread: the kernel ends workers with the thread that is their parent.
        """
        told, told_end = os.pipe()
        begin_end, begin = os.pipe()
        passed = [told_end, begin_end]
        if self.store is not None:
            passed.append(self.store.fileno())
        logs = {
            rank: os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for rank, log in self.logs.items()
        }
        try:
            process = Popen(
                [sys.executable, "-u", "-m", fork_server.__name__, self.module, self.argument],
                env={**self.env, **self._variables()},
                stdin=PIPE,
                stdout=logs[min(logs)],
                stderr=STDOUT,
                start_new_session=True,
                pass_fds=passed,
            )
        finally:
            for descriptor in (told_end, begin_end, *logs.values()):
                os.close(descriptor)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as request:
            request.write(json.dumps(self._request(told_end, begin_end)).encode())
        return ForkServer(process, told, begin, sorted(self.logs))

    def _request(self, told: int, begin: int) -> ForkRequest:
        is_bound_by_user = not self.env.keys().isdisjoint(USER_BINDING)
        slots = [
            RankSlot(
                rank=rank,
                env=self._own_variables(rank),
                log=str(self.logs[rank]),
                cpus=None if is_bound_by_user else self.cpus.get(rank),
                has_store=rank == 0,
            )
            for rank in sorted(self.logs)
        ]
        store = None if self.store is None else self.store.fileno()
        return ForkRequest(agent=os.getpid(), told=told, begin=begin, store=store, seats=slots)

    def _variables(self) -> dict[str, str]:
        """Return what torchrun sets for every rank of this host."""
        # A job's own ranks meet in the file that ZRUN_STORE names: this is for code that calls
        # `init_process_group("gloo")` by itself.
        address, port = self.meeting or ("127.0.0.1", free_port())
        return {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.host[0]),
            "GROUP_WORLD_SIZE": str(self.host[1]),
            "NODE_RANK": str(self.host[0]),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }

    def _own_variables(self, rank: int) -> dict[str, str]:
        """Return what it sets for this rank only."""
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks.start),
            "ROLE_RANK": str(rank),
        }
        if rank in self.alone:
            own |= environment_of([self.alone[rank]])
        if self.store is not None and rank == 0:
            own["ZRUN_STORE_FD"] = str(self.store.fileno())
        return own
