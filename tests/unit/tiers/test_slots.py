"""Pieces of memory that transfers take turns in: nobody waits in vain, or forever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from zrun_core.errors import OffloadError
from zrun_core.tiers.slots import Slots


class Leaving:
    """A transfer that is over when its future is."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result(60)

    def wait_on_host(self) -> None:
        self.wait()


def slots(number: int, check: Callable[[], None] = lambda: None) -> Slots:
    return Slots([torch.zeros(64, dtype=torch.uint8) for _ in range(number)], check)


def test_a_piece_is_taken_when_another_thread_gives_it() -> None:
    pieces = slots(1)
    first = pieces.take(40)
    assert first.shape == (40,)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pieces.take, 64)
        pieces.give(first.view(torch.float32))
        assert waiting.result(60).data_ptr() == first.data_ptr()


def test_a_piece_is_free_when_what_leaves_it_is_over() -> None:
    pieces, leaving = slots(1), Leaving()
    pieces.give(pieces.take(64), after=leaving)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pieces.take, 64)
        assert not waiting.done()
        leaving.future.set_result(None)
        waiting.result(60)


def test_a_piece_that_is_too_small_is_replaced() -> None:
    pieces = slots(2)
    large = pieces.take(8192)
    assert large.shape == (8192,)
    assert pieces.num_bytes == 8192 + 64
    pieces.give(large)


def test_a_transfer_that_failed_is_told_to_all_who_want_its_piece() -> None:
    pieces, leaving = slots(1), Leaving()
    pieces.give(pieces.take(64), after=leaving)
    leaving.future.set_exception(OffloadError("the disk is full"))
    for _ in range(2):
        with pytest.raises(OffloadError, match="the disk is full"):
            pieces.take(64)


def test_nobody_waits_for_a_piece_of_somebody_who_failed() -> None:
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise OffloadError("the disk fails")

    pieces = slots(1, check)
    pieces.take(64)  # and never given back
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pieces.take, 64)
        failed.set()
        with pytest.raises(OffloadError, match="the disk fails"):
            waiting.result(60)


def test_nobody_waits_for_a_piece_that_is_taken_if_free() -> None:
    pieces, leaving = slots(2), Leaving()
    first, second = pieces.take(64), pieces.take_free(40)
    assert second is not None
    assert (second.shape, pieces.take_free(64)) == ((40,), None)
    pieces.give(first, after=leaving)
    assert pieces.take_free(64) is None
    leaving.future.set_result(None)
    again = pieces.take_free(64)
    assert again is not None
    assert again.data_ptr() == first.data_ptr()


def test_what_grows_stays_in_its_piece_or_takes_a_larger_one_with_it() -> None:
    pieces = slots(1)
    part = pieces.take(8).fill_(7)
    grown = pieces.extend(part, 64)
    assert (grown.data_ptr(), grown.shape) == (part.data_ptr(), (64,))
    assert grown[:8].tolist() == [7] * 8
    larger = pieces.extend(grown, 8192)
    assert larger.shape == (8192,)
    assert larger[:8].tolist() == [7] * 8
    pieces.give(larger)
    assert (pieces.num_bytes, pieces.num_taken) == (8192, 0)
