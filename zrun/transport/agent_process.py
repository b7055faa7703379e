"""An agent as the launcher sees it: orders go down a link, frames come up. It is a lifeline too.

The agent of this machine is a child, that of another one is reached through an ssh client, and one
that another launcher has started comes by itself, through a socket. All are the same here: they
differ in how they are started, and in what an early end means.

    AgentLink
      AgentProcess      a child, or a client that leads to the agent
        LocalAgent        of this machine
        SshAgent          zrun.transport.ssh
        SrunAgent         zrun.transport.slurm
      JoinedAgent       zrun.transport.join

    agents = [SshAgent(host) for host in hosts]
    selector.register(agents[0], EVENT_READ)
    ...
    frames = agents[0].read()       # None: it has ended, and agents[0].end_reason() says why
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Self

from zrun.transport.frame_reader import FrameReader
from zrun.transport.frames import Frame, StartRequest, StopMode, pack
from zrun.transport.nonblocking_writer import NonblockingWriter

_READ_BYTES = 1 << 16  # larger ones would be mapped anew for each read
PATIENCE_S = 10.0  # for an agent that was told to end; it gives its workers half of that


class AgentLink(ABC):
    """An agent that is there before it is told what to run.

    Attributes:
        host: what messages call its host.
        hello: the first thing it said: its pid, Python and zrun; None until then.
        known_address: at which others have reached its host; None: none is known.
    """

    by_ssh = False  # sshd knows at which address its host was reached

    def __init__(self, host: str, down: IO[bytes], up: IO[bytes]) -> None:
        """Talk to it through two unbuffered files.

        Args:
            host: what messages call the agent's host.
            down: what the agent reads.
            up: what the agent writes.
        """
        self.host = host
        self.hello: Frame | None = None
        self.known_address: str | None = None
        self._input = down
        self._output = up
        self._outbox = NonblockingWriter(down.fileno())
        os.set_blocking(up.fileno(), False)
        self._lines = FrameReader()
        self._started = False
        self._broken: OSError | None = None
        self._sending = threading.Condition()
        self._sender: threading.Thread | None = None

    @property
    @abstractmethod
    def pid(self) -> int:
        """Return a process number for messages: of the agent, or of what leads to it."""

    def fileno(self) -> int:
        """Return what becomes readable when the agent has said something, or has ended."""
        return self._output.fileno()

    def start(self, start: StartRequest, spec: bytes | None = None) -> None:
        """Run the workers.

        Args:
            spec: `start.pack_spec()`, where the caller has it already.
        """
        self._started = True
        self.send(start.pack_spec() if spec is None else spec)
        self.send(start.pack_own())

    def stop(self, how: StopMode) -> None:
        """Ask the workers to end."""
        self.send(pack({"stop": how}))

    def read(self) -> list[Frame] | None:
        """Return what the agent has said since the last call; None when it has ended."""
        try:
            data = os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:  # a connection that broke
            self._broken = error
            return None
        if not data:
            return None
        frames = self._lines.feed(data)
        if self.hello is None:
            self.hello = next((frame for frame in frames if frame.get("frame") == "hello"), None)
        # A login shell may print anything, also an object.
        return [frame for frame in frames if frame.get("frame") not in (None, "hello")]

    def frames(self, patience_s: float) -> list[Frame] | None:
        """Return what the agent says within `patience_s` seconds; None when it has ended."""
        if not _wait(self.fileno(), select.POLLIN, patience_s):
            return []
        return self.read()

    def send(self, data: bytes) -> None:
        """Send `data`, without waiting for a host that does not listen.

        An agent that is gone is noticed by `read`.
        """
        with self._sending:
            if self._input.closed:
                return
            self._outbox.put(data)
            if self._sender is None and not self._outbox.send():
                self._sender = threading.Thread(
                    target=self._send_rest, name=f"to {self.host}", daemon=True
                )
                self._sender.start()

    def _send_rest(self) -> None:
        while True:
            with self._sending:
                if self._input.closed or self._outbox.send():
                    self._sender = None
                    return
                # A copy, which stays what it is should the lifeline be cut meanwhile.
                descriptor = os.dup(self._input.fileno())
            try:
                _wait(descriptor, select.POLLOUT, 0.1)
            finally:
                os.close(descriptor)

    @abstractmethod
    def end_reason(self) -> str:
        """Return, in one line, why `read` gave None: what happened, and what to do."""

    def disconnect(self) -> None:
        """Cut the lifeline: the agent ends its workers, cleans up, and ends."""
        with self._sending, suppress(OSError):
            self._input.close()

    def abandon(self) -> None:
        """Disconnect from an agent that does not answer, and wait for nothing."""
        self.disconnect()

    @abstractmethod
    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Disconnect, and wait until it has exited, at most for `patience_s` seconds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the agent and, through it, every worker."""
        self.close()


class AgentProcess(AgentLink):
    """An agent that is a process of this host, or is behind one: stdin leads down, stdout up."""

    def __init__(self, host: str, argv: Sequence[str], stderr: int | None = None) -> None:
        """Start it.

        Args:
            host: what messages call the agent's host.
            argv: what is executed here, without a shell.
            stderr: a descriptor that gets its error output; None leaves it to the terminal.
        """
        # A session of its own: ctrl-C in the terminal reaches the launcher only.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(host, self._process.stdin, self._process.stdout)

    @property
    def pid(self) -> int:
        """Return the number of the process here: the agent, or the client that leads to it."""
        return self._process.pid

    def abandon(self) -> None:
        self.disconnect()
        self._process.terminate()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Disconnect, and wait until it has exited; kill it after `patience_s` seconds."""
        self.disconnect()
        with suppress(OSError):
            self._output.close()
        # A client that still connects would not hear of the end.
        if self.hello is None and not self._started:
            self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LocalAgent(AgentProcess):
    """The agent of this machine, as a child of the launcher.

    It must be created by the main thread: the kernel ends it with the thread that started it.
    """

    def __init__(self) -> None:
        # -P: a json.py or types.py in the working directory is not meant for the agent.
        super().__init__(socket.gethostname(), [sys.executable, "-P", "-m", "zrun.agent.main"])

    def end_reason(self) -> str:
        return (
            "the agent of this host ended unexpectedly; its last output is above, or in "
            "logs/agent-<host>.log of the run directory"
        )

    def close(self, patience_s: float = PATIENCE_S) -> None:
        if not self._started:
            self._process.terminate()  # it may not be ready to hear of the end
        super().close(patience_s)


def close_all(agents: Iterable[AgentLink], patience_s: float = PATIENCE_S) -> None:
    """End all of them together: it takes as long as the slowest."""
    agents = list(agents)
    for agent in agents:
        agent.disconnect()
    deadline = time.monotonic() + patience_s
    for agent in agents:
        agent.close(max(0.0, deadline - time.monotonic()))


def _wait(descriptor: int, event: int, patience_s: float) -> bool:
    """Return whether the event came. `select` would not take descriptors from 1024 on."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(patience_s * 1000))
