"""States elsewhere change nothing: every placement, stage, format and optimizer, to the bit."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import (
    DISK,
    HOST,
    PLACEMENTS,
    SETTINGS,
    WITH_PARAMETERS,
    Ranks,
    assert_equal,
    check_slots,
    late_copies,
    parts_of,
    run,
    sharded_at,
)
from toys import build, data, make_sharded, split, train_sharded, world

from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import OffloadError
from zrun_core.memory.buffers import ON_DEVICE, Kind, Placement
from zrun_core.memory.state_policy import DISK_SLOTS
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.pipeline.actions import ActionKind
from zrun_core.pipeline.schedule import layer_major
from zrun_core.tiers.copies import ThreadCopier, Way
from zrun_core.tiers.slots import Slots
from zrun_core.tiers.swap_file import Extent
from zrun_core.tiers.tiers import Tiers
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.account import allocated_memory
from zrun_core.zero.passes.sliced_passes import SlicedPasses
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.exchange import Exchange
from zrun_core.zero.unit.home_elsewhere import OnDisk
from zrun_core.zero.update.unit_optimizer import UnitOptimizer


def cases() -> Iterator[Any]:
    """Every placement at every stage, with another format and optimizer each."""
    settings = itertools.cycle(SETTINGS.items())
    for stage in range(4):
        placements = PLACEMENTS | (WITH_PARAMETERS if stage == 3 else {})
        for place, placement in placements.items():
            name, chosen = next(settings)
            yield pytest.param(stage, placement, chosen, id=f"{stage}-{place}-{name}")
        next(settings)


@pytest.mark.parametrize(("stage", "placement", "settings"), list(cases()))
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.at_most(8)
def test_where_states_live_changes_no_bit(
    ranks: Ranks, num_ranks: int, stage: int, placement: Placement, settings: dict[str, Any]
) -> None:
    here = ranks(num_ranks).run(run, stage, ON_DEVICE, settings, 3, "overlap")
    assert_equal(here, ranks(num_ranks).run(run, stage, placement, settings, 3, "overlap"))


ALL_APART = Placement(param=HOST, grad=HOST, optimizer=HOST)
ALL_ON_DISK = Placement(param=DISK, grad=DISK, optimizer=DISK)


@pytest.mark.parametrize("placement", [ALL_APART, ALL_ON_DISK], ids=["apart", "disk"])
@pytest.mark.at_most(1)
def test_waiting_for_updates_changes_no_bit(ranks: Ranks, placement: Placement) -> None:
    settings = SETTINGS["bf16, clipped"]
    behind = ranks(2).run(run, 3, placement, settings, 2, "overlap")
    assert_equal(behind, ranks(2).run(run, 3, placement, settings, 2, "serial"))


def run_through_slots(
    placement: Placement, settings: dict[str, Any], prefetch: int
) -> tuple[list[float], dict[Any, torch.Tensor]]:
    """Train where states on disk come to a device that is apart from the host."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = make_sharded(
            build(),
            3,
            bucket=1 << 12,
            placement=placement,
            disk_folder=folder,
            apart=late_copies(),
            prefetch=prefetch,
            **settings,
        )
        losses = train_sharded(sharded, data(4), accumulation=2)
        return losses, parts_of(sharded)


@pytest.mark.parametrize(
    ("place", "name", "prefetch"),
    [
        ("disk, all", "fp32", 1),  # the update holds two units' parameters, which are masters
        ("disk, all", "bf16, clipped", 3),  # more are prefetched than there are slots
        ("disk parameters", "bf16, clipped", 1),  # no gradient ever comes down
    ],
)
@pytest.mark.at_most(1)
def test_training_holds_no_slot_that_it_waits_for(
    ranks: Ranks, place: str, name: str, prefetch: int
) -> None:
    settings = SETTINGS[name]
    here = ranks(1).run(run_through_slots, ON_DEVICE, settings, prefetch)
    away = ranks(1).run(run_through_slots, WITH_PARAMETERS[place], settings, prefetch)
    assert_equal(here, away)


def read_ahead(placement: Placement) -> tuple[list[dict[str, int]], list[float]]:
    """Return the slots that are taken after a backward, and losses that follow it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = sharded_at(2, placement, folder, {})
        train_sharded(sharded, data(1))
        assert sharded.tiers is not None
        taken = []
        for is_made in (False, True):
            sharded.begin_step()
            with sharded.forward() as micro:
                loss = sharded.module(*split(data(2)[1], *world()))
            check_slots(sharded)
            sharded.backward(loss * float("inf"), micro, boundary=True)
            sharded.updates._reading_ahead.wait()
            taken.append(sharded.tiers.slots_taken)
            if is_made:
                sums = NamedVector.of(sharded.comm.device, loss=0.0)
                assert sharded.step(1.0, sums, lambda sums: torch.ones(()).double()).skipped
            check_slots(sharded)  # who looks at states needs some
        return taken, train_sharded(sharded, data(3))


def losses_in_memory() -> list[float]:
    sharded = make_sharded(build(), 2)
    return train_sharded(sharded, [*data(1), *data(3)])[1:]


def test_records_are_read_ahead_beside_the_last_backward(ranks: Ranks) -> None:
    """They wait in all slots, until the step, or until somebody looks at states instead."""
    taken, losses = ranks(1).run(read_ahead, Placement(optimizer=DISK))[0]
    assert taken == [{"optim": DISK_SLOTS}] * 2
    assert losses == ranks(1).run(losses_in_memory)[0]


def order_of_updates(schedule: str) -> list[str]:
    """Return in which order gradients begin to come down, and units are updated, in a step."""
    sharded = make_sharded(
        build(), 1, placement=Placement(optimizer=HOST), apart=late_copies(), schedule=schedule
    )
    train_sharded(sharded, data(1))
    sharded.settle_updates()
    copy_down, update = Tiers.copy_down, UnitOptimizer.update
    names = {unit.grad.local.data_ptr(): unit.name for unit in sharded.units}
    order = []

    def watched_copy(tiers: Tiers, source: torch.Tensor, *args: Any) -> Transfer:
        order.append(f"copy {names[source.data_ptr()]}")
        return copy_down(tiers, source, *args)

    def watched_update(optimizer: UnitOptimizer, *args: Any, **keys: Any) -> None:
        order.append(f"update {optimizer.unit.name}")
        update(optimizer, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tiers, "copy_down", watched_copy)
        patch.setattr(UnitOptimizer, "update", watched_update)
        train_sharded(sharded, data(1))
        check_slots(sharded)
    return order


@pytest.mark.parametrize("schedule", ["overlap", "delayed"])
def test_the_next_gradient_comes_down_beside_an_update(ranks: Ranks, schedule: str) -> None:
    (order,) = ranks(1).run(order_of_updates, schedule)
    units = [each.removeprefix("update ") for each in order if each.startswith("update")]
    assert len(units) > 2
    wanted = [f"copy {units[0]}"]
    for unit, following in itertools.pairwise(units):
        wanted += [f"copy {following}", f"update {unit}"]
    assert order == [*wanted, f"update {units[-1]}"]


def train_delayed_and_slowly() -> list[float]:
    """Let the worker take slots slowly, and training look at records slowly."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/var/tmp") as dir:
        take_free, at = Slots.take_free, OnDisk.at

        def take_slowly(*args: Any, **keys: Any) -> Any:
            found = take_free(*args, **keys)
            time.sleep(0.01)
            return found

        def look_slowly(home: OnDisk) -> torch.Tensor:
            if threading.current_thread() is threading.main_thread():
                time.sleep(0.02)
            return at(home)

        patch.setattr(Slots, "take_free", take_slowly)
        patch.setattr(OnDisk, "at", look_slowly)
        sharded = sharded_at(1, Placement(optimizer=DISK), dir, {}, **DELAYED)
        losses = train_sharded(sharded, data(4))
        check_slots(sharded)
        return losses


def train_delayed_on_the_host() -> list[float]:
    sharded = make_sharded(
        build(), 1, placement=Placement(optimizer=HOST), apart=late_copies(), **DELAYED
    )
    return train_sharded(sharded, data(4))


DELAYED: dict[str, Any] = {"schedule": "delayed", "delay_after": 1}


@pytest.mark.thorough
def test_a_step_settles_delayed_updates_before_their_records_are_read_again(ranks: Ranks) -> None:
    """Else two threads would take a slot for one record, and training wait for the last ones."""
    assert ranks(1).run(train_delayed_and_slowly) == ranks(1).run(train_delayed_on_the_host)


MICRO_BATCHES = 4


def train_in_slices(
    sharded: ShardedModel, passes: SlicedPasses, batches: Sequence[Any]
) -> list[float]:
    """Train as `train_sharded` does, in layer-major order."""
    rank, size = world()
    found = []
    for batch in batches:
        parts = [split(split(batch, rank, size), k, MICRO_BATCHES) for k in range(MICRO_BATCHES)]
        shares: dict[int, torch.Tensor] = {}
        total = 0.0
        sharded.begin_step()
        with passes.step([partial(sharded.module, *part) for part in parts]):
            for action in layer_major(passes.num_slices, MICRO_BATCHES):
                number = action.micro
                turns_round = action.chunk == passes.num_slices - 1
                if action.kind is ActionKind.FORWARD:
                    passes.forward(action)
                    if turns_round:
                        loss = passes.take_result(number)
                        total += loss.item() / size / MICRO_BATCHES
                        shares[number] = loss / (size * MICRO_BATCHES)
                    continue
                loss = shares.pop(number) if turns_round else None
                passes.backward(action, loss, boundary=number == MICRO_BATCHES - 1)
        sums = NamedVector.of(sharded.comm.device, loss=total)
        result = sharded.step(1e-2, sums, lambda sums: torch.ones(()).double())
        found.append(float(result.sums["loss"]))
    return found


def run_in_an_order(
    placement: Placement, is_layer_major: bool, is_apart: bool
) -> tuple[list[float], dict[Any, torch.Tensor], dict[str, float]]:
    """Return losses, values, and what a step read from the disk, over what lies there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = make_sharded(
            build(),
            3,
            precision="bf16",
            layer_major=is_layer_major,
            placement=placement,
            disk_folder=folder,
            apart=late_copies() if is_apart else None,
        )
        train = partial(train_sharded, sharded, accumulation=MICRO_BATCHES)
        if is_layer_major:
            train = partial(train_in_slices, sharded, sharded.use_slices())
        losses = train(data(3, batch=16))
        sharded.settle_updates()
        read = {}
        if sharded.tiers is not None:
            moved = sharded.updates.step_counts.moved
            for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIM):
                there = allocated_memory(sharded).elsewhere[DISK, kind]
                read[kind.value] = moved[Move(DISK, Direction.READ, kind)] / there
        return losses, parts_of(sharded), read


@pytest.mark.parametrize(("num_ranks", "is_apart"), [(1, True), (2, False)])
@pytest.mark.at_most(1)
def test_layers_first_read_the_parameters_from_the_disk_once_for_all_micro_batches(
    ranks: Ranks, num_ranks: int, is_apart: bool
) -> None:
    pool = ranks(num_ranks)
    here = pool.run(run_in_an_order, ON_DEVICE, False, False)
    plain = pool.run(run_in_an_order, ALL_ON_DISK, False, is_apart)
    sliced = pool.run(run_in_an_order, ALL_ON_DISK, True, is_apart)
    for away in (plain, sliced):
        assert_equal([each[:2] for each in here], [each[:2] for each in away])
    for (_, _, in_turns), (_, _, together) in zip(plain, sliced, strict=True):
        assert in_turns["params"] == 2 * MICRO_BATCHES
        assert 1 < together["params"] <= 2  # the last slice stays from forward to backward
        # To add to, and by the update, which a rank that has padding only does not make.
        assert MICRO_BATCHES - 1 < together["grads"] == in_turns["grads"] <= MICRO_BATCHES
        assert 0 < together["optim"] == in_turns["optim"] <= 1


def run_until_the_disk_fails(
    stage: int, placement: Placement, schedule: str, num_blocks: int
) -> list[str]:
    """Train on a disk that moves so many blocks; return what is raised, then and afterwards."""
    left = itertools.count(num_blocks, -1)

    def failing(call: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            if next(left) <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*arguments)

        return called

    said = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, pytest.MonkeyPatch.context() as on:
        sharded = sharded_at(stage, placement, folder, {}, schedule=schedule)
        on.setattr(os, "pwritev", failing(os.pwritev))
        on.setattr(os, "preadv", failing(os.preadv))
        for _ in range(2):
            try:
                train_sharded(sharded, data(9), accumulation=2)
                sharded.settle_updates()
            except OffloadError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("schedule", ["overlap", "serial", "delayed"])
@pytest.mark.parametrize(
    ("stage", "place"), [(1, "disk"), (3, "disk, all"), (3, "apart and disk"), (3, "mixed")]
)
@pytest.mark.at_most(1)
def test_a_disk_that_fails_at_any_time_leaves_nobody_waiting(
    ranks: Ranks, stage: int, place: str, schedule: str
) -> None:
    """Neither here nor in the thread that updates, which the end of the process waits for."""
    placement = (PLACEMENTS | WITH_PARAMETERS)[place]
    for num_blocks in (0, 2, 9, 25, 40, 57):
        (said,) = ranks(1).run(run_until_the_disk_fails, stage, placement, schedule, num_blocks)
        assert len(said) == 2
        assert all("Input/output error; the disk fails" in each for each in said)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.at_most(1)
def test_layer_wise_updates_on_the_host(ranks: Ranks, stage: int) -> None:
    settings = {"precision": "bf16", "optim": {"name": "lamb", "moments": "bf16"}}
    placement = Placement(grad=HOST, optimizer=HOST)
    if stage == 3:
        placement = ALL_APART
    here = ranks(2).run(run, stage, ON_DEVICE, settings, 2, "overlap")
    assert_equal(here, ranks(2).run(run, stage, placement, settings, 2, "overlap"))


def run_hybrid(placement: Placement, stage: int) -> dict[str, torch.Tensor]:
    """Two copies of two shards each, and a gradient after the one that was to be the last."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = sharded_at(stage, placement, folder, {}, shard_group=2)
        rank, size = world()
        for x, y in data(3):
            sharded.begin_step()
            for boundary in (False, True, True):
                with sharded.forward() as micro:
                    loss = sharded.module(x.chunk(size)[rank], y.chunk(size)[rank])
                sharded.backward(loss / size, micro, boundary=boundary)
            sums = NamedVector.of(sharded.comm.device, loss=0.0)
            sharded.step(1e-2, sums, lambda sums: torch.ones(()).double())
            with sharded.gathered() as module:
                for param in module.parameters():
                    param.mul_(0.75)
        with sharded.evaluation():
            sharded.module(*data(1)[0])
        with sharded.gathered() as module:
            return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", [3, 0, 2])
@pytest.mark.thorough
def test_a_sum_that_is_added_to_and_what_user_code_writes(ranks: Ranks, stage: int) -> None:
    placements = [Placement(grad=HOST, optimizer=HOST), Placement(grad=DISK, optimizer=DISK)]
    if stage == 3:
        placements = [ALL_APART, ALL_ON_DISK]
    here = ranks(4).run(run_hybrid, ON_DEVICE, stage)
    for placement in placements:
        away = ranks(4).run(run_hybrid, placement, stage)
        for own, other in zip(here, away, strict=True):
            differ = {name: (own[name] - other[name]).abs().max() for name in own}
            # At stage 0 the late gradient is summed over ranks before it is added, not after.
            assert max(differ.values()) <= (1e-7 if stage < 2 else 0), differ


def test_only_what_was_changed_is_written_to_the_disk_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = make_sharded(
        build(), 1, precision="bf16", placement=PLACEMENTS["disk"], disk_folder=str(tmp_path)
    )
    train_sharded(sharded, data(1))
    sharded.settle_updates()
    written: list[str] = []
    write = Tiers.write

    def watched(self: Tiers, extent: Extent, source: torch.Tensor, kind: Kind) -> Transfer:
        written.append(extent.name)
        return write(self, extent, source, kind)

    monkeypatch.setattr(Tiers, "write", watched)
    with sharded.gathered():
        pass
    assert written == []
    with sharded.gathered() as module:
        module.last.weight.zero_()
    assert set(written) == {
        f"the optim of {unit.name}" for unit in sharded.units if "last" in unit.name
    }


def run_delayed(placement: Placement, delay_after: int) -> list[float]:
    sharded = make_sharded(
        build(),
        1,
        placement=placement,
        apart=ThreadCopier(lambda: 0.01),  # the next backward has gradients before
        schedule="delayed",
        delay_after=delay_after,
    )
    losses = train_sharded(sharded, data(6), accumulation=2)
    sharded.settle_updates()
    return [*losses, *weights_of(sharded)]


def weights_of(sharded: ShardedModel) -> list[float]:
    with sharded.gathered() as module:
        return [float(param.norm()) for param in module.parameters()]


def run_delayed_by_hand(delay_after: int) -> list[float]:
    """The oracle: update a model with the gradients of a plain copy that lags a step behind it."""
    rank, size = world()
    trained = make_sharded(build(), 1)
    seen = build()
    losses = []
    for number, (x, y) in enumerate(data(6), start=1):
        trained.begin_step()
        total = 0.0
        for k in range(2):
            loss = seen(*(t.chunk(size)[rank].chunk(2)[k] for t in (x, y)))
            total += loss.item() / size / 2
            grads = torch.autograd.grad(loss / (size * 2), list(seen.parameters()))
            with trained.forward() as micro:
                pairs = zip(trained.module.parameters(), grads, strict=True)
                stand_in = torch.stack([(param * grad).sum() for param, grad in pairs]).sum()
            trained.backward(stand_in, micro, boundary=k == 1)
        with trained.gathered() as module:
            before = [param.detach().clone() for param in module.parameters()]
        sums = NamedVector.of(trained.comm.device, loss=total)
        result = trained.step(1e-2, sums, lambda sums: torch.ones(()).double())
        losses.append(float(result.sums["loss"]))
        with trained.gathered() as module, torch.no_grad():
            now = before if number > delay_after else module.parameters()
            for param, value in zip(seen.parameters(), now, strict=True):
                param.copy_(value)
    return [*losses, *weights_of(trained)]


@pytest.mark.parametrize("place", ["apart optimizer", "apart"])
@pytest.mark.thorough
def test_a_delayed_update_is_that_of_a_gradient_one_step_old(ranks: Ranks, place: str) -> None:
    placement = PLACEMENTS[place]
    delayed = ranks(2).run(run_delayed, placement, 3)
    assert delayed == ranks(2).run(run_delayed_by_hand, 3)
    assert delayed != ranks(2).run(run_delayed, placement, 100), "it changes numbers"


class Narrow(torch.nn.Module):
    """Its last unit is so small that the last rank has none of it, but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.scale = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.scale(self.first(x).sum(1, keepdim=True)) - y.sum()).square().mean()


def gathers_of_narrow() -> tuple[list[str], int]:
    """Return the units in the order in which this rank gathers them, and how many it updates."""
    gathered: list[str] = []

    def seen(self: Exchange, comm: Any, unit: Any) -> Any:
        gathered.append(unit.name)
        return all_gather(self, comm, unit)

    all_gather = Exchange.all_gather
    with pytest.MonkeyPatch.context() as on:
        on.setattr(Exchange, "all_gather", seen)
        torch.manual_seed(1)
        sharded = make_sharded(
            Narrow(),
            1,
            bucket=256,
            placement=PLACEMENTS["apart"],
            apart=ThreadCopier(lambda: 0.01),
            unit_names=["scale"],
        )
        train_sharded(sharded, data(3))
    return gathered, len({unit.name for unit, _, _ in sharded.optimizer.updated_pieces()})


def test_ranks_gather_in_one_order_what_only_some_of_them_update(ranks: Ranks) -> None:
    """A backend pairs up collectives by their order."""
    (first, num_first), (last, num_last) = ranks(2).run(gathers_of_narrow)
    assert num_first > num_last
    assert first == last


class Hasty(ThreadCopier):
    """Copies that nobody waits for."""

    def _begin(self, source: torch.Tensor, target: torch.Tensor, way: Way) -> Transfer:
        super()._begin(source, target, way)
        return DONE


def run_hasty(copier: type[ThreadCopier], placement: Placement) -> list[float]:
    sharded = make_sharded(build(), 3, placement=placement, apart=copier(lambda: 0.01))
    losses = train_sharded(sharded, data(3))
    sharded.settle_updates()
    return losses


@pytest.mark.parametrize(
    "placement",
    [Placement(optimizer=HOST), Placement(grad=HOST, optimizer=HOST)],
    ids=["optimizer", "gradients"],
)
def test_a_missing_wait_would_be_found(ranks: Ranks, placement: Placement) -> None:
    """Of parameters it ends the process: their pages are unreadable until they are gathered."""
    right = ranks(1).run(run_hasty, ThreadCopier, placement)
    assert right == ranks(1).run(run_hasty, ThreadCopier, ON_DEVICE)
    assert right != ranks(1).run(run_hasty, Hasty, placement)


def scratch_of_threads(placement: Placement) -> tuple[set[int], set[int]]:
    """Return the scratch of updates that training makes, and of those that the worker makes."""
    sharded = sharded_at(3, placement, "", {"precision": "bf16"})
    here, beside = set(), set()
    for unit, _, update in sharded.optimizer.updated_pieces():
        if unit.update_side.is_elsewhere:
            beside.add(id(update.scratch))
        else:
            here.add(id(update.scratch))
    return here, beside


def test_two_threads_that_update_share_no_scratch(ranks: Ranks) -> None:
    here, beside = ranks(1).run(scratch_of_threads, PLACEMENTS["apart, half"])[0]
    assert len(here) == len(beside) == 1
    assert not here & beside
