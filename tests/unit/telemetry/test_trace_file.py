"""Traces as torch's profiler writes them become traces of a rank, and their parts are added up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from zrun_core.hardware.spans import MARK
from zrun_core.telemetry.trace_file import (
    BLOCK_TIDS,
    GPU_PIDS,
    Parts,
    Span,
    blocks_between,
    convert,
    self_times,
)

PID, THREAD = 4321, 4321


def span(name: str, ts: float, dur: float, tid: int = THREAD, **fields: Any) -> dict[str, Any]:
    base = {"ph": "X", "cat": "user_annotation", "name": name, "pid": PID, "tid": tid}
    return {**base, "ts": ts, "dur": dur, "args": {}, **fields}


def written(tmp_path: Path, events: list[dict[str, Any]], cut: int = 0) -> Path:
    """A file as torch writes it: its own name comes last."""
    raw = tmp_path / "raw.json"
    head = {"schemaVersion": 1, "baseTimeNanoseconds": 17, "traceEvents": events}
    text = json.dumps({**head, "traceName": f"{tmp_path}/a]b.json"}, indent=1)
    raw.write_text(text[: len(text) - cut], encoding="utf-8")
    return raw


def converted(tmp_path: Path, events: list[dict[str, Any]]) -> tuple[dict[str, Any], Parts]:
    target = tmp_path / "new.json.gz"
    parts = convert(written(tmp_path, events), target, PID, 3, "rank 3 (node1, cuda:1, pp 1)")
    with gzip.open(target, "rt", encoding="utf-8") as file:
        return json.load(file), parts


EVENTS = [
    {"ph": "M", "name": "process_name", "ts": 0, "pid": PID, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "ts": 0, "pid": PID, "tid": THREAD, "args": {"name": "t"}},
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 7, "tid": 0, "args": {"name": "python"}},
    span("PyTorch Profiler (0)", 0, 2000, pid="Spans", tid="PyTorch Profiler", cat="Trace"),
    span("step 4", 0, 1000),
    span("backward", 100, 800),
    span(MARK + "blocks.1 backward", 200, 1),
    span("all_gather blocks.1 (backward, shard)", 210, 40),
    span(MARK, 400, 1),
    span(MARK + "blocks.0 backward", 500, 1),
    span("update blocks.0", 0, 500, tid=99),
    span("aten::mm", 300, 20, cat="cpu_op"),
    span("sgemm", 350, 30, cat="kernel", pid=0, tid=7),
    span("backward", 340, 60, cat="gpu_user_annotation", pid=0, tid=7),
]


def test_a_process_says_which_rank_it_is(tmp_path: Path) -> None:
    trace, _ = converted(tmp_path, EVENTS)
    assert (trace["rank"], trace["baseTimeNanoseconds"]) == (3, 17)
    assert "traceName" not in trace
    events = trace["traceEvents"]
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    name = "rank 3 (node1, cuda:1, pp 1)"
    assert named == {3: name, 3 + GPU_PIDS: f"{name}: kernels"}  # and no GPU that did nothing
    assert {each["pid"] for each in events} == {3, 3 + GPU_PIDS}


def test_marks_become_a_track_of_blocks(tmp_path: Path) -> None:
    trace, _ = converted(tmp_path, EVENTS)
    blocks = [
        (each["name"], each["ts"], each["dur"])
        for each in trace["traceEvents"]
        if each["tid"] == THREAD + BLOCK_TIDS and each["ph"] == "X"
    ]
    assert blocks == [("blocks.1 backward", 200, 200), ("blocks.0 backward", 500, 400)]
    assert not any(each["name"].startswith(MARK) for each in trace["traceEvents"])


def test_parts_are_what_spans_take_by_themselves(tmp_path: Path) -> None:
    """Of 1000 us of a step, 800 are backward, 600 of them of blocks, 40 of these of a gather."""
    _, parts = converted(tmp_path, EVENTS)
    found = {name: (part.self_s, part.calls) for name, part in parts.by_name.items()}
    assert found == {
        "step": (pytest.approx(200e-6), 1),
        "backward": (pytest.approx(200e-6), 1),
        "blocks.1 backward": (pytest.approx(160e-6), 1),
        "blocks.0 backward": (pytest.approx(400e-6), 1),
        "all_gather blocks.1 (backward, shard)": (pytest.approx(40e-6), 1),
        "update blocks.0 (another thread)": (pytest.approx(500e-6), 1),
    }
    assert parts.steps_s == pytest.approx(1e-3)
    assert parts.by_name["backward"].device_s == pytest.approx(60e-6)
    assert parts.largest(2)[0].name == "backward"  # by the device's time, where that is known


def test_what_differs_in_numbers_alone_is_one_part() -> None:
    parts = Parts()
    names = ["step 1", "step 2", "send activations of micro-batch 0 (forward, pipe)"]
    names += ["send activations of micro-batch 1 (forward, pipe)", "action F0.1", "action B0.1"]
    parts.add([Span(10 * n, 10 * n + 5, name) for n, name in enumerate(names)], on_gpu=False)
    assert {name: part.calls for name, part in parts.by_name.items()} == {
        "step": 2,
        "send activations (forward, pipe)": 2,
        "action": 2,
    }


def test_spans_that_overlap_are_cut() -> None:
    spans = [Span(0, 10, "a"), Span(5, 15, "b"), Span(12, 13, "c")]
    assert {each.name: time for each, time in self_times(spans)} == {"a": 5, "b": 5, "c": 1}


def test_a_block_ends_with_the_backward_around_it() -> None:
    marks = [Span(10, 10, MARK + "x"), Span(30, 30, MARK + "y"), Span(60, 60, MARK)]
    assert blocks_between(marks, [20, 90]) == [Span(10, 20, "x"), Span(30, 60, "y")]
    assert blocks_between(marks[:1], []) == [Span(10, 10, "x")]  # as where a backward has raised


@pytest.mark.parametrize("cut", [60, 400])
def test_a_trace_that_was_cut_short_is_none(tmp_path: Path, cut: int) -> None:
    """The disk was full, of which torch's profiler says nothing."""
    raw = written(tmp_path, EVENTS, len(f"{tmp_path}") + cut)
    with pytest.raises(ValueError, match="has left a part of a trace"):
        convert(raw, tmp_path / "new.json.gz", PID, 0, "rank 0")
    raw.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="no trace"):
        convert(raw, tmp_path / "new.json.gz", PID, 0, "rank 0")
