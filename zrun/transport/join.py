"""Processes that another launcher has started, one for each rank or host, come together and become one run.

    rendezvous = Rendezvous.of(convention, os.environ)
    if rendezvous.index > 0:
        become_agent(knock(rendezvous, key, patience_s))          # never returns
    agents = [LocalAgent(), *Door.open(rendezvous, key).gather(patience_s)]

The first process leads: it opens a door, and the others prove there that they run the same job. Each becomes the agent
of its rank or host, and the connection its lifeline, as if it had been reached by ssh. Processes of one host meet at a
socket that has no address; those of several at MASTER_ADDR, on MASTER_PORT or the next free one of the seven after it.
The door is closed once all are there.
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
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self

from zrun.hosts.cluster_env import ClusterEnv
from zrun.hosts.probe import route_to
from zrun.system.processes import allow_files
from zrun.transport.agent_process import PATIENCE_S, AgentLink, close_all
from zrun.transport.frames import BEAT_S, SILENCE_S, pack
from zrun_core.errors import ExitCode, JobError, PreflightError, RendezvousError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.printable import printable

_PORT = 29500  # torchrun's, where nobody names one
_NUM_PORTS = 8
_TURN_S = 0.2
_HANDSHAKE_S = 5.0
_CONNECT_S = 3.0
_LONGEST = 4096  # bytes of a line of the handshake
_SHOWN = 8
# What tells one start from another; all processes of a start have the same.
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
    """Where the processes of a start meet, and which of them this one is.

    Attributes:
        index, count: of ranks, or of hosts.
        is_rank: it is to be one rank; else it runs those of its host.
        local_index: of a rank on its host.
        address: of the first process; None: all are on this host.
        ports: there, the first free one of which is the door.
        mark: the same for all processes of a start, and another for every other one.
    """

    index: int
    count: int
    is_rank: bool
    local_index: int
    address: str | None
    ports: range
    mark: str

    @classmethod
    def of(cls, cluster_env: ClusterEnv, environ: Mapping[str, str]) -> Self:
        """What the environment of this process says.

        Raises:
            JobError: not enough.
        """
        seat, host = cluster_env.seat, cluster_env.host_seat
        assert seat is not None or host is not None
        index, count = (
            (seat.rank, seat.world)
            if seat is not None
            else (host.index, host.count)
            if host
            else (0, 1)
        )
        alone = seat is not None and seat.local_world == seat.world
        address = (
            None if alone else seat.address if seat is not None else host.address if host else None
        )
        if not alone and address is None:
            raise JobError(
                f"{cluster_env.evidence}: MASTER_ADDR does not name the host of rank 0: pass it to all processes, "
                "such as by mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            )
        marks = [f"{name}={environ[name]}" for name in _MARKS if environ.get(name)]
        if alone and not marks:
            raise JobError(
                f"{cluster_env.evidence}: nothing tells these processes from those of another start on this host: pass "
                "MASTER_PORT to all of them, such as by mpirun -x MASTER_PORT=29500 or mpiexec -genv MASTER_PORT 29500"
            )
        port = (seat.port if seat is not None else host.port if host else None) or _default_port(
            environ
        )
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1  # torchrun's own store has the first
        mark = hashlib.sha256("\n".join([str(count), *marks]).encode()).hexdigest()
        local = seat.local_rank if seat is not None else 0
        return cls(
            index,
            count,
            seat is not None,
            local,
            address,
            range(port, min(port + _NUM_PORTS, 1 << 16)),
            mark,
        )

    @property
    def noun(self) -> str:
        return "rank" if self.is_rank else "host"


@dataclass(frozen=True)
class JoiningProcess:
    """A process that is to become an agent, as it introduces itself."""

    index: int
    count: int
    local_index: int
    host: str
    pid: int


def job_key(
    job: JobConfig, worker: str, rendezvous: Rendezvous, environ: Mapping[str, str]
) -> bytes:
    """What only processes know that were started for the same job; with ZRUN_TOKEN it is a secret.

    Args:
        worker: the module that runs a rank.
    """
    known = [
        job.model_dump_json(by_alias=True),
        worker,
        rendezvous.mark,
        environ.get("ZRUN_TOKEN", ""),
    ]
    return hashlib.sha256("\0".join(known).encode(errors="surrogateescape")).digest()


def _default_port(environ: Mapping[str, str]) -> int:
    """Jobs of Slurm may share a host: each gets eight ports of its own, as far as that goes."""
    number = environ.get("SLURM_JOB_ID", "")
    return 20000 + int(number) * _NUM_PORTS % 9000 if number.isdigit() else _PORT


class JoinedAgent(AgentLink):
    """An agent that came by itself, through a socket."""

    def __init__(self, name: str, caller: JoiningProcess, connection: socket.socket) -> None:
        self._connection, self._caller = connection, caller
        down, up = (
            os.fdopen(os.dup(connection.fileno()), mode, buffering=0) for mode in ("wb", "rb")
        )
        super().__init__(name, down, up)
        if connection.family != socket.AF_UNIX:
            self.known_address = str(connection.getpeername()[0])

    @property
    def pid(self) -> int:
        return self._caller.pid

    @property
    def caller(self) -> JoiningProcess:
        return self._caller

    def end_reason(self) -> str:
        if self._broken is not None and not isinstance(self._broken, ConnectionError):
            return f"{self.host}: it no longer answers ({self._broken.strerror}): it is down, or the network is cut"
        return f"{self.host}: its process {self._caller.pid} on {self._caller.host} ended, or was killed"

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
            while (
                self.frames(max(0.0, deadline - time.monotonic())) is not None
                and time.monotonic() < deadline
            ):
                pass
        for each in (self._input, self._output, self._connection):
            with suppress(OSError):
                each.close()


class JoinServer:
    """Where the first process waits for the others.

    Attributes:
        address: at which it listens; None: at a socket without.
    """

    def __init__(self, server: socket.socket, rendezvous: Rendezvous, key: bytes) -> None:
        self._server, self._rendezvous, self._key = server, rendezvous, key
        self.address = None if server.family == socket.AF_UNIX else str(server.getsockname()[0])
        self._lock = threading.Lock()
        self._came: dict[int, JoinedAgent] = {}
        self._num_strangers = 0

    @classmethod
    def open(cls, rendezvous: Rendezvous, key: bytes) -> Self:
        """Listen, at one address and never at all of them.

        Raises:
            PreflightError: that cannot be.
        """
        if rendezvous.address is None:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.bind(_hidden(rendezvous))
            except OSError as error:
                server.close()
                raise PreflightError(
                    f"another process leads these ranks already ({error.strerror}): is it left of an earlier start?"
                ) from None
            server.listen(rendezvous.count)
            return cls(server, rendezvous, key)
        address = _own_address(rendezvous.address)
        reason = "no port"
        for port in rendezvous.ports:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                server = socket.create_server((address, port), family=family, backlog=4096)
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            return cls(server, rendezvous, key)
        first, last = rendezvous.ports[0], rendezvous.ports[-1]
        raise PreflightError(
            f"{address}: ports {first} to {last} cannot be used ({reason}): set another MASTER_PORT"
        )

    def gather(self, patience_s: float) -> list[JoinedAgent]:
        """The agents of all other processes, in order, once they are there. Then nothing listens any more.

        Raises:
            RendezvousError: some have not come, or have ended again.
        """
        allow_files()  # 3 for each process
        late = time.monotonic() + patience_s
        known: set[int] = set()
        with selectors.DefaultSelector() as selector, self._server as server:
            selector.register(server, selectors.EVENT_READ)
            try:
                while len(known) < self._rendezvous.count - 1:
                    for key, _ in selector.select(_TURN_S):
                        if key.data is None:
                            visitor, _ = server.accept()
                            threading.Thread(
                                target=self._receive, args=(visitor,), name="visitor", daemon=True
                            ).start()
                        elif key.data.read() is None:
                            raise RendezvousError(
                                f"{key.data.end_reason()} while the others were awaited"
                            )
                    with self._lock:
                        new = {
                            index: agent
                            for index, agent in self._came.items()
                            if index not in known
                        }
                    for agent in new.values():
                        selector.register(agent, selectors.EVENT_READ, agent)
                    known |= new.keys()
                    if time.monotonic() > late:
                        raise RendezvousError(self._missing(known, patience_s))
            except BaseException as error:
                came = list(self._came.values())
                for agent in came:
                    agent.send_exit_code(int(getattr(error, "exit_code", ExitCode.INTERRUPTED)))
                close_all(came, _HANDSHAKE_S)
                raise
        return [self._came[index] for index in sorted(self._came)]

    def _missing(self, known: set[int], patience_s: float) -> str:
        noun = self._rendezvous.noun
        missing = [str(index) for index in range(1, self._rendezvous.count) if index not in known]
        more = len(missing) - _SHOWN
        names = ", ".join(missing[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        where = (
            f" at {self.address}:{self._server.getsockname()[1]}"
            if self.address is not None
            else ""
        )
        strangers = (
            f"; {self._num_strangers} that came do not run this job" if self._num_strangers else ""
        )
        plural = "s" if len(missing) > 1 else ""
        return (
            f"{noun}{plural} {names} of {self._rendezvous.count} did not come to rank 0{where} within {patience_s:g} s "
            f"(limits.start_s){strangers}: were all processes started, with the same job?"
        )

    def _receive(self, visitor: socket.socket) -> None:
        """Find out who it is; whoever does not say so in time, or not truly, goes."""
        try:
            visitor.settimeout(_HANDSHAKE_S)
            if visitor.family == socket.AF_UNIX and _owner(visitor) != os.geteuid():
                visitor.close()
                return
            nonce = secrets.token_hex(16)
            _say(visitor, {"mark": _shown(self._rendezvous), "nonce": nonce})
            told = _hear(visitor)
            caller = JoiningProcess(**told["caller"])
            if not hmac.compare_digest(
                _proof(self._key, "caller", nonce, told["nonce"], caller), told["proof"]
            ):
                self._num_strangers += 1
                _say(
                    visitor,
                    {
                        "refused": "it runs another job, or the same with other overrides or another zrun"
                    },
                )
                visitor.close()
                return
            refused = self._admit(visitor, caller)
            proof = _proof(self._key, "door", nonce, told["nonce"], caller)
            _say(
                visitor,
                {"proof": proof} if refused is None else {"proof": proof, "refused": refused},
            )
            if refused is not None:
                visitor.close()
        except (OSError, ValueError, KeyError, TypeError):
            visitor.close()

    def _admit(self, visitor: socket.socket, caller: JoiningProcess) -> str | None:
        """Take in a process that has proven that it runs this job; or why not."""
        wanted, noun = self._rendezvous, self._rendezvous.noun
        if caller.count != wanted.count or not 0 < caller.index < wanted.count:
            return (
                f"it is {noun} {caller.index} of {caller.count}, and rank 0 one of {wanted.count}"
            )
        with self._lock:
            if caller.index in self._came:
                return f"{noun} {caller.index} is there already, as process {self._came[caller.index].pid}"
            _keep_alive(visitor)
            name = f"rank {caller.index} ({caller.host})" if wanted.is_rank else caller.host
            self._came[caller.index] = JoinedAgent(name, caller, visitor)
        return None


def connect_to_leader(rendezvous: Rendezvous, key: bytes, patience_s: float) -> socket.socket:
    """The connection of this process to the first one.

    Raises:
        PreflightError: it does not take this process.
        RendezvousError: it is not there.
    """
    caller = JoiningProcess(
        rendezvous.index,
        rendezvous.count,
        rendezvous.local_index,
        socket.gethostname(),
        os.getpid(),
    )
    late = time.monotonic() + patience_s
    reason = ""
    while True:
        for connection in _connections(rendezvous):
            if isinstance(connection, str):
                reason = connection
                continue
            try:
                if _introduce(connection, caller, rendezvous, key):
                    return connection
                reason = "somebody else listens there"
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = str(error) or type(error).__name__
            except BaseException:
                connection.close()
                raise
            connection.close()
        if time.monotonic() > late:
            where = (
                ""
                if rendezvous.address is None
                else f" at {rendezvous.address}, port {rendezvous.ports[0]} and on"
            )
            raise RendezvousError(
                f"the process of rank 0 is not there{where} after {patience_s:g} s: {reason}"
            )
        time.sleep(_TURN_S)


def _connections(rendezvous: Rendezvous) -> Iterator[socket.socket | str]:
    """A connection to each place where the door may be, or why there is none."""
    if rendezvous.address is None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(_hidden(rendezvous))
        except OSError as error:
            connection.close()
            yield error.strerror or str(error)
            return
        if _owner(connection) == os.geteuid():
            yield connection
        else:
            connection.close()
            yield "a process of another user has taken its place"
        return
    for port in rendezvous.ports:
        try:
            yield socket.create_connection((rendezvous.address, port), _CONNECT_S)
        except socket.gaierror as error:
            yield f"{rendezvous.address}: {error.strerror}"
            return
        except OSError as error:
            yield error.strerror or str(error)


def _introduce(
    connection: socket.socket, caller: JoiningProcess, rendezvous: Rendezvous, key: bytes
) -> bool:
    """Whether this is the door of this start, which has taken the process in.

    Raises:
        PreflightError: it is, and has not.
    """
    connection.settimeout(_HANDSHAKE_S)
    told = _hear(connection)
    if told["mark"] != _shown(rendezvous):
        return False
    nonce = secrets.token_hex(16)
    proof = _proof(key, "caller", told["nonce"], nonce, caller)
    _say(connection, {"nonce": nonce, "caller": asdict(caller), "proof": proof})
    answer = _hear(connection)
    if "refused" in answer:
        reason = printable(str(answer["refused"]))
        raise PreflightError(
            f"rank 0 does not take {rendezvous.noun} {caller.index} on {caller.host}: {reason}"
        )
    if not hmac.compare_digest(_proof(key, "door", told["nonce"], nonce, caller), answer["proof"]):
        return False
    connection.settimeout(None)
    _keep_alive(connection)
    return True


def become_agent(connection: socket.socket) -> NoReturn:
    """Go on as the agent at the end of this connection."""
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "zrun.agent.main", "joined"])


def _own_address(name: str) -> str:
    """The address of this host by which `name` calls it; else that from which it reaches others.

    Raises:
        PreflightError: it has none.
    """
    with suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            address = str(where[0])
            if (
                address.startswith("127.") or address == "::1"
            ):  # as the first pod of a PyTorchJob sees itself
                continue
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
                return address
    for elsewhere in ("192.0.2.1", "2001:db8::1"):  # for documentation: nobody's; nothing is sent
        if (found := route_to(elsewhere)) is not None:
            return found
    raise PreflightError(
        f"MASTER_ADDR={name} is no address of this host, the first one, and no interface leads to others: set it to one"
    )


def _hidden(rendezvous: Rendezvous) -> str:
    """The name of a socket in no file system: it is gone with its process."""
    return f"\0zrun-{os.geteuid()}-{rendezvous.mark[:32]}"


def _shown(rendezvous: Rendezvous) -> str:
    """Tells a door from that of another start, and nothing else."""
    return hashlib.sha256(f"door {rendezvous.mark}".encode()).hexdigest()[:16]


def _owner(connection: socket.socket) -> int:
    """The user at the other end of a socket of this host."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", data)[1])


def _proof(key: bytes, who: str, door_nonce: str, caller_nonce: str, caller: JoiningProcess) -> str:
    text = json.dumps([who, door_nonce, caller_nonce, asdict(caller)])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _keep_alive(connection: socket.socket) -> None:
    """Notice that the other host is gone, about when it notices that by `SILENCE_S`."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 3),
        (socket.TCP_KEEPINTVL, 3),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((SILENCE_S - BEAT_S) * 1000)
    )


def _say(connection: socket.socket, what: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(what).encode() + b"\n")


def _hear(connection: socket.socket) -> dict[str, Any]:
    """One line. Read byte by byte: what follows is not ours.

    Raises:
        ValueError: it is not a JSON object on a line of its own.
        OSError: it does not come.
    """
    line, late = b"", time.monotonic() + _HANDSHAKE_S
    while not line.endswith(b"\n"):
        if len(line) > _LONGEST or time.monotonic() > late:
            raise ValueError("no zrun is at the other end")
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("it closed the connection")
        line += byte
    told = json.loads(line)
    if not isinstance(told, dict):
        raise ValueError("no zrun is at the other end")
    return told
