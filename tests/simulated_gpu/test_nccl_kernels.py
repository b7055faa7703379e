"""Kernels of simulated NCCL on their wires, by threads as ranks: no device is needed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from simulated_gpu.nccl.collectives import Kernels
from simulated_gpu.nccl.settings import settings, take
from simulated_gpu.nccl.wire import Aborted, MismatchError, PeerLostError, Wire

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.uint8, torch.int64, torch.bool),
]
SUM = dist.ReduceOp.SUM


@pytest.fixture(autouse=True)
def usual_settings() -> Iterator[None]:
    before = vars(settings).copy()
    yield
    vars(settings).update(before)


class Ranks:
    """Connected wires, and a thread for each of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        store = dist.HashStore()
        connected = self._pool.map(
            lambda rank: Wire.connect(store, "all", rank, size, lambda: True), range(size)
        )
        self.wires = list(connected)
        self.kernels = [Kernels(wire) for wire in self.wires]

    def run(self, call: Callable[[Kernels, int], Any]) -> list[Any]:
        """The results of `call(kernels, rank)` on every rank, together."""
        return list(self._pool.map(lambda rank: call(self.kernels[rank], rank), range(self.size)))

    def start(self, rank: int, call: Callable[[Kernels], Any]) -> Any:
        """The future of a kernel on one rank."""
        return self._pool.submit(call, self.kernels[rank])

    def close(self) -> None:
        for wire in self.wires:
            wire.abort()
            wire.close()
        self._pool.shutdown()


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(numel, generator=generator, dtype=torch.float64)).to(dtype)


def summed(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum over ranks, from the first to the last."""
    total = values(0, numel, dtype)
    for rank in range(1, size):
        other = values(rank, numel, dtype)
        total = total.logical_or(other) if dtype is torch.bool else total.add(other)
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 100_000])
def test_sums_are_those_of_the_ranks_in_order_to_the_bit(
    ranks: Ranks, dtype: torch.dtype, numel: int
) -> None:
    def kernel(kernels: Kernels, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        everywhere = values(rank, numel, dtype)
        kernels.all_reduce(everywhere, SUM)
        on_last = values(rank, numel, dtype)
        kernels.reduce(on_last, ranks.size - 1, SUM)
        parts = values(rank, numel * ranks.size, dtype).view(ranks.size, numel).unbind()
        own = torch.empty(numel, dtype=dtype)
        kernels.reduce_scatter(own, parts, SUM)
        return everywhere, on_last, own

    found = ranks.run(kernel)
    want = summed(ranks.size, numel, dtype)
    parts = summed(ranks.size, numel * ranks.size, dtype).view(ranks.size, numel)
    for rank, (everywhere, on_last, own) in enumerate(found):
        assert everywhere.equal(want)
        assert on_last.equal(want if rank == ranks.size - 1 else values(rank, numel, dtype))
        assert own.equal(parts[rank])


def test_other_reductions(ranks: Ranks) -> None:
    given = torch.stack([values(rank, 9, torch.float32) for rank in range(ranks.size)])
    wanted = {
        dist.ReduceOp.MAX: given.amax(0),
        dist.ReduceOp.MIN: given.amin(0),
        dist.ReduceOp.AVG: summed(ranks.size, 9, torch.float32) / ranks.size,
        dist.ReduceOp.PRODUCT: given.prod(0),
    }
    for op, want in wanted.items():

        def kernel(kernels: Kernels, rank: int, op: Any = op) -> torch.Tensor:
            tensor = values(rank, 9, torch.float32)
            kernels.all_reduce(tensor, op)
            return tensor

        for found in ranks.run(kernel):
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_gathered_sent_and_exchanged_arrives(ranks: Ranks, dtype: torch.dtype) -> None:
    size, numel = ranks.size, 50_000

    def kernel(kernels: Kernels, rank: int) -> tuple[torch.Tensor, ...]:
        full = torch.empty(size, numel, dtype=dtype)
        full[rank] = values(rank, numel, dtype)
        kernels.all_gather(full.unbind(), full[rank])  # in place, as zrun's
        shared = values(rank, numel, dtype)
        kernels.broadcast(shared, 1)
        turned = torch.empty(size, numel, dtype=dtype)
        mine = values(rank, size * numel, dtype).view(size, numel)
        kernels.all_to_all(turned.unbind(), mine.unbind())
        passed = values(rank, numel, dtype)
        if rank == 0:
            kernels.send(passed, size - 1)
        elif rank == size - 1:
            kernels.receive(passed, 0)
        return full, shared, turned, passed

    for rank, (full, shared, turned, passed) in enumerate(ranks.run(kernel)):
        assert full.equal(torch.stack([values(each, numel, dtype) for each in range(size)]))
        assert shared.equal(values(1, numel, dtype))
        rows = [values(each, size * numel, dtype).view(size, numel)[rank] for each in range(size)]
        assert turned.equal(torch.stack(rows))
        assert passed.equal(values(0 if rank == size - 1 else rank, numel, dtype))


def is_over(future: Any) -> bool:
    """Whether a kernel ends by itself: one that does takes a few milliseconds."""
    time.sleep(0.2)
    return bool(future.done())


@pytest.mark.parametrize(("numel", "ends"), [(1000, True), (2000, False)])
def test_small_messages_wait_in_buffers_where_there_are_some(
    two: Ranks, numel: int, ends: bool
) -> None:
    assert take({"nccl_buffer": 4000, "seed": 3}) == {"seed": 3}
    tensor = torch.ones(numel)
    sent = two.start(0, lambda kernels: kernels.send(tensor, 1))
    assert is_over(sent) == ends
    received = torch.empty(numel)
    two.start(1, lambda kernels: kernels.receive(received, 0)).result(10)
    sent.result(10)
    assert received.equal(tensor)


def test_a_message_without_a_receiver_blocks(two: Ranks) -> None:
    sent = two.start(0, lambda kernels: kernels.send(torch.ones(1), 1))
    assert not is_over(sent)
    two.wires[0].abort()
    with pytest.raises(Aborted):
        sent.result(10)


def test_ranks_that_meet_with_different_operations_are_told(two: Ranks) -> None:
    first = two.start(0, lambda kernels: kernels.all_reduce(torch.ones(4), SUM))
    second = two.start(1, lambda kernels: kernels.broadcast(torch.ones(4), 0))
    with pytest.raises(MismatchError, match="broadcast of 16 bytes meets all_reduce of 8 bytes"):
        second.result(10)
    two.wires[0].abort()
    with pytest.raises(Aborted):
        first.result(10)


@pytest.mark.parametrize("tells", [0, 1])
def test_a_rank_that_has_ended_is_an_error_only_over_a_network(two: Ranks, tells: int) -> None:
    settings.remote_errors = tells
    waits = two.start(0, lambda kernels: kernels.receive(torch.empty(4), 1))
    two.wires[1].close()
    assert is_over(waits) == bool(tells)
    if tells:
        with pytest.raises(PeerLostError, match="rank 1 of the communicator has ended"):
            waits.result(10)
        return
    two.wires[0].abort()
    with pytest.raises(Aborted):
        waits.result(10)


def test_the_host_waits_until_all_ranks_are_there() -> None:
    store = dist.HashStore()
    wires: dict[int, Wire] = {}
    goes_on = threading.Event()

    def connect(rank: int) -> None:
        wires[rank] = Wire.connect(store, "late", rank, 2, lambda: not goes_on.is_set())

    first = threading.Thread(target=connect, args=(0,))
    first.start()
    first.join(0.2)
    assert first.is_alive()
    connect(1)
    first.join(10)
    assert sorted(wires) == [0, 1]

    def alone() -> None:
        with pytest.raises(Aborted):
            Wire.connect(store, "never", 0, 2, lambda: not goes_on.is_set())

    waiting = threading.Thread(target=alone)
    waiting.start()
    goes_on.set()
    waiting.join(10)
    assert not waiting.is_alive()
