"""Exact bytes: traffic from `Comm` against the formulas, memory from `Layout` against what is
allocated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import Exact, Net, data, make_sharded, train_sharded

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.memory.buffers import Kind
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.zero.account import allocated_memory, expected_traffic, planned_memory
from zrun_core.zero.unit.exchange import KINDS
from zrun_core.zero.unit.unit_params import moves_pages

P = Exact.NUMEL


def count(stage: int, accumulation: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    sharded = make_sharded(Exact(), stage, bucket=96 * 1024 * 2, **options)
    batches = data(3, 36, 1024)
    train_sharded(sharded, batches[:2], accumulation=accumulation)
    sharded.comm.drain()
    train_sharded(sharded, batches[2:], accumulation=accumulation)
    sent = {key.kind: 0 for key in sharded.comm.sent_bytes}
    for key, num_bytes in sharded.comm.sent_bytes.items():
        sent[key.kind] += num_bytes
    planned, allocated = planned_memory(sharded).by_kind, allocated_memory(sharded).by_kind
    return {
        "units": len(sharded.units),
        "sent": sent,
        "planned": {kind.value: size for kind, size in planned.items()},
        "allocated": {kind.value: size for kind, size in allocated.items()},
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.at_most(2)
def test_traffic_of_a_step_is_the_formula(ranks, world_size, accumulation):
    k, n = accumulation, world_size
    gathered = {0: 0, 1: P, 2: P, 3: 2 * k * P}
    scattered = {0: 0, 1: P, 2: k * P, 3: k * P}
    for stage in range(4):
        sent = ranks(n).run(count, stage, k, {})[0]["sent"]
        sent.pop("small")
        expected = {
            "all_gather": gathered[stage],
            "reduce_scatter": scattered[stage],
            "all_reduce": 2 * P * (stage == 0),
        }
        assert sent == {kind: 4 * size * (n - 1) // n for kind, size in expected.items() if size}, (
            f"stage {stage}"
        )


@pytest.mark.parametrize("reduce", ["compute", "fp32"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.at_most(3)
def test_model_states_are_the_papers(ranks, world_size, reduce):
    """Rajbhandari et al. 2020, section 5: 16P, 4P + 12P/N, 2P + 14P/N, 16P/N; fp32 gradients take 2
    bytes more.
    """
    n, grad = world_size, 2 if reduce == "compute" else 4
    expected = [
        (2 + grad) * P + 12 * P,
        (2 + grad) * P + 12 * P // n,
        2 * P + (grad + 12) * P // n,
        (2 + grad + 12) * P // n,
    ]
    for stage in range(4):
        run = ranks(n).run(count, stage, 1, {"precision": {"compute": "bf16", "reduce": reduce}})[0]
        assert run["units"] == 4
        states = sum(size for kind, size in run["allocated"].items() if kind != Kind.RING.value)
        assert states == expected[stage], f"stage {stage}"


def everything(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net(dim=24, depth=3)  # nothing divides
    model.blocks[1].requires_grad_(requires_grad=False)
    sharded = make_sharded(model, stage, **options)
    train_sharded(sharded, data(3, 12, 24))
    expected = expected_traffic(sharded, 3, 3)
    sent = dict.fromkeys(expected, 0)
    for key, num_bytes in sharded.comm.sent_bytes.items():
        if key.kind in sent:
            sent[key.kind] += num_bytes
    assert sent == expected, (sent, expected)
    return {
        "planned": {kind.value: size for kind, size in planned_memory(sharded).by_kind.items()},
        "allocated": {kind.value: size for kind, size in allocated_memory(sharded).by_kind.items()},
    }


REDUCE_COMPUTE = {"compute": "bf16", "reduce": "compute"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": REDUCE_COMPUTE},
        {"persist_below": 300},
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.at_most(3)
def test_what_is_planned_is_what_is_allocated(ranks, world_size, options):
    for stage in range(4):
        for rank, run in enumerate(ranks(world_size).run(everything, stage, options)):
            assert run["allocated"] == run["planned"], (stage, rank)


class Weighted(nn.Module):
    """A net with weights of its losses, which the loss function reads after forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Linear(dim, dim)
        self.deep = nn.Linear(dim, dim)
        self.log_weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(torch.tanh(self.net(x)))


def weigh(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    made, wanted = model(batch[0].float()), batch[1].float()
    losses = torch.stack([(made - wanted).square().mean(), (made - wanted).abs().mean()])
    return (losses * torch.exp(-model.log_weights) + model.log_weights).sum()


def looked_at(bucket: int, accumulation: int) -> tuple[dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    sharded = make_sharded(Weighted(32), 3, bucket=bucket)
    batches = data(3, 12 * accumulation)
    for batch in batches:
        sharded.begin_step()
        micros = list(zip(*(part.split(12) for part in batch), strict=True))
        for number, micro in enumerate(micros, start=1):
            with sharded.forward() as under_way:
                loss = weigh(sharded.module, micro)
            sharded.backward(loss, under_way, boundary=number == accumulation)
        sums = NamedVector.of(sharded.comm.device, weight=1.0)
        sharded.step(1e-3, sums, lambda sums: sums["weight"])
    expected = expected_traffic(sharded, len(batches), len(batches) * accumulation)
    sent = dict.fromkeys(expected, 0)
    for key, num_bytes in sharded.comm.sent_bytes.items():
        if key.kind in sent:
            sent[key.kind] += num_bytes
    return sent, expected


@pytest.mark.parametrize("bucket", [1 << 20, 1 << 12])
def test_weights_of_the_loss_are_gathered_once_more(ranks, bucket):
    for accumulation in (1, 2):
        for sent, expected in ranks(2).run(looked_at, bucket, accumulation):
            assert sent == expected


class Tables(nn.Module):
    """Embeddings that run between two layers of one unit, registered after them: a DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(512, 32) for _ in range(4))
        self.bottom = nn.Linear(32, 32)
        self.top = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = (x.float().abs() * 100).long() % 512
        found = [self.bottom(x.float())]
        found += [table(rows[:, number]) for number, table in enumerate(self.tables)]
        return nn.functional.mse_loss(self.top(torch.stack(found).sum(0)).float(), y.float())


class Towers(nn.Module):
    """Two towers, of which the one that was registered first runs last: a CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.image = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        image = self.image(x.float())
        return nn.functional.mse_loss(image.float(), self.text(x.float() + 1).float())


def reduced(kind: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = {"tables": Tables, "towers": Towers}[kind]()
    sharded = make_sharded(model, stage, bucket=1 << 12, persist_below=0)
    first = [unit.name for unit in sharded.reducer.order.backward]
    train_sharded(sharded, data(1))
    learnt = [unit.name for unit in sharded.reducer.order.backward]
    train_sharded(sharded, data(2))
    return {
        "orders": (first, learnt),
        "planned": sharded.planned_rings[1],
        "allocated": sharded.ring_bytes[1],
    }


@pytest.mark.parametrize("kind", ["tables", "towers"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_wait_for_no_unit_that_was_registered_late_and_runs_early(
    ranks, world_size, kind
):
    for stage in (2, 3):
        for run in ranks(world_size).run(reduced, kind, stage):
            first, learnt = run["orders"]
            assert first != learnt, "the order of registration would do"
            assert run["allocated"] == run["planned"], stage


Adapted = tuple[int, str, int]  # stage, checkpoint, accumulation


def frozen_traffic(cases: list[Adapted]) -> list[dict[str, Any]]:
    """What is sent where one layer is trained, in the middle of a frozen model."""
    found = []
    for stage, checkpoint, accumulation in cases:
        torch.manual_seed(0)
        model = Net(dim=24, depth=4).requires_grad_(False)
        model.blocks[1].up.requires_grad_()
        apply_checkpointing(model, ActivationsConfig(checkpoint=checkpoint, n=2))
        sharded = make_sharded(model, stage, recomputes_blocks=checkpoint != "none", bucket=1 << 20)
        train_sharded(sharded, data(3, 12, 24), accumulation=accumulation)
        sent: dict[str, int] = {}
        for key, num_bytes in sharded.comm.sent_bytes.items():
            if key.kind in KINDS:
                sent[key.kind] = sent.get(key.kind, 0) + num_bytes
        found.append(
            {
                "sent": sent,
                "expected": expected_traffic(sharded, 3, 3 * accumulation),
                "sizes": {layout.name: 4 * layout.shard_numel for layout in sharded.layouts},
            }
        )
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.thorough
def test_frozen_units_without_a_gradient_are_gathered_once(ranks, world_size):
    cases = [
        (stage, checkpoint, accumulation)
        for stage in range(4)
        for checkpoint in ("none", "full", "every_n", "selective")
        for accumulation in (1, 2)
    ]
    for case, run in zip(cases, ranks(world_size).run(frozen_traffic, cases)[0], strict=True):
        stage, _, k = case
        assert run["sent"] == run["expected"], case
        sizes = run["sizes"]
        assert "blocks.1(frozen)" in sizes
        trained = sizes.pop("blocks.1")
        before = sizes.pop("first(frozen)") + sizes.pop("blocks.0(frozen)")
        refreshed = 2 * trained  # after the first and the second of three updates
        per_micro = before + 2 * sum(sizes.values()) + 2 * trained
        gathered = [0, refreshed, refreshed, 3 * k * per_micro][stage]
        assert run["sent"].get("all_gather", 0) == (world_size - 1) * gathered, case


def recomputed(world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net(dim=64)
    apply_checkpointing(model, ActivationsConfig(checkpoint="full"))
    sharded = make_sharded(
        model, 3, recomputes_blocks=True, bucket=1 << 14
    )  # blocks of 66 kB: cut in two
    train_sharded(sharded, data(3, 12, 64))
    with sharded.gathered() as whole:
        assert all(torch.isfinite(param).all() for param in whole.parameters())
        inside = allocated_memory(sharded).by_kind[Kind.RING]
    rings = [
        sharded.settings.states.gather_ring_bytes(
            sharded.layouts, ahead, moves_pages=moves_pages("cpu")
        )
        for ahead in (sharded.settings.prefetch, len(sharded.layouts))
    ]
    return {
        "whole": rings[1] - rings[0],  # as the planner counts what hooks gather
        "units": [layout.name for layout in sharded.layouts],
        "inside": inside,
        "planned": planned_memory(sharded).by_kind[Kind.RING],
        "allocated": allocated_memory(sharded).by_kind[Kind.RING],
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_rings_hold_a_block_that_is_recomputed_and_shrink_after_gathered(ranks, world_size):
    for run in ranks(world_size).run(recomputed, world_size):
        assert "blocks.0.{norm,up}" in run["units"] or "blocks.0.up" in run["units"]
        assert run["allocated"] == run["planned"] < run["inside"]
        assert run["inside"] == run["planned"] + run["whole"]


Deep = tuple[
    str, str, int, int, bool
]  # checkpoint, precision, prefetch, bucket, whether only parts are trained
ONE_UNIT, TWO_UNITS = 1 << 20, 1 << 14  # buckets that a block of 66 kB is cut by
DEEP: list[Deep] = [
    *(
        (checkpoint, precision, prefetch, ONE_UNIT, False)
        for checkpoint in ("full", "every_n", "selective")
        for precision in ("fp32", "bf16")
        for prefetch in (0, 1, 2)
    ),
    *(("full", "fp32", prefetch, TWO_UNITS, False) for prefetch in (0, 2)),
    *(("full", "fp32", 1, bucket, True) for bucket in (ONE_UNIT, TWO_UNITS)),
]


def deep(stage: int, case: Deep) -> dict[str, Any]:
    checkpoint, precision, prefetch, bucket, frozen = case
    torch.manual_seed(0)
    model = Net(dim=64, depth=4)
    if frozen:
        model.blocks.requires_grad_(requires_grad=False)
        for block in model.blocks:
            block.up.requires_grad_()
    apply_checkpointing(model, ActivationsConfig(checkpoint=checkpoint, n=2))
    sharded = make_sharded(
        model,
        stage,
        recomputes_blocks=checkpoint != "none",
        precision=precision,
        prefetch=prefetch,
        bucket=bucket,
    )
    losses = train_sharded(sharded, data(2, 6, 64))
    planned, allocated = planned_memory(sharded).by_kind, allocated_memory(sharded).by_kind
    return {"losses": losses, "planned": planned, "allocated": allocated}


def deep_runs(cases: list[tuple[int, Deep]]) -> list[dict[str, Any]]:
    return [deep(*case) for case in cases]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.thorough
def test_blocks_that_are_recomputed_are_whole_one_after_the_other(ranks, world_size):
    kept = sorted(
        {("none", precision, 1, bucket, frozen) for _, precision, _, bucket, frozen in DEEP}
    )
    cases = [
        *((1, case) for case in kept),
        *((3, case) for case in (DEEP if world_size == 2 else DEEP[::2])),
    ]
    for found in ranks(world_size).run(deep_runs, cases):
        losses = {
            (case[1], *case[3:]): run["losses"] for case, run in zip(kept, found, strict=False)
        }
        for (stage, case), run in zip(cases, found, strict=True):
            assert run["allocated"] == run["planned"], (stage, *case)
            assert run["losses"] == losses[case[1], *case[3:]], (stage, *case)


def test_hybrid_shards_share_one_copy_per_group(ranks):
    options = {"shard_group": 2}
    for run in ranks(4).run(everything, 3, options):
        assert run["allocated"] == run["planned"]
