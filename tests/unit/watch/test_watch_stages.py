"""A pipeline on screens, from planted events: what its stages have, do and wait for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from zrun.pages.pipeline import picture
from zrun.watch.panel import panel
from zrun.watch.panel_layout import Facts
from zrun.watch.report import report
from zrun.watch.run_state import RunState, fold
from zrun.watch.stages import stage_rows
from zrun_core.pipeline.grid import Grid, bubble
from zrun_core.spine.events import Event

FACTS = Facts("gpt", "20260102-030405-ab12", ("n01", "n01"))
COLUMN_S = 0.5


def event(kind: str, rank: int, **fields: Any) -> Event:
    return {"type": kind, "time": 1.0, "rank": rank, **fields}


def pipeline(slow: float = 1.0, **memory: Any) -> RunState:
    """Two stages whose step takes as long as the grid says.

    Args:
        slow: seconds of the second stage's work, times those of the first.
        memory: more fields of each rank's event.
    """
    grid = Grid.of("1f1b", stages=2, virtual=1, micro_batches=4)
    state = RunState()
    for stage, row in enumerate(grid.rows):
        blocks = [f"blocks.{2 * stage}", f"blocks.{2 * stage + 1}"]
        facts = {"stage": stage, "stages": 2, "virtual": 1, "schedule": "1f1b", "blocks": blocks}
        state = fold(state, event("stage", stage, **facts, params=1000 * (stage + 1), trainable=0))
        actions = []
        for number, cell in enumerate(row):
            begin = 0 if number == 0 else row[number - 1].end
            waited = cell.start - begin
            times = [COLUMN_S * value for value in (begin, cell.end, waited)]
            actions.append([cell.action.kind.value, cell.action.chunk, cell.action.micro, *times])
        state = fold(state, event("schedule", stage, step=2, stage=stage, actions=actions))
        span = 10.0
        waited_s = 5.0 if stage == 0 else span - 5.0 * slow
        use = {"stage": stage, "span_s": span, "waited_s": waited_s, "in_flight": 2 - stage}
        state = fold(state, event("memory", stage, step=2, pipeline=use, **memory))
    return state


def test_each_stage_is_told_with_its_share_and_the_bubble_beside_theory():
    rows = dict(stage_rows(pipeline()))
    what = "2 blocks (blocks.0 to blocks.1), 1.0k parameters, busy 50%, 2 in flight"
    assert rows["stage 0"] == what
    assert rows["stage 1"].endswith("busy 50%, 1 in flight")
    share = f"{bubble('1f1b', 2, 1, 4):.0%}"
    told = f"stages were idle for {share} of step 2 (replayed {share}, with equal stages {share})"
    assert rows["bubble"] == told
    assert "slow stage" not in rows


def test_nearly_equal_stages_are_not_called_slow():
    for slow in (1.3, 0.8):
        assert "slow stage" not in dict(stage_rows(pipeline(slow=slow)))


def test_a_slow_stage_is_named_with_the_key_that_cuts_the_model():
    rows = dict(stage_rows(pipeline(slow=1.9)))
    assert rows["slow stage"].startswith("stage 1 computes 31% longer than the mean")
    assert "parallel.split" in rows["slow stage"]


def test_a_gpus_stages_are_told_as_a_cpus():
    assert stage_rows(pipeline(slow=1.9, device_allocated=1 << 20)) == stage_rows(pipeline(1.9))


def test_the_page_draws_each_recorded_action_in_the_row_of_its_stage():
    text = picture(pipeline())
    (drawn,) = re.findall(r'<svg[^>]*aria-label="Step 2 by stage".*?</svg>', text)
    boxes = [
        (box.attrib["y"], float(box.attrib["x"]))
        for box in ElementTree.fromstring(drawn).iter("rect")
    ]
    rows = [[x for y, x in boxes if y == row] for row in dict.fromkeys(y for y, _ in boxes)]
    assert [len(row) for row in rows] == [8, 8]
    assert all(row == sorted(row) for row in rows)
    assert rows[1][0] > rows[0][0], "the second stage waits for the first activations"


def test_the_report_and_the_panel_have_rows_of_stages_only_where_there_are_some():
    for state, there in ((pipeline(), True), (RunState(), False)):
        assert ("bubble" in report(state, Path("run"))) is there
        lines = panel(state, FACTS, 100).renderable
        assert ("blocks.0 to blocks.1" in str([str(line) for line in lines.renderables])) is there


def test_an_unfinished_record_has_no_picture():
    state = pipeline()
    later = {**state.schedules[1], "step": 4}
    rows = dict(stage_rows(fold(state, later)))
    assert "bubble" not in rows
    assert picture(fold(state, later)) == ""
