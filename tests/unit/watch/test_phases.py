"""What the run is waiting for, and when that is worth a word."""

from __future__ import annotations

import io
from typing import Any

import pytest

from zrun.watch.phases import PhaseWatch
from zrun.watch.plain import Plain
from zrun.watch.run_state import RunState
from zrun_core.spine.flight_page import PHASES, RankProgress


def state(phase: str, step: int = 0, *, waiting: bool = False, first: int = 1) -> RankProgress:
    return RankProgress(step, waiting, 0, 1, phase, 1, first if step else 0)


def told(watch: PhaseWatch, start: float, seconds: float, *ranks: RankProgress) -> list[str]:
    """What is told while the ranks are in these states."""
    lines = []
    turns = int(seconds * 2)
    for turn in range(turns):
        watch.see(start + turn / 2, dict(enumerate(ranks)))
        if (event := watch.news()) is not None:
            lines.append(f"{event['what']} {event['seconds']:g}")
    return lines


def what(*ranks: RankProgress, compiles: bool = False) -> str:
    watch = PhaseWatch(compiles=compiles)
    watch.see(0.0, dict(enumerate(ranks)))
    assert watch.doing is not None
    return watch.doing.what


def test_each_phase_has_words_and_the_rank_that_is_behind_is_named() -> None:
    assert len({what(state(phase, 3)) for phase in PHASES}) == len(PHASES) - 2  # a step is one
    assert what(state("build"), state("build")) == "building the model"
    assert what(state("data"), state("build")) == "building the model (rank 1)"
    assert what(state("load"), state("build"), state("build"), state("data")) == (
        "building the model (2 of 4 ranks)"
    )
    assert what(state("forward", 7, waiting=True), state("data", 7)) == "reading data (rank 1)"
    assert (
        what(state("evaluation", 7, waiting=True), state("evaluation", 7, waiting=True))
        == "evaluating"
    )
    assert what(state("backward", 12)) == "step 12"
    assert what(state("forward", 12, first=12)) == "first step"
    assert what(state("forward", 1), compiles=True) == "first step, which compiles the model"


def test_a_long_phase_is_told_and_told_again_when_it_has_doubled() -> None:
    watch = PhaseWatch()
    assert told(watch, 0, 4, state("start")) == []
    assert told(watch, 4, 45, state("build")) == [
        f"building the model {seconds}" for seconds in (5, 10, 20, 40)
    ]
    assert told(watch, 49, 6, state("data")) == ["reading data 5"]


def test_what_is_as_slow_as_always_is_not_told() -> None:
    watch = PhaseWatch()
    now, lines = 0.0, []
    for step in range(1, 6):
        lines.append(told(watch, now, 8, state("forward", step)))
        lines.append(told(watch, now + 8, 20, state("evaluation", step)))
        now += 28
    assert lines[:4] == [["first step 5"], ["evaluating 5", "evaluating 10"], ["step 2 5"], []]
    assert lines[4:] == [[]] * 6
    assert told(watch, now, 13, state("forward", 6)) == ["step 6 11.5"]


@pytest.mark.parametrize(("phase", "is_long"), [("forward", False), ("evaluation", True)])
def test_the_panel_shows_what_is_not_part_of_every_step(phase: str, is_long: bool) -> None:
    watch = PhaseWatch()
    told(watch, 0, 4, state(phase, 2))
    told(watch, 4, 1, state("hook", 2))
    told(watch, 5, 4, state(phase, 3))
    assert watch.doing is not None
    assert watch.doing.seconds == 3.5
    assert watch.doing.is_long == is_long


def test_nothing_is_done_where_no_rank_runs() -> None:
    watch = PhaseWatch()
    assert watch.news() is None
    told(watch, 0, 9, state("end", 3))
    watch.see(10.0, {})
    assert watch.doing is None
    assert watch.news() is None


def test_plain_output_has_a_line() -> None:
    watch, out = PhaseWatch(), io.StringIO()
    watch.see(0.0, {0: state("build")})
    watch.see(65.0, {0: state("build")})
    event: Any = watch.news()
    Plain(out, 10).show(RunState(), event)
    assert out.getvalue() == "building the model: 1m05s so far\n"
