"""Inputs of recomputed blocks that wait elsewhere, in sharded training: the same bits and bytes."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from toys import Net, data, make_sharded, world

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.activations.kept import DiskKeeper, HostKeeper, Keeper
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.memory.buffers import Kind, Tier
from zrun_core.memory.layout import PAGE_BYTES
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.pipeline.actions import Action, ActionKind
from zrun_core.pipeline.schedule import no_pipeline, one_forward_one_backward
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.tiers.copies import ThreadCopier
from zrun_core.tiers.host_arena import HostArena
from zrun_core.tiers.swap_file import SwapFile

Ranks = Callable[[int], Any]
DEPTH, MICRO_BATCHES, STEPS = 4, 3, 2
ALTERNATING = no_pipeline(MICRO_BATCHES)
AHEAD = one_forward_one_backward(0, 2, MICRO_BATCHES)  # F0 F1 B0 F2 B1 B2


class Found(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]
    sent: dict[Any, int]
    moved: dict[Move, int]
    kept: dict[Tier, int]


def make_keeper(tier: Tier, folder: str) -> Keeper | None:
    chance = random.Random(world()[0])
    copier = ThreadCopier(lambda: chance.choice([0.0, 0.0, 0.003]))
    arena = HostArena(1 << 26, torch.device("cpu"))
    if tier is Tier.HOST:
        return HostKeeper(copier, arena)
    if tier is Tier.DISK:
        return DiskKeeper(SwapFile(Path(folder), 0), copier, arena, host_is_device=True)
    return None


def train(
    tier: Tier, stage: int, precision: str, policy: str, orders: Sequence[Sequence[Action]]
) -> Found:
    """Make a step in each order of forwards and backwards."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        torch.manual_seed(1)
        model = Net(depth=DEPTH)
        keeper = make_keeper(tier, folder)
        inputs = None if keeper is None else OffloadedInputs(keeper)
        apply_checkpointing(model, ActivationsConfig.model_validate({"checkpoint": policy}), inputs)
        sharded = make_sharded(model, stage, precision=precision, recomputes_blocks=True)
        rank, size = world()
        losses = []
        for (x, y), actions in zip(data(len(orders)), orders, strict=True):
            under_way: dict[int, Any] = {}
            sharded.begin_step()
            for action in actions:
                if action.kind is ActionKind.FORWARD:
                    part = slice(action.micro * size + rank, None, MICRO_BATCHES * size)
                    with sharded.forward() as micro:
                        loss = sharded.module(x[part], y[part])
                    losses.append(loss.item())
                    under_way[action.micro] = (loss, micro)
                else:
                    is_last = action is actions[-1]
                    sharded.backward(*under_way.pop(action.micro), boundary=is_last)
            sums = NamedVector.of(sharded.comm.device, weight=1.0)
            sharded.step(1e-2, sums, lambda sums: sums["weight"])
        with sharded.evaluation():
            losses.append(sharded.module(x, y).item())
        with sharded.gathered() as module:
            state = {name: value.clone() for name, value in module.state_dict().items()}
        return Found(
            losses,
            state,
            dict(sharded.comm.sent_bytes),
            {} if inputs is None else dict(inputs.moved),
            {} if inputs is None else inputs.kept_bytes,
        )


def walk(tier: Tier, stage: int) -> dict[tuple[str, str], Found]:
    return {
        (precision, policy): train(tier, stage, precision, policy, [ALTERNATING, AHEAD])
        for precision, policy in itertools.product(("fp32", "bf16"), ("full", "every_n"))
    }


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.at_most(1)
def test_where_inputs_wait_changes_nothing(
    ranks: Ranks, num_ranks: int, stage: int, tier: Tier
) -> None:
    here = ranks(num_ranks).run(walk, Tier.DEVICE, stage)
    away = ranks(num_ranks).run(walk, tier, stage)
    for own, others in zip(here, away, strict=True):
        for case, found in others.items():
            expected = own[case]
            assert found.losses == expected.losses, case
            differ = [
                name
                for name, value in expected.state.items()
                if not torch.equal(value, found.state[name])
            ]
            assert differ == [], case
            assert found.sent == expected.sent, case
            check_bytes(found, tier, num_blocks=DEPTH if case[1] == "full" else DEPTH // 2)


def check_bytes(found: Found, tier: Tier, num_blocks: int) -> None:
    """Whatever a small input has lies in a page of its own.

    Alternating passes begin backward with the last input on the device; of those ahead (F0 F1 B0
    F2 B1 B2) only the last does, and of all of them the others come back.
    """
    assert found.kept[tier] == 2 * num_blocks * PAGE_BYTES  # two micro-batches under way
    on_device = MICRO_BATCHES + 1
    all_inputs = STEPS * MICRO_BATCHES * num_blocks
    read = found.moved[Move(tier, Direction.READ, Kind.ACTIVATION)]
    written = found.moved[Move(tier, Direction.WRITTEN, Kind.ACTIVATION)]
    if tier is Tier.DISK:
        assert read == written == (all_inputs - on_device) * PAGE_BYTES
    else:
        assert written * (all_inputs - on_device) == read * all_inputs > 0
