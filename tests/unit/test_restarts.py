"""Which failures are tried again, how often, and after how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from zrun.launch.failures import Exit, Failure, Hang, LostHost, Note
from zrun.launch.restarts import Restarts
from zrun_core.spec import LaunchPlan, RankPlace

PLACE = RankPlace(rank=0, host="node", local_rank=0, device="cpu")
LOST = LostHost("node", "node: the connection broke", 12)


def failure(status: int, kind: str | None = None, message: str = "boom") -> Failure:
    note = None
    if kind is not None:
        note = Note.model_validate({"rank": 0, "kind": kind, "type": "E", "message": message, "exit_code": 5})
    return Failure(Exit(0, status, 1.0, note=note), PLACE, num_ranks=1, last_step=12, log=Path("log"))


@pytest.mark.parametrize(
    ("what", "is_tried"),
    [
        (LOST, True),
        (Hang({}, LaunchPlan(ranks=[PLACE]), Path("run")), True),
        (failure(-9), True),
        (failure(139), True),
        (failure(5, "peer"), True),
        (failure(5, "user"), False),
        (failure(7, "zrun"), False),
        (failure(5, "bug"), False),
        (failure(3), False),
        (None, False),
    ],
)
def test_only_accidents_are_tried_again(what: Failure | Hang | LostHost | None, is_tried: bool) -> None:
    assert (Restarts(1).after(what, 0) is not None) == is_tried


def test_the_pauses_grow_and_the_budget_ends() -> None:
    restarts = Restarts(5)
    assert [restarts.after(LOST, committed) for committed in range(6)] == [5.0, 10.0, 20.0, 20.0, 20.0, None]
    assert restarts.made == 5


def test_a_restart_that_saved_nothing_counts_twice() -> None:
    restarts = Restarts(4)
    assert [restarts.after(LOST, 10) for _ in range(3)] == [5.0, 10.0, None]
    assert Restarts(0).after(LOST, 10) is None
