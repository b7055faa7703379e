"""Micro-batches under way together: the same bits and bytes in any order of passes.

Gradients add up in the order of backwards, so these stay in the order of the micro-batches wherever
bits are compared; forwards may come in any order.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from runs import job, losses, run
from torch import Tensor, nn
from toys import Block, make_sharded, split, world

import zrun_core.train.micro_batches
from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.pipeline.actions import Action, ActionKind, validated
from zrun_core.pipeline.schedule import no_pipeline, one_forward_one_backward
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.train.user_hooks import HookContext
from zrun_core.zero.account import expected_traffic, grown_rings
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.exchange import KINDS

DIM, MICRO_BATCHES = 16, 3
KINDS_OF_MODELS = ["plain", "tied", "looked at", "frozen", "leaf", "checkpointed", "changing"]
UNUSED = [("blocks.2", "blocks.3"), ("blocks.1", "blocks.3"), ("blocks.1", "blocks.2")]
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
            if self.kind != "changing" or f"blocks.{place}" not in UNUSED[number % 3]:
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
    return make_sharded(
        model, stage, optim={"name": "sgd", "weight_decay": None}, bucket=1 << 13, **options
    )


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    rank, size = world()
    whole = [torch.randn(12, DIM, generator=generator) for _ in range(MICRO_BATCHES)]
    return [part for each in whole for part in split((each,), rank, size)]


def execute(sharded: ShardedModel, actions: Actions) -> list[float]:
    """Run the forwards and backwards of a step; return losses by micro-batch."""
    inputs, under_way, losses = batches(), {}, {}
    sharded.begin_step()
    for action in validated(actions):
        if action.kind is ActionKind.FORWARD:
            with sharded.forward() as micro:
                loss = sharded.module(inputs[action.micro], action.micro)
            losses[action.micro], under_way[action.micro] = loss.item(), (loss, micro)
        else:
            sharded.backward(*under_way.pop(action.micro), boundary=action is actions[-1])
    return [losses[number] for number in range(MICRO_BATCHES)]


def gradients(sharded: ShardedModel) -> list[Tensor]:
    return [unit.grad.local.clone() for unit in sharded.units if unit.trainable]


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
                losses,
                grads,
                {each: size for each, size in sent.items() if size},
                theory(sharded, kind, done),
                sharded.ring_bytes,
                [purpose for purpose, _, _ in grown_rings(sharded)],
                sharded.reducer.order.state_dict()["late"],
                agreed,
            )
        )
    return found


def theory(sharded: ShardedModel, kind: str, steps: Sequence[Actions]) -> dict[str, int]:
    """Bytes that this rank should have sent.

    At stage 3 a unit is gathered for each forward and each backward that uses it, whatever their
    order. One that is looked at outside of its module is held from there to the end of the
    backward, and others find it there: it is gathered, for its module and for the look, only in
    forwards that begin while nothing is under way.
    """
    expected = expected_traffic(sharded, len(steps), len(steps) * MICRO_BATCHES)
    if not sharded.settings.zero.reshard_after_use or kind not in ("looked at", "changing"):
        return expected
    gathers = 0
    for actions in steps:
        under_way = 0
        for action in actions:
            is_forward = action.kind is ActionKind.FORWARD
            for layout in sharded.layouts:
                uses = 1
                if kind == "changing" and layout.name in UNUSED[action.micro % 3]:
                    uses = 0
                if kind == "looked at" and layout.name == "blocks.1":
                    uses = 2 if is_forward and not under_way else 0
                gathers += uses * layout.shard_numel * layout.dtype.itemsize
            under_way += 1 if is_forward else -1
    return expected | {"all_gather": (sharded.mesh.shard.size - 1) * gathers}


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
    return validated(actions)


ALTERNATING = no_pipeline(MICRO_BATCHES)
AHEAD = one_forward_one_backward(0, 2, MICRO_BATCHES)  # F0 F1 B0 F2 B1 B2
ALL_AHEAD = one_forward_one_backward(0, 1 + MICRO_BATCHES, MICRO_BATCHES)
RANDOM = [legal_order(seed) for seed in (6, 7)]
WALKS = (
    [ALTERNATING, AHEAD, ALL_AHEAD, *RANDOM],
    [AHEAD, ALTERNATING],
)  # each of two is the first of a model


def walk_all() -> dict[tuple[str, int], tuple[list[Found], list[Found]]]:
    return {
        (kind, stage): (walk(kind, stage, WALKS[0]), walk(kind, stage, WALKS[1]))
        for kind in KINDS_OF_MODELS
        for stage in range(4)
    }


@pytest.mark.thorough
def test_the_order_changes_neither_bits_nor_bytes_nor_rings(ranks):
    for by_case in ranks(3).run(walk_all):
        for case, (first, second) in by_case.items():
            plain = first[0]
            for name, found in zip([*WALKS[0], *WALKS[1]], [*first, *second], strict=True):
                where = f"{case}: {' '.join(map(str, name))}"
                assert found.losses == plain.losses, where
                assert found.grads == plain.grads, where
                assert found.sent == found.expected, where
                assert found.late == [], where
                assert found.agreed, where
                # What is held outside of modules is not planned. It is held once, by however many
                # micro-batches.
                assert found.grown == (["gathering"] if case == ("looked at", 3) else []), where
                assert found.rings == plain.rings, where


def gradients_by_order(stage: int) -> list[list[Tensor]]:
    """Gradients where a look is held: in order, with backwards backwards, and with an evaluation
    between.
    """
    sharded, found = make("looked at", stage), []
    stacked = validated([*ALL_AHEAD[:MICRO_BATCHES], *reversed(ALL_AHEAD[MICRO_BATCHES:])])
    for actions in (ALTERNATING, stacked):
        execute(sharded, actions)
        found.append(gradients(sharded))
        finish(sharded)
    inputs = batches()
    sharded.begin_step()
    for number, x in enumerate(inputs):
        with sharded.forward() as micro:
            loss = sharded.module(x, number)
        with sharded.evaluation():
            sharded.module(x, number)
        sharded.backward(loss, micro, boundary=number == MICRO_BATCHES - 1)
    found.append(gradients(sharded))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_micro_batch_looked_at_stays_until_its_own_backward(ranks, stage):
    for in_order, stacked, evaluated in ranks(2).run(gradients_by_order, stage):
        for one, other, third in zip(in_order, stacked, evaluated, strict=True):
            torch.testing.assert_close(
                one, other
            )  # another order of backwards is another order of sums
            assert torch.equal(one, third)


def gradients_after(stage: int, evaluation_fails: bool) -> list[Tensor]:
    sharded = make("plain", stage)
    x = batches()[0]

    def fail(*_: Any) -> None:
        raise ArithmeticError

    if evaluation_fails:
        hook = sharded.module.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError), sharded.evaluation():
            sharded.module(x, 0)
        hook.remove()
        with sharded.gathered() as module:
            assert all(param.isfinite().all() for param in module.parameters())
    sharded.begin_step()
    with sharded.forward() as micro:
        loss = sharded.module(x, 0)
    sharded.backward(loss, micro, boundary=True)
    return gradients(sharded)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_that_raised_leaves_no_pass_behind(ranks, stage):
    pool = ranks(2)
    plain = pool.run(gradients_after, stage, False)
    after = pool.run(gradients_after, stage, True)
    for one, other in zip(plain, after, strict=True):
        assert all(map(torch.equal, one, other))


def lose_two(context: HookContext) -> None:
    """On the last rank there is no memory for a forward of the third step, nor for a backward of
    the fifth.
    """
    calls = Counter()

    def fail(second: str) -> None:
        calls[second] += 1
        if calls[second] == 2:
            raise MemoryError

    if world()[0] == world()[1] - 1:
        if context.step == 2:
            context.model.register_forward_pre_hook(lambda *_: fail("forward"))
        if context.step == 4:
            context.model.blocks[1].up.weight.register_hook(lambda _: fail("backward"))


def run_ahead(keys: dict[str, Any], run_dir: str, ahead: int) -> dict[str, Any]:
    """Train a job, with so many forwards ahead of their backwards."""
    plain = zrun_core.train.micro_batches.no_pipeline
    zrun_core.train.micro_batches.no_pipeline = lambda count: one_forward_one_backward(
        0, 1 + ahead, count
    )
    try:
        return run(keys, run_dir)
    finally:
        zrun_core.train.micro_batches.no_pipeline = plain


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.thorough
def test_the_trainer_executes_any_order(ranks, tmp_path, stage):
    keys = job(
        zero=stage, checkpoint=None, hooks={}, guards={"on_oom": "skip"} if stage < 3 else {}
    )
    if stage < 3:
        keys["hooks"] = {"on_step": "zero/test_passes.py:lose_two"}
    runs = [
        ranks(2).run(run_ahead, keys, str(tmp_path / str(ahead)), ahead)[0] for ahead in (0, 1, 9)
    ]
    for found in runs:
        steps = [event for event in found["events"] if event["type"] == "step"]
        assert found["error"] == ""
        assert [event["step"] for event in steps if event["skipped"]] == (
            [3, 5] if stage < 3 else []
        )
        assert losses(found) == losses(runs[0])
        assert found["digest"] == runs[0]["digest"]
