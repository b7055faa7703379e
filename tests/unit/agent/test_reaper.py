"""An agent's reaper: nothing of what an agent started outlives it, however either of them ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Listener, arbitrary_address
from multiprocessing.process import current_process
from pathlib import Path

import pytest

from zrun.agent import reaper as reaper_module
from zrun.system.processes import Process

AGENT = """
import os, signal, subprocess, sys, time
from zrun.agent import reaper
folder = reaper.fork_agent()
folder.mkdir()
helpers = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
print(os.getpid(), *(helper.pid for helper in helpers), folder, flush=True)
sys.stdin.read()
sys.exit(7)
"""


@contextmanager
def agent() -> Iterator[tuple[subprocess.Popen[str], list[Process], Path]]:
    """The reaper, the agent and two helpers of its, of which one leads a session,
    and the agent's folder.
    """
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        found = [Process.find(int(pid)) for pid in pids]
        try:
            yield process, [each for each in found if each is not None], Path(folder)
        finally:
            for pid in map(int, pids):
                if (each := Process.find(pid)) in found and each is not None and each.alive():
                    os.kill(pid, signal.SIGKILL)
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_what_a_killed_agent_started_ends_with_it(number: signal.Signals) -> None:
    with agent() as (reaper, alive, folder):
        os.kill(alive[0].pid, number)
        assert reaper.wait(30) == -number, "it ends as the agent did"
        assert [each for each in alive if each.alive()] == []
        assert not folder.exists()


def test_an_agent_that_ends_by_itself_leaves_nothing_either() -> None:
    with agent() as (reaper, alive, folder):
        assert reaper.stdin is not None
        reaper.stdin.close()
        assert reaper.wait(30) == 7
        assert [each for each in alive if each.alive()] == []
        assert not folder.exists()


def test_the_streams_are_the_agents_and_signals_reach_it() -> None:
    with agent() as (reaper, alive, _):
        assert reaper.stdout is not None
        reaper.send_signal(signal.SIGTERM)
        assert reaper.stdout.read() == "", "the reaper holds no end of it"
        assert reaper.wait(30) == -signal.SIGTERM
        assert not alive[0].alive()


def test_a_signal_that_comes_when_the_agent_is_gone_is_no_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = """
import os, signal
wait = os.waitpid
def reap(*given):
    found = wait(*given)
    os.kill(os.getpid(), signal.SIGTERM)
    return found
os.waitpid = reap
"""
    monkeypatch.setitem(globals(), "AGENT", late + AGENT)
    with agent() as (reaper, _, _folder):
        assert reaper.stdin is not None
        reaper.stdin.close()
        assert reaper.wait(30) == 7


def test_an_agent_hears_of_its_keepers_death() -> None:
    with agent() as (reaper, alive, _):
        reaper.kill()
        deadline = time.monotonic() + 30
        while alive[0].alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive[0].alive()


def folder_of(parent: Path, number: int, *, has_socket: bool) -> Path:
    """A folder as an agent makes it; nobody listens at its socket any more."""
    folder = parent / f"zrun-{number:016x}"
    folder.mkdir()
    if has_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telemetry:
            telemetry.bind(str(folder / reaper_module.SOCKET))
    return folder


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in whose name a socket's address has room."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_what_a_keeper_killed_with_its_agent_left_goes_later(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    dead = folder_of(short_path, 1, has_socket=True)
    with socket.socket(socket.AF_UNIX) as of_loader:
        of_loader.bind(str(dead / "listener-x"))
    new, old = (
        folder_of(short_path, 2, has_socket=False),
        folder_of(short_path, 3, has_socket=False),
    )
    os.utime(old, (0, 0))
    living, fuller = (
        folder_of(short_path, 4, has_socket=False),
        folder_of(short_path, 5, has_socket=True),
    )
    (fuller / "something").touch()
    others = short_path / "zrun-0000"
    others.mkdir()
    link = short_path / f"zrun-{6:016x}"
    link.symlink_to(folder_of(others, 7, has_socket=True))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telemetry:
        telemetry.bind(str(living / reaper_module.SOCKET))
        reaper_module.sweep()
    assert not dead.exists()
    assert not old.exists()
    assert sorted(short_path.iterdir()) == sorted([new, living, fuller, others, link])
    assert (link / reaper_module.SOCKET).exists()


@pytest.mark.parametrize(("length", "is_own"), [(67, True), (68, False), (300, False)])
def test_a_long_folder_of_temporary_files_holds_no_socket(monkeypatch, length, is_own):
    """An agent could not bind it, and its ranks could not reach it; so with loader processes."""
    folder = "/".ljust(length, "x")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    private = reaper_module.private_folder()
    assert str(private.parent) == (folder if is_own else "/tmp")
    assert len(str(private / reaper_module.SOCKET)) <= 107  # see unix(7)
    monkeypatch.setitem(current_process()._config, "tempdir", str(private))
    assert len(arbitrary_address("AF_UNIX")) <= 107


def test_loader_processes_can_listen_in_the_longest_folder(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one in which an agent makes its folder."""
    for length in range(60, 80):
        parent = short_path / ("x" * (length - len(str(short_path)) - 1))
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        private = reaper_module.private_folder()
        if private.parent != parent:
            break
        private.mkdir(parents=True)
        config = current_process()._config  # type: ignore[attr-defined]
        monkeypatch.setitem(config, "tempdir", str(private))
        Listener(family="AF_UNIX").close()
    assert length == 68
