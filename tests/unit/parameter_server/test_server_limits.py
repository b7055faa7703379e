"""How long ranks wait around a parameter server: each longer than what it waits for may last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from zrun_core.distributed.line import NO_LIMIT
from zrun_core.distributed.transport import Group
from zrun_core.parameter_server import server as server_module
from zrun_core.parameter_server.messages import OVER, Push
from zrun_core.parameter_server.server import Client, Server, WindowPlan

PUSH = Push(0, 0, 0.0, 1, 0.0, False, b"")  # of weight 0: nothing is updated


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """Record the limits of process groups in place of making them."""
    found: list[timedelta] = []

    def with_limit(group: Group, limit: timedelta) -> Group:
        found.append(limit)
        return group

    monkeypatch.setattr(server_module, "with_limit", with_limit)
    return found


class Memory:
    """Of no units."""

    num_params = 0

    def take_room(self, _number: int) -> list[Any]:
        return [[]]


class Waits:
    """Counts nothing."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        yield


def a_server(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Serve two ranks; the other one's thread does nothing, and a test answers in its place."""
    monkeypatch.setattr(Server, "_serve", lambda *_: None)
    comm: Any = SimpleNamespace(tell_waiting=lambda _: None, count=lambda _: None, waits=Waits())
    memory: Any = Memory()
    return Server(memory, Group("all", (0, 1), 0, None), comm, 1, 2, limit_s)


class SlowestClock:
    """A condition whose every wait lasts as long as it may, and then finds what it waited for."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []
        self.on_wait: list[Callable[[], None]] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        if not condition():
            self.waited_s.append(timeout)
            self.on_wait.pop(0)()
        return condition()


@pytest.mark.parametrize("limit_s", [1.0, 600.0, 1e6])
def test_a_rank_waits_for_as_long_as_the_server_may_take_to_answer(
    limits: list[timedelta], monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    server = a_server(limit_s, monkeypatch)
    server.begin(WindowPlan([2, 2], lambda _: 0.1))
    shares = server._shares
    clock = SlowestClock()
    server._changed = clock  # type: ignore[assignment]

    def answer(rank: int) -> Any:
        return server._answer(rank, PUSH, [], lambda: None, nullcontext)

    assert answer(1).step == 1

    def slow_rank_pushes() -> None:
        shares.push(0)
        shares.take(0)

    # Of the fast rank's second push: it is beyond the bound; then the slow one has the last share.
    clock.on_wait = [slow_rank_pushes, lambda: shares.push(0)]
    assert answer(1).step == OVER
    assert clock.waited_s == [limit_s, limit_s]

    memory: Any = Memory()
    comm: Any = None
    Client(memory, Group("all", (0, 1), 1, None), comm, limit_s)
    assert limits[-1].total_seconds() > sum(clock.waited_s)


def test_a_limit_beyond_all_clocks_is_no_trouble(
    limits: list[timedelta], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: Any = Memory()
    comm: Any = None
    Client(memory, Group("all", (0, 1), 1, None), comm, float("inf"))
    assert limits[-1] == NO_LIMIT
    server = a_server(2 * threading.TIMEOUT_MAX, monkeypatch)
    server.begin(WindowPlan([2], lambda _: 0.1))
    assert server.end().made == []
