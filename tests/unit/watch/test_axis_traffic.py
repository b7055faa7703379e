"""Bytes along each axis beside theory: on the page of a run, in its last lines, in a comparison."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_report_page import FACTS, MIB, drawn, event, recorded, start, step

from zrun.pages.traffic_tables import traffic
from zrun.watch.axis_traffic import borders_of, sent_rows, theory_along
from zrun.watch.compared import read_compared
from zrun.watch.comparison import rows
from zrun.watch.report import report_rows
from zrun.watch.run_record import read_record
from zrun_core.distributed.comm import CommPhase, TrafficKey
from zrun_core.spine.events import Event
from zrun_core.telemetry.sent_bytes import SentBytes

SENT = {
    "all_gather": {"measured_bytes": 12 * MIB, "expected_bytes": 12 * MIB},
    "tensor": {
        "measured_bytes": 9 * MIB,
        "by_kind": {"all_reduce": 5 * MIB, "all_gather": 4 * MIB},
    },
    "pipe": {"measured_bytes": 6 * MIB, "by_kind": {"activations": 6 * MIB}},
}
FORETOLD: dict[str, Any] = {
    "sent": {
        "tensor": {"all_reduce": MIB, "all_gather": 2 * MIB},
        "pipe": {"activations": 2 * MIB},
    },
    "stages_sent": [
        {"activations": MIB // 2, "gradients": 0},
        {"activations": 0, "gradients": MIB},
    ],
}


def told(number: int, **sent: int) -> list[Event]:
    """What a stage of two tells, whose ranks have made 12 micro-batches."""
    facts = {"virtual": 1, "schedule": "1f1b", "blocks": ["b"], "params": 1, "trainable": 1}
    stage = event("stage", rank=number, stage=number, stages=2, **facts)
    handed_on = {"stage": number, **sent, "micro_batches": 12}
    return [stage, event("memory", rank=number, step=3, params=MIB, pipe_sent=handed_on)]


def run_of(predicted: dict[str, Any] | None = None, **fields: Any) -> list[Event]:
    """Three steps of a launch that went on after step 4."""
    first, second = told(0, activations=6 * MIB), told(1, gradients=9 * MIB)
    events = [first[0], second[0], start(world_size=2, resumed={"step": 4})]
    events += [*(step(n) for n in (5, 6, 7)), first[1], second[1]]
    if predicted is not None:
        events.append(event("estimate", step=7, predicted=predicted, measured={}))
    end = {"reason": "steps", "total_s": 1.0, "traffic": SENT, **fields}
    return [*events, event("end", step=7, **end)]


def table_rows(text: str) -> list[list[str]]:
    return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]


def test_each_axis_stands_beside_its_theory(tmp_path: Path) -> None:
    text = drawn(tmp_path, *run_of(FORETOLD))
    part = text[text.index("Sent along each axis") : text.index("Launches</h2>")]
    found = table_rows(part)
    assert [row for row in found if len(row) == 5] == [
        ["data", "all_gather", "12.0 MiB", "12.0 MiB", "none"],
        ["tensor", "all_reduce", "3.0 MiB", "5.0 MiB", "+66.67%"],
        ["tensor", "all_gather", "6.0 MiB", "4.0 MiB", "-33.33%"],
        ["pipe", "activations", "6.0 MiB", "6.0 MiB", "none"],
    ]
    assert [row for row in found if len(row) == 6] == [
        ["stage 0", "stage 1", "activations", "512.0 KiB", "512.0 KiB", "none"],
        ["stage 1", "stage 0", "gradients", "1.0 MiB", "768.0 KiB", "-25.00%"],
    ]
    assert "The plan predicts nothing" not in part
    said = dict(report_rows(read_record(tmp_path).state))
    assert said["pipe"] == "6.0 MiB sent by rank 0 in this attempt, equal to theory"
    assert said["tensor"] == "9.0 MiB sent by rank 0 in this attempt, equal to theory"


@pytest.mark.parametrize("predicted", [None, {"peak_bytes": 1}])
def test_what_no_plan_tells_is_measured_alone_and_said_so(
    tmp_path: Path, predicted: dict[str, Any] | None
) -> None:
    text = drawn(tmp_path, *run_of(predicted))
    assert "The plan predicts nothing along pipe and tensor: those bytes are measured only" in text
    assert ("zrun estimate makes one" in text) == (predicted is None)
    found = table_rows(text[text.index("Sent along each axis") :])
    assert ["tensor", "all_reduce", "-", "5.0 MiB", "-"] in found
    assert ["stage 1", "stage 0", "gradients", "-", "768.0 KiB", "-"] in found
    state = read_record(tmp_path).state
    assert theory_along(state, "tensor") is None
    assert dict(report_rows(state))["tensor"] == "9.0 MiB sent by rank 0 in this attempt"


def test_theory_of_ragged_samples_is_of_the_longest(tmp_path: Path) -> None:
    text = drawn(tmp_path, *run_of(FORETOLD | {"is_bound": True}))
    assert "Samples differ in size: along tensor and pipe theory is of the longest." in text


def test_what_a_plan_foretold_and_nobody_sent_is_shown(tmp_path: Path) -> None:
    sent = {"tensor": {"measured_bytes": MIB, "by_kind": {"all_reduce": MIB}}}
    recorded(tmp_path, run_of(FORETOLD, traffic=sent))
    assert [tuple(row) for row in sent_rows(read_record(tmp_path).state)] == [
        ("tensor", "all_reduce", 3 * MIB, MIB),
        ("tensor", "all_gather", 6 * MIB, 0),
    ]


def test_a_run_of_an_earlier_version_has_its_sum(tmp_path: Path) -> None:
    recorded(tmp_path, run_of(FORETOLD, traffic={"tensor": {"measured_bytes": 9 * MIB}}))
    (row,) = sent_rows(read_record(tmp_path).state)
    assert tuple(row) == ("tensor", "all", 9 * MIB, 9 * MIB)


def test_a_run_that_goes_on_has_its_borders_already(tmp_path: Path) -> None:
    text = drawn(tmp_path, *run_of(FORETOLD)[:-1])
    assert "once it ends" not in text, "no step has told what it sent"
    found = table_rows(text[text.index("Sent along each axis") :])
    assert ["stage 0", "stage 1", "activations", "512.0 KiB", "512.0 KiB", "none"] in found


def test_without_anything_sent_there_is_no_such_part(tmp_path: Path) -> None:
    recorded(tmp_path, [start(), step(1)])
    assert traffic(read_record(tmp_path).state) == ""


def test_stages_with_several_chunks_hand_on_around_the_ring() -> None:
    found = [
        [(row.to, row.what, row.borders) for row in borders_of(stage, 3, 2, {}, {})]
        for stage in range(3)
    ]
    assert found == [
        [(1, "activations", 2), (2, "gradients", 1)],
        [(2, "activations", 2), (0, "gradients", 2)],
        [(0, "activations", 1), (1, "gradients", 2)],
    ]
    crossed = sum(borders for rows in found for _, what, borders in rows if what == "activations")
    assert crossed == 3 * 2 - 1, "each border of six chunks once"


def test_runs_are_compared_by_axis_and_step(tmp_path: Path) -> None:
    paths = []
    for name, scale in (("a", 1), ("b", 2)):
        sent = {"pipe": {"measured_bytes": 6 * MIB * scale}, "all_gather": SENT["all_gather"]}
        (tmp_path / name).mkdir()
        recorded(tmp_path / name, run_of(traffic=sent))
        paths.append(tmp_path / name)
    (tmp_path / "c").mkdir()
    recorded(tmp_path / "c", run_of()[:-1])  # it has not come to its end
    values = {row.name: list(row.values) for row in rows(read_compared([*paths, tmp_path / "c"]))}
    assert values["sent along pipe, a step"] == [2 * MIB, 4 * MIB, None]
    assert values["sent along data, a step"] == [4 * MIB, 4 * MIB, None]
    assert "sent along tensor, a step" not in values


def test_a_rank_tells_apart_what_follows_from_layouts() -> None:
    sent = SentBytes()
    keys = [
        ("send", "pipe"),
        ("send", "pipe_back"),
        ("all_reduce", "tensor"),
        ("all_reduce", "data"),
    ]
    for number in (1, 2):
        told_keys = {
            TrafficKey(*key, CommPhase.FORWARD): 10**place for place, key in enumerate(keys)
        }
        sent.add({key: number * size for key, size in told_keys.items()}, 4)
    assert sent.beside({"all_reduce": 7}) == {
        "all_reduce": {"measured_bytes": 3000, "expected_bytes": 7},
        "tensor": {"measured_bytes": 300, "by_kind": {"all_reduce": 300}},
        "pipe": {"measured_bytes": 33, "by_kind": {"activations": 3, "gradients": 30}},
    }
    assert sent.to_other_stages() == {"activations": 3, "gradients": 30, "micro_batches": 8}
    assert SentBytes().beside({}) == {}


def test_the_page_has_none_of_it_without_ranks_that_send(tmp_path: Path) -> None:
    assert "Sent along each axis" not in drawn(tmp_path, start(), step(1), facts=FACTS)
