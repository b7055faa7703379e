"""Whoever reads a record reads it once, and holds little of it at a time."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zrun.estimate import compare_run
from zrun.estimate.measured_launch import measured_of
from zrun.estimate.trial import read_trial
from zrun.runs.listing import read_run
from zrun.system.tail_file import FileTail
from zrun.trackers.feed import scalars_of
from zrun.verification.moved_and_held import moved_and_held
from zrun.watch.compared import read_compared
from zrun.watch.log_view import sources
from zrun.watch.recording import Recording
from zrun.watch.run_record import read_record
from zrun_core.spine.events import Event, encode

RANKS = 32
SPLIT = {"data": 0.01, "forward": 0.25, "backward": 0.5, "comm": 0.05, "optim": 0.02}
HELD = 2 << 20  # bytes that a reader may hold, whatever the length of the record


def events(num_memory: int) -> Iterator[Event]:
    """A few steps, and much that ranks tell of themselves, as older records have it."""
    about = {"time": 1.0, "rank": 0}
    yield {"type": "start", **about, "job": "gpt", "world_size": RANKS, "params": 10, "stage": 2}
    for number in range(1, 7):
        yield {"type": "step", **about, "step": number, "loss": 1.0, "step_s": 0.5, "split": SPLIT}
        for place in range(num_memory // 5 if number < 6 else 0):
            rank = place % RANKS
            told = {"type": "memory", "time": 1.0, "rank": rank, "step": number, "split": SPLIT}
            kinds = dict.fromkeys(("params", "grads", "optim", "rings", "buffers"), 1 << 30)
            yield {**told, **kinds, "rss_bytes": 5 << 30, "process_bytes": place, "x": "x" * 300}
    yield {"type": "end", **about, "step": 6, "reason": "steps", "traffic": {}}


def write(folder: Path, num_memory: int) -> Path:
    folder.mkdir()
    with (folder / "events.jsonl").open("wb") as file:
        file.writelines(encode(event) + b"\n" for event in events(num_memory))
    return folder


def top(run: Path) -> object:
    recording = Recording(run)
    assert recording.read()
    assert not recording.read()
    return recording.now.state.end


def trackers(run: Path) -> object:
    lines = FileTail(run / "events.jsonl").lines()
    return sum(scalars_of(json.loads(line)) is not None for line in lines)


def messages(run: Path) -> object:
    (source,) = sources(run, "messages")
    return sum(1 for _ in source.tail().lines())


READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda run: read_record(run).state.end,
    "report --compare": lambda run: read_compared([run])[0].state.end,
    "top": top,
    "trackers": trackers,
    "logs": messages,
    "estimate --compare-run": lambda run: measured_of(compare_run._events(run / "events.jsonl")),
    "estimate --measure": lambda run: read_trial(run / "events.jsonl"),
    "verify": moved_and_held,
}


def bytes_read() -> int:
    """What this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.at_most(2)
def test_a_record_is_read_once_and_not_held(name: str, tmp_path: Path) -> None:
    read = READERS[name]
    small = write(tmp_path / "small", 500)
    assert read(small), "it finds what it looks for; and what is imported does not count below"
    run = write(tmp_path / "run", 8_000)
    size = (run / "events.jsonl").stat().st_size
    assert size > 2 * HELD
    before = bytes_read()
    assert read(run)
    assert size <= bytes_read() - before < 1.1 * size
    tracemalloc.start()
    try:
        assert read(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < HELD


def test_of_a_list_of_runs_ends_are_read(tmp_path: Path) -> None:
    read_run(write(tmp_path / "small", 500))
    run = write(tmp_path / "run", 8_000)
    before = bytes_read()
    assert read_run(run).step == 6
    assert bytes_read() - before < (run / "events.jsonl").stat().st_size / 2


def test_lines_are_whole_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    expected = [b"x" * size for size in (0, 1, 5, 6, 7, 8, 13, 14, 15, 40, 0, 0, 3)]
    data = b"".join(line + b"\n" for line in expected)
    for block in range(1, 20):
        monkeypatch.setattr("zrun.system.tail_file._BLOCK_BYTES", block)
        path.write_bytes(data + b"half")
        tail = FileTail(path)
        assert list(tail.lines()) == expected
        assert list(tail.lines()) == []
        with path.open("ab") as file:
            file.write(b" and half\nmore")
        assert list(tail.lines()) == [b"half and half"]
        path.unlink()
        assert list(tail.lines()) == []
        replacement = tmp_path / "other"
        replacement.write_bytes(b"new\n")
        replacement.rename(path)
        whole = FileTail(path)
        assert whole.read() == b"new\n"
        assert whole.read() == b""


def test_another_file_in_its_place_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"a long line of the first file\nhalf")
    tail = FileTail(path)
    assert list(tail.lines()) == [b"a long line of the first file"]
    other.write_bytes(b"second\n")
    other.rename(path)
    assert list(tail.lines()) == [b"second"]
