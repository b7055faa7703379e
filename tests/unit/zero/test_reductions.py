"""Reductions under way: on an accelerator the stream that computes waits for none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zrun_core.distributed.handle import Handle
from zrun_core.memory.arena import Ring
from zrun_core.zero.reduce import reductions
from zrun_core.zero.reduce.reductions import KEPT, Reduction, Reductions

CPU = torch.device("cpu")


class Device:
    """An accelerator that only notes which stream was given what."""

    def __init__(self) -> None:
        self.stream = "compute"
        self.given: list[str] = []

    def give(self, what: str) -> None:
        self.given.append(f"{self.stream}: {what}")

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def event(self, device: torch.device) -> Any:
        return Message(self, f"what {self.stream} was given", is_over=False)


class Message:
    """A work whose end a stream waits for."""

    def __init__(self, device: Device, name: str, *, is_over: bool) -> None:
        self._device = device
        self._name = name
        self._is_over = is_over

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        self._device.give(f"wait for {self._name}")

    def wait_on_host(self) -> None:
        raise AssertionError("the host waits for nothing here")


class Waiter:
    """The part of `Comm` that a handle needs: on NCCL nobody sees what has arrived."""

    in_words = None

    def wait_for(self, works: Sequence[Any], issued: object = None) -> None:
        for work in works:
            work.wait()

    def observes_completion(self, group: Any) -> bool:
        return False

    def follow(self, handle: Handle) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    fake = SimpleNamespace(
        is_accelerator=lambda device: True,
        new_stream=lambda device: "side",
        on_stream=made.on_stream,
        Event=made.event,
    )
    monkeypatch.setattr(reductions, "accelerator", fake)
    return made


def unit() -> Any:
    return SimpleNamespace(grad=SimpleNamespace(put=lambda: None))


def hybrid(device: Device, name: str, *, is_over: bool = False) -> Handle:
    """A reduce-scatter, a sum, and an all-reduce that all ranks start in one order."""

    def message(kind: str) -> Message:
        return Message(device, f"{kind} {name}", is_over=is_over)

    def all_reduce() -> Handle:
        device.give(f"begin all-reduce {name}")
        return Handle(Waiter(), [message("all-reduce")])

    def add() -> None:
        device.give(f"add {name}")

    device.give(f"begin scatter {name}")
    group: Any = None
    return Handle(Waiter(), [message("scatter")], add).then(all_reduce, group)


def issue(under_way: Reductions, handle: Callable[[], Handle]) -> None:
    under_way.advance()
    under_way.add(Reduction(unit(), handle(), KEPT, []))


def test_the_stream_that_computes_waits_for_nothing_before_the_end(device: Device) -> None:
    under_way = Reductions(Ring(0, CPU), torch.float32)
    for name in "CBA":
        device.give(f"backward of {name}")
        issue(under_way, lambda name=name: hybrid(device, name))
    assert device.given == [
        "compute: backward of C",
        "compute: begin scatter C",
        "compute: backward of B",
        "side: wait for scatter C",
        "side: add C",
        "side: begin all-reduce C",
        "compute: begin scatter B",
        "compute: backward of A",
        "side: wait for scatter B",
        "side: add B",
        "side: begin all-reduce B",
        "compute: begin scatter A",
    ]
    device.given.clear()
    under_way.drain()
    assert device.given == [
        "compute: wait for what side was given",
        "compute: wait for all-reduce C",
        "compute: wait for what side was given",
        "compute: wait for all-reduce B",
        "compute: wait for scatter A",
        "compute: add A",
        "compute: begin all-reduce A",
        "compute: wait for all-reduce A",
    ]


def test_what_the_side_stream_has_ended_is_waited_for_too(device: Device) -> None:
    under_way = Reductions(Ring(0, CPU), torch.float32)
    issue(under_way, lambda: hybrid(device, "B", is_over=True))
    under_way.advance()
    assert device.given[-1] == "side: wait for all-reduce B"
    under_way.drain()
    assert device.given[-1] == "compute: wait for what side was given"


def test_a_cpu_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    under_way = Reductions(Ring(0, CPU), torch.float32)
    for name in "BA":
        issue(under_way, lambda name=name: hybrid(device, name))
    under_way.drain()
    assert not any(each.startswith("side") for each in device.given)
    assert "compute: wait for what compute was given" not in device.given
