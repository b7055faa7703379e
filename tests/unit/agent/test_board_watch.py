"""The agent's watch over GPUs, with a monitor that does what a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zrun.agent import board_watch
from zrun.agent.board_watch import BoardWatch
from zrun.topology.boards import POWER_CAP, Fault, Health
from zrun.topology.xids import fault_of

GPUS = {2: ("GPU-a", "rank 2 (n1, cuda:0)"), 3: ("GPU-b", "rank 3 (n1, cuda:1)")}
PATIENCE_S = 30.0  # only bounds a failure


class Uplink:
    """Keeps what is sent up."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.is_full = False

    def send(self, frame: dict[str, Any]) -> None:
        self.frames.append(frame)

    def send_events(self, events: list[dict[str, Any]]) -> None:
        self.events += events


class Monitor:
    """Reports what it is given, once."""

    def __init__(self) -> None:
        self.reported: list[Fault] = []
        self.counted: list[Fault] = []
        self.sensed: dict[str, Health] = {}
        self.is_stuck = threading.Event()
        self.goes_on = threading.Event()

    def faults(self, patience_s: float) -> list[Fault]:
        if self.is_stuck.is_set():
            self.goes_on.wait(PATIENCE_S)
        time.sleep(0.01)
        found, self.reported = self.reported, []
        return found

    def changes(self) -> list[Fault]:
        found, self.counted = self.counted, []
        return found

    def health(self) -> dict[str, Health]:
        return self.sensed


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BoardWatch, Monitor, Uplink]]:
    monkeypatch.setattr(board_watch, "_LOOK_S", 0.02)
    monkeypatch.setattr(board_watch, "_TELL_S", 0.0)
    monitor, uplink = Monitor(), Uplink()

    @contextmanager
    def opened(uuids: frozenset[str]) -> Iterator[Monitor]:
        assert uuids == {"GPU-a", "GPU-b"}
        yield monitor

    watch = BoardWatch(GPUS, uplink, opened)  # type: ignore[arg-type]
    yield watch, monitor, uplink
    monitor.goes_on.set()
    watch.close()


def fault(uuid: str, xid: int) -> Fault:
    found = fault_of(uuid, xid)
    assert found is not None
    return found


def warnings(uplink: Uplink) -> list[str]:
    return [event["message"] for event in uplink.events if event["type"] == "warning"]


def test_what_was_reported_is_told_by_the_time_a_rank_s_end_is(watch: Any) -> None:
    watching, monitor, uplink = watch
    monitor.reported = [fault("GPU-b", 31)]
    monitor.counted = [Fault("GPU-a", None, "an error", "look", is_fatal=False)]
    watching.catch_up(PATIENCE_S)
    assert [(frame["ranks"], frame["fault"]["xid"]) for frame in uplink.frames] == [
        ([3], 31),
        ([2], None),
    ]
    assert watching.doomed() == {}
    assert warnings(uplink)[1] == "rank 2 (n1, cuda:0): its GPU GPU-a reports an error: look"


def test_a_rank_has_a_moment_to_end_by_itself(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watching, monitor, _ = watch
    monitor.reported = [fault("GPU-b", 79), fault("GPU-b", 95)]
    watching.catch_up(PATIENCE_S)
    assert watching.doomed() == {}
    monkeypatch.setattr(board_watch, "_OWN_WORDS_S", -1.0)
    assert {rank: each.xid for rank, each in watching.doomed().items()} == {3: 79}


def test_a_library_that_stands_still_holds_nobody_up(watch: Any) -> None:
    watching, monitor, _ = watch
    monitor.is_stuck.set()
    watching.catch_up(0.05)
    watching.close()  # returns too, although the thread does not end
    assert not monitor.goes_on.is_set()


def test_heat_is_told_once_and_a_power_limit_never(watch: Any) -> None:
    watching, monitor, uplink = watch
    hot = Health(
        temperature_c=92, slowed=("it is too hot", POWER_CAP), corrected=3, remap="pending"
    )
    monitor.sensed = {"GPU-a": hot, "GPU-b": Health(slowed=(POWER_CAP,))}
    for _ in range(4):
        watching.catch_up(PATIENCE_S)
    assert warnings(uplink) == [
        "rank 2 (n1, cuda:0): its GPU is slowed down at 92 degrees: it is too hot"
    ]
    told = next(event for event in uplink.events if event["type"] == "gpus")
    assert (told["rank"], [each["rank"] for each in told["gpus"]]) == (2, [2, 3])
    assert told["gpus"][0]["slowed"] == ["it is too hot", POWER_CAP]
    errors = [told["gpus"][0][name] for name in ("corrected", "uncorrected", "remap")]
    assert errors == [3, None, "pending"]


def test_without_a_driver_there_is_nothing_to_wait_for() -> None:
    @contextmanager
    def nothing(uuids: frozenset[str]) -> Iterator[None]:
        yield None

    watching = BoardWatch(GPUS, Uplink(), nothing)  # type: ignore[arg-type]
    watching.catch_up(PATIENCE_S)
    assert watching.doomed() == {}
    watching.close()
