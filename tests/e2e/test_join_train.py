"""`zrun train` once per rank, as torchrun and its like start it.

One run, with the bits of `zrun train` by itself.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

HERE = Path(__file__).parent
ZRUN = ["-m", "zrun", "train", "job.yaml"]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def left(folder: Path) -> list[str]:
    """What still runs in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.thorough
def test_under_torchrun_the_losses_are_those_of_zrun_alone(tmp_path: Path) -> None:
    shutil.copy(HERE / "wild.py", tmp_path)
    (tmp_path / "job.yaml").write_text(
        "name: joined\nmodel: {call: wild.py:Net}\ndata: wild.py:data\nsteps: 6\nbatch: "
        "8\nzero: 3\ndevice: cpu\n"
        "log: {every: 1}\nlaunch: auto\n"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        free_port(),
    ]
    runs = {"joined": torchrun, "alone": [sys.executable]}
    for name, command in runs.items():
        more = ["--slots", "2"] if name == "alone" else []
        done = subprocess.run(
            [*command, *ZRUN, "--run-dir", name, *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
    joined, alone = (events(tmp_path / name, "step") for name in runs)
    assert [step["loss"] for step in joined] == [step["loss"] for step in alone]
    assert len(joined) == 6
    plan = json.loads((tmp_path / "joined" / "plan.json").read_text())
    assert plan == json.loads((tmp_path / "alone" / "plan.json").read_text())
    assert left(tmp_path) == []


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


class Ranks:
    """Two processes, as a launcher starts them that knows nothing of zrun."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.processes: list[subprocess.Popen[str]] = []
        self._port = free_port()
        (folder / "job.yaml").write_text(
            "name: fake\nmodel: {call: 'fake:model'}\ndata: fake:data\nsteps: 3\nbatch: 4\nlog: "
            "{every: 1}\n"
        )

    def start(
        self,
        behaviour: dict[str, str],
        *options: str,
        ranks: tuple[int, ...] = (0, 1),
        stdout: int = subprocess.PIPE,
    ) -> None:
        arguments = [
            f"model.args.behaviour={json.dumps(behaviour)}",
            "--worker",
            "fake_worker",
            "--run-dir",
            "run",
        ]
        for rank in ranks:
            environ = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 2,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self._port,
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *ZRUN, *arguments, *options],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    env=os.environ
                    | {key: str(value) for key, value in environ.items()}
                    | {"PYTHONPATH": str(HERE)},
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                )
            )

    def wait_for_hang(self) -> None:
        wait_for(lambda: len(events(self.run, "log")) == 2)

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each."""
        told = [process.communicate(timeout=PATIENCE_S) for process in self.processes]
        return [(each.returncode, *text) for each, text in zip(self.processes, told, strict=True)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()
    wait_for(lambda: left(tmp_path) == [])


def test_two_processes_are_one_run_and_one_of_them_speaks(ranks: Ranks) -> None:
    terminal, end = pty.openpty()  # mpirun gives one to each
    ranks.start({"1": "show_environment"}, stdout=end)
    first, second = ranks.end()
    os.close(end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert first[0] == second[0] == 0, (first, second)
    assert second[2] == ""
    assert "start: 1.2M parameters" in shown
    assert "step 3/3 loss 1 lr 0.001" in shown
    assert shown.count("step 3/3") == 1
    assert "\x1b" not in shown
    assert "hosts: env (a launcher like torchrun: RANK=0, WORLD_SIZE=2, LOCAL_RANK=0)" in first[2]
    seen = json.loads(events(ranks.run, "log")[0]["message"])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ZRUN_STORE")
    assert [seen[name] for name in names] == ["1", "2", "1", "2", f"{ranks.run}/store"]
    assert sorted(path.name for path in ranks.run.glob("spec*.json")) == [
        "spec-1.json",
        "spec.json",
    ]


@pytest.mark.thorough
def test_the_failure_of_a_rank_is_the_end_of_all_with_its_exit_code(ranks: Ranks) -> None:
    ranks.start({"0": "hang", "1": "fail_numerically"})
    first, second = ranks.end()
    assert (first[0], second[0]) == (7, 7)
    assert "rank 1 of 2" in first[2]
    assert "the loss is not finite" in first[2]
    assert second[1:] == ("", "")


@pytest.mark.thorough
def test_a_signal_to_all_of_them_stops_all(ranks: Ranks) -> None:
    ranks.start({"0": "hang", "1": "hang"})
    ranks.wait_for_hang()
    for process in ranks.processes:
        process.send_signal(signal.SIGTERM)
    first, second = ranks.end()
    assert (first[0], second[0]) == (143, 143)
    assert (
        "stopped before the first step ended" in first[2]
        or "stopped after step 0, not saved" in first[2]
    )
    assert second[1:] == ("", "")


@pytest.mark.parametrize(
    ("killed", "says"), [(0, "lost the process of rank 0"), (1, r"lost rank 1 (")]
)
@pytest.mark.thorough
def test_a_process_that_is_killed_ends_the_others(ranks: Ranks, killed: int, says: str) -> None:
    ranks.start({"0": "hang", "1": "hang"})
    ranks.wait_for_hang()
    ranks.processes[killed].kill()
    ended = ranks.end()
    code, _, text = ended[1 - killed]
    assert (ended[killed][0], code) == (-signal.SIGKILL, 6)
    assert says in text


def test_ctrl_c_while_others_are_awaited_is_one_line(ranks: Ranks) -> None:
    ranks.start({}, ranks=(0,))
    stderr = ranks.processes[0].stderr
    assert stderr is not None
    assert stderr.readline().startswith("hosts: env")
    ranks.processes[0].send_signal(signal.SIGINT)
    ((code, _, text),) = ranks.end()
    assert (code, text) == (130, "SIGINT: stopped before training began\n")
