"""Processes that another launcher started, one for each rank or host, become one run.

    rendezvous = Rendezvous.of(cluster_env, os.environ)
    if rendezvous.member.index > 0:
        become_agent(connect_to_leader(rendezvous, key, patience_s))     # never returns
    agents = [LocalAgent(), *JoinServer(rendezvous, key).gather(patience_s)]

The first process leads, and the others connect to it. Each becomes the agent of its rank or host
and the connection its lifeline, as if it had been reached by ssh. An agent executes what its leader
sends, so both prove first that they know the key:

    leader                                          joining process
    {"nonce": a}                           ->
                                           <-       {"nonce": b, "process": ..., "proof": ...}
    {"proof": ...} or {"refused": "why"}   ->

Whoever has the resolved job has the key, unless ZRUN_TOKEN makes it a secret. Processes of one host
meet at an abstract Unix socket and look at each other's user, so they need no secret; those of
several meet at MASTER_ADDR:MASTER_PORT. Nothing listens any more once all are there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, Self

from zrun.hosts.cluster_env import ClusterEnv, Member
from zrun.hosts.probe import route_to
from zrun.system.processes import allow_files
from zrun.transport.agent_process import PATIENCE_S, AgentLink, close_all
from zrun.transport.frames import BEAT_S, SILENCE_S, pack
from zrun_core.errors import ExitCode, JobError, PreflightError, RendezvousError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.printable import printable

_PORT = 29500  # torchrun's, where no other is named
_RETRY_S = 0.2
_HANDSHAKE_S = 5.0
_CONNECT_S = 3.0
_LENGTH = struct.Struct(">I")
_LARGEST = 4096  # bytes of a message of the handshake
_NUM_NAMED = 8  # missing ranks in a message
# Variables that differ between starts and are the same for all processes of one.
_MARKS = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
    "PET_MASTER_PORT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SKYPILOT_TASK_ID",
)


@dataclass(frozen=True)
class Rendezvous:
    """The meeting of the processes of a start, as one of them sees it.

    Attributes:
        member: this process. It has an address and a port, unless all are on this host.
        mark: the same for all processes of a start, and another for every other one.
    """

    member: Member
    mark: str

    @classmethod
    def of(cls, cluster_env: ClusterEnv, environ: Mapping[str, str]) -> Self:
        """Return where this process, one of several, meets the others.

        Raises:
            JobError: the environment does not say enough.
        """
        member = cluster_env.member
        assert member is not None
        marks = [f"{name}={environ[name]}" for name in _MARKS if environ.get(name)]
        mark = hashlib.sha256("\n".join([str(member.count), *marks]).encode()).hexdigest()
        if member.is_rank and member.slots == member.count:  # all are on this host
            if not marks:
                raise JobError(
                    f"{cluster_env.evidence}: nothing tells these processes from those of another "
                    "start on this host: pass MASTER_PORT to all of them, such as by mpirun -x "
                    "MASTER_PORT=29500 or mpiexec -genv MASTER_PORT 29500"
                )
            return cls(replace(member, address=None), mark)
        if member.address is None:
            raise JobError(
                f"{cluster_env.evidence}: MASTER_ADDR does not name the host of rank 0: pass it to "
                "all processes, such as by mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            )
        port = member.port or _default_port(environ)
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1  # torchrun's own store has that one
        return cls(replace(member, port=port), mark)

    @property
    def noun(self) -> str:
        return "rank" if self.member.is_rank else "host"

    @property
    def abstract_name(self) -> str:
        """Return the name of a socket in no file system, which is gone with its process."""
        return f"\0zrun-{os.geteuid()}-{self.mark[:32]}"


def _default_port(environ: Mapping[str, str]) -> int:
    """Give each job of Slurm, and each step of one, a port of its own: they may share a host."""
    job = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", "")
    if not job.isdecimal():
        return _PORT
    number = 8 * int(job)
    if step.isdecimal():
        number += int(step)
    return 20000 + number % 9000


@dataclass(frozen=True)
class JoiningProcess:
    """A process that is to become an agent, as it introduces itself."""

    index: int
    local_index: int
    host: str
    pid: int


def job_key(
    job: JobConfig, worker: str, rendezvous: Rendezvous, environ: Mapping[str, str]
) -> bytes:
    """Return what only processes know that were started for the same job.

    Args:
        job: as it was resolved, with overrides.
        worker: the module that runs a rank.
        environ: with a ZRUN_TOKEN, the key is a secret.
    """
    known = [
        job.model_dump_json(by_alias=True),
        worker,
        rendezvous.mark,
        environ.get("ZRUN_TOKEN", ""),
    ]
    return hashlib.sha256("\0".join(known).encode(errors="surrogateescape")).digest()


class JoinedAgent(AgentLink):
    """An agent that came by itself, through a socket."""

    def __init__(self, name: str, process: JoiningProcess, connection: socket.socket) -> None:
        self.process = process
        self._connection = connection
        down = os.fdopen(os.dup(connection.fileno()), "wb", buffering=0)
        up = os.fdopen(os.dup(connection.fileno()), "rb", buffering=0)
        super().__init__(name, down, up)
        if connection.family != socket.AF_UNIX:
            self.known_address = str(connection.getpeername()[0])

    @property
    def pid(self) -> int:
        return self.process.pid

    def end_reason(self) -> str:
        if self._broken is not None and not isinstance(self._broken, ConnectionError):
            return (
                f"{self.host}: it no longer answers ({self._broken.strerror}): it is down, or the "
                "network is cut"
            )
        return f"{self.host}: its process {self.pid} on {self.process.host} ended, or was killed"

    def send_exit_code(self, code: int) -> None:
        """Say how the run ended: its process ends with the same exit code."""
        self.send(pack({"exit": code}))

    def disconnect(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        with self._sending:
            sender = self._sender
        if sender is not None:
            sender.join(patience_s)
        self.disconnect()
        with suppress(OSError, ValueError):
            while time.monotonic() < deadline:
                if self.frames(deadline - time.monotonic()) is None:
                    break
        for each in (self._input, self._output, self._connection):
            with suppress(OSError):
                each.close()


class JoinServer:
    """The first process of a start, as it waits for the others.

    Attributes:
        address: at which it listens; None: at an abstract socket.
    """

    def __init__(self, rendezvous: Rendezvous, key: bytes) -> None:
        """Listen, at one address and never at all of them.

        Raises:
            PreflightError: the address or the port cannot be used.
        """
        self._rendezvous = rendezvous
        self._key = key
        self._num_strangers = 0
        self.address: str | None = None
        if rendezvous.member.address is not None:
            self.address = _own_address(rendezvous.member.address)
        self._server = _listen(rendezvous, self.address)

    def gather(self, patience_s: float) -> list[JoinedAgent]:
        """Return the agents of all other processes, in order, and listen no longer.

        Raises:
            RendezvousError: some have not come, or have ended again.
        """
        allow_files()  # 3 for each process
        count = self._rendezvous.member.count
        deadline = time.monotonic() + patience_s
        joined: dict[int, JoinedAgent] = {}
        with selectors.DefaultSelector() as selector, self._server as server:
            selector.register(server, selectors.EVENT_READ)
            try:
                while len(joined) < count - 1:
                    for key, _ in selector.select(_RETRY_S):
                        if key.data is None:
                            new = self._admit(server.accept()[0], joined)
                            if new is not None:
                                joined[new.process.index] = new
                                selector.register(new, selectors.EVENT_READ, new)
                        elif key.data.read() is None:
                            reason = key.data.end_reason()
                            raise RendezvousError(f"{reason} while the others were awaited")
                    if time.monotonic() > deadline and len(joined) < count - 1:
                        missing = [each for each in range(1, count) if each not in joined]
                        raise RendezvousError(self._describe_missing(missing, patience_s))
            except BaseException as error:
                code = int(getattr(error, "exit_code", ExitCode.INTERRUPTED))
                for agent in joined.values():
                    agent.send_exit_code(code)
                close_all(joined.values(), _HANDSHAKE_S)
                raise
        return [joined[index] for index in sorted(joined)]

    def _admit(
        self, connection: socket.socket, joined: Mapping[int, JoinedAgent]
    ) -> JoinedAgent | None:
        """Find out who connected; None where it does not run this job, or says nothing in time."""
        try:
            connection.settimeout(_HANDSHAKE_S)
            _check_user(connection)
            nonce = secrets.token_hex(16)
            _send(connection, {"nonce": nonce})
            told = _receive(connection)
            process = JoiningProcess(**told["process"])
            refused = None
            expected = _proof(self._key, "process", nonce, told["nonce"], process)
            if not hmac.compare_digest(expected, told["proof"]):
                self._num_strangers += 1
                refused = "it runs another job, or the same with other overrides or another zrun"
            elif process.index in joined:
                refused = (
                    f"{self._rendezvous.noun} {process.index} has joined already, as process "
                    f"{joined[process.index].pid}"
                )
            if refused is not None:
                _send(connection, {"refused": refused})
                raise PermissionError(refused)
            proof = _proof(self._key, "leader", nonce, told["nonce"], process)
            _send(connection, {"proof": proof})
            _keep_alive(connection)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return None
        name = process.host
        if self._rendezvous.member.is_rank:
            name = f"rank {process.index} ({process.host})"
        return JoinedAgent(name, process, connection)

    def _describe_missing(self, missing: Sequence[int], patience_s: float) -> str:
        names = ", ".join(map(str, missing[:_NUM_NAMED]))
        if len(missing) > _NUM_NAMED:
            names += f" and {len(missing) - _NUM_NAMED} more"
        where = ""
        if self.address is not None:
            where = f" at {self.address}:{self._rendezvous.member.port}"
        strangers = ""
        if self._num_strangers:
            strangers = f"; {self._num_strangers} that came do not run this job"
        plural = "s" if len(missing) > 1 else ""
        return (
            f"{self._rendezvous.noun}{plural} {names} of {self._rendezvous.member.count} did not "
            f"reach rank 0{where} within {patience_s:g} s (limits.start_s){strangers}: were all "
            "processes started, with the same job?"
        )


def connect_to_leader(rendezvous: Rendezvous, key: bytes, patience_s: float) -> socket.socket:
    """Return the connection of this process to the first one, over which it was taken in.

    Args:
        key: see `job_key`.
        patience_s: seconds for the first process to be there.

    Raises:
        PreflightError: the first process does not take this one.
        RendezvousError: it is not there.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection = _connect(rendezvous)
            try:
                connection.settimeout(max(_HANDSHAKE_S, deadline - time.monotonic()))
                _introduce(connection, rendezvous, key)
            except BaseException:
                connection.close()
                raise
            connection.settimeout(None)
            return connection
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() > deadline:
            where = ""
            if rendezvous.member.address is not None:
                where = f" at {rendezvous.member.address}, port {rendezvous.member.port}"
            raise RendezvousError(
                f"the process of rank 0 is not there{where} after {patience_s:g} s: {reason}"
            )
        time.sleep(_RETRY_S)


def _connect(rendezvous: Rendezvous) -> socket.socket:
    address = rendezvous.member.address
    if address is not None:
        return socket.create_connection((address, rendezvous.member.port), _CONNECT_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(rendezvous.abstract_name)
        _check_user(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _introduce(connection: socket.socket, rendezvous: Rendezvous, key: bytes) -> None:
    host = socket.gethostname()
    member = rendezvous.member
    process = JoiningProcess(member.index, member.local_index, host, os.getpid())
    theirs = _receive(connection)["nonce"]
    nonce = secrets.token_hex(16)
    proof = _proof(key, "process", theirs, nonce, process)
    _send(connection, {"nonce": nonce, "process": asdict(process), "proof": proof})
    answer = _receive(connection)
    if "refused" in answer:
        reason = printable(str(answer["refused"]))
        raise PreflightError(
            f"rank 0 does not take {rendezvous.noun} {process.index} on {host}: {reason}"
        )
    if not hmac.compare_digest(_proof(key, "leader", theirs, nonce, process), answer["proof"]):
        raise PermissionError("another program listens there")
    _keep_alive(connection)


def become_agent(connection: socket.socket) -> NoReturn:
    """Go on as the agent at the end of this connection."""
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "zrun.agent.main", "joined"])


def _listen(rendezvous: Rendezvous, address: str | None) -> socket.socket:
    if address is None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(rendezvous.abstract_name)
        except OSError as error:
            server.close()
            raise PreflightError(
                f"another process leads these ranks already ({error.strerror}): is it left over "
                "from an earlier start?"
            ) from None
        server.listen(rendezvous.member.count)
        return server
    port = rendezvous.member.port
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=4096)
    except OSError as error:
        raise PreflightError(
            f"{address}: port {port} cannot be used ({error.strerror}): set another MASTER_PORT"
        ) from None


def _own_address(first: str) -> str:
    """Return the address of this host, the `first` one, at which others reach it.

    Raises:
        PreflightError: it has none.
    """
    # What it calls itself may be a loopback address, as in the first pod of a PyTorchJob. The other
    # addresses are for documentation; nothing is sent to them.
    for name in (first, "192.0.2.1", "2001:db8::1"):
        address = route_to(name)
        if address is not None and not address.startswith("127.") and address != "::1":
            return address
    raise PreflightError(
        f"MASTER_ADDR={first} is no address of this host, the first one, and no interface leads to "
        "others: set it to one"
    )


def _check_user(connection: socket.socket) -> None:
    """Refuse another user at the other end of a Unix socket.

    Anyone may bind an abstract name first, and the key is no secret without ZRUN_TOKEN.
    """
    if connection.family != socket.AF_UNIX:
        return
    ids = struct.Struct("3i")  # of the process, the user and the group
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ids.size)
    if ids.unpack(data)[1] != os.geteuid():
        raise PermissionError("a process of another user has taken its place")


def _proof(key: bytes, who: str, leader_nonce: str, nonce: str, process: JoiningProcess) -> str:
    text = json.dumps([who, leader_nonce, nonce, asdict(process)])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _keep_alive(connection: socket.socket) -> None:
    """Notice that the other host is gone, about when it notices that by `SILENCE_S`."""
    if connection.family == socket.AF_UNIX:
        return
    timeout_ms = int((SILENCE_S - BEAT_S) * 1000)  # of what was sent and not acknowledged
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(pack(message))


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Read one frame and not a byte more: what follows is the agent's.

    Raises:
        ValueError: something else is said there.
        OSError: nothing is said in time.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _LARGEST:
        raise ValueError("no zrun is at the other end")
    message = json.loads(_read(connection, length))
    if not isinstance(message, dict):
        raise ValueError("no zrun is at the other end")
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data
