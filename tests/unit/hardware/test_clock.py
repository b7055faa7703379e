"""Times on a device's own clock. The device here is a fake: a stream whose time the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zrun_core.distributed.comm import Comm
from zrun_core.hardware import accelerator, clock
from zrun_core.hardware.clock import Unpassed, Waits, mark, seconds_between
from zrun_core.memory.buffers import Tier
from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.telemetry.metrics import StepClock, StepPhase
from zrun_core.telemetry.stage_fields import ActionMarks, StageUse, action_times
from zrun_core.tiers.tiers import TierCounts

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Stream:
    """What the host has queued, in seconds of the device, and how far the device has come."""

    device = GPU

    def __init__(self) -> None:
        self.queued = 0.0
        self.passed = 0.0

    def compute(self, seconds: float) -> None:
        self.queued += seconds


class Event:
    """As torch's: it has a time once the stream has passed it."""

    made = 0
    host_waits = 0

    def __init__(self, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking
        Event.made += 1

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.queued

    def query(self) -> bool:
        return self.at <= self.stream.passed

    def synchronize(self) -> None:
        if not self.query():
            Event.host_waits += 1
            self.stream.passed = self.at

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query()
        return 1e3 * (later.at - self.at)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    accelerator._spare_events.clear()
    Event.made = Event.host_waits = 0
    yield made
    accelerator._spare_events.clear()


class Work:
    """A collective that keeps the stream waiting; the host goes on at once."""

    def __init__(self, stream: Stream, seconds: float) -> None:
        self.wait = lambda: stream.compute(seconds)

    def is_completed(self) -> bool:
        return False


def test_the_time_between_marks_is_the_streams(stream: Stream) -> None:
    begin = mark(GPU)
    stream.compute(3.0)
    end = mark(GPU)
    stream.passed = stream.queued
    assert seconds_between(begin, end) == pytest.approx(3.0)
    assert Event.host_waits == 0


def test_on_a_cpu_a_mark_is_the_hosts_time() -> None:
    begin = mark(CPU)
    end = mark(CPU)
    assert isinstance(begin, float)
    assert seconds_between(begin, end) == end - begin >= 0


def test_marks_of_two_devices_are_refused(stream: Stream) -> None:
    with pytest.raises(AssertionError, match="another device"):
        seconds_between(mark(CPU), mark(GPU))


def test_what_a_stream_waits_for_is_known_once_it_has_passed(stream: Stream) -> None:
    waits = Waits(GPU)
    for seconds in (1.0, 2.0):
        stream.compute(10.0)
        with waits.counting():
            stream.compute(seconds)
    stream.passed = stream.queued
    assert waits.seconds() == pytest.approx(3.0)
    assert waits.seconds() == pytest.approx(3.0)
    assert Event.host_waits == 0


def test_what_is_taken_is_counted_once(stream: Stream) -> None:
    waits, total = Waits(GPU), Waits(GPU)
    for seconds in (1.0, 2.0):
        with waits.counting():
            stream.compute(seconds)
        total += waits.take()
    assert waits.seconds() == 0
    stream.passed = stream.queued
    assert total.seconds() == pytest.approx(3.0)


def test_a_wait_that_fails_asks_the_device_for_nothing(stream: Stream) -> None:
    waits = Waits(GPU)

    def lose() -> None:
        with waits.counting():
            Event.made = 0
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose()
    assert Event.made == 0
    assert waits.seconds() == 0


def test_nobody_reads_and_no_more_events_are_held_than_the_host_runs_ahead(stream: Stream) -> None:
    waits = Waits(GPU)
    for _ in range(5000):
        with waits.counting():
            stream.compute(0.5)
        stream.passed = max(stream.passed, stream.queued - 10)
    assert Event.made < 200
    assert Event.host_waits == 0
    stream.passed = stream.queued
    assert waits.seconds() == pytest.approx(2500)


def test_events_of_one_step_serve_the_next(stream: Stream) -> None:
    for _ in range(5):
        waits = Waits(GPU)
        for _ in range(10):
            with waits.counting():
                stream.compute(1.0)
        stream.passed = stream.queued
        assert waits.seconds() == pytest.approx(10)
    assert Event.made == 20


def test_spare_events_are_bounded(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_SPARE_EVENTS", 3)
    held = [mark(GPU) for _ in range(10)]
    del held
    assert len(accelerator._spare_events[GPU]) == 3


def test_comm_counts_what_the_stream_waits_for_other_ranks(stream: Stream) -> None:
    comm = Comm(GPU)
    comm.wait_for([Work(stream, 2.0), Work(stream, 0.5)])
    stream.passed = stream.queued
    assert comm.waits.take().seconds() == pytest.approx(2.5)
    assert comm.waits.take().seconds() == 0


def test_waiting_for_ranks_is_taken_out_of_the_phases_of_a_step(stream: Stream) -> None:
    times = StepClock(GPU)
    comm = Comm(GPU)
    waited = {phase: Waits(GPU) for phase in StepPhase}
    with times.during(StepPhase.FORWARD):
        stream.compute(4.0)
        comm.wait_for([Work(stream, 1.0)])
    waited[StepPhase.FORWARD] += comm.waits.take()
    with times.during(StepPhase.BACKWARD):
        stream.compute(6.0)
        comm.wait_for([Work(stream, 3.0)])
    waited[StepPhase.BACKWARD] += comm.waits.take()
    ended = times.restart()
    assert Event.host_waits == 0
    stream.passed = stream.queued
    seconds, split = times.read(ended, waited)
    assert seconds == pytest.approx(14)
    assert split == pytest.approx({"data": 0, "forward": 4, "backward": 6, "comm": 4, "optim": 0})
    assert Event.host_waits == 0


def test_actions_of_a_stage_have_times_of_their_device(stream: Stream) -> None:
    links = Waits(GPU)
    marks = []
    begin = mark(GPU)
    for kind, waits, works in (("F", 2.0, 1.0), ("B", 0.0, 3.0)):
        with links.counting():
            stream.compute(waits)
        stream.compute(works)
        end = mark(GPU)
        marks.append(ActionMarks(Action(ActionKind(kind), 0, 0), begin, end, links.take()))
        begin = end
    stream.passed = stream.queued
    times = action_times(marks)
    assert [tuple(each)[1:] for each in times] == [(0, 3, 2), (3, 6, 0)]
    assert StageUse.of(times)[:2] == (6, 2)
    assert action_times([]) == []


def test_waits_for_tiers_are_the_devices(stream: Stream) -> None:
    counts = TierCounts(GPU)
    with counts.waits[Tier.HOST].counting():
        stream.compute(1.5)
    with counts.lag.counting():
        stream.compute(0.5)
    stream.passed = stream.queued
    assert counts.waited_s == {Tier.HOST: pytest.approx(1.5), Tier.DISK: 0}
    assert counts.lag_s == pytest.approx(0.5)


def test_a_clock_of_the_host_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    waits = Waits(CPU)
    with waits.counting():
        pass
    assert waits.seconds() == 2.0


def test_a_device_is_in_the_first_stretch_that_it_has_not_passed(stream) -> None:
    unpassed = Unpassed()
    waits = Waits(GPU, unpassed)
    for _ in range(2):
        stream.compute(1.0)
        with waits.counting():
            stream.compute(2.0)
    found = []
    for at in (0.5, 1.5, 3.5, 4.0, 6.0):
        stream.passed = at
        found.append(unpassed.current())
    assert [each is not None for each in found] == [False, True, False, True, False]
    assert found[1] is not found[3]
    cpu = Unpassed()
    with Waits(CPU, cpu).counting():
        pass
    assert cpu.current() is None


def test_stretches_that_nobody_looks_at_are_forgotten(stream) -> None:
    unpassed = Unpassed()
    made = Event.made
    for _ in range(3):
        waits = Waits(GPU, unpassed)
        for _ in range(1000):
            with waits.counting():
                stream.compute(1.0)
        stream.passed = stream.queued
        waits.seconds()
    assert Event.made - made < 2 * 2100
