"""Agents over a real ssh: what reaches them, how they end, and what each failure is called."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
import venv
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import faults
import pytest
from rig import Rig, silent_listener

from zrun.hosts.backend import HostEntry
from zrun.preflight.host_checks import HostRequirements
from zrun.preflight.inspection import check_hosts
from zrun.transport.agent_process import close_all
from zrun.transport.frames import StartRequest
from zrun.transport.ssh import SshAgent
from zrun_core.errors import PreflightError

HERE = Path(__file__).parent
NUM_VALUES = 10_000


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + faults.PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
    return found


def follow(agent: SshAgent) -> list[dict[str, Any]]:
    """Its frames up to `done`."""
    frames: list[dict[str, Any]] = []
    deadline = time.monotonic() + faults.PATIENCE_S
    while not any(frame["frame"] == "done" for frame in frames):
        assert time.monotonic() < deadline, frames
        new = agent.frames(0.5)
        assert new is not None, agent.end_reason()
        frames += new
    return frames


def start_frame(
    run_dir: Path, host: str, module: str, env: dict[str, str] | None = None, **job: Any
) -> StartRequest:
    """One rank of two is on this host."""
    (run_dir / "logs").mkdir(parents=True, mode=0o700)
    places = [
        {"rank": 0, "host": host, "local_rank": 0, "device": "cpu"},
        {"rank": 1, "host": "another"},
    ]
    spec = {
        "run_dir": str(run_dir),
        "run_id": "r",
        "job": job,
        "plan": {"ranks": places, "threads": 1},
    }
    return StartRequest(spec, host, {"PYTHONPATH": str(HERE), **(env or {})}, module)


def agent_of(rig: Rig, name: str) -> SshAgent:
    return SshAgent(HostEntry(name), rig.ssh)


def test_an_agent_of_each_host_answers_runs_and_ends(rig: Rig, tmp_path: Path) -> None:
    agents = [agent_of(rig, name) for name in rig.hosts]
    check_hosts(agents, HostRequirements())
    assert all(agent.hello is not None and agent.hello["pid"] > 0 for agent in agents)
    for agent in agents:
        agent.start(
            start_frame(tmp_path / agent.host, agent.host, "echo_worker", values=[], names=[])
        )
    for agent in agents:
        exits = [frame for frame in follow(agent) if frame["frame"] == "exit"]
        assert [(frame["rank"], frame["status"]) for frame in exits] == [(0, 0)]
        assert json.loads((tmp_path / agent.host / "heard.json").read_text())["host"] == (
            agent.host if rig.isolated else os.uname().nodename
        )
    close_all(agents)


@pytest.mark.parametrize("how", ["let go", "client killed", "agent killed", "reaper killed"])
def test_the_end_of_the_connection_is_the_end_of_all(rig: Rig, tmp_path: Path, how: str) -> None:
    node, agent = rig.hosts["node2"], agent_of(rig, "node2")
    agent.start(start_frame(tmp_path / "run", "node2", "endless"))
    wait_for(lambda: sum("endless" in line for line in node.commands().values()) == 3)
    if how == "let go":
        agent.close()
    else:
        while agent.hello is None:
            agent.frames(0.1)
        pid = agent.hello["pid"]
        reaper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(
            {"client killed": agent.pid, "agent killed": pid, "reaper killed": reaper}[how],
            signal.SIGKILL,
        )
        while agent.frames(0.5) is not None:
            pass
        cause = (
            "the ssh client was killed by signal 9"
            if how == "client killed"
            else "its agent was killed"
        )
        assert agent.end_reason().startswith(f"node2: {cause}")
    wait_for(lambda: not node.commands())
    agent.close()


def test_a_secret_is_in_no_command_line_and_in_no_file(rig: Rig, tmp_path: Path) -> None:
    canary = f"canary-{os.urandom(8).hex()}".encode()
    with agent_of(rig, "node3") as agent:
        agent.start(
            start_frame(tmp_path / "run", "node3", "endless", {"HF_TOKEN": canary.decode()})
        )
        pids = wait_for(
            lambda: [
                pid for pid, line in rig.hosts["node3"].commands().items() if "endless" in line
            ]
        )
        assert canary in Path(f"/proc/{pids[0]}/environ").read_bytes()  # it did arrive
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                assert canary not in path.read_bytes()
        files = [
            path
            for folder in (tmp_path, rig.folder)
            for path in folder.rglob("*")
            if path.is_file()
        ]
        assert files
        assert [path for path in files if canary in path.read_bytes()] == []


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has no packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


FAILURES = {
    "nowhere": "no such host is known here: correct the name",
    "refusing": r"the connection was refused: .*\(connect to host \S+ port 9: Connection refused\)",
    "unseen": "its host key is not known here: log in once by hand with ssh unseen",
    "changed": "its host key is not the one known here, .* ssh-keygen -R changed",
    "stranger": r"ssh was refused \(.*Permission denied \(publickey\).*\): ssh stranger must "
    r"work without a password",
    "node1": "there is no Python /opt/none/bin/python: install it there",
    "node2": "/bin/python has no zrun: install the same version there",
}


def test_each_failure_has_its_own_cause_and_all_are_named_at_once(
    rig: Rig, bare_python: str
) -> None:
    pythons = {"node1": "/opt/none/bin/python", "node2": bare_python}
    agents = [
        SshAgent(HostEntry(name), rig.ssh, pythons.get(name, sys.executable)) for name in FAILURES
    ]
    hasty = rig.ssh.replace("ConnectTimeout=60", "ConnectTimeout=2")
    with silent_listener(rig.address) as port:
        good, silent = agent_of(rig, "node3"), SshAgent(HostEntry(rig.address, port=port), hasty)
        all_ = [*agents, good, silent]
        try:
            with pytest.raises(PreflightError) as caught:
                check_hosts(all_, HostRequirements())
        finally:
            close_all(all_)
    lines = str(caught.value).splitlines()
    assert lines[0] == "8 of 9 hosts cannot be used:"
    assert caught.value.exit_code == 3
    lines = lines[2 + len(all_) :]  # below the table
    assert [line.split(":")[0] for line in lines] == [
        f"  {name}" for name in (*FAILURES, rig.address)
    ]
    for line, cause in zip(lines, FAILURES.values(), strict=False):
        assert re.search(cause, line), line
    assert (
        "sshd has not answered in time: is the host up, and is it sshd that listens?" in lines[-1]
    )


def nasty(random_: random.Random, canary: str) -> str:
    """Text that a shell would make something of."""
    pieces = [
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary} ;",
        f"\n touch {canary}\n",
        f"' ||touch {canary}",
        '"',
        "'",
        "\\",
        "$HOME",
        "${IFS}",
        "%s",
        "-oProxyCommand=x",
        "--",
        "~",
        "*",
        "?",
        "[a]",
        "{1..9}",
        "!!",
        "#",
        " ",
        "\t",
        "\r",
        "\n",
        "\x01",
        "\x1b[31m",
        "\x7f",
        "=",
        "&",
        "|",
        "<",
        ">",
        "ä",
        "漢字",
        "🚀",
        "\u202e",
        "\udcff",  # a byte that is no UTF-8
    ]
    return random_.choice(["", "-"]) + "".join(random_.choices(pieces, k=random_.randrange(6)))


def test_ten_thousand_values_arrive_as_they_were_and_nothing_is_executed(
    rig: Rig, tmp_path: Path
) -> None:
    canary, random_ = tmp_path / "executed", random.Random(4)
    third = NUM_VALUES // 3
    env = {
        f"VALUE_{number}": nasty(random_, str(canary)) for number in range(NUM_VALUES - 2 * third)
    }
    values = [nasty(random_, str(canary)) for _ in range(third)]
    names = [f"{nasty(random_, 'x')}{number}" for number in range(third)]
    run_dir = tmp_path / f"-a 'run' \"of\" $(touch {canary.name})\n`touch {canary.name}` ü"
    agent = agent_of(rig, "node1")
    agent.start(start_frame(run_dir, "node1", "echo_worker", env, values=values, names=names))
    exits = [frame for frame in follow(agent) if frame["frame"] == "exit"]
    assert exits[0]["status"] == 0, (run_dir / "logs" / "rank-0.log").read_text()
    heard = json.loads((run_dir / "heard.json").read_text())
    assert heard["argument"] == os.fsencode(run_dir / "spec.json").hex()
    assert heard["values"] == [value.encode(errors="surrogatepass").hex() for value in values]
    found = {bytes.fromhex(key): bytes.fromhex(value) for key, value in heard["env"].items()}
    assert (
        found.items()
        >= {os.fsencode(key): os.fsencode(value) for key, value in env.items()}.items()
    )
    assert set(os.listdir(os.fsencode(run_dir / "names"))) == {os.fsencode(name) for name in names}
    agent.close()
    places = [tmp_path, Path.home(), Path("/")]
    assert not any((place / canary.name).exists() for place in places)
