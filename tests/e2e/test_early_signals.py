"""Ctrl-C and SIGTERM while hosts are looked at, while workers import, and between two attempts.

Nothing is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S, lines_of, wait_for

from zrun.system.processes import Process
from zrun_core.spine.stop_signals import SAVE

HERE = Path(__file__).parent
JOB = "name: fake\nmodel: {call: 'fake:model'}\ndata: fake:data\nsteps: 3\nbatch: 4\nslots: 2\n"


def train(
    folder: Path, job: str, *options: str, worker: str = "fake_worker"
) -> subprocess.Popen[str]:
    (folder / "job.yaml").write_text(job)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "zrun",
            "train",
            "job.yaml",
            "--worker",
            worker,
            "--run-dir",
            "run",
            *options,
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(folder)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_folder(folder: Path) -> list[bytes]:
    """The command lines of what runs there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder:
                found.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)]
)
def test_while_hosts_are_awaited(tmp_path: Path, number: signal.Signals, code: int) -> None:
    client = tmp_path / "silent-ssh"
    client.write_text("#!/bin/sh\nexec sleep 600\n")
    client.chmod(0o755)
    launcher = train(tmp_path, JOB + f"hosts: [a, b]\nlaunch: {{ssh: {client}}}\n")
    lines_of(launcher, "b  its GPUs")
    wait_for(lambda: sum(b"sleep" in line for line in in_folder(tmp_path)) == 2)
    launcher.send_signal(number)
    _, rest = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, rest) == (code, f"{number.name}: stopped before training began\n")
    assert in_folder(tmp_path) == []
    assert not (tmp_path / "run").exists()


_DEAF = """for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
"""


@pytest.mark.parametrize(
    ("numbers", "deaf", "code"),
    [
        ([signal.SIGINT], "", 130),
        ([signal.SIGINT] * 3, _DEAF, 130),
        ([signal.SIGKILL], _DEAF, -signal.SIGKILL),
    ],
)
@pytest.mark.thorough
def test_while_the_workers_import(
    tmp_path: Path, numbers: list[signal.Signals], deaf: str, code: int
) -> None:
    """Also where what they import listens to no signal, and where the launcher itself is killed."""
    (tmp_path / "slow.py").write_text(
        f"import signal, time\n{deaf}print('imports')\ntime.sleep(600)\n"
    )
    launcher = train(tmp_path, JOB, worker="slow")
    log = tmp_path / "run" / "logs" / "rank-0.log"
    wait_for(lambda: log.exists() and log.read_text() == "imports\n")
    process = Process.find(launcher.pid)
    assert process is not None
    wait_for(
        lambda: process.catches(SAVE)
    )  # it follows the workers, and asks them to end from now on
    assert launcher.stderr is not None
    for number, said in zip(
        numbers, ("ending before the first step", "stopping the workers", "killing"), strict=False
    ):
        launcher.send_signal(number)
        if number != signal.SIGKILL:
            lines_of(launcher, said)
    _, rest = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, "Traceback" in rest) == (code, False)
    wait_for(lambda: in_folder(tmp_path) == [])
    told = json.loads((tmp_path / "run" / "failure.json").read_text())
    if numbers[0] == signal.SIGKILL:
        assert (told["kind"], told["exit_code"]) == ("launcher", None)
        assert told["message"].startswith(f"the launcher, process {launcher.pid} on ")
    else:
        assert (told["kind"], told["signal"], told["exit_code"]) == ("stopped", "SIGINT", 130)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.thorough
def test_between_two_attempts(tmp_path: Path, number: signal.Signals, code: int) -> None:
    behaviour = json.dumps({"1": "kill_itself"})
    launcher = train(tmp_path, JOB + "restarts: 3\n", f"model.args.behaviour={behaviour}")
    lines_of(launcher, "restart 1 of 3 in 5 s")
    launcher.send_signal(number)
    _, rest = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, rest) == (code, f"{number.name}: stopped before restart 1\n")
    assert in_folder(tmp_path) == []


def test_an_agent_that_was_let_go_before_it_was_there_says_nothing() -> None:
    command = [sys.executable, "-m", "zrun.agent.main"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as agent:
        assert agent.stdout is not None
        assert agent.stderr is not None
        agent.stdout.close()
        assert agent.stderr.read() == b""
        assert agent.wait(PATIENCE_S) == 0
