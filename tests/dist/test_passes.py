"""Micro-batches under way together: whatever the order of forwards and backwards, the same bits and bytes.

Gradients add up in the order of backwards, so these stay in the order of the micro-batches wherever bits are compared;
forwards may come in any order.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from toys import Block, make_sharded, split, world

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.config import ActivationsConfig
from zrun_core.layout import Sharded
from zrun_core.named_vector import NamedVector
from zrun_core.pipeline.schedule import (
    Action,
    ActionKind,
    checked,
    no_pipeline,
    one_forward_one_backward,
)
from zrun_core.zero.sharded import ShardedModel
from zrun_core.zero.traffic import KINDS

DIM, MICRO_BATCHES = 16, 4
KINDS_OF_MODELS = ["plain", "tied", "looked at", "frozen", "leaf", "checkpointed", "changing"]
Actions = Sequence[Action]


class Choice(nn.Module):
    """One of two layers, by the data: ranks may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(x.sum() > 0)](x)


class Model(nn.Module):
    """Blocks between two layers, with one peculiarity."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(4))
        self.last = Choice() if kind == "leaf" else nn.Linear(DIM, DIM)
        if kind == "tied":
            self.last.weight = self.first.weight
        if kind == "frozen":
            self.blocks[1].requires_grad_(requires_grad=False)
            self.first.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            if self.kind != "changing" or place in (0, 1 + number % 3):  # units that others do not use
                x = block(x)
        if self.kind == "looked at":
            x = nn.functional.linear(x, self.blocks[1].down.weight[:, :DIM])
        return self.last(x).square().mean()


def make(kind: str, stage: int) -> ShardedModel:
    torch.manual_seed(5)
    model = Model(kind)
    options: dict[str, Any] = {"leaf_names": ["last"]} if kind == "leaf" else {}
    if kind == "checkpointed":
        apply_checkpointing(model, ActivationsConfig(checkpoint="full"))
        options = {"recomputes_blocks": True}
    if kind == "changing":
        options = {"prefetch": 0}  # what is gathered ahead in vain counts
    return make_sharded(model, stage, optim={"name": "sgd", "weight_decay": None}, bucket=1 << 13, **options)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    rank, size = world()
    whole = [torch.randn(12, DIM, generator=generator) for _ in range(MICRO_BATCHES)]
    return [part for each in whole for part in split((each,), rank, size)]


def execute(sharded: ShardedModel, actions: Actions) -> list[float]:
    """Run the forwards and backwards of a step; returns losses by micro-batch."""
    inputs, under_way, losses = batches(), {}, {}
    sharded.begin_step()
    for action in checked(actions):
        if action.kind is ActionKind.FORWARD:
            with sharded.forward() as micro:
                loss = sharded.module(inputs[action.micro], action.micro)
            losses[action.micro], under_way[action.micro] = loss.item(), (loss, micro)
        else:
            sharded.backward(*under_way.pop(action.micro), boundary=action is actions[-1])
    return [losses[number] for number in range(MICRO_BATCHES)]


def gradients(sharded: ShardedModel) -> list[Tensor]:
    return [unit.grad.clone() for unit in sharded.units if unit.trainable]


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def finish(sharded: ShardedModel) -> bool:
    """Make a step that changes nothing; returns whether the ranks agree on what was gathered."""
    sums = NamedVector.of(sharded.comm.device, weight=1.0)
    return bool(sharded.step(0.0, sums, lambda sums: sums["weight"]).agreed)


class Found(NamedTuple):
    """What a step in one order came to on a rank. Bytes are those of all steps so far."""

    losses: list[float]
    grads: str
    sent: dict[str, int]
    expected: dict[str, int]
    rings: tuple[int, int]
    grown: list[str]
    late: list[str]
    agreed: bool


def walk(kind: str, stage: int, orders: Sequence[Actions]) -> list[Found]:
    """One step in each order after the other, from the same parameters."""
    sharded = make(kind, stage)
    found, done = [], []
    for actions in orders:
        losses = execute(sharded, actions)
        grads = digest(gradients(sharded))
        agreed = finish(sharded)
        done.append(actions)
        sent: Counter[str] = Counter()
        for key, num_bytes in sharded.comm.sent_bytes.items():
            sent[key.kind] += num_bytes * (key.kind in KINDS)
        found.append(
            Found(
                losses, grads, {each: size for each, size in sent.items() if size},
                theory(sharded, kind, done), sharded.ring_bytes,
                [purpose for purpose, _, _ in sharded.grown_rings()],
                sharded.reducer.learnt()["late"], agreed,
            )
        )  # fmt: skip
    return found


def theory(sharded: ShardedModel, kind: str, steps: Sequence[Actions]) -> dict[str, int]:
    """Bytes that this rank should have sent.

    At stage 3 a unit is gathered for each forward and each backward that uses it, in any order of these. One that is
    looked at outside of its module is held from there to the end of the backward, and others find it there: it is
    gathered (for its module, and for the look) only in forwards that begin while none is under way.
    """
    expected = sharded.expected_traffic(len(steps), len(steps) * MICRO_BATCHES)
    if Sharded.PARAMETER not in sharded.settings.zero.sharded:
        return expected
    uses: Counter[str] = Counter()  # by unit, passes that gather it
    for actions in steps:
        for number, action in enumerate(actions):
            is_forward = action.kind is ActionKind.FORWARD
            for layout in sharded.layouts:
                block = int(layout.name.split(".")[1].split("(")[0]) if "blocks" in layout.name else 0
                if kind == "changing" and block and block != 1 + action.micro % 3:
                    continue
                if kind == "looked at" and block == 1:
                    before = actions[:number]
                    under_way = sum(1 if a.kind is ActionKind.FORWARD else -1 for a in before)
                    uses[layout.name] += 2 * (is_forward and not under_way)
                elif is_forward or kind != "frozen" or "first" not in layout.name:  # no gradient flows to that one
                    uses[layout.name] += 1
    peers = sharded.mesh.shard.size - 1
    sizes = {layout.name: layout.shard_numel * layout.dtype.itemsize for layout in sharded.layouts}
    return expected | {"all_gather": peers * sum(uses[name] * size for name, size in sizes.items())}


def legal_order(seed: int) -> Actions:
    """Forwards in any order, backwards in that of the micro-batches."""
    choose = random.Random(seed)
    left, ready, next_back, actions = list(range(MICRO_BATCHES)), set(), 0, []
    while next_back < MICRO_BATCHES:
        if next_back in ready and (not left or choose.random() < 0.5):
            actions.append(Action(ActionKind.BACKWARD, 0, next_back))
            next_back += 1
        else:
            micro = left.pop(choose.randrange(len(left)))
            ready.add(micro)
            actions.append(Action(ActionKind.FORWARD, 0, micro))
    return checked(actions)


ALTERNATING = no_pipeline(MICRO_BATCHES)
AHEAD = one_forward_one_backward(0, 2, MICRO_BATCHES)  # F0 F1 B0 F2 B1 F3 B2 B3
ALL_AHEAD = one_forward_one_backward(0, 1 + MICRO_BATCHES, MICRO_BATCHES)
RANDOM = [legal_order(seed) for seed in (1, 2, 3)]
WALKS = [ALTERNATING, AHEAD, ALL_AHEAD, *RANDOM], [AHEAD, ALTERNATING]  # each of two is the first of a model


def walk_all() -> dict[tuple[str, int], tuple[list[Found], list[Found]]]:
    return {
        (kind, stage): (walk(kind, stage, WALKS[0]), walk(kind, stage, WALKS[1]))
        for kind in KINDS_OF_MODELS
        for stage in range(4)
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_order_changes_neither_bits_nor_bytes_nor_rings(ranks, world_size):
    for by_case in ranks(world_size).run(walk_all):
        for case, (first, second) in by_case.items():
            plain = first[0]
            for name, found in zip([*WALKS[0], *WALKS[1]], [*first, *second], strict=True):
                where = f"{case}: {' '.join(map(str, name))}"
                assert found.losses == plain.losses, where
                assert found.grads == plain.grads, where
                assert found.sent == found.expected, where
                assert found.late == [], where
                assert found.agreed, where
                # What is held outside of modules is not planned. It is held once, by however many micro-batches.
                assert found.grown == (["gathering"] if case == ("looked at", 3) else []), where
                assert found.rings == plain.rings, where
