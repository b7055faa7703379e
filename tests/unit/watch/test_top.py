"""`zrun top`: curves, the record as it grows, what keys do, pictures of every size."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zrun.top.app import Position, machine_picture, picture, pressed
from zrun.top.machine import GpuSeen, Machine, MachineWatch, Use
from zrun.top.terminal import FullScreen
from zrun.top.views import VIEWS
from zrun.watch.braille import plot
from zrun.watch.panel_layout import PanelSpace
from zrun.watch.recording import Recording

ROOT = Path(__file__).parents[3]
SPLIT = {"data": 0.01, "forward": 0.1, "backward": 0.2, "comm": 0.05, "optim": 0.02}
KINDS = ("params", "grads", "optim", "rings", "buffers")


def record(folder: Path, events: list[dict[str, Any]], *, more: bytes = b"") -> Path:
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(lines + more)
    return folder


def start(**keys: Any) -> dict[str, Any]:
    planned = dict.fromkeys(KINDS, 1 << 20)
    known = {"job": "gpt", "world_size": 2, "params": 10, "stage": 2, "total_steps": 40}
    return {"type": "start", "time": 100.0, "rank": 0, **known, "planned_bytes": planned, **keys}


def step(number: int, **keys: Any) -> dict[str, Any]:
    known = {"loss": 5.0 / number, "lr": 1e-3, "grad_norm": 1.0, "step_s": 0.4, "tokens": 100}
    more = {"tokens_per_s": 250.0, "split": SPLIT, "samples": 1, "total_tokens": 100 * number}
    return {
        "type": "step",
        "time": 100.0 + number,
        "rank": 0,
        "step": number,
        **known,
        **more,
        **keys,
    }


def memory(rank: int, number: int, **keys: Any) -> dict[str, Any]:
    held = dict.fromkeys(KINDS, 1 << 20) | {"rss_bytes": 1 << 28, "peak_rss_bytes": 1 << 29}
    event = {"type": "memory", "time": 100.0 + number, "rank": rank, "step": number}
    return event | held | {"planned_bytes": 5 << 20, "split": SPLIT} | keys


def a_run(folder: Path, num_steps: int = 20, num_ranks: int = 2) -> Recording:
    events = [start(world_size=num_ranks)]
    for number in range(1, num_steps + 1):
        events.append(step(number))
        events += [memory(rank, number) for rank in range(num_ranks)]
    events.append(
        {"type": "save", "time": 118.0, "rank": 0, "step": 18, "bytes": 1, "seconds": 0.1}
    )
    recording = Recording(record(folder, events))
    assert recording.read()
    return recording


def text_of(recording: Recording, where: Position, width: int = 100, height: int = 40) -> list[str]:
    room = PanelSpace(width, height)
    return [line.plain for line in picture(where, recording, "running", room, None)]


# Curves


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = plot([(step, float(-step)) for step in range(16)], 13, 4, "{:.0f}".format)
    assert lines == ["  0 ┤⠑⢄", "    │  ⠑⢄", "    │    ⠑⢄", "-15 ┤      ⠑⢄"]


def test_in_ascii_there_are_stars() -> None:
    lines = plot([(0, 1.0), (9, 2.0)], 14, 3, "{:.0f}".format, ascii_only=True)
    assert [line[:3] for line in lines] == ["2 +", "  |", "1 +"]
    assert set("".join(line[3:] for line in lines)) == {" ", "*"}


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, float("nan"))],
        [(1, 1.0)],
        [(1, 2.0), (2, float("inf")), (3, 2.0)],
        [(5, 1e-9), (6, 1e9)],
    ],
)
def test_odd_series_are_drawn_or_left_out(points: list[tuple[int, float]]) -> None:
    lines = plot(points, 30, 4, "{:.3g}".format)
    assert len(lines) in (0, 4)
    assert all(len(line) <= 30 for line in lines)
    assert plot(points, 6, 4, "{:.3g}".format) == []


# The record


def test_a_record_is_read_as_it_grows(tmp_path: Path) -> None:
    recording = a_run(tmp_path, 3)
    assert recording.now.state.step.step == 3
    record(tmp_path, [step(4)], more=b'{"type":"step","time":1')
    assert recording.read()
    assert [each.state.step.step for each in recording.moments] == [1, 2, 3, 4]
    record(tmp_path, [], more=b'05.0,"rank":0,"step":5,"loss":1.0}\n')
    assert recording.read()
    assert recording.now.state.step.step == 5
    assert not recording.read()
    assert recording.now.state.elapsed_s == pytest.approx(5.0)


def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path) -> None:
    odd = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"type":"step"}',
        b'{"type":"memory","time":1}',
        b"\xff\xfe",
    ]
    odd.append(b'{"type":"from the future","time":101.5,"rank":0}')
    record(tmp_path, [start(), step(1)], more=b"\n".join([*odd, b""]))
    record(tmp_path, [step(2, loss="nan", time=50.0)])  # by a clock that went back
    recording = Recording(tmp_path)
    recording.read()
    assert recording.now.state.step.step == 2
    assert recording.now.time >= 101.0
    for view in range(len(VIEWS)):
        assert len(text_of(recording, Position(view))) == 40


def test_of_a_long_run_every_second_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zrun.watch.recording._MOST_MOMENTS", 8)
    recording = a_run(tmp_path, 40)
    steps = [each.state.step.step for each in recording.moments]
    assert len(steps) <= 8
    assert steps == sorted(steps)
    assert {b - a for a, b in itertools.pairwise(steps)} == {8}


def test_of_a_record_that_is_too_long_its_beginning_and_its_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [start(), *(step(number) for number in range(1, 41))]
    record(tmp_path, events)
    monkeypatch.setattr("zrun.watch.recording._HEAD_BYTES", 600)
    monkeypatch.setattr("zrun.watch.recording._MOST_BYTES", 2000)
    recording = Recording(tmp_path)
    recording.read()
    assert recording.is_cut
    assert recording.now.state.start is not None
    assert recording.now.state.step.step == 40
    assert len(recording.moments) < 20
    assert "a long record" in text_of(recording, Position())[0]


# Keys


def test_keys_lead_to_views_and_moments() -> None:
    def after(keys: str) -> Position:
        where = Position()
        for key in keys.split():
            where = pressed(where, {"space": " "}.get(key, key), 30)
        return where

    assert after("2").view == 1
    assert after("9").view == 0
    assert after("next next back").view == 1
    assert after("back").view == len(VIEWS) - 1
    assert after("left").at == 28
    assert after(", ,").at == 9
    assert after("home").at == 0
    assert after("home left").at == 0
    assert after("home . . .").at is None, "behind the last one it is live again"
    assert after("left end") == Position()
    assert after("up up down page_down").scroll == 1
    assert after("space").is_still
    assert after("? 3") == Position(), "any key leaves the help"
    assert after("x escape resize") == Position()
    assert after("q").is_over
    assert pressed(Position(), "left", 0) == Position()


# Pictures


@pytest.mark.parametrize(
    ("width", "height"), [(40, 8), (60, 20), (80, 24), (140, 40), (200, 60), (73, 11)]
)
def test_pictures_fill_a_terminal_and_no_more(tmp_path: Path, width: int, height: int) -> None:
    recording = a_run(tmp_path)
    for view in range(len(VIEWS)):
        for at in (None, 0, 7):
            lines = picture(
                Position(view, at),
                recording,
                "running",
                PanelSpace(width, height),
                MachineWatch().look(),
            )
            assert len(lines) == height
            console = Console(width=width, no_color=True)
            for line in lines[-1:] + lines[:2]:
                assert console.measure(line).maximum <= width


def test_the_past_is_shown_as_it_was(tmp_path: Path) -> None:
    recording = a_run(tmp_path)
    now, then = (text_of(recording, Position(0, at)) for at in (None, 4))
    assert any("20/40" in line for line in now)
    assert any("5/40" in line for line in then)
    assert any("1 at step 5" in line for line in then)
    assert then[-1].startswith("step 5 ")
    messages = text_of(recording, Position(len(VIEWS) - 1))
    assert any("saved step 18" in line for line in messages)
    assert not any("saved step 18" in line for line in text_of(recording, Position(5, 4)))


def test_each_host_tells_of_its_cores_memory_disk_and_network(tmp_path: Path) -> None:
    told = {
        "type": "host",
        "time": 101.0,
        "rank": 0,
        "cores": 8,
        "cores_busy": 0.25,
        "load": 2.5,
        "memory_bytes": 4 << 30,
        "memory_used_bytes": 1 << 30,
        "disk_bytes": 100 << 30,
        "disk_free_bytes": 5 << 30,
        "sent_bytes_per_s": 2048.0,
        "disk_read_bytes_per_s": None,
    }
    recording = Recording(record(tmp_path, [start(), step(1), told]))
    recording.read()
    hosts = next(number for number, view in enumerate(VIEWS) if view.name == "hosts")
    lines = text_of(recording, Position(hosts))
    assert any(line.startswith("  cores ") and "25%  8 cores, load 2.5" in line for line in lines)
    assert any("25%  1.0 GiB of 4.0 GiB" in line for line in lines)
    assert any("95%  5.0 GiB free of the run's" in line for line in lines)
    assert "  2.0 KiB/s sent" in lines
    half = {"type": "host", "time": 102.0, "rank": 0, "memory_bytes": 0, "cores_busy": "x"}
    recording = Recording(record(tmp_path / "half", [start(), step(1), half]))
    recording.read()
    lines = text_of(recording, Position(hosts))
    assert any("no GPU has reported yet" in line for line in lines)
    assert not any("cores" in line for line in lines)


def test_in_a_narrow_terminal_words_go_on_in_the_next_line(tmp_path: Path) -> None:
    long = "rank 3 is slow, and the others wait for it: busy 0.24s of each step, " * 3
    told = [
        {"type": "warning", "time": 100.5 + number, "rank": 0, "message": f"{number}: {long}end"}
        for number in range(6)
    ]
    recording = Recording(record(tmp_path, [start(), *told, step(1)]))
    recording.read()
    newest = text_of(recording, Position(len(VIEWS) - 1), 60, 12)
    assert all(len(line) <= 60 for line in newest)
    assert newest[-2].endswith("end") or newest[-1].endswith("end")
    assert any("5: rank 3" in line for line in newest)
    oldest = text_of(recording, Position(len(VIEWS) - 1, scroll=99), 60, 12)
    assert any("0: rank 3" in line for line in oldest), "scrolled to the first one"
    helped = text_of(recording, Position(helps=True), 40, 30)
    assert all(len(line) <= 40 for line in helped)
    assert ", and . by ten" in " ".join(line.strip() for line in helped)


def test_of_many_ranks_the_slow_one_is_named(tmp_path: Path) -> None:
    events = [start(world_size=256), step(1)]
    for number in (1, 2):
        for rank in range(256):
            own = SPLIT | ({"backward": 0.6} if rank == 77 else {})
            events.append(memory(rank, number, split=own))
        slowed = {"rank": 77, "utilisation": 99, "power_w": 350.0, "power_limit_w": 700.0}
        events.append(
            {"type": "gpus", "time": 103.0, "rank": 0, "gpus": [slowed | {"slowed": ["heat"]}]}
        )
    recording = Recording(record(tmp_path, events))
    recording.read()
    lines = text_of(recording, Position(1), 120, 40)
    named = [line for line in lines if line.startswith("rank ")]
    assert len(named) == 4
    assert named[0].startswith("rank 77")
    assert named[0].endswith("slow")
    assert "slow" not in "".join(named[1:])
    assert any("350 W of 700" in line and "slowed by heat" in line for line in lines)
    assert any(line.startswith("median  busy 0.33s") for line in lines)


def test_a_rank_is_slow_beside_those_of_its_stage_alone(tmp_path: Path) -> None:
    """The last stage of a pipeline has more to compute, and is no slow machine."""
    events = [start(world_size=8), step(1)]
    for rank in range(8):
        stage = rank // 4
        took = {0: 0.2, 1: 0.6}[stage] + (0.6 if rank == 6 else 0.0)
        use = {"stage": stage, "span_s": 1.0, "waited_s": 0.1, "in_flight": 1}
        events.append(memory(rank, 1, split=SPLIT | {"backward": took}, pipeline=use))
    recording = Recording(record(tmp_path, events))
    recording.read()
    lines = text_of(recording, Position(1), 120, 40)
    assert [line.split()[1] for line in lines if line.endswith("slow")] == ["6"]


def test_memory_is_beside_its_plan(tmp_path: Path) -> None:
    recording = a_run(tmp_path)
    lines = text_of(recording, Position(2))
    assert "        5.0 MiB, equal to plan" in lines
    record(tmp_path, [memory(0, 21, optim=3 << 20)])
    recording.read()
    assert "        7.0 MiB, 5.0 MiB planned" in text_of(recording, Position(2))


def test_a_machine_without_a_run() -> None:
    seen = Machine(
        "box: network 1 B/s out, 2 B/s in",
        (Use("cores", 0.5, "2 cores, load 1.0"), Use("memory", 0.95, "23 GiB of 24 GiB")),
        (GpuSeen("GPU 0 H100", {"utilisation": 3, "temperature_c": 41}),),
    )
    lines = [line.plain for line in machine_picture(seen, [], PanelSpace(80, 20))]
    assert len(lines) == 20
    assert any(re.match(r"memory +━+─+ +95%  23 GiB of 24 GiB", line) for line in lines)
    assert "GPU 0 H100: 3% busy, 41 C" in lines
    there = MachineWatch().look()
    assert [use.name for use in there.uses] == ["cores", "memory", "disk"]
    assert all(0 <= use.share <= 1 for use in there.uses)


def test_a_script_that_tells_no_loss(tmp_path: Path) -> None:
    events = [start(total_steps=None)]
    for number in (1, 2, 3):
        values = {"type": "metrics", "time": 101.0, "rank": 0, "step": number, "hook": "script"}
        events += [step(number, loss=None), values | {"values": {"reward": 1.5 * number}}]
    recording = Recording(record(tmp_path, events))
    recording.read()
    lines = text_of(recording, Position())
    assert not any(line.startswith("loss") for line in lines)
    assert any("reward  4.5 at step 3" in line for line in lines)
    assert "no messages so far" in text_of(recording, Position(5))


# The command


def test_into_a_pipe_one_view_is_printed(tmp_path: Path) -> None:
    def top(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "zrun", "top", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return done.returncode, done.stdout, done.stderr

    run = tmp_path / "runs" / "gpt" / "20260102-030405-ab12"
    run.mkdir(parents=True)
    a_run(run)
    code, said, _ = top("gpt")
    assert code == 0
    assert "20/40" in said
    assert "\x1b" not in said
    code, said, _ = top(str(run), "--view", "ranks")
    assert (code, said.count("rank 0"), said.count("rank 1")) == (0, 2, 2)
    code, _, said = top("--view", "nosuch")
    assert (code, said.startswith("error: --view nosuch: write one of ")) == (2, True)
    code, _, said = top("gpt", "--view", "rank")
    assert code == 2
    assert said == (
        "error: --view rank: write one of overview, ranks, memory, stages, hosts, messages\n"
    )


# The terminal


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of one of 50 columns and 10 lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 50, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_up_to(terminal: int, end: str) -> str:
    """Return what was written, which the kernel may hand over in parts."""
    said = ""
    while not said.endswith(end):
        assert select.select([terminal], [], [], 30.0)[0], said
        said += os.read(terminal, 1 << 16).decode()
    return said


def test_a_terminal_is_given_back_as_it_was(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    with FullScreen(theirs, theirs) as screen:
        assert screen.size == (50, 10)
        assert termios.tcgetattr(theirs) != before
        screen.show(["one", "two"])
        screen.show(["one", "two"])
        os.write(ours, b"2\x1b[D\x1b[5~\x1b[99;1x\tq")
        keys = [screen.key(1.0) for _ in range(5)]
        os.kill(os.getpid(), signal.SIGWINCH)
        assert screen.key(1.0) == "resize"
        assert screen.key(0.01) is None
        os.write(ours, b"\x1b")
        assert screen.key(1.0) == "escape"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            assert screen.key(1.0) == "q"
    assert keys == ["2", "left", "page up", "next", "q"]
    assert termios.tcgetattr(theirs) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    said = read_up_to(ours, "\x1b[?25h\x1b[?1049l").replace("\r", "")
    assert said.startswith("\x1b[?1049h")
    assert said.count("one\x1b[0m\x1b[K\ntwo") == 1, "the same picture is drawn once"
