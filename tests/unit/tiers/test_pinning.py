"""Pinned host memory: copies end where ranges do, and a snapshot pins the bytes that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from pinned_memory import Driver

from zrun_core.checkpoint.manifest_fields import VALUE
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.checkpoint.snapshot import Snapshot
from zrun_core.hardware import accelerator
from zrun_core.memory.arena import byte_buffer
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.tiers.copies import StreamCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.pinning import Pinned, pinned_parts
from zrun_core.tiers.transfer import DONE

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver.take_place(monkeypatch)


def pages(parts: Iterator[slice]) -> list[tuple[float, float]]:
    return [(part.start / PAGE_BYTES, part.stop / PAGE_BYTES) for part in parts]


def test_parts_end_where_ranges_begin_and_end(driver: Driver) -> None:
    memory = byte_buffer(10 * PAGE_BYTES, CPU)
    at = [memory[first * PAGE_BYTES :] for first in range(10)]
    assert pages(pinned_parts(memory)) == [(0, 10)]
    held = [Pinned(at[first][: count * PAGE_BYTES], CUDA) for first, count in ((1, 2), (3, 2))]
    held.append(Pinned(at[7][:PAGE_BYTES], CUDA))
    assert pages(pinned_parts(memory)) == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8), (8, 10)]
    assert pages(pinned_parts(at[1][: 2 * PAGE_BYTES])) == [(0, 2)]
    assert pages(pinned_parts(at[2][: 2 * PAGE_BYTES])) == [(0, 1), (1, 2)]
    assert pages(pinned_parts(at[2][PAGE_BYTES // 2 : PAGE_BYTES])) == [(0, 0.5)]
    assert pages(pinned_parts(at[5][: 2 * PAGE_BYTES])) == [(0, 2)]
    assert pages(pinned_parts(at[9])) == [(0, 1)]
    held.clear()
    assert driver.registered == {}
    assert pages(pinned_parts(memory)) == [(0, 10)]


def test_memory_stays_while_it_is_pinned(driver: Driver) -> None:
    memory = byte_buffer(PAGE_BYTES, CPU)
    address = memory.data_ptr()
    pinned = Pinned(memory, CUDA)
    del memory
    assert driver.registered == {address: PAGE_BYTES}
    del pinned
    assert driver.registered == {}


def test_copies_lie_in_one_range_each(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pieces that take the place of others, and of one that is pinned in part."""
    monkeypatch.setattr(accelerator, "new_stream", lambda device: None)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(accelerator, "wait_stream", lambda stream, other: None)
    monkeypatch.setattr(accelerator, "on_stream", lambda stream: nullcontext())
    monkeypatch.setattr(accelerator, "Event", lambda device: DONE)
    copied: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def watched(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> object:
        if non_blocking:
            copied.append((self.data_ptr(), self.nbytes))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    arena = HostArena(20 * PAGE_BYTES, CUDA)
    first, second = (arena.take(2 * PAGE_BYTES, torch.uint8) for _ in range(2))
    start = first.data_ptr()
    arena.give(first)
    arena.give(second)
    across = arena.take(3 * PAGE_BYTES, torch.uint8)
    driver.left = 0
    partly = arena.take(2 * PAGE_BYTES, torch.uint8)  # the last page is new, and not pinned
    assert arena.note
    copier = StreamCopier(CUDA)
    values = torch.arange(3 * PAGE_BYTES).to(torch.uint8)
    copier.down(values, across).wait()
    copier.down(values[: partly.numel()], partly).wait()
    assert torch.equal(across, values)
    assert torch.equal(partly, values[: partly.numel()])
    at = [(address - start) // PAGE_BYTES for address, _ in copied]
    sizes = [num_bytes // PAGE_BYTES for _, num_bytes in copied]
    assert list(zip(at, sizes, strict=True)) == [(0, 2), (2, 1), (3, 1), (4, 1)]


def items(num_bytes: int) -> list[WriteItem]:
    values = torch.arange(num_bytes).to(torch.uint8)
    return [WriteItem("weight", VALUE, 0, num_bytes, values)]


@pytest.fixture
def on_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(accelerator, "synchronize_stream", lambda device: None)
    return driver


def test_a_snapshot_pins_the_bytes_that_it_takes(on_cuda: Driver) -> None:
    snapshot = Snapshot(CUDA)
    (copy,), _ = snapshot.take(items(33 * PAGE_BYTES))
    assert list(on_cuda.registered.values()) == [33 * PAGE_BYTES]
    assert on_cuda.registered == {copy.data.data_ptr(): 33 * PAGE_BYTES}
    del copy
    snapshot.take(items(5 * PAGE_BYTES))
    assert list(on_cuda.registered.values()) == [33 * PAGE_BYTES]
    snapshot.take(items(40 * PAGE_BYTES + 1))
    assert list(on_cuda.registered.values()) == [41 * PAGE_BYTES], "never both"
    assert snapshot.note == ""
    del snapshot
    assert on_cuda.registered == {}


def test_a_snapshot_that_cannot_be_pinned_is_taken_all_the_same(on_cuda: Driver) -> None:
    on_cuda.left = 0
    snapshot = Snapshot(CUDA)
    wanted = items(3 * PAGE_BYTES)
    (copy,), _ = snapshot.take(wanted)
    assert torch.equal(copy.data, wanted[0].data)
    assert "could not be pinned (the driver says out of memory)" in snapshot.note


def test_a_snapshot_of_a_cpu_is_not_pinned(on_cuda: Driver) -> None:
    snapshot = Snapshot(CPU)
    snapshot.take(items(3 * PAGE_BYTES))
    assert on_cuda.registered == {}
