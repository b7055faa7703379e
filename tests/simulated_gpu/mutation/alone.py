"""Parts of the runtime by themselves, where nobody else waits for what they have begun.

Each function is a scenario: it returns what it comes to, as plain numbers that were taken there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from simulated_gpu import python_kernels
from tiers_cases import a_model_goes_before_its_update
from toys import own_device, world

from zrun_core.activations.kept import HostKeeper
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.hardware.clock import Waits
from zrun_core.memory.arena import byte_buffer
from zrun_core.memory.buffers import Buffer, Kind, Tier
from zrun_core.memory.state_policy import DISK_SLOTS, SlotSizes
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.tiers.copies import StreamCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.stored import BlockReader, Part, StoredOnDisk
from zrun_core.tiers.swap_file import Extent, SwapFile
from zrun_core.tiers.tiers import Tiers
from zrun_core.tiers.transfer import Transfer
from zrun_core.zero.unit.home_elsewhere import OnDisk, OnHost

NUMEL = 1 << 14
BLOCK = 1 << 14
LATE_S = 0.03  # a rank that others wait for
OVER_S = 0.06  # after which whatever was under way has come

# Messages


def _everyone() -> Group:
    rank, size = world()
    return Group("world", tuple(range(size)), rank, dist.group.WORLD)


def meetings(folder: str) -> list[object]:
    """Meet others, of whom another one comes late each time."""
    rank, size = world()
    group = _everyone()
    comm = Comm(own_device())
    found: list[object] = []
    for number in range(2 * size):
        if rank == number % size:
            time.sleep(LATE_S)
        Path(folder, f"{number}-{rank}").touch()
        comm.barrier(group)
        found.append(len(list(Path(folder).glob(f"{number}-*"))))
    for number in range(2 * size):
        if rank == number % size:
            time.sleep(LATE_S)
        found.append(comm.share_bytes(b"%d" % number, group, name="shared"))
        found.append(comm.gather_bytes(b"%d-%d" % (number, rank), group, name="gathered"))
        found.append(comm.all_gather_bytes(b"x" * (number + rank), group, name="told"))
    same, other = (comm.all_equal(each, group, name="equal") for each in (5, rank))
    return [*found, same, other]


def two_hosts(folder: str) -> list[float]:
    """Wait for all ranks, while the other one of this host waits for what is asked of this one."""
    rank, size = world()
    pairs = [(number, number + 1) for number in range(0, size, 2)]
    made = [dist.new_group(list(pair)) for pair in pairs]
    host = Group("host", pairs[rank // 2], rank % 2, made[rank // 2])
    comm = Comm(own_device())
    assert comm.use_cma(host, timeout_s=20.0) is None
    found = []
    for number in range(4):
        full = torch.arange(float(NUMEL)) + rank + number
        into = torch.zeros(NUMEL // 2)
        handle = comm.reduce_scatter(
            full, torch.empty(NUMEL), into, host, accumulate=False, tag=4, name="gradients"
        )
        goes_on = number % 2 == host.index
        if not goes_on:
            handle.wait()
        told = comm.all_reduce_small(torch.tensor([float(rank)]), _everyone(), name="told")
        if goes_on:
            handle.wait()
        found += [float(told.sum()), float(into.sum())]
    return found


def writes_rows(folder: str) -> list[float]:
    """Write to what ranks have gathered, which begins with what another rank is to read."""
    rank, size = world()
    comm = Comm(own_device())
    assert comm.use_cma(_everyone(), timeout_s=20.0) is None
    tensor = TensorComm(comm, _everyone())
    found = []
    for number in range(4):
        rows = tensor.gather_rows(torch.full((NUMEL,), float(rank + number)), "rows")
        found.append(float(rows.sum()))
        rows.zero_()
    return [*found, float(size)]


# Tensors of activations


def abandoned(folder: str) -> list[float]:
    """Keep a tensor where one was that nobody has waited for."""
    keeper = HostKeeper(StreamCopier(own_device()), HostArena(1 << 16, own_device()))
    first = torch.ones(1 << 12, device=own_device())
    kept = keeper.keep(first)
    kept.settle()
    kept.fetch()
    kept.abandon()
    second = torch.zeros(1 << 12, device=own_device())
    other = keeper.keep(second)
    other.settle()
    return [float(other.get().sum())]


# Homes: their verbs take effect in the order of the calls


def _tiers(folder: str | None = None) -> Tiers:
    """Return tiers for one gradient of `NUMEL`, on the host or, with a folder, on a disk there."""
    num_bytes = 4 * NUMEL
    if folder is None:
        sizes, tier = SlotSizes(down=num_bytes), Tier.HOST
    else:
        sizes, tier = SlotSizes(down=num_bytes, disk={Kind.GRAD: num_bytes}), Tier.DISK
    buffers = [Buffer("gradient", Kind.GRAD, num_bytes, tier), *sizes.buffers()]
    return Tiers(own_device(), buffers, sizes, None if folder is None else Path(folder))


def _of(value: float) -> torch.Tensor:
    memory = byte_buffer(4 * NUMEL, own_device())  # whole pages, which a disk may read to
    return memory.view(torch.float32).fill_(value)


def on_host(folder: str) -> list[float]:
    """Store and load what lives on the host."""
    home = OnHost(_tiers(), Kind.GRAD, NUMEL, torch.float32)
    ones, twos, threes = (_of(value) for value in (1.0, 2.0, 3.0))
    found, seen = [], []
    home.store(ones)
    found.append(float(home.at().sum()))
    home.store(ones, accumulate=True)
    home.store(twos)
    home.settle()
    found.append(float(home.at().sum()))
    home.load(ones)
    home.at().fill_(4.0)
    found.append(float(ones.sum()))
    home.store(ones, accumulate=True, look=lambda total: seen.append(float(total.sum())))
    home.settle()
    found += seen
    home.store(threes)
    with BlockReader() as reader:
        for part in home.stored(torch.float32, 0, 4 * NUMEL).read(reader):
            found.append(float(part.view(torch.float32).sum()))
    target = _of(0.0)
    for _ in range(4):  # what the worker is adding
        home.store(ones, accumulate=True)
        home.load(target).wait()
        found.append(float(target.sum()))
    torch.accelerator.synchronize()
    return found


def failed_sum(folder: str) -> str:
    """Add to a sum whose last addition has failed."""
    home = OnHost(_tiers(), Kind.GRAD, NUMEL, torch.float32)
    ones = _of(1.0)  # who has copied keeps it until somebody waits
    home.store(ones)
    home.store(ones, accumulate=True, look=_fail)
    home.store(ones, accumulate=True)
    told = _said(home.settle)
    torch.accelerator.synchronize()
    return told


def on_disk(folder: str) -> list[float]:
    """Store, fetch, load and drop what lives on a disk."""
    tiers = _tiers(folder)
    home = OnDisk(tiers, Kind.GRAD, "gradient", NUMEL, torch.float32)
    ones, twos, fives = (_of(value) for value in (1.0, 2.0, 5.0))
    found, seen = [], []
    for source in (ones, twos):
        home.store(source)
        home.fetch()
        found.append(float(home.at().sum()))
        home.drop()
    home.store(twos, accumulate=True, look=lambda total: seen.append(float(total.sum())))
    home.settle()
    found += seen
    target = _of(0.0)
    home.load(target).wait_on_host()
    found.append(float(target.sum()))
    home.store(ones)
    home.load(target).wait_on_host()
    found.append(float(target.sum()))
    home.store(ones, accumulate=True)
    kept = home.store(twos)  # in place of the sum that is being made
    home.settle()
    kept.wait_on_host()
    home.load(target).wait_on_host()
    found.append(float(target.sum()))
    home.store(fives)
    with BlockReader() as reader:
        stored = home.stored(torch.float32, 0, 4 * NUMEL).read(reader)
        found += [float(part.view(torch.float32).sum()) for part in stored]
    home.fetch()
    home.drop()  # it was not used after all: others may have the slot
    slots = [tiers.slots[Kind.GRAD].take(4 * NUMEL) for _ in range(DISK_SLOTS)]
    for slot in slots:
        slot.fill_(6)
    time.sleep(OVER_S)
    torch.accelerator.synchronize()
    return [*found, *(float(slot.float().sum()) for slot in slots)]


def failed_tasks(folder: str) -> list[str]:
    """Wait for updates and transfers that have failed, and are over."""
    tiers = _tiers()
    found = []
    waits: list[Callable[[Transfer], None]] = [
        tiers.wait_for_update,
        partial(tiers.wait, tier=Tier.HOST),
    ]
    for wait in waits:
        failed = tiers.worker.submit(partial(_fail, None))
        while not failed.is_completed():
            time.sleep(0.001)
        found.append(_said(partial(wait, failed)))
    return found


def _fail(_: torch.Tensor | None) -> None:
    raise OSError("it has failed")


def _said(wait: Callable[[], None]) -> str:
    try:
        wait()
    except OSError as error:
        return str(error)
    return "all is well"


class _Lender:
    """Reads a file for a save, and lends it memory."""

    def __init__(self, swap: SwapFile, pieces: list[torch.Tensor]) -> None:
        self._swap = swap
        self.pieces = pieces

    def read_stored(self, extent: Extent, target: torch.Tensor, start: int) -> Transfer:
        return self._swap.read(extent, target, start=start)

    def lend(self) -> torch.Tensor | None:
        return self.pieces.pop() if self.pieces else None

    def take_back(self, memory: torch.Tensor) -> None:
        self.pieces.append(memory)


def cut_save(folder: str) -> list[int]:
    """Skip blocks of a save, and end it, while they are still on their way from the disk."""
    number = 8
    swap = SwapFile(Path(folder), number * BLOCK, num_threads=number, block_bytes=BLOCK)
    extent = swap.reserve(number * BLOCK, name="record")
    memory = byte_buffer(number * BLOCK, torch.device("cpu"))
    memory.copy_(torch.arange(number, dtype=torch.uint8).repeat_interleave(BLOCK))
    swap.write(extent, memory).wait()
    lender = _Lender(swap, [byte_buffer(BLOCK, torch.device("cpu"))])
    stored = StoredOnDisk(lender, [Part(0, extent)], torch.uint8, 0, number * BLOCK)
    blocks = [block for block, _, _ in stored._blocks()]
    found = []
    with BlockReader() as reader:
        for block in blocks:
            reader.begin(block)
        last = reader.get(blocks[-1])
        time.sleep(OVER_S)
        found.append(int(last.sum()))
    for block in blocks:
        with BlockReader() as reader:
            reader.begin(block)
        (memory,) = lender.pieces
        memory.fill_(77)
        time.sleep(OVER_S / 2)
        found.append(int(memory.sum()))
    swap.close()
    return found


def closed_file(folder: str) -> bool:
    """Close a file whose only thread has many blocks to write yet."""
    number = 8
    swap = SwapFile(Path(folder), number * BLOCK, num_threads=1, block_bytes=BLOCK)
    memory = byte_buffer(number * BLOCK, torch.device("cpu"))
    writing = swap.write(swap.reserve(number * BLOCK, name="record"), memory)
    swap.close()
    return writing.is_completed()


# Times, and models


def times(folder: str) -> bool:
    """Ask for the time that a device waits before it has done so."""
    waits = Waits(own_device())
    with waits.counting():
        late = torch.ones(1, device=own_device())
        for _ in range(20):
            python_kernels.launch(lambda _: time.sleep(0.001), writes=[late], name="late")
    return waits.seconds() > 0.01


def goes_first(folder: str) -> None:
    """Drop a model before its last update: nobody is left who waits for its copies."""
    a_model_goes_before_its_update()
