"""The agent of another machine, reached with the system's `ssh`.

The user's own config, keys, jumps and agents apply, and the policy on host keys stays the user's.
The remote command is a constant. All that is particular to a run goes down stdin as JSON, where no
shell looks at it, and stdin is the lifeline: its end, also that of a killed ssh client, is the end
of the remote workers.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from zrun.hosts.hostfile import HostEntry
from zrun.transport.agent_process import AgentProcess
from zrun_core.errors import JobError, PreflightError
from zrun_core.spine.printable import printable

CONNECT_S = 10.0

_OPTIONS = {
    "BatchMode": "yes",  # never ask: nobody could answer on many hosts at once
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "4",  # a cut connection is noticed within 15 s
    # Tunnels of the user's config belong to the first session that opens them.
    "ClearAllForwardings": "yes",
    # A master that is there is used, but other sessions must not depend on this one.
    "ControlMaster": "no",
    "LogLevel": "INFO",  # without its messages nobody could say what is wrong
}
_KEPT_STDERR = 1 << 14  # bytes
_PLAIN_PATH = re.compile(r"[\w./~+@%:,][\w./~+@%:,-]*", re.ASCII)

# What ssh says, and what it means: (pattern, meaning). The first match counts.
_CAUSES = [
    (
        r"could not resolve hostname",
        "no such host is known here: correct the name, or add it to /etc/hosts or ~/.ssh/config",
    ),
    (
        r"remote host identification has changed",
        "its host key is not the one known here, so this may be another machine: if the host was "
        "set up anew, run ssh-keygen -R {address} and log in once by hand",
    ),
    (
        r"host key verification failed|no \S+ host key is known",
        "its host key is not known here: log in once by hand with {login}, check the key and "
        "accept it",
    ),
    (
        r"permission denied|too many authentication failures|no supported authentication methods",
        "ssh was refused ({line}): {login} must work without a password, by key (ssh-copy-id), "
        "agent or Kerberos",
    ),
    (
        r"connection refused",
        "the connection was refused: is sshd running there, on this port? ({line})",
    ),
    (
        r"timed out|timeout",
        "sshd has not answered in time: is the host up, and is it sshd that listens? ({line})",
    ),
    (
        r"no route to host|network is unreachable|host is down",
        "it cannot be reached from here ({line})",
    ),
    (
        r"connection (closed|reset) by|kex_exchange_identification|connection to \S+ closed",
        "sshd ended the connection ({line}): look at its log, and at MaxStartups, AllowUsers and "
        "DenyUsers",
    ),
    (
        r"bad configuration option|bad owner or permissions|can't open user config",
        "ssh cannot be used ({line})",
    ),
]


class SshAgent(AgentProcess):
    """An agent at the other end of an ssh connection."""

    by_ssh = True

    def __init__(
        self,
        entry: HostEntry,
        ssh: str = "ssh",
        python: str = sys.executable,
        connect_s: float = CONNECT_S,
    ) -> None:
        """Begin to connect. It is there once it has said hello.

        Args:
            ssh: the client with options of the user's, as a shell would split it: "ssh -F my.cfg".
            python: a Python there that has zrun.
            connect_s: seconds that the connection may take; options in `ssh` come first.

        Raises:
            PreflightError: there is no such client here.
            JobError: the host, the client or the Python is not what it must be.
        """
        self._argv = ssh_argv(entry, ssh, python, connect_s)
        self._entry = entry
        self._python = python
        self._stderr = os.memfd_create("ssh-stderr", os.MFD_CLOEXEC)  # unlike a pipe, never full
        try:
            super().__init__(str(entry), self._argv, self._stderr)
        except OSError as error:
            os.close(self._stderr)
            raise PreflightError(
                f"{self._argv[0]}: {error.strerror}: install the OpenSSH client, or name one in "
                "launch.ssh"
            ) from None

    def end_reason(self) -> str:
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        return explain(status, self.errors(), self.hello is not None, self._entry, self._python)

    def errors(self) -> str:
        """Return the last lines that ssh, or the agent before it had a log, wrote to stderr."""
        size = os.fstat(self._stderr).st_size
        data = os.pread(self._stderr, _KEPT_STDERR, max(0, size - _KEPT_STDERR))
        return data.decode(errors="replace")

    def close(self, patience_s: float = 10.0) -> None:
        super().close(patience_s)
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1


def ssh_argv(entry: HostEntry, ssh: str, python: str, connect_s: float) -> list[str]:
    """Return the command that leads to the agent of a host.

    Nothing in it comes from the job but `launch.ssh`, `launch.python` and the host.

    Args:
        ssh, python, connect_s: as for `SshAgent`.

    Raises:
        JobError: as for `SshAgent`.
    """
    try:
        client = shlex.split(ssh)
    except ValueError as error:
        raise JobError(f"launch.ssh: {ssh!r}: {error}") from None
    if not client:
        raise JobError('launch.ssh: it is empty: write "ssh", with options if need be')
    for what in (entry.name, entry.user):
        if what is not None and (what == "" or what.startswith("-") or not what.isprintable()):
            raise JobError(f"{what!r} is no host or user")
    options = _OPTIONS | {"ConnectTimeout": f"{max(1, connect_s):.0f}"}
    argv = [*client, "-T", "-x", *(f"-o{key}={value}" for key, value in options.items())]
    if entry.user is not None:
        argv += ["-l", entry.user]
    if entry.port is not None:
        argv += ["-p", str(entry.port)]
    return [*argv, "--", entry.name, remote_command(python)]


def remote_command(python: str) -> str:
    """Return what the login shell of the remote user executes.

    It may be any shell, so there is as little of a language as possible.

    Raises:
        JobError: `python` is no path.
    """
    if not python.isprintable() or python.startswith("-") or not python.strip():
        raise JobError(f"launch.python: {python!r} is no path of a Python")
    word = python  # a ~ is for that shell
    if not _PLAIN_PATH.fullmatch(python):
        word = shlex.quote(python)
    # -P: a json.py or types.py in the home directory is not meant for the agent.
    return f"exec {word} -P -m zrun.agent.main"


def explain(
    status: int | None, errors: str, said_hello: bool, entry: HostEntry, python: str
) -> str:
    """Say in one line why a connection to an agent ended.

    Args:
        status: of the ssh client; 255 is its own, or means that a signal ended the agent. None: it
            still runs.
        errors: what the client wrote to stderr.
    """
    lines = [printable(line.strip()) for line in errors.splitlines()]
    lines = [line for line in lines if line]
    if status is not None and status < 0:
        cause = f"the ssh client was killed by signal {-status}"
    elif said_hello:
        cause = _explain_loss(status, lines)
    elif status in (255, None):
        cause = _explain_connection(lines, entry)
    else:
        cause = _explain_start(status or 0, lines, python)
    return f"{entry}: {cause}"


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else "it gave no reason"


def _explain_connection(lines: list[str], entry: HostEntry) -> str:
    """Explain why there was no login."""
    user = f"{entry.user}@" if entry.user else ""
    port = f" -p {entry.port}" if entry.port else ""
    address = entry.name  # as known_hosts has it
    if entry.port not in (None, 22):
        address = f"'[{entry.name}]:{entry.port}'"
    for pattern, meaning in _CAUSES:
        found = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
        if found:
            line = found[-1].removeprefix("ssh: ")
            return meaning.format(line=line, login=f"ssh{port} {user}{entry.name}", address=address)
    return f"ssh failed: {_last(lines)}"


def _explain_start(status: int, lines: list[str], python: str) -> str:
    """Explain why what was to run after the login ended with `status`."""
    text = "\n".join(lines)
    if status in (126, 127):
        return (
            f"there is no Python {python}: install it there, or name one that is on all hosts in "
            "launch.python"
        )
    if re.search(r"No module named '?zrun", text):
        return (
            f"{python} has no zrun: install the same version there, or name another Python in "
            "launch.python"
        )
    if "No module named" in text:
        return (
            f"{python} lacks what zrun needs ({_last(lines)}): install zrun there with its "
            "dependencies"
        )
    if re.search(r"unknown option:? -P|SyntaxError", text, re.IGNORECASE):
        return f"{python} is older than Python 3.11: name a newer one in launch.python"
    return f"the agent did not start (status {status}): {_last(lines)}"


def _explain_loss(status: int | None, lines: list[str]) -> str:
    """Explain why an agent that was there is no longer heard."""
    if any("not responding" in line for line in lines):
        return "the host no longer answers: it is down, or the network is cut"
    broken = [
        line
        for line in lines
        if re.search(r"closed by|reset by|broken pipe|timed out", line, re.IGNORECASE)
    ]
    if broken:
        return f"the connection broke ({broken[-1]})"
    if status == 255:
        return "its agent was killed there, or the connection was cut"
    return f"its agent ended (status {status}): {_last(lines)}"
