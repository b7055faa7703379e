"""The host's memory for offload: whole pages, no more than was asked for, pinned if that can be."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pinned_memory import Driver

from zrun_core.errors import OffloadError, PreflightError
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.tiers.host_arena import HostArena

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver.take_place(monkeypatch)


def test_pieces_lie_in_pages_of_their_own() -> None:
    arena = HostArena(3 * PAGE_BYTES, CPU)
    first = arena.take(3, torch.float32)
    second = arena.take(PAGE_BYTES // 2 + 1, torch.bfloat16)
    assert first.tolist() == [0.0, 0.0, 0.0]
    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == PAGE_BYTES
    assert arena.used_bytes == arena.num_bytes == 3 * PAGE_BYTES
    second.fill_(7)
    assert first.sum() == 0
    assert arena.note == ""


def test_no_more_than_was_asked_for() -> None:
    arena = HostArena(2 * PAGE_BYTES, CPU)
    arena.take(PAGE_BYTES, torch.uint8)
    with pytest.raises(OffloadError, match=r"8\.0 KiB .* 4\.0 KiB are left of 8\.0 KiB.*offload"):
        arena.take(2 * PAGE_BYTES, torch.uint8)
    arena.take(PAGE_BYTES, torch.uint8)  # what there is can still be had
    assert arena.take(0, torch.uint8).numel() == 0


def test_pieces_that_were_given_back_are_used_again() -> None:
    arena = HostArena(6 * PAGE_BYTES, CPU)
    first, second, third = (arena.take(pages * PAGE_BYTES, torch.uint8) for pages in (1, 2, 1))
    third.fill_(3)
    arena.give(first)
    assert arena.take(2 * PAGE_BYTES, torch.uint8).data_ptr() > third.data_ptr()  # a wider gap
    arena.give(second)
    joined = arena.take(3 * PAGE_BYTES, torch.uint8)  # of both
    assert joined.data_ptr() == first.data_ptr()
    joined.fill_(1)
    assert third.sum() == 3 * PAGE_BYTES
    assert arena.used_bytes == 6 * PAGE_BYTES
    with pytest.raises(OffloadError):
        arena.take(1, torch.uint8)


def test_a_piece_outlives_its_arena() -> None:
    piece = HostArena(PAGE_BYTES, CPU).take(PAGE_BYTES, torch.uint8)
    assert piece.fill_(3).sum() == 3 * PAGE_BYTES


def test_the_system_refuses() -> None:
    with pytest.raises(PreflightError, match=r"cannot reserve .* TiB .*offload\.host_memory"):
        HostArena(1 << 62, CPU)


@pytest.mark.thorough
def test_what_is_not_handed_out_counts_towards_no_limit() -> None:
    code = """
import resource, torch
from zrun_core.errors import OffloadError
from zrun_core.spine import memory_limits
from zrun_core.tiers.host_arena import HostArena
torch.ones(1) + 1
memory_limits.limit_growth(64 << 20)
arena = HostArena(1 << 40, torch.device("cpu"))
assert arena.take(32 << 20, torch.uint8).fill_(1)[-1] == 1
try:
    arena.take(128 << 20, torch.uint8)
except OffloadError as error:
    print(error)
assert arena.used_bytes == 32 << 20
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "only 32.0 MiB of host memory" in done.stdout
    assert "ulimit -d" in done.stdout


def test_memory_is_pinned_as_it_is_handed_out(driver: Driver) -> None:
    arena = HostArena(100 * PAGE_BYTES, CUDA)
    assert driver.registered == {}
    pieces = [arena.take(PAGE_BYTES + 1, torch.uint8), arena.take(4, torch.float32)]
    assert arena.note == ""
    assert driver.registered == {
        pieces[0].data_ptr(): 2 * PAGE_BYTES,
        pieces[1].data_ptr(): PAGE_BYTES,
    }
    del arena
    assert driver.registered == {}


def test_memory_that_cannot_be_pinned_is_told_once(driver: Driver) -> None:
    driver.left = PAGE_BYTES
    arena = HostArena(100 * PAGE_BYTES, CUDA)
    arena.take(PAGE_BYTES, torch.uint8)
    assert arena.note == ""
    piece = arena.take(2 * PAGE_BYTES, torch.uint8)
    assert piece.fill_(1).sum() == 2 * PAGE_BYTES
    assert "could not be pinned (the driver says out of memory)" in arena.note
    driver.left = 1 << 30
    arena.take(1, torch.uint8)
    assert driver.forgotten == [CUDA]  # after a refusal it is not tried again
    assert len(driver.registered) == 1


def test_memory_is_pinned_once(driver: Driver) -> None:
    arena = HostArena(100 * PAGE_BYTES, CUDA)
    for _ in range(3):
        piece = arena.take(2 * PAGE_BYTES, torch.uint8)
        arena.give(piece)
    arena.take(3 * PAGE_BYTES, torch.uint8)
    start = piece.data_ptr()
    assert driver.registered == {start: 2 * PAGE_BYTES, start + 2 * PAGE_BYTES: PAGE_BYTES}
