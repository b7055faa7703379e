"""Copies between memories arrive whole, in order, and only when somebody has waited for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.handle import Handle
from zrun_core.errors import PreflightError
from zrun_core.tiers.copies import ThreadCopier
from zrun_core.tiers.transfer import DONE

CPU = torch.device("cpu")


class Gate:
    """Lets copies through one by one."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)

    def __call__(self) -> float:
        assert self.passes.acquire(timeout=30)
        return 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool])
def test_bytes_arrive(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (3, 1001)).to(dtype)
    target = torch.empty(3003, dtype=dtype)
    transfer = ThreadCopier().down(source, target)
    transfer.wait()
    assert transfer.is_completed()
    assert torch.equal(target, source.view(-1))


def test_nothing_arrives_before_its_turn() -> None:
    gate = Gate()
    copier = ThreadCopier(gate)
    memory = [torch.full((1000,), float(number)) for number in range(3)]
    first = copier.down(memory[0], memory[1])
    second = copier.down(memory[1], memory[2])  # of what the first one brings
    assert not first.is_completed()
    assert memory[1][0] == 1.0
    gate.passes.release()
    first.wait()
    assert not second.is_completed()
    assert memory[2][0] == 2.0
    gate.passes.release()
    second.wait_on_host()
    assert torch.equal(memory[2], memory[0])


def test_a_copy_of_what_requires_a_gradient_has_none() -> None:
    source = torch.ones(10, requires_grad=True)
    target = torch.zeros(10)
    ThreadCopier().down(source, target).wait()
    assert torch.equal(target, torch.ones(10))
    assert not target.requires_grad


def test_the_other_way_is_free() -> None:
    """A copy up waits for no copy down that was asked for before it."""
    gate = Gate()
    delays = iter([gate, lambda: 0.0])
    copier = ThreadCopier(lambda: next(delays)())
    memory = [torch.full((1000,), float(number)) for number in range(4)]
    down = copier.down(memory[0], memory[1])
    up = copier.up(memory[2], memory[3])
    up.wait()
    assert torch.equal(memory[3], memory[2])
    assert not down.is_completed()
    gate.passes.release()
    down.wait()
    assert torch.equal(memory[1], memory[0])


def test_an_error_reaches_whoever_waits() -> None:
    def fails() -> float:
        raise OSError("the bus is gone")

    transfer = ThreadCopier(fails).down(torch.ones(4), torch.ones(4))
    for wait in (transfer.wait, transfer.wait_on_host):
        with pytest.raises(OSError, match="the bus is gone"):
            wait()
    assert transfer.is_completed()


def test_sizes_differ() -> None:
    with pytest.raises(ValueError, match="16 bytes to 20"):
        ThreadCopier().down(torch.ones(4), torch.ones(5))


def test_an_empty_copy_is_done() -> None:
    transfer = ThreadCopier().down(torch.ones(0), torch.ones(0))
    assert transfer is DONE
    assert transfer.is_completed()


def test_more_follows_a_copy() -> None:
    gate = Gate()
    target = torch.zeros(4)
    sums = []
    copy = ThreadCopier(gate).down(torch.ones(4), target)
    handle = Handle(Comm(CPU), [copy], then=lambda: sums.append(float(target.sum())))
    assert not handle.poll()
    gate.passes.release()
    handle.wait()
    assert sums == [4.0]


def test_no_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    with pytest.raises(PreflightError, match="ulimit -u"):
        ThreadCopier().down(torch.ones(4), torch.ones(4))


def test_its_thread_starts_late_and_ends_with_it() -> None:
    before = set(threading.enumerate())
    copier = ThreadCopier()
    assert set(threading.enumerate()) <= before  # a rank that builds a model may still be forked
    copier.down(torch.ones(4), torch.ones(4)).wait()
    (thread,) = set(threading.enumerate()) - before
    del copier
    thread.join(30)
    assert not thread.is_alive()
