"""What processes with simulated GPUs do for `test_tiers.py`: each function is called in one."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import simulated_gpu
import torch
from simulated_gpu import python_kernels

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
import test_cuda as on_one_device

from zrun_core.activations.kept import make_keeper
from zrun_core.checkpoint.manifest_fields import VALUE
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.checkpoint.snapshot import Snapshot
from zrun_core.distributed.mesh import Mesh
from zrun_core.hardware import accelerator
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Placement, Tier
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.memory.state_policy import SlotSizes
from zrun_core.tiers import copies, pinning
from zrun_core.tiers.copies import StreamCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.tiers import Tiers
from zrun_core.zero.account import planned_moves
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.flat_unit import FlatUnit

CUDA = torch.device("cuda")
WAIT_S = 20.0


@contextmanager
def _held(stream: Any) -> Iterator[Callable[[], None]]:
    """Hold a stream up where it is now, until what is yielded is called, or at the end."""
    may_go = threading.Event()
    with torch.cuda.stream(stream):
        mark = torch.empty(1, device=CUDA)
        python_kernels.launch(lambda _: may_go.wait(WAIT_S), writes=[mark])
    try:
        yield may_go.set
    finally:
        may_go.set()


def _is_over_soon(transfer: Any) -> bool:
    """Wait for a transfer on the host, but not for ever."""
    waiting = threading.Thread(target=transfer.wait_on_host, daemon=True)
    waiting.start()
    waiting.join(WAIT_S / 4)
    return not waiting.is_alive()


def _bytes(pages: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + pages * PAGE_BYTES, device=CUDA).to(torch.uint8)


# Copies


def pieces_of_pinned_memory(in_parts: bool) -> str:
    """Copy pieces that lie across ranges, and beyond what could be pinned.

    Args:
        in_parts: each piece lies in one range.
    """
    refuses = count(-3)  # the fourth range is one too many
    register = accelerator.register_host_memory

    def register_some(address: int, num_bytes: int) -> str:
        return register(address, num_bytes) if next(refuses) < 0 else "out of memory"

    whole = [slice(None)]
    parts = pinning.pinned_parts if in_parts else lambda memory: whole
    with (
        patch.object(accelerator, "register_host_memory", register_some),
        patch.object(copies, "pinned_parts", parts),
    ):
        arena = HostArena(20 * PAGE_BYTES, CUDA)
        copier = StreamCopier(CUDA)
        first, second = (arena.take(2 * PAGE_BYTES, torch.uint8) for _ in range(2))
        arena.give(first)
        arena.give(second)
        pieces = [arena.take(3 * PAGE_BYTES, torch.uint8), arena.take(3 * PAGE_BYTES, torch.uint8)]
        arena.give(pieces.pop())
        pieces.append(arena.take(5 * PAGE_BYTES, torch.uint8))
        assert arena.note
        try:
            for number, piece in enumerate(pieces):
                values = _bytes(piece.numel() // PAGE_BYTES, number)
                down = copier.down(values, piece)
                back = torch.empty_like(values)
                down.wait()
                copier.up(piece, back).wait()
                assert torch.equal(back, values)
                assert torch.equal(piece, values.cpu())
        except RuntimeError as error:
            return str(error)
    return "equal"


def a_copy_up_beside_one_down() -> list[bool]:
    """Ask for a copy down that waits for what computes, and then in another stream for one up."""
    copier = StreamCopier(CUDA)
    arena = HostArena(4 * PAGE_BYTES, CUDA)
    computed, arrived = _bytes(1), torch.zeros(PAGE_BYTES, dtype=torch.uint8, device=CUDA)
    room, updated = (arena.take(PAGE_BYTES, torch.uint8) for _ in range(2))
    updated.fill_(7)
    torch.cuda.synchronize()
    with _held(torch.cuda.current_stream()) as let_go:
        down = copier.down(computed, room)
        with torch.cuda.stream(torch.cuda.Stream()):
            up = copier.up(updated, arrived)
        found = [_is_over_soon(up), down.is_completed()]
        let_go()
    down.wait_on_host()
    return [*found, torch.equal(room, computed.cpu()), bool((arrived == 7).all())]


# States elsewhere


ALONE = (0, 1, 1)  # rank, number of ranks, and of those that hold one copy of the states


def losses(
    stage: int,
    placement: Placement,
    schedule: str,
    folder: str,
    accumulation: int,
    place: tuple[int, int, int] = ALONE,
    has_side_stream: bool = True,
) -> list[float]:
    """Return the losses of some steps, and then a number for each parameter.

    Args:
        place: rank, number of ranks, and of those that hold one copy of the states.
        has_side_stream: reductions move on in a stream of their own.
    """
    rank, size, shard_size = place
    device = torch.device("cuda", rank)
    mesh = Mesh.build(rank, ["host"] * size, 1 if stage == 0 else shard_size)
    with (
        patch.object(on_one_device, "CUDA", device),
        patch.object(on_one_device.Mesh, "build", lambda *_: mesh),
    ):
        sharded = on_one_device.make_sharded(
            on_one_device.build(),
            stage,
            "bf16",
            {"clip": 0.5},
            placement=placement,
            schedule=schedule,
            disk_folder=folder,
            delay_after=1,
        )
        batches = on_one_device.batches(3 * accumulation)
    if not has_side_stream:
        sharded.reducer._under_way._side = None
    found = []
    for step in range(3):
        sharded.begin_step()
        of_step = batches[step * accumulation :][:accumulation]
        sums = on_one_device.NamedVector.of(device, weight=1.0, loss=0.0)
        for number, batch in enumerate(of_step):
            with sharded.forward() as micro:
                loss = sharded.module(*(each.chunk(size)[rank].contiguous() for each in batch))
            share = loss / accumulation / size
            sharded.backward(share, micro, boundary=number == accumulation - 1)
            sums.add(loss=share.detach())
        found.append(sharded.step(1e-2, sums, lambda summed: summed["weight"]).sums["loss"])
    sharded.settle_updates()
    if sharded.tiers is not None:
        sharded.tiers.worker.submit(lambda: None).wait()
        assert sharded.tiers.slots_taken == {}
    with sharded.gathered() as module:
        found += [param.double().abs().sum() for param in module.parameters()]
    return [float(number) for number in found]


def differing(
    cases: list[tuple[int, str, str, str, str]], folder: str, place: tuple[int, int, int] = ALONE
) -> list[Any]:
    """Return those of some cases that do not compute what states on the device do.

    Args:
        cases: stage, tiers of parameters, gradients and optimizer, schedule.
        place: as for `losses`.
    """
    found: list[Any] = []
    expected: dict[Any, list[float]] = {}
    for case in cases:
        stage, param, grad, optimizer, schedule = case
        placement = Placement(param=Tier(param), grad=Tier(grad), optimizer=Tier(optimizer))
        key = stage, schedule == "delayed"
        if key not in expected:
            here = Placement(optimizer=Tier.HOST) if schedule == "delayed" else ON_DEVICE
            expected[key] = losses(stage, here, schedule, folder, 2, place)
        away = losses(stage, placement, schedule, folder, 2, place)
        if away != expected[key]:
            found.append(case)
    return found


def beside_backward(folder: str, place: tuple[int, int, int]) -> list[bool]:
    """Return whether the stream in which reductions move on changes no bit."""
    host = Tier.HOST
    found = []
    for stage, placement in ((1, ON_DEVICE), (3, Placement(grad=host, optimizer=host))):
        ways = [
            losses(stage, placement, "overlap", folder, 2, place, has_side_stream)
            for has_side_stream in (False, True)
        ]
        found.append(ways[0] == ways[1])
    return found


def refusals(cases: list[tuple[int, str, str, str, str]], folder: str) -> list[Any]:
    """Return what torch says of host waits in steps with states elsewhere, case by case.

    What waits for copies by their events is not among them: who computes on the host has to.
    """
    found: list[Any] = []
    for stage, param, grad, optimizer, schedule in cases:
        sharded = on_one_device.make_sharded(
            on_one_device.build(),
            stage,
            "bf16",
            {"clip": 1.0},
            placement=Placement(param=Tier(param), grad=Tier(grad), optimizer=Tier(optimizer)),
            schedule=schedule,
            disk_folder=folder,
            delay_after=1,
        )
        batches = on_one_device.batches(4)
        for batch in batches[:2]:
            on_one_device.one_step(sharded, batch)
        try:
            with on_one_device.no_synchronisation():
                for batch in batches[2:]:
                    on_one_device.one_step(sharded, batch)
                sharded.settle_updates()
        except RuntimeError as error:
            found.append([stage, param, grad, optimizer, schedule, str(error)])
    return found


def moved_otherwise(cases: list[tuple[int, str, str, str, str]], folder: str) -> list[Any]:
    """Return those of some cases in which a step moves other bytes than the plan says."""
    found: list[Any] = []
    for case in cases:
        stage, param, grad, optimizer, schedule = case
        sharded = on_one_device.make_sharded(
            on_one_device.build(),
            stage,
            "bf16",
            placement=Placement(param=Tier(param), grad=Tier(grad), optimizer=Tier(optimizer)),
            schedule=schedule,
            disk_folder=folder,
            delay_after=1,
        )
        for batch in on_one_device.batches(3):
            on_one_device.one_step(sharded, batch)
        moved = {move: size for move, size in sharded.updates.step_counts.moved.items() if size}
        if moved != planned_moves(sharded, 1):
            found.append(case)
    return found


def inputs_elsewhere(folder: str) -> list[list[float]]:
    """Return losses with the inputs of blocks kept, on the host and on a disk.

    Batches are of many sizes, so that room for inputs is used again in other pieces.
    """
    found = []
    for tier in Tier:
        keeper = None
        if tier is not Tier.DEVICE:
            keeper = make_keeper(tier, CUDA, Path(folder), 1 << 26, nullcontext)
        model = on_one_device.build()
        inputs = None if keeper is None else on_one_device.OffloadedInputs(keeper)
        config = on_one_device.ActivationsConfig(checkpoint="full")
        on_one_device.apply_checkpointing(model, config, inputs)
        sharded = on_one_device.make_sharded(model, 3, "bf16")
        of_run = []
        for number, (x, y) in enumerate(on_one_device.batches()):
            rows = (32, 8, 24, 16, 30, 12)[number]
            batch = (x[:rows].repeat(16, 1), y[:rows].repeat(16, 1))
            of_run.append(float(on_one_device.one_step(sharded, batch).sums["loss"]))
        found.append(of_run)
    return found


def values_written_after_an_evaluation() -> list[bool]:
    """Write to parameters that the device, which is behind, has not read yet."""
    place = Placement(param=Tier.HOST, grad=Tier.HOST, optimizer=Tier.HOST)
    sharded = on_one_device.make_sharded(on_one_device.build(), 3, "bf16", placement=place)
    (batch,) = on_one_device.batches(1)

    def evaluate() -> torch.Tensor:
        with sharded.evaluation():
            return sharded.module(*batch)

    before = float(evaluate())
    torch.cuda.synchronize()
    with _held(torch.cuda.current_stream()) as let_go:  # so the loads of all units are yet to come
        behind = evaluate()
        threading.Timer(0.5, let_go).start()  # whoever waits for the device has waited by then
        _fill(sharded, 0.0)
    return [float(behind) == before, float(evaluate()) == before]


def races_of_memory_that_goes() -> list[int]:
    """Drop what a copy still writes to, with and without the end of what a rank has beside it."""
    found = []
    for ends in (False, True):
        buffers = [Buffer("parameters", Kind.PARAM, 1 << 20, Tier.HOST)]
        tiers = Tiers(CUDA, buffers, SlotSizes(), None)
        on_host = tiers.host_memory(1 << 18, torch.float32)
        on_device = torch.empty(1 << 18, device=CUDA)
        tiers.submit(partial(tiers.copy_up, on_host, on_device, Kind.PARAM)).wait_on_host()
        if ends:
            tiers.end()
        del on_device
        torch.cuda.synchronize()
        found.append(len(simulated_gpu.races()))
        simulated_gpu.clear_races()
    return found


def races_of_a_model_that_goes_before_its_update() -> int:
    """Count the races of `a_model_goes_before_its_update`."""
    a_model_goes_before_its_update()
    found = len(simulated_gpu.races())
    simulated_gpu.clear_races()
    return found


def a_model_goes_before_its_update() -> None:
    """Drop a model whose last update has not begun: it copies parameters to the device later."""
    goes_on = threading.Event()
    unit = _updated_late(goes_on)
    gc.collect()
    assert unit() is not None, "the update that is to come holds it"
    goes_on.set()
    while unit() is not None:
        time.sleep(0.1)
        gc.collect()
    torch.cuda.synchronize()


def _updated_late(goes_on: threading.Event) -> weakref.ref[FlatUnit]:
    """Make a step of a model whose update waits; nothing else holds the model afterwards."""
    place = Placement(grad=Tier.HOST, optimizer=Tier.HOST)
    sharded = on_one_device.make_sharded(on_one_device.build(), 1, "bf16", placement=place)
    update = sharded.optimizer._update_beside

    def late(*args: Any) -> None:
        goes_on.wait(20)
        update(*args)

    sharded.optimizer._update_beside = late  # type: ignore[method-assign]
    (batch,) = on_one_device.batches(1)
    on_one_device.one_step(sharded, batch)
    return weakref.ref(sharded.units[-1])


def _fill(sharded: ShardedModel, value: float) -> None:
    for unit in sharded.units:
        unit.values().flat.fill_(value)
        unit.values_changed()
        unit.drop_values()


# Saves


def a_snapshot() -> list[bool]:
    """Take snapshots of what the device has not computed yet, of more and more bytes."""
    snapshot = Snapshot(CUDA)
    ranges: list[int] = []
    register = accelerator.register_host_memory

    def watched(address: int, num_bytes: int) -> str:
        ranges.append(num_bytes)
        return register(address, num_bytes)

    found = []
    with patch.object(accelerator, "register_host_memory", watched):
        for pages in (5, 3, 33):
            values = _bytes(pages, pages)
            item = WriteItem("weight", VALUE, 0, values.numel(), values)
            (copy,), late = snapshot.take([item])
            assert isinstance(copy.data, torch.Tensor)
            found.append(not late.pairs and torch.equal(copy.data, values.cpu()))
            del copy
    return [*found, ranges == [5 * PAGE_BYTES, 33 * PAGE_BYTES]]
