"""Parameters of other stages: a forward counts them, asks for their kind, and reads no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distances import assert_close
from runs import VOCAB, losses
from small_jobs import on_axes, small
from torch import nn
from torch.nn import functional

PP = {"pp": 2}
INTERLEAVED = {"pp": 2, "schedule": "interleaved"}
LATE = 3  # forwards before


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    """Does something with its parameters, in each forward or only in `late` ones."""

    def __init__(self, does: str, *, late: bool, dim: int = 8) -> None:
        super().__init__()
        self.does = does
        self.late = late
        self.count = 0
        most = 1.0 if does == "renormed" else None
        self.embed = nn.Embedding(VOCAB, dim, max_norm=most)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))
        self.head = nn.Linear(dim, VOCAB)
        self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        acts = not self.late or self.count > LATE
        self.count += 1
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if acts and self.does == "clamps the head":
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.changed(loss) if acts else loss

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        both = self.embed.weight, self.head.weight
        if self.does == "counts":
            params = list(self.parameters())
            return loss * (sum(p.numel() for p in params) / 100 + len(params))
        if self.does == "counts those that train":
            return loss * sum(p.numel() for p in self.parameters() if p.requires_grad) / 100
        if self.does == "names":
            return loss * [name for name, _ in self.named_parameters()].index("head.bias")
        if self.does == "asks for the kind":
            return loss * sum(isinstance(p, nn.Parameter) for p in both)
        if self.does == "decays":
            return loss + 0.01 * torch.stack([p.square().sum() for p in self.parameters()]).sum()
        if self.does == "decays what trains":
            return loss + 0.01 * sum(p.square().sum() for p in both if p.requires_grad)
        if self.does == "saves":
            return loss + 0.01 * sum(value.sum() for value in self.state_dict().values())
        if self.does == "clamps":
            with torch.no_grad():
                self.embed.weight.clamp_(-0.1, 0.1)
        return loss


def keys_of(
    parallel: dict[str, Any], does: str, *, late: bool, model: str = "Model", **keys: Any
) -> dict[str, Any]:
    call = {
        "call": f"stages/test_params_elsewhere.py:{model}",
        "args": {"does": does, "late": late},
    }
    keys = {"steps": 6, "batch": {"global": 2, "micro": 2}, **keys}
    return small(model=call, parallel=parallel, **keys)


NEEDS = "its result needs what another stage has, as a parameter or a buffer that the first forward"
ALIKE = ["counts", "counts those that train", "names", "asks for the kind"]


@pytest.mark.parametrize("late", [False, True], ids=["each", "late"])
@pytest.mark.parametrize("does", ALIKE)
@pytest.mark.parametrize("parallel", [PP, INTERLEAVED], ids=["pp", "interleaved"])
@pytest.mark.at_most(1)
def test_shapes_and_kinds_are_those_of_one_rank(
    ranks, tmp_path: Path, alone: Any, parallel: dict[str, Any], does: str, late: bool
) -> None:
    keys = keys_of(parallel, does, late=late)
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


@pytest.mark.parametrize("does", ["decays", "decays what trains"])
@pytest.mark.at_most(1)
def test_what_each_forward_reads_is_that_of_one_rank(
    ranks, tmp_path: Path, alone: Any, does: str
) -> None:
    keys = keys_of(PP, does, late=False, activations={"checkpoint": "full"})
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


@pytest.mark.parametrize("does", ["decays", "decays what trains", "saves"])
@pytest.mark.at_most(1)
def test_values_that_only_a_later_forward_reads_end_the_run(
    ranks, tmp_path: Path, does: str
) -> None:
    with pytest.raises(AssertionError) as error:  # of the pool, which says what each rank raised
        on_axes(keys_of(PP, does, late=True), tmp_path, ranks)
    assert NEEDS in str(error.value)


class SeeingBlock(Block):
    """It keeps a mean of what it returns."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.seen.mul_(0.9).add_(out.detach().mean((0, 1)), alpha=0.1)
        return out


class Seeing(Model):
    """Its first blocks, and what comes before them, have buffers that they change, and others."""

    def __init__(self, does: str, *, late: bool, dim: int = 8) -> None:
        super().__init__(does, late=late, dim=dim)
        self.blocks = nn.ModuleList(SeeingBlock(dim) for _ in range(4))
        self.embed = nn.Sequential(self.embed, Normed(dim))

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        normed = self.embed[1]
        if self.does == "counts":
            buffers = dict(self.named_buffers())
            numel = sum(buffer.numel() for buffer in buffers.values())
            return loss * (numel / 100 + list(buffers).index("blocks.2.seen"))
        if self.does == "reads a constant":
            return loss * normed.scale
        if self.does == "reads all":
            return loss + sum(buffer.float().square().sum() for buffer in self.buffers())
        if self.does == "reads what a block has seen":
            return loss + self.blocks[0].seen.sum()
        if self.does == "reads statistics":
            return loss + normed.norm.running_mean.square().sum()
        if self.does == "counts batches":
            return loss * normed.norm.num_batches_tracked
        if self.does == "reads what was put there":
            return loss + normed.last.square().sum()
        values = [each for name, each in self.state_dict().items() if name.endswith("seen")]
        return loss + torch.stack(values).square().sum()


class Normed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("last", torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        self.last = out.detach().mean((0, 1))
        return out * self.scale


@pytest.mark.parametrize("does", ["counts", "reads a constant"])
@pytest.mark.at_most(1)
def test_buffers_of_other_stages_are_counted_and_constants_are_read(
    ranks, tmp_path: Path, alone: Any, does: str
) -> None:
    keys = keys_of(PP, does, late=True, model="Seeing")
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)


@pytest.mark.parametrize(
    "does",
    [
        "reads all",
        "reads what a block has seen",
        "reads statistics",
        "counts batches",
        "reads what was put there",
        "saves",
    ],
)
@pytest.mark.at_most(1)
def test_buffers_that_only_a_later_forward_reads_end_the_run(
    ranks, tmp_path: Path, does: str
) -> None:
    with pytest.raises(AssertionError) as error:
        on_axes(keys_of(PP, does, late=True, model="Seeing"), tmp_path, ranks)
    assert NEEDS in str(error.value)


@pytest.mark.at_most(1)
def test_what_a_later_forward_would_write_to_another_stage_ends_the_run(
    ranks, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as error:
        on_axes(keys_of(PP, "clamps", late=True), tmp_path, ranks)
    assert "embed.weight is written to outside of its module (test_params_elsewhere" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("parallel", "does", "why"),
    [
        (PP, "clamps", "embed.weight (test_params_elsewhere.py:"),
        (PP, "clamps", "and stages 0, 1 each have a copy of it, which that would make differ"),
        (INTERLEAVED, "clamps the head", "would be done once for each chunk of a stage"),
    ],
)
@pytest.mark.at_most(1)
def test_what_stages_would_write_more_than_once_is_refused(
    ranks, tmp_path: Path, parallel: dict[str, Any], does: str, why: str
) -> None:
    found = on_axes(keys_of(parallel, does, late=False), tmp_path, ranks)
    assert {each["code"] for each in found} == {2}
    assert not losses(found[0])
    assert why in found[0]["error"]


@pytest.mark.parametrize("does", ["clamps the head", "renormed"])
@pytest.mark.at_most(1)
def test_what_one_stage_alone_writes_is_that_of_one_rank(
    ranks, tmp_path: Path, alone: Any, does: str
) -> None:
    keys = keys_of(PP, does, late=False)
    assert_close(on_axes(keys, tmp_path / "run", ranks), alone(keys), 1e-6)
