"""The command that leads to an agent, and what the end of an ssh connection is called.

No connection is made.
"""

from __future__ import annotations

import signal

import pytest

from zrun.hosts.backend import HostEntry
from zrun.transport.agent_process import AgentProcess
from zrun.transport.agents import AgentGroup
from zrun.transport.frames import StartRequest
from zrun.transport.slurm import SrunAgent
from zrun.transport.ssh import SshAgent, explain, remote_command, ssh_argv
from zrun_core.errors import JobError, PreflightError


def test_the_host_comes_after_the_options_and_the_remote_command_is_a_constant() -> None:
    argv = ssh_argv(
        HostEntry("fe80::1", "me", 2222),
        "ssh -F 'my cfg' -oConnectTimeout=3",
        "/venv/bin/python",
        10,
    )
    assert argv[:4] == [
        "ssh",
        "-F",
        "my cfg",
        "-oConnectTimeout=3",
    ]  # ssh takes the first of two values
    assert argv[-7:] == [
        "-l",
        "me",
        "-p",
        "2222",
        "--",
        "fe80::1",
        "exec /venv/bin/python -P -m zrun.agent.main",
    ]
    assert "-oBatchMode=yes" in argv
    assert not [each for each in argv if "StrictHostKeyChecking" in each]


@pytest.mark.parametrize("name", ["-oProxyCommand=touch${IFS}x", "", "a\nb", "\x1b[2J"])
def test_what_is_no_host_is_refused(name: str) -> None:
    for entry in (HostEntry(name), HostEntry("fine", user=name)):
        with pytest.raises(JobError, match="is no host or user"):
            ssh_argv(entry, "ssh", "python3", 10)


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ("python3.12", "exec python3.12 -P -m zrun.agent.main"),
        ("~/venv/bin/python", "exec ~/venv/bin/python -P -m zrun.agent.main"),
        ("/my envs/a;b$(x)/python", "exec '/my envs/a;b$(x)/python' -P -m zrun.agent.main"),
    ],
)
def test_a_path_of_a_python_stays_one_word(python: str, command: str) -> None:
    assert remote_command(python) == command


@pytest.mark.parametrize("python", ["", " ", "-c", "a\nb"])
def test_what_is_no_python_is_refused(python: str) -> None:
    with pytest.raises(JobError, match=r"launch\.python"):
        remote_command(python)


@pytest.mark.parametrize("ssh", ["", "ssh 'open"])
def test_a_client_that_no_shell_would_take_is_refused(ssh: str) -> None:
    with pytest.raises(JobError, match=r"launch\.ssh"):
        ssh_argv(HostEntry("a"), ssh, "python3", 10)


def test_a_client_that_is_not_there_is_named() -> None:
    with pytest.raises(
        PreflightError, match=r"no-such-ssh: No such file.*install the OpenSSH client"
    ):
        SshAgent(HostEntry("a"), ssh="no-such-ssh")


@pytest.mark.parametrize(
    ("status", "errors", "said_hello", "cause"),
    [
        (
            255,
            "banner\r\nssh: connect to host a port 22: Connection timed out\r\n",
            False,
            "a: sshd has not answered",
        ),
        (
            255,
            "ssh: connect to host a port 22: No route to host",
            False,
            "a: it cannot be reached from here (connect",
        ),
        (
            255,
            "kex_exchange_identification: Connection closed by remote host",
            False,
            "a: sshd ended the connection",
        ),
        (255, "something new", False, "a: ssh failed: something new"),
        (255, "", False, "a: ssh failed: it gave no reason"),
        (
            2,
            "unknown option -P\nusage: python3 [option] ...",
            False,
            "a: py is older than Python 3.11",
        ),
        (
            1,
            "ModuleNotFoundError: No module named 'pydantic'",
            False,
            "a: py lacks what zrun needs (ModuleNot",
        ),
        (
            1,
            "This account is currently not available.",
            False,
            "a: the agent did not start (status 1): This account",
        ),
        (1, "\x1b[31mred", False, "a: the agent did not start (status 1): red"),
        (255, "Timeout, server a not responding.\r\n", True, "a: the host no longer answers"),
        (
            255,
            "Connection to a closed by remote host.",
            True,
            "a: the connection broke (Connection to a closed",
        ),
        (255, "", True, "a: its agent was killed there, or the connection was cut"),
        (1, "MemoryError", True, "a: its agent ended (status 1): MemoryError"),
        (-9, "", True, "a: the ssh client was killed by signal 9"),
    ],
)
def test_an_end_has_one_line(status: int, errors: str, said_hello: bool, cause: str) -> None:
    line = explain(status, errors, said_hello, HostEntry("a"), "py")
    assert line.startswith(cause)
    assert "\n" not in line


def test_the_advice_fits_the_host() -> None:
    changed = explain(
        255,
        "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!",
        False,
        HostEntry("a", port=2222),
        "py",
    )
    assert "ssh-keygen -R '[a]:2222'" in changed
    unknown = explain(255, "Host key verification failed.", False, HostEntry("a", "me", 2222), "py")
    assert "log in once by hand with ssh -p 2222 me@a," in unknown


def test_a_client_that_never_got_through_is_not_waited_for() -> None:
    agent = Waiting("a", ["sleep", "600"])
    agent.close(patience_s=0.2)
    assert agent._process.returncode == -signal.SIGTERM
    there = Waiting("a", ["sh", "-c", 'echo "{\\"frame\\":\\"hello\\"}"; read line; exit 3'])
    assert there.frames(30.0) == []
    there.close()
    assert there._process.returncode == 3, "an agent that is there ends by itself"


class Waiting(AgentProcess):
    def end_reason(self) -> str:
        return self.host


def test_many_hosts_share_what_is_the_same_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []
    pack_spec = StartRequest.pack_spec

    def count(start: StartRequest) -> bytes:
        packed.append(start.host)
        return pack_spec(start)

    monkeypatch.setattr(StartRequest, "pack_spec", count)
    spec = {"plan": {"ranks": [{"rank": rank, "host": "n"} for rank in range(5000)]}}
    members = [Waiting(name, ["cat"]) for name in ("a", "b", "c")]
    AgentGroup(members).start(StartRequest(spec, member.host, {}, "m") for member in members)
    assert packed == ["a"]
    for member in members:
        member.close()


def test_a_host_without_srun_is_told_what_the_job_asks_for():
    with pytest.raises(
        PreflightError,
        match=r"nowhere/srun: No such file or directory: launch.backend: slurm needs",
    ):
        SrunAgent("node1", "python3", srun="/nowhere/srun")
