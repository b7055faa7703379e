"""Whatever training waits for beside its device is on its page, and timed once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from zrun_core.memory.arena import byte_buffer
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.state_policy import SlotSizes
from zrun_core.spine.flight_recorder import FlightRecorder
from zrun_core.tiers.tiers import Tiers

MIB = 1 << 20


@pytest.fixture
def board(tmp_path: Path) -> FlightRecorder:
    return FlightRecorder(tmp_path / "board", 0, range(1), 1)


@pytest.fixture
def tiers(tmp_path: Path, board: FlightRecorder) -> Tiers:
    buffers = [Buffer("record", Kind.OPTIM, MIB, Tier.DISK)]
    found = Tiers(torch.device("cpu"), buffers, SlotSizes(), tmp_path, board=board)
    found.worker.is_in_step = True
    return found


def test_a_wait_for_the_worker_is_shown_until_it_is_over(
    tiers: Tiers, board: FlightRecorder, tmp_path: Path
) -> None:
    shown: list[str] = []

    def work() -> None:
        while (wait := board.tier_wait(0)) is None:  # the other thread waits for this one
            time.sleep(0.001)
        shown.append(wait.what)

    tiers.submit(work).wait_on_host()
    assert shown == [f"its disk ({tmp_path})"]
    assert board.tier_wait(0) is None
    assert tiers.counts.waited_s[Tier.DISK] > 0
    assert tiers.counts.waited_s[Tier.HOST] == 0


def test_what_the_worker_itself_waits_for_is_not_training(
    tiers: Tiers, board: FlightRecorder
) -> None:
    extent = tiers.reserve(MIB, "record")
    memory = byte_buffer(MIB, torch.device("cpu"))
    seen: list[bool] = []

    def work() -> None:
        tiers.write(extent, memory, Kind.OPTIM).wait_on_host()
        seen.append(board.tier_wait(0) is None)

    transfer = tiers.submit(work)
    while not transfer.is_completed():
        time.sleep(0.001)
    transfer.wait()
    assert seen == [True]
    assert not any(tiers.counts.waited_s.values())


def test_memory_that_could_not_be_pinned_is_told(tiers: Tiers) -> None:
    before = list(tiers.notes)
    tiers._arena.note = "host memory of offload could not be pinned"  # as its first pieces show
    assert tiers.notes == [*before, tiers._arena.note]


def test_a_wait_within_another_is_timed_as_one(tiers: Tiers, board: FlightRecorder) -> None:
    inner = tiers.submit(lambda: time.sleep(0.02))
    tiers.wait_on_host(inner, Tier.HOST)
    assert board.tier_wait(0) is None
    assert tiers.counts.waited_s[Tier.HOST] > 0
    assert tiers.counts.waited_s[Tier.DISK] == 0
