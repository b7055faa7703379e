"""An agent whose launcher does not listen.

It goes on to obey, to watch over its workers, and loses no word.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from zrun.agent import agent_loop, launcher_silence, memory_watch
from zrun.agent.agent_loop import AgentLoop
from zrun.agent.observer import Observer
from zrun.agent.workers import WorkerProcess
from zrun.transport.frame_reader import FrameReader
from zrun.transport.frames import StartRequest, StopMode, pack
from zrun.transport.memories import apart
from zrun_core.spine import profile_request
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.spine.flight_view import FlightRecorderView
from zrun_core.spine.profile_request import ProfileRequest
from zrun_core.spine.stop_signals import PROFILE, SAVE

PATIENCE_S = 30.0


class Setting:
    """An agent's loop with one worker, seen from its launcher. `beside` are ranks without one."""

    def __init__(
        self,
        folder: Path,
        *,
        is_remote: bool = False,
        memory: int | None = None,
        rank: int = 0,
        beside: int = 0,
        num_ranks: int = 1,
    ) -> None:
        control, self.control = os.pipe()
        self.output, output = os.pipe()
        self.loop = AgentLoop(control, output)
        os.write(self.control, StartRequest({}, "here", {}, "module").pack())
        self.loop.orders.get(timeout=PATIENCE_S)
        heard, self.telemetry = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.loop.listen(heard)
        pid = os.posix_spawnp(
            "sleep", ["sleep", "600"], os.environ, setsid=True, setsigdef=[SAVE, PROFILE]
        )
        self.worker = WorkerProcess(pid, os.pidfd_open(pid))
        ranks = range(rank, rank + 1 + beside)
        observer = Observer(FlightRecorderView(folder / "board", ranks), folder)
        self.loop.watch(
            ranks, pid, observer, {}, is_remote=is_remote, memory=memory, num_ranks=num_ranks
        )
        self.loop.follow({rank: self.worker})

    def wait(self) -> int:
        """How the worker ended."""
        assert select.select([self.worker.pidfd], [], [], PATIENCE_S)[0]
        return self.worker.wait()

    def kill(self) -> None:
        """Leave no worker behind."""
        if self.worker.poll() is None:
            os.kill(self.worker.pid, signal.SIGKILL)
            self.worker.wait()

    @property
    def is_paused(self) -> bool:
        assert self.loop._telemetry is not None
        return self.loop._telemetry.is_paused

    def flood(self, count: int) -> None:
        """Emit more than the pipe takes."""
        for number in range(count):
            self.telemetry.send(
                json.dumps({"type": "log", "number": number, "text": "x" * 1000}).encode()
            )

    def hear(self) -> list[dict[str, Any]]:
        """Every frame up to `done`."""
        lines, frames = FrameReader(), []
        while not frames or frames[-1]["frame"] != "done":
            assert select.select([self.output], [], [], PATIENCE_S)[0], frames[-3:]
            frames += lines.feed(os.read(self.output, 1 << 16))
        return frames

    def hear_to_the_end(self) -> list[dict[str, Any]]:
        """Have the worker killed, and return all frames."""
        os.write(self.control, pack({"stop": StopMode.KILL}))
        assert self.wait() == -9
        os.close(self.loop._finish)
        return self.hear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "failures").mkdir()
    return tmp_path


def test_ranks_that_take_too_much_memory_in_their_first_step_are_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "_TOLERATED_PER_RANK", 0)
    setting = Setting(folder, memory=1)
    assert setting.wait() == -signal.SIGKILL
    setting.loop.finish()
    (end,) = (frame for frame in setting.hear() if frame["frame"] == "exit")
    assert end["oom"]
    assert re.fullmatch(
        r"ranks of this host held \S+ .iB, and limits\.memory is 1 B \(start\)", end["shortage"]
    )


def test_ranks_that_grow_beyond_their_limit_later_may_finish_their_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, "PROGRESS_S", 0.02)
    monkeypatch.setattr(memory_watch, "_TOLERATED_PER_RANK", 0)
    monkeypatch.setattr(memory_watch, "_LONGEST_S", 0.02)
    held = 0
    for name in ("resident_bytes", "held_together"):
        monkeypatch.setattr(memory_watch.memory_limits, name, lambda pids: held)
    setting = Setting(folder, memory=1000)
    board = FlightRecorder(folder / "board", 0, range(1), 1)
    try:
        for number in (1, 2, 3):
            board.step(number)
        board.phase("evaluation")
        time.sleep(0.2)  # until its steps are seen
        assert setting.worker.poll() is None
        held = 1200
        assert setting.wait() == -signal.SIGUSR1
        setting.loop.finish()
    finally:
        setting.kill()
    (short,) = (frame for frame in setting.hear() if frame["frame"] == "short")
    limit = "limits.memory is 1000 B (evaluation of step 3)"
    assert short["why"] == f"ranks of this host held 1.2 KiB, and {limit}"


def test_silence_is_noticed_although_nobody_takes_what_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (launcher_silence, agent_loop):
        monkeypatch.setattr(module, "SILENCE_S", 0.2)
    setting = Setting(folder, is_remote=True)
    try:
        setting.flood(200)
        assert setting.wait() != 0
        setting.loop.end_sessions()
        setting.loop.finish()  # nor does the end wait for such a launcher
    finally:
        setting.kill()


def test_ranks_that_go_on_get_time_to_save_when_nobody_is_heard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, "PROGRESS_S", 0.02)
    monkeypatch.setattr(launcher_silence, "SILENCE_S", 1.0)
    monkeypatch.setattr(launcher_silence, "ORPHAN_S", 1.2)
    setting = Setting(folder, is_remote=True)
    board = FlightRecorder(folder / "board", 0, range(1), 1)
    try:
        while not select.select([setting.worker.pidfd], [], [], 0.02)[0]:
            board.step(1)  # it moves
        assert setting.wait() == -signal.SIGUSR1, "asked to finish its step"
        setting.loop.finish()
    finally:
        setting.kill()
    (deaf,) = (frame for frame in setting.hear() if frame["frame"] == "deaf")
    assert (deaf["stop"], deaf["silent_s"] > 1.2) == ("finish", True)


def test_a_launcher_that_said_so_may_be_silent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, "PROGRESS_S", 0.02)
    monkeypatch.setattr(launcher_silence, "SILENCE_S", 0.2)
    setting = Setting(folder, is_remote=True)
    try:
        os.write(setting.control, pack({"hold": True}))
        assert not select.select([setting.worker.pidfd], [], [], 1.0)[0]
        os.write(setting.control, pack({"beat": True}))
        assert setting.wait() != 0, "the next silence counts"
    finally:
        setting.loop.finish()
        setting.kill()


def test_orders_are_obeyed_meanwhile_and_nothing_that_was_said_is_lost(folder: Path) -> None:
    setting = Setting(folder, is_remote=False)
    try:
        setting.flood(200)
        frames = setting.hear_to_the_end()
    finally:
        setting.kill()
    events = [frame["event"]["number"] for frame in frames if frame["frame"] == "event"]
    assert events == list(range(200))
    assert [frame["status"] for frame in frames if frame["frame"] == "exit"] == [-9]


def test_telemetry_waits_with_the_workers_when_too_much_is_kept(folder: Path) -> None:
    setting = Setting(folder, is_remote=False)
    try:
        setting.telemetry.setblocking(False)
        deadline, sent = time.monotonic() + PATIENCE_S, 0
        while not setting.is_paused and time.monotonic() < deadline:
            try:
                setting.telemetry.send(b'{"type":"log","text":"' + b"x" * 10_000 + b'"}')
                sent += 1
            except BlockingIOError:
                time.sleep(0.001)
        assert setting.is_paused
        frames = setting.hear_to_the_end()
    finally:
        setting.kill()
    assert sum(frame["frame"] == "event" for frame in frames) == sent


@pytest.mark.parametrize(
    ("num_ranks", "beside", "sent"),
    [
        (16, 1, [["memory", 8], ["memory", 9], ["memory", 8]]),
        (17, 1, [["memories", 8, 9], ["memories", 8]]),
        (17, 0, [["memory", 8], ["memory", 9], ["memory", 8]]),  # a process of each rank
    ],
)
def test_an_agent_folds_what_its_ranks_tell_in_a_large_launch(
    folder: Path, num_ranks: int, beside: int, sent: list[list[Any]]
) -> None:
    setting = Setting(folder, rank=8, beside=beside, num_ranks=num_ranks)
    try:
        for rank, step in ((8, 1), (9, 1), (8, 2)):
            event = {"type": "memory", "time": 1.0, "rank": rank, "step": step}
            setting.telemetry.send(json.dumps(event, separators=(",", ":")).encode())
        frames = setting.hear_to_the_end()
    finally:
        setting.kill()
    told = [frame for frame in frames if frame["frame"] in ("event", "exit")]
    assert told.pop()["frame"] == "exit", "what waits for other ranks comes before it"
    events = [frame["event"] for frame in told]
    found = [
        [event["type"], *(each["rank"] for each in apart(event))]
        if event["type"] == "memories"
        else [event["type"], event["rank"]]
        for event in events
    ]
    assert found == sent


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_is_asked_to_save(folder: Path, rank: int) -> None:
    """The worker has no handler: what reaches it ends it."""
    setting = Setting(folder, rank=rank)
    os.write(setting.control, pack({"save": True}))
    if rank:
        os.write(setting.control, pack({"stop": StopMode.KILL}))
    assert setting.wait() == (-signal.SIGKILL if rank else -SAVE)
    setting.loop.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_is_asked_for_a_profile(folder: Path, rank: int) -> None:
    """And finds what for."""
    setting = Setting(folder, rank=rank)
    request = ProfileRequest("id", 3, (0, 1))
    frame = {"profile": request.to_text(), "run_dir": str(folder / "run")}
    os.write(setting.control, pack(frame))
    if rank:
        os.write(setting.control, pack({"stop": StopMode.KILL}))
    assert setting.wait() == (-signal.SIGKILL if rank else -PROFILE)
    setting.loop.finish()
    if rank == 0:
        assert profile_request.read(folder / "run") == request


def test_who_was_asked_to_end_is_not_asked_to_save(folder: Path) -> None:
    setting = Setting(folder)
    for frame in ({"stop": StopMode.FINISH}, {"save": True}):
        os.write(setting.control, pack(frame))
    assert setting.wait() == -signal.SIGUSR1
    setting.loop.finish()
