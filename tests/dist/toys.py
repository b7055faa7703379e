"""Small models and the shortest training loops, ours and plain, for parity tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pool import DEVICE
from torch import nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.tiers.copies import Copier
from zrun_core.zero.account import allocated_memory, planned_memory
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.auto_wrap import NO_GROUPS
from zrun_core.zero.wrap.sharding_config import ShardingConfig

Batches = Sequence[Any]  # one global batch per step; each is indexable by sample


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding-free residual net: [batch, dim] -> mean squared error."""

    def __init__(self, dim: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.last = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x).float(), y.float())


def build() -> Net:
    """The same one on every rank and in every test."""
    torch.manual_seed(1)
    return Net()


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own_device() -> torch.device:
    """That of this rank."""
    if os.environ.get(DEVICE, "cpu") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", world()[0] % torch.cuda.device_count())


def make_sharded(
    model: nn.Module,
    stage: int,
    *,
    precision: dict[str, Any] | str = "fp32",
    optim: dict[str, Any] | None = None,
    shard_group: int | None = None,
    bucket: int = 1 << 14,
    read: Callable[[str, nn.Parameter], torch.Tensor] = lambda name, param: param.detach(),
    meet: tuple[Mesh, Comm] | None = None,
    apart: Copier | None = None,
    groups_of: Mapping[str, str] = NO_GROUPS,
    **settings: Any,
) -> ShardedModel:
    """A model on the ranks of the pool; `meet` is given where they are not all data-parallel."""
    rank, world_size = world()
    policy = ZeroPolicy(stage)
    shard_size = 1 if stage == 0 else shard_group or world_size
    config = optim_config(**(optim or {}))
    full = ShardingConfig(
        zero=policy,
        precision=Precision.of(PrecisionConfig.model_validate(precision)),
        optimizer=resolve_optimizer(config, lambda name: None, own_device()),
        bucket=bucket,
        clip=config.clip,
        no_decay=config.no_decay,
        **settings,
    )
    if meet is None:
        meet = Mesh.build(rank, ["host"] * world_size, shard_size), Comm(own_device())
        meet[1].use_cma(meet[0].host, 60.0)
    sharded = ShardedModel(model, read, full, *meet, apart=apart, groups_of=groups_of)
    sharded.module.to(meet[1].device)  # buffers, as a worker does
    return sharded


def optim_config(**keys: Any) -> OptimConfig:
    """The optimizer of these tests, AdamW with decay, as far as `keys` say nothing else.

    None leaves a key out.
    """
    given = {"lr": 1e-2, "weight_decay": 0.1, **keys}
    return OptimConfig.model_validate(
        {key: value for key, value in given.items() if value is not None}
    )


def split(batch: Any, rank: int, size: int) -> Any:
    """The contiguous rank-th part of every tensor in a tuple, on this rank's device."""
    return tuple(t.chunk(size)[rank].to(own_device()) for t in batch)


def train_sharded(
    sharded: ShardedModel,
    batches: Batches,
    *,
    accumulation: int = 1,
    lr: float = 1e-2,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = lambda model, batch: model(*batch),
) -> list[float]:
    """Global mean losses by step.

    Each micro-batch's mean loss weighs its share of the global batch.
    """
    rank, size = world()
    losses = []
    for batch in batches:
        sharded.begin_step()
        total = 0.0
        for k in range(accumulation):
            part = split(split(batch, rank, size), k, accumulation)
            with sharded.forward() as micro:
                loss = loss_of(sharded.module, part)
            total += loss.item() / size / accumulation
            sharded.backward(loss / (size * accumulation), micro, boundary=k == accumulation - 1)
        sums = NamedVector.of(sharded.comm.device, loss=total)
        result = sharded.step(lr, sums, lambda sums: torch.ones((), device=own_device()).double())
        losses.append(float(result.sums["loss"]))
    return losses


def train_plain(
    model: nn.Module,
    batches: Batches,
    *,
    lr: float = 1e-2,
    clip: float | None = None,
    weight_decay: float = 0.1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = lambda model, batch: model(*batch),
) -> list[float]:
    """The plain single-process loop over global batches."""
    chosen = optimizer(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=weight_decay
    )
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    return losses


def train(
    stage: int, options: dict[str, Any], accumulation: int = 1, lr: float = 1e-2, steps: int = 6
) -> dict[str, Any]:
    """Losses by step, and parameters, after training in shards."""
    sharded = make_sharded(build(), stage, **options)
    losses = train_sharded(sharded, data(steps), accumulation=accumulation, lr=lr)
    planned, allocated = planned_memory(sharded).by_kind, allocated_memory(sharded).by_kind
    assert planned == allocated, (planned, allocated)
    return {
        "losses": losses,
        "state": {name: value.float().cpu().numpy() for name, value in full_state(sharded).items()},
    }


def train_peer(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> list[float]:
    """Global mean losses by step of a model that averages gradients over the ranks by itself."""
    rank, size = world()
    losses = []
    for batch in data(steps):
        loss = model(*split(batch, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double() / size
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def train_ddp(optimizer: str = "AdamW", kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `train` gives, by torch's DDP and a class of torch.optim."""
    model = nn.parallel.DistributedDataParallel(build())
    options = {"lr": 1e-2, "weight_decay": 0.1, "fused": True} if kwargs is None else kwargs
    losses = train_peer(model, getattr(torch.optim, optimizer)(model.parameters(), **options))
    return {
        "losses": losses,
        "state": {name: param.detach().numpy() for name, param in model.module.named_parameters()},
    }


def same_bits(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Two results of `train` are equal."""
    assert left["losses"] == right["losses"]
    for name, value in left["state"].items():
        assert (value == right["state"][name]).all(), name


def data(steps: int, batch: int = 12, dim: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, dim, generator=generator), torch.randn(batch, 1, generator=generator))
        for _ in range(steps)
    ]


def full_state(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """Parameters as a plain model has them."""
    with sharded.gathered() as module:
        return {name: param.detach().clone() for name, param in module.named_parameters()}


class Exact(nn.Module):
    """Four units of 96 x 1024 elements: shards of any of 1 to 4 ranks are whole pages, without
    padding.
    """

    NUMEL = 4 * 96 * 1024

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(1024, 96, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = [torch.tanh(row(x)) for row in self.rows]
        return nn.functional.mse_loss(torch.stack(outputs).sum((0, 2)).float(), y[:, 0].float())
