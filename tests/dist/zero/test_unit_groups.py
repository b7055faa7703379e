"""Units on groups of their own: one block lies on pairs of ranks, the others on all four.

first, blocks.0, blocks.2, last     shards on ranks 0 1 2 3, one copy
blocks.1                            shards on ranks 0 1 and again on 2 3: two copies
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from elsewhere import late_copies
from numpy.typing import NDArray
from torch import Tensor, nn
from toys import Net, build, data, full_state, make_sharded, split, train_plain, world

from zrun_core.checkpoint.model_state import ModelState
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import DivergedError
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier
from zrun_core.zero.account import (
    allocated_memory,
    expected_traffic,
    grown_rings,
    planned_memory,
)
from zrun_core.zero.sharded_model import ShardedModel

PAIRED = "blocks.1"
ON_PAIRS = {f"{PAIRED}.{name}": "pairs" for name, _ in Net().blocks[1].named_parameters()}
STEPS, BATCH = 3, 24
CLIP = 0.05
ELSEWHERE = {
    "host": Placement(grad=Tier.HOST, optimizer=Tier.HOST),
    "disk": Placement(grad=Tier.DISK, optimizer=Tier.DISK),
}


class Leaving(Net):
    """Its second block is left out at times."""

    leaves_out = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or not self.leaves_out:
                x = block(x)
        return nn.functional.mse_loss(self.last(x), y)


def leaving() -> Leaving:
    torch.manual_seed(1)
    return Leaving()


class Range(NamedTuple):
    """What a rank has of the gradient of a parameter, from one of its elements on."""

    param: str
    first: int
    values: NDArray[np.float32]


def make(stage: int, **options: Any) -> ShardedModel:
    """The model of these tests. One block lies on `own_size` ranks; None: where the others do."""
    rank, size = world()
    own_size = options.pop("own_size", 2)
    mesh = Mesh.build(rank, ["host"] * size, size if stage else 1)
    if own_size is not None:
        mesh = mesh.divide("pairs", own_size if stage else 1)
        options["groups_of"] = ON_PAIRS
    comm = Comm(torch.device("cpu"))
    comm.use_cma(mesh.host, 60.0)
    options["optim"] = {"clip": CLIP, **options.get("optim", {})}
    return make_sharded(leaving(), stage, meet=(mesh, comm), **options)


def gradients(sharded: ShardedModel) -> list[Range]:
    """This rank's part of the step's gradient, by parameter."""
    found = []
    for unit in sharded.units:
        start, stop = unit.updated_range
        local = unit.grad.fetch().clone()
        unit.grad.drop()
        for piece in unit.layout.pieces(start, stop):
            first = start + piece.start - piece.slot.offset
            values = local[piece.start : piece.stop].numpy()
            found.append(Range(piece.slot.name, first, values))
    return found


def run_step(
    sharded: ShardedModel, batch: Sequence[Tensor], boundaries: Sequence[bool]
) -> tuple[float, list[Range], float]:
    """Make a step of as many micro-batches as `boundaries` says of them.

    Returns:
        The mean loss of all ranks, the gradient before the update, and its norm.
    """
    rank, size = world()
    sharded.begin_step()
    total = 0.0
    for number, boundary in enumerate(boundaries):
        part = split(split(batch, rank, size), number, len(boundaries))
        with sharded.forward() as micro:
            loss = sharded.module(*part)
        total += loss.item() / size / len(boundaries)
        sharded.backward(loss / (size * len(boundaries)), micro, boundary=boundary)
    sharded.reducer.flush()
    grads = gradients(sharded)
    sums = NamedVector.of(sharded.comm.device, loss=total)
    result = sharded.step(1e-2, sums, lambda sums: torch.ones((), dtype=torch.float64))
    assert bool(result.agreed)
    return float(result.sums["loss"]), grads, float(result.grad_norm)


def run(
    stage: int,
    boundaries: Sequence[bool],
    placement: Placement = ON_DEVICE,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train; the step of number `without` leaves out the block."""
    options = dict(options or {})
    without = options.pop("without", None)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if placement is not ON_DEVICE:
            options |= {"placement": placement, "disk_folder": folder}
            options["apart"] = late_copies() if placement.grad is Tier.HOST else None
        sharded = make(stage, **options)
        steps = []
        for number, batch in enumerate(data(STEPS, BATCH)):
            sharded.module.leaves_out = number == without
            steps.append(run_step(sharded, batch, boundaries))
        sharded.settle_updates()
        ReplicaGuard(sharded).check(STEPS, {"step": float(STEPS)})
        planned, allocated = planned_memory(sharded), allocated_memory(sharded)
        sent = Counter[str]()
        for key, num_bytes in sharded.comm.sent_bytes.items():
            sent[key.kind] += num_bytes
        expected = expected_traffic(sharded, STEPS, STEPS * len(boundaries))
        return {
            "losses": [loss for loss, _, _ in steps],
            "grads": [grads for _, grads, _ in steps],
            "norms": [norm for _, _, norm in steps],
            "state": {name: each.numpy() for name, each in full_state(sharded).items()},
            "groups": {u.name: (u.shard.ranks, u.replicate.ranks) for u in sharded.units},
            "memory": (planned.by_kind == allocated.by_kind, grown_rings(sharded)),
            "bytes": (expected, {kind: sent[kind] for kind in expected}),
            "spans": [span for share in ModelState(sharded).shares() for span in share.spans()],
        }


def plain(
    without: int | None = None,
) -> tuple[list[float], list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    """Losses, gradients, norms and parameters of a plain loop over global batches."""
    grads: list[dict[str, Tensor]] = []
    norms: list[float] = []

    model = leaving()
    clip = nn.utils.clip_grad_norm_

    def watched(params: Any, largest: float) -> Tensor:
        named = model.named_parameters()
        grads.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
        )
        norms.append(float(clip(model.parameters(), largest)))
        return torch.tensor(norms[-1])

    def loss_of(_: nn.Module, batch: Any) -> Tensor:
        model.leaves_out = len(grads) == without
        return model(*batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", watched)
        losses = train_plain(model, data(STEPS, BATCH), clip=CLIP, loss_of=loss_of)
    return losses, grads, norms, dict(model.state_dict())


def assert_plain(
    ranks_found: Sequence[dict[str, Any]], copies_of_block: int = 2, without: int | None = None
) -> None:
    """All ranks together have the losses, gradients and parameters of a plain loop."""
    losses, grads, norms, state = plain(without)
    close = 2e-6
    for found in ranks_found:
        assert found["losses"] == pytest.approx(losses, abs=close)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        for name, value in found["state"].items():
            assert np.abs(value - state[name].numpy()).max() < 20 * close, name
    for step, expected in enumerate(grads):
        held = {name: np.zeros(each.numel(), dtype=int) for name, each in expected.items()}
        for found in ranks_found:
            for param, first, values in found["grads"][step]:
                where = slice(first, first + len(values))
                assert np.abs(values - expected[param].flatten()[where].numpy()).max() < close
                held[param][where] += 1
        for name, times in held.items():
            copies = copies_of_block if name.startswith(PAIRED) else 1
            assert (times == copies).all(), name


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("micros", [1, 3])
def test_gradients_and_parameters_are_those_of_a_plain_loop(ranks, stage, micros):
    boundaries = [number == micros - 1 for number in range(micros)]
    found = ranks(4).run(run, stage, boundaries)
    for rank, each in enumerate(found):
        pair = (0, 1) if rank < 2 else (2, 3)
        copies = (0, 2) if rank % 2 == 0 else (1, 3)
        assert len(each["groups"]) > 4
        for name, groups in each["groups"].items():
            own = PAIRED in name
            assert groups == ((pair, copies) if own else ((0, 1, 2, 3), (rank,))), name
        assert each["memory"] == (True, [])
        expected, sent = each["bytes"]
        assert sent == expected
        assert expected["all_reduce"] > 0, "replicas of the block, and of nothing else"
    assert_plain(found)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_other_stages_do_the_same(ranks, stage):
    found = ranks(4).run(run, stage, [False, True])
    assert all(each["bytes"][0] == each["bytes"][1] for each in found)
    losses, _, norms, _ = plain()
    for each in found:
        assert each["losses"] == pytest.approx(losses, abs=2e-6)
        assert each["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "boundaries",
    [[False, False], [False, True, True], [True, False]],
    ids=["none is the last", "one too many", "one comes after it"],
)
def test_a_step_that_ends_otherwise_than_it_said(ranks, stage, boundaries):
    """Some units are summed over shards by then, and none over replicas, or all of them are."""
    assert_plain(ranks(4).run(run, stage, boundaries))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("boundaries", [[False, True], [False, False], [False, True, True]])
def test_a_block_that_no_ranks_divide(ranks, stage, boundaries):
    """Its micro-batches add up on each rank, while the others are reduced one by one."""
    found = ranks(4).run(run, stage, boundaries, ON_DEVICE, {"own_size": 1})
    assert_plain(found, copies_of_block=4)
    for each in found:
        assert each["memory"] == (True, [])
        if boundaries == [False, True]:
            expected, sent = each["bytes"]
            assert sent == expected


@pytest.mark.parametrize("own_size", [1, 2])
@pytest.mark.parametrize("boundaries", [[False, True], [False, False]])
def test_a_step_without_the_block(ranks, own_size, boundaries):
    """Its gradient is nothing, not that of the step before, whoever sums it when."""
    options = {"own_size": own_size, "without": 1}
    found = ranks(4).run(run, 3, boundaries, ON_DEVICE, options)
    assert_plain(found, copies_of_block=4 // own_size, without=1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("where", list(ELSEWHERE))
@pytest.mark.at_most(2)
def test_where_gradients_live_changes_no_bit(ranks, stage, where):
    boundaries = [False, True, True]
    here = ranks(4).run(run, stage, boundaries)
    away = ranks(4).run(run, stage, boundaries, ELSEWHERE[where])
    for own, other in zip(here, away, strict=True):
        assert own["losses"] == other["losses"]
        for mine, theirs in zip(own["grads"], other["grads"], strict=True):
            assert [each[:2] for each in mine] == [each[:2] for each in theirs]
            assert all((a.values == b.values).all() for a, b in zip(mine, theirs, strict=True))


def test_ratios_of_layers_are_those_of_units_on_the_same_ranks(ranks):
    """Norms of a layer are summed over the ranks that hold its unit, and no others."""
    lamb: dict[str, Any] = {"optim": {"name": "lamb"}}
    found = ranks(4).run(run, 2, [True], ON_DEVICE, lamb)
    usual = ranks(4).run(run, 2, [True], ON_DEVICE, {**lamb, "own_size": None})
    for own, other in zip(found, usual, strict=True):
        assert own["losses"] == pytest.approx(other["losses"], abs=2e-6)
        for name, value in own["state"].items():
            assert np.abs(value - other["state"][name]).max() < 2e-6, name


@pytest.mark.parametrize("stage", [1, 3])
def test_each_element_is_saved_by_one_rank(ranks, stage):
    found = ranks(4).run(run, stage, [True])
    written = {name: np.zeros(each.numel(), dtype=int) for name, each in build().named_parameters()}
    by_rank = Counter[int]()
    for rank, each in enumerate(found):
        for tensor, start, stop in each["spans"]:
            written[tensor][start:stop] += 1
            by_rank[rank] += (stop - start) * tensor.startswith(PAIRED)
    assert all((times == 1).all() for times in written.values())
    assert all(by_rank[rank] for rank in range(3)), "copies deal out what they write"


def damage() -> list[str]:
    """What the guard says before and after a copy of a shard of the block is another."""
    sharded = make(3)
    guard = ReplicaGuard(sharded)
    run_step(sharded, data(1)[0], [True])
    said = []
    for damaged in ("", PAIRED):
        for unit in sharded.units:
            if damaged and damaged in unit.name and world()[0] == 3:
                unit.values().flat[:1] += 1.0
                unit.values_changed()
        try:
            guard.check(1, {"step": 1.0})
            said.append("")
        except DivergedError as error:
            said.append(str(error))
    return said


def test_a_copy_that_differs_is_found_among_those_that_hold_it(ranks):
    for before, after in ranks(4).run(damage):
        assert before == ""
        assert "replicas diverged: rank" in after
        assert PAIRED in after


def gathers() -> tuple[list[str], str]:
    sharded = make(3, prefetch=0)
    seen = []
    gather = Comm.all_gather

    def watched(comm: Comm, full: Tensor, shard: Tensor, group: Any, **names: Any) -> Any:
        seen.append(f"{names['name']} {group.size}")
        return gather(comm, full, shard, group, **names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_gather", watched)
        with sharded.evaluation():
            sharded.module(*data(1)[0])
    try:
        make(3, groups_of=ON_PAIRS, own_size=None)
    except ValueError as error:
        return seen, str(error)
    return seen, ""


def test_a_unit_is_gathered_over_its_own_ranks_and_unknown_groups_are_refused(ranks):
    for seen, error in ranks(4).run(gathers):
        sizes = {name.split()[0]: int(name.split()[-1]) for name in seen}
        assert {size for name, size in sizes.items() if PAIRED in name} == {2}
        assert {size for name, size in sizes.items() if PAIRED not in name} == {4}
        assert "pairs" in error
