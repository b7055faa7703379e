"""Checks before the first step that were left out or overruled are told for as long as they are."""

from __future__ import annotations

from zrun.watch.checks_left_out import checks_left_out
from zrun.watch.report import report_rows
from zrun.watch.run_state import RunState
from zrun_core.train.value_check import TRUST, not_compared

TOLD = f"{TRUST}: with parallel.tp 2 blocks.2 is another than in the whole model (0.07), and trains"


def test_notes_of_checks_are_told_from_others() -> None:
    without = not_compared("guards.check_values is false")
    gradients = not_compared("some are not finite", "its gradients are ")
    start = {"type": "start", "notes": ["slow format", TOLD, without, gradients]}
    assert checks_left_out(start) == [TOLD, without, gradients]
    assert checks_left_out({"type": "start"}) == []
    assert checks_left_out(None) == []


def test_the_report_tells_them() -> None:
    state = RunState(start={"type": "start", "notes": ["slow format", TOLD]})
    assert ("checks", TOLD) in report_rows(state)
    assert "checks" not in dict(report_rows(RunState(start={"type": "start"})))
