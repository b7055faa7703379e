"""`zrun train --detach`, `ps`, `logs` and `stop`, with real launchers and a worker that needs no
torch.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_for

from zrun.runs import run_lock

HERE = Path(__file__).parent
ZRUN = [sys.executable, "-m", "zrun"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a job lies; whatever happens, no launcher of it is left afterwards."""
    (tmp_path / "job.yaml").write_text(
        "name: fake\nmodel: {call: 'fake:model'}\ndata: fake:data\nsteps: 3\nbatch: 4\nslots: 2\n"
        "log: {every: 1}\n"
    )
    yield tmp_path
    for path in (tmp_path / "runs").glob("*/*"):
        holder = run_lock.last_holder(path)
        if holder is not None and holder.process is not None:
            os.kill(holder.pid, signal.SIGKILL)


def zrun(
    folder: Path, *arguments: str, inherited: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ZRUN, *arguments],
        **settings(folder),
        capture_output=True,
        pass_fds=inherited,
        timeout=PATIENCE_S,
    )


def settings(folder: Path) -> dict[str, Any]:
    environ = os.environ | {"PYTHONPATH": str(HERE)}
    return {"cwd": folder, "env": environ, "text": True, "stdin": subprocess.DEVNULL}


def train_arguments(behaviour: dict[str, str], *options: str) -> list[str]:
    chosen = f"model.args.behaviour={json.dumps(behaviour)}"
    return ["train", "job.yaml", chosen, "--worker", "fake_worker", "--detach", *options]


def detached(folder: Path, behaviour: dict[str, str], inherited: tuple[int, ...] = ()) -> Path:
    """A run that goes on by itself; its directory. It has let go the pipes that its output is read
    from here.
    """
    done = zrun(folder, *train_arguments(behaviour), inherited=inherited)
    assert done.returncode == 0, done.stderr
    first, place, *commands = done.stdout.splitlines()
    path = Path(place.strip().removeprefix("in "))
    pid = int(first.rpartition(" ")[2])
    assert path.parent == folder / "runs" / "fake"
    assert [line.partition("zrun ")[2] for line in commands] == [
        f"logs {path.name} -r launcher -f",
        f"stop {path.name}",
        "ps",
    ]
    holder = run_lock.last_holder(path)
    assert holder is not None
    assert holder.pid == pid
    assert os.getsid(pid) == pid
    return path


def of(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """What `zrun ps` tells of the runs of this folder, by id."""
    told = json.loads(zrun(folder, "ps", "--json", *options).stdout)
    return {run["run"]: run for run in told if run["path"].startswith(f"{folder}/")}


def opened_by(path: Path) -> set[str]:
    """The files that the launcher of a run has open."""
    holder = run_lock.last_holder(path)
    assert holder is not None
    names = set()
    for descriptor in Path(f"/proc/{holder.pid}/fd").iterdir():
        with suppress(OSError):
            names.add(os.readlink(descriptor))
    return names


def hangs(path: Path) -> bool:
    """Both ranks are where they stay."""
    return (path / "events.jsonl").read_text().count('"hanging ') == 2


def test_two_runs_go_on_and_one_is_stopped(folder: Path) -> None:
    first, second = (detached(folder, {"0": "steps_then_hang", "1": "hang"}) for _ in range(2))
    wait_for(lambda: hangs(first))
    wait_for(lambda: hangs(second))
    told = of(folder)
    assert {name: run["state"] for name, run in told.items()} == {
        first.name: "running",
        second.name: "running",
    }
    assert told[first.name]["job"] == "fake"
    assert (told[first.name]["ranks"], told[first.name]["total_steps"]) == (2, 3)

    both = zrun(folder, "stop", "fake")
    assert both.returncode == 2
    assert "'fake' may be any of 2 runs" in both.stderr

    follow = [*ZRUN, "logs", str(first), "-f", "-r", "all,launcher"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, **settings(folder)) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "rank 0: rank 0 behaves: steps_then_hang\n"
        stopped = zrun(folder, "stop", first.name)
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout == "stopped after step 1, exit code 143, not saved\n"
        rest = follower.stdout.read()
        assert follower.wait(PATIENCE_S) == 0
        assert "rank 1: on stderr\n" in rest
        assert "launcher: SIGTERM: finishing the step" in rest  # it came while the run ended
    told = of(folder)
    assert (told[first.name]["state"], told[first.name]["exit_code"]) == ("stopped", 143)
    assert told[second.name]["state"] == "running"
    again = zrun(folder, "stop", first.name)
    assert (again.returncode, again.stdout.partition(":")[0]) == (
        0,
        f"run {first.name} was not running",
    )

    os.kill(told[second.name]["launcher"]["pid"], signal.SIGKILL)
    wait_for(lambda: of(folder)[second.name]["state"] == "vanished")


@pytest.mark.thorough
def test_now_means_now_and_not_kill(folder: Path) -> None:
    mine = os.open(folder / "mine", os.O_RDWR | os.O_CREAT)  # such as a shell's lock
    path = detached(folder, {"0": "step_and_not_finish", "1": "will_not_finish"}, (mine,))
    os.close(mine)
    assert str(folder / "mine") not in opened_by(path)
    assert str(path / "launcher.log") in opened_by(path)
    wait_for(lambda: hangs(path))
    gentle = zrun(folder, "stop", "fake", "--timeout", "0")
    assert gentle.returncode == 6
    assert f"zrun stop {path.name} --now" in gentle.stderr
    stopped = zrun(folder, "stop", "fake", "--now", "--json")
    assert stopped.returncode == 0, stopped.stderr
    facts = json.loads(stopped.stdout)
    assert (facts["state"], facts["exit_code"], facts["was_running"]) == ("stopped", 143, True)
    log = (path / "launcher.log").read_text()
    assert "stopping the workers" in log
    assert "killing the workers" not in log


@pytest.mark.thorough
def test_a_closed_terminal_stops_nothing(folder: Path) -> None:
    """The shell and what it started get SIGHUP with the terminal's end; the launcher is none of
    them any more.
    """
    arguments = [*ZRUN, *train_arguments({"0": "steps_then_hang", "1": "hang"})]
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(HERE)
        os.execvp("sh", ["sh", "-c", '"$@"; cat', "sh", *arguments])
    shown = b""
    while b"see it:" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]) == -signal.SIGHUP
    (path,) = (folder / "runs" / "fake").iterdir()
    assert of(folder)[path.name]["state"] == "running"
    assert zrun(folder, "stop", path.name).returncode == 0
    assert (
        "SIGTERM: finishing the step" in (path / "launcher.log").read_text()
    )  # the first that it heard of


@pytest.mark.thorough
def test_what_fails_before_training_begins_is_told_as_without_detach(folder: Path) -> None:
    wrong = ["train", "job.yaml", "stepss=3"]
    plain, alone = zrun(folder, *wrong), zrun(folder, *wrong, "--detach")
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", plain.stderr)
    assert not (folder / "runs").exists()
    live = zrun(folder, *wrong, "--detach", "--ui", "live")
    assert (live.returncode, "--ui live" in live.stderr) == (2, True)

    failed = zrun(folder, *train_arguments({}, "--worker", "no_such_worker"))
    (path,) = (folder / "runs" / "fake").iterdir()
    assert (failed.returncode, failed.stdout) == (5, "")
    assert "No module named 'no_such_worker'" in failed.stderr
    assert f"log: {path}/logs/rank-" in failed.stderr
    told = of(folder)[path.name]
    assert (told["state"], told["exit_code"]) == ("failed", 5)
    assert "ended with status 1" in told["headline"]


@pytest.mark.thorough
def test_what_fails_in_the_first_step_is_told_too(folder: Path) -> None:
    """Rank 0 has said that it starts; that is not yet a step."""
    failed = zrun(folder, *train_arguments({"0": "lose_peer", "1": "fail_in_user_code"}))
    (path,) = (folder / "runs" / "fake").iterdir()
    assert (failed.returncode, failed.stdout) == (5, "")
    assert (
        f"run {path.name}: waiting for its first step; until then Ctrl-C ends it\n" in failed.stderr
    )
    assert "start: 1.2M parameters" in failed.stderr
    assert failed.stderr.count("ValueError: a wrong turn") == 1
    assert "rank 1 of 2" in failed.stderr


@pytest.mark.thorough
def test_a_run_that_ends_at_once_has_made_its_first_step(folder: Path) -> None:
    done = zrun(folder, *train_arguments({}))
    (path,) = (folder / "runs" / "fake").iterdir()
    assert (done.returncode, done.stdout.splitlines()[0].rpartition(":")[0]) in (
        (0, f"run {path.name} is training in the background"),
        (0, ""),  # it was over before anybody looked
    )


def test_an_interrupt_reaches_the_launcher_until_it_is_on_its_own(folder: Path) -> None:
    """A worker that never says `start`: the command waits, and ctrl-C ends what it waits for."""
    (folder / "silent.py").write_text(
        "import time\ndef main():\n    print('silent')\n    time.sleep(600)\n"
    )
    arguments = [*ZRUN, *train_arguments({}, "--worker", "silent")]
    surroundings = settings(folder)
    surroundings["env"] = surroundings["env"] | {"PYTHONPATH": str(folder)}
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, start_new_session=True, **surroundings
    ) as command:
        wait_for(lambda: list(folder.glob("runs/fake/*/logs/rank-1.log")))
        (path,) = (folder / "runs" / "fake").iterdir()
        launcher = run_lock.last_holder(path)
        wait_for(lambda: (path / "logs" / "rank-1.log").read_text() == "silent\n")
        os.killpg(command.pid, signal.SIGINT)
        _, told = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130
    assert "SIGINT: ending before the first step" in told
    assert launcher is not None
    assert launcher.process is None
