"""Memory for units: values survive being given up, views stay good, and the own shard is always
there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from zrun_core.memory.arena import (
    PagePool,
    PageWindow,
    Region,
    ResidentWindow,
    Ring,
    StorageMeter,
    StorageWindow,
    Window,
    can_move_pages,
)
from zrun_core.memory.arena import flat_buffer as make_buffer
from zrun_core.memory.layout import PAGE_BYTES

CPU = torch.device("cpu")
ROW = PAGE_BYTES // 4  # float32 elements of a page
HUGE_BYTES = 2 << 20
HUGE = HUGE_BYTES // PAGE_BYTES  # pages
needs_pages = pytest.mark.skipif(not can_move_pages(), reason="this system cannot move pages")
Make = Callable[[int, tuple[int, int]], Window]


def page_window(numel: int, own: tuple[int, int]) -> Window:
    return PageWindow(numel, own, torch.float32, PagePool(4 * numel))


def storage_window(numel: int, own: tuple[int, int]) -> Window:
    return StorageWindow(numel, own, torch.float32, CPU, StorageMeter(0))


def whole_window(numel: int, own: tuple[int, int]) -> Window:
    return ResidentWindow(torch.empty(numel), own)


@pytest.fixture(params=[pytest.param(page_window, marks=needs_pages), storage_window, whole_window])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def fill(window: Window, own: tuple[int, int], values: torch.Tensor) -> None:
    """What a gather does: the foreign parts arrive, and the own one where it is not there."""
    window.full[: own[0]] = values[: own[0]]
    window.full[own[1] :] = values[own[1] :]
    window.full[own[0] : own[1]] = window.shard


class Operators(TorchDispatchMode):
    """Notes which operators run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [pytest.param(page_window, marks=needs_pages), storage_window])
def test_a_shard_begins_with_zeros(make):
    """Padding is never written: it must not hold what others have left."""
    torch.full((3 * ROW,), float("nan"))  # the memory of which may be taken
    window = make(3 * ROW, (ROW, 2 * ROW))
    assert not window.shard.any()


def test_memory_is_given_without_a_pass_over_it(make):
    window = make(3 * ROW, (ROW, 2 * ROW))
    with Operators() as operators:
        window.acquire()
        window.release()
    assert operators.names == []


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_own_shard_is_valid_throughout(make, index):
    own = (index * ROW, (index + 1) * ROW)
    window, values = make(3 * ROW, own), torch.arange(3.0 * ROW)
    window.shard.copy_(values[own[0] : own[1]])
    for _ in range(3):
        window.acquire()
        if not isinstance(window, StorageWindow):
            assert torch.equal(window.full[own[0] : own[1]], values[own[0] : own[1]])
        fill(window, own, values)
        assert torch.equal(window.full, values)
        window.release()
        assert torch.equal(window.shard, values[own[0] : own[1]])


def test_an_updated_shard_is_the_next_gathers(make):
    window = make(2 * ROW, (ROW, 2 * ROW))
    window.shard.fill_(1)
    window.acquire()
    window.release()
    window.shard.add_(1)
    window.acquire()
    fill(window, (ROW, 2 * ROW), torch.ones(2 * ROW))
    assert (window.full[ROW:] == 2).all()


def test_a_view_saved_before_release_is_valid_after_the_next_acquire(make):
    """As autograd saves `weight.t()` in forward and reads it in backward."""
    own, values = (0, ROW), torch.arange(2.0 * ROW)
    window = make(2 * ROW, own)
    window.shard.copy_(values[:ROW])
    window.acquire()
    fill(window, own, values)
    saved = window.full.view(2, ROW).t()
    address = window.full.data_ptr()
    window.release()
    window.acquire()
    fill(window, own, values)
    assert torch.equal(saved, values.view(2, ROW).t())
    if not isinstance(window, StorageWindow):
        assert window.full.data_ptr() == address


def test_a_storage_window_holds_no_memory_while_it_is_released():
    window = storage_window(8 * ROW, (0, ROW))
    assert window.full.untyped_storage().nbytes() == 0
    window.acquire()
    assert window.full.untyped_storage().nbytes() == 8 * PAGE_BYTES
    window.release()
    assert window.full.untyped_storage().nbytes() == 0


def signal_of(read: Callable[[], object]) -> int:
    """The signal that ends a process which runs `read`; 0 if none does."""
    if (pid := os.fork()) == 0:
        import faulthandler

        faulthandler.disable()
        read()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


@needs_pages
def test_loader_processes_do_not_inherit_the_memory():
    buffer = make_buffer(ROW, torch.float32, CPU)
    assert signal_of(lambda: float(buffer[0])) == signal.SIGSEGV
    assert float(buffer[0]) == 0
    assert signal_of(lambda: None) == 0
    assert float(buffer[0]) == 0


@needs_pages
def test_pages_return_to_the_pool_and_it_grows_when_it_must():
    pool = PagePool(2 * PAGE_BYTES)
    first = PageWindow(3 * ROW, (0, ROW), torch.float32, pool)
    second = PageWindow(4 * ROW, (ROW, 2 * ROW), torch.float32, pool)
    first.acquire()
    assert pool.free_bytes == 0
    assert pool.num_bytes == 2 * PAGE_BYTES
    first.release()
    assert pool.free_bytes == 2 * PAGE_BYTES
    first.acquire()
    second.acquire()
    assert pool.num_bytes == 5 * PAGE_BYTES, "it grows by what is missing"
    first.full[ROW:], second.full[:ROW], second.full[2 * ROW :] = 1, 2, 3
    assert (first.full[ROW:] == 1).all()
    first.release()
    second.release()
    assert pool.free_bytes == pool.num_bytes == 5 * PAGE_BYTES


@needs_pages
def test_memory_outlives_its_owner_as_long_as_a_view_of_it():
    view = make_buffer(ROW, torch.float32, CPU)[5:7]
    view.fill_(3)
    others = [make_buffer(ROW, torch.float32, CPU) for _ in range(20)]
    assert view.tolist() == [3, 3]
    assert all((other == 0).all() for other in others)


@needs_pages
@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5
    ),
    moves=st.lists(st.integers(0, 4), max_size=40),
    pool_pages=st.integers(0, 24),
)
def test_any_sequence_of_acquire_and_release_keeps_every_value(shapes, moves, pool_pages):
    """Fragmented pools assemble a unit from many extents, across regions that have no borders in
    common.
    """
    pool = PagePool(pool_pages * PAGE_BYTES)
    windows, values, held = [], [], []
    for number, (num_shards, pages, index) in enumerate(shapes):
        size, index = pages * ROW, index % num_shards
        own = (index * size, (index + 1) * size)
        windows.append((PageWindow(num_shards * size, own, torch.float32, pool), own))
        values.append(torch.arange(num_shards * size, dtype=torch.float32) + 1e6 * number)
        windows[-1][0].shard.copy_(values[-1][own[0] : own[1]])
        held.append(False)
    for move in moves:
        number = move % len(windows)
        window, own = windows[number]
        if held[number]:
            assert torch.equal(window.full, values[number])
            window.release()
        else:
            window.acquire()
            fill(window, own, values[number])
        held[number] = not held[number]
        for (other, own), expected, whole in zip(windows, values, held, strict=True):
            assert (
                torch.equal(other.full, expected)
                if whole
                else torch.equal(other.shard, expected[own[0] : own[1]])
            )
    in_use = sum(
        window.full.nbytes - window.shard.nbytes
        for (window, _), whole in zip(windows, held, strict=True)
        if whole
    )
    assert pool.num_bytes - pool.free_bytes == in_use


@needs_pages
def test_huge_pages_are_moved_whole_and_serve_one_purpose():
    """Units of several huge pages, whose borders lie anywhere, come and go two at a time."""
    sizes = [3 * HUGE + 5, 2 * HUGE + 300, 3 * HUGE + 511, 4 * HUGE, HUGE - 1]
    pool = PagePool(PAGE_BYTES * (sizes[2] + sizes[3]))
    planned, windows, moved = pool.num_bytes, [], [set(), set()]
    for number, pages in enumerate(sizes):
        own = (0, pages * ROW) if number % 2 else (pages * ROW, 2 * pages * ROW)
        window = PageWindow(2 * pages * ROW, own, torch.float32, pool)
        window.shard.fill_(number)
        windows.append((window, own))
    for _ in range(3):
        for number, (window, own) in enumerate(windows):
            window.acquire()
            fill(window, own, torch.full_like(window.full, number))
            for source, target, num_bytes in window._held:
                is_huge = source % HUGE_BYTES == target % HUGE_BYTES == num_bytes % HUGE_BYTES == 0
                pages = range(source // HUGE_BYTES, -(-(source + num_bytes) // HUGE_BYTES))
                moved[is_huge].update(pages)
            held = sum(num_bytes for _, _, num_bytes in window._held)
            assert held == window.full.nbytes - window.shard.nbytes
            before, _ = windows[number - 1]
            if before._held:
                assert (before.full == (number - 1) % len(windows)).all()
                before.release()
            assert (window.full == number).all()
    assert pool.num_bytes == planned, "it has not grown"
    assert moved[True]
    assert not moved[True] & moved[False], "no huge page was split"


# The ring of scratch


def test_ring_is_first_fit_and_says_when_it_is_full():
    ring = Ring(1024, CPU)
    first, second = ring.take(128, torch.float32), ring.take(64, torch.float32)
    assert first is not None
    assert second is not None
    assert ring.take(128, torch.float32) is None, "768 of 1024 bytes are taken"
    ring.give(first)
    third = ring.take(100, torch.float32)
    assert third is not None
    assert third.data_ptr() == first.data_ptr()
    assert ring.num_bytes == 1024


def test_ring_grows_on_request_only():
    ring = Ring(256, CPU)
    assert ring.take(1000, torch.bfloat16) is None
    grown = ring.take(1000, torch.bfloat16, grow=True)
    assert grown is not None
    assert grown.shape == (1000,)
    assert ring.num_bytes == 256 + 2048
    ring.give(grown)
    with pytest.raises(AssertionError, match="not from this ring"):
        ring.give(torch.ones(4))


def test_ring_gives_nothing_for_no_elements():
    ring = Ring(512, CPU)
    nothing = ring.take(0, torch.float32)
    real = ring.take(64, torch.float32)
    assert nothing is not None
    assert real is not None
    ring.give(nothing)
    again = ring.take(64, torch.float32)
    assert again is not None
    assert again.data_ptr() != real.data_ptr()


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.integers(0, 10)), max_size=60)
)
def test_what_a_ring_hands_out_never_overlaps(moves):
    ring, taken = Ring(4096, CPU), []
    for number, (takes, numel, pick) in enumerate(moves):
        if takes:
            found = ring.take(numel, torch.float32, grow=not taken)
            if found is not None:
                found.fill_(number)
                taken.append((found, number))
        elif taken:
            tensor, _ = taken.pop(pick % len(taken))
            ring.give(tensor)
        assert all((tensor == value).all() for tensor, value in taken)


def test_buffers_are_zero_and_of_the_size_that_was_asked_for():
    for numel in (0, 1, 1000, 3 * ROW + 1):
        buffer = make_buffer(numel, torch.bfloat16, CPU)
        assert buffer.shape == (numel,)
        assert buffer.dtype == torch.bfloat16
        assert not buffer.any()


@needs_pages
def test_a_region_is_unreadable_where_it_is_protected():
    region = Region(2 * PAGE_BYTES, huge=False)
    tensor = region.tensor()
    region.protect(PAGE_BYTES, PAGE_BYTES)
    tensor[:PAGE_BYTES] = 7
    assert (tensor[:PAGE_BYTES] == 7).all()


def test_the_meter_of_storages_counts_like_a_pool():
    meter = StorageMeter(4096)
    windows = [StorageWindow(1024, (0, 512), torch.float32, CPU, meter) for _ in range(2)]
    windows[0].acquire()
    assert meter.num_bytes == 4096, "foreseen"
    windows[1].acquire()
    assert meter.num_bytes == 8192
    windows[0].release()
    meter.shrink()
    assert meter.num_bytes == 8192, "one is whole still"
    windows[1].release()
    meter.shrink()
    assert meter.num_bytes == 4096
