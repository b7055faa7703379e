"""How each system trains.

`load(name)` imports what a system needs and returns the function that sets it up.

To add one: write `def mine() -> Make`, put it into `_LOADERS` and its name into `cases.SYSTEMS`.
Imports come first, so that they count neither as time nor as memory of the system. Every optimizer
is AdamW in one fused call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from cases import BETAS, LR, WEIGHT_DECAY, Shape, zrun_job
from torch import Tensor, nn

if TYPE_CHECKING:  # peers run where zrun's requirements are not installed
    from zrun_core.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class Seat:
    """Where a system runs, and on what."""

    rank: int
    world: int
    shape: Shape
    bf16: bool


@dataclass(frozen=True)
class Training:
    """A system that is ready to train.

    Attributes:
        step: (tokens, targets) of this rank -> its mean loss, after one update.
        params: every parameter in whole, in the order of the plain model; None where the system has
            no simple way.
        counted: bytes that the system says this rank has sent and should have sent in this many
            steps.
        sharded: zrun's model.
        actions: when a stage of zrun ran which action of its last step, as events have it.
        runner: of a pipeline, what runs its actions.
    """

    step: Callable[[Tensor, Tensor], float]
    params: Callable[[], Iterable[Tensor]] | None = None
    counted: Callable[[int], tuple[int, int]] | None = None
    sharded: ShardedModel | None = None
    actions: Callable[[], list[list[Any]]] | None = None
    runner: Any = None


Make = Callable[[nn.Module, Seat], Training]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def plain_training(
    model: nn.Module,
    seat: Seat,
    *,
    micro_batches: int = 1,
    params: Callable[[], Iterable[Tensor]] | None = None,
) -> Training:
    """The loop that everyone writes, with autocast in bf16."""
    optimizer = adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> float:
        total = 0.0
        for part, wanted in zip(
            tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=seat.bf16):
                loss = model(part, wanted)
            (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(step, params or model.parameters)


def single() -> Make:
    return lambda model, seat: plain_training(model, seat, micro_batches=seat.world)


def nocomm() -> Make:
    return plain_training


def ddp() -> Make:
    from torch.nn.parallel import DistributedDataParallel

    def make(model: nn.Module, seat: Seat) -> Training:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return plain_training(wrapped, seat)

    return make


def fsdp2(reshard: bool) -> Make:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def make(model: nn.Module, seat: Seat) -> Training:
        half = torch.bfloat16 if seat.bf16 else None
        options = {
            "mesh": init_device_mesh("cpu", (seat.world,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
            "reshard_after_forward": reshard,
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        # Its parameters are in bf16 already: autocast would only change which layers run in fp32.
        without_autocast = Seat(seat.rank, seat.world, seat.shape, bf16=False)
        return plain_training(
            model, without_autocast, params=lambda: (p.full_tensor() for p in model.parameters())
        )

    return make


def deepspeed(stage: int, more: Mapping[str, Any] | None = None) -> Make:
    """DeepSpeed with the settings that it has of itself, and `more` in its section of ZeRO."""
    import deepspeed

    deepspeed.logger.setLevel("ERROR")

    def make(model: nn.Module, seat: Seat) -> Training:
        config = {
            "train_micro_batch_size_per_gpu": seat.shape.batch,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage, **(more or {})},
            "bf16": {"enabled": seat.bf16},
            "gradient_clipping": 0.0,  # 0.19 clips at 1.0 unless told otherwise
            # torch's fused AdamW is as fast as DeepSpeed's own, which would compile for 90 s at its
            # first use.
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        optimizer = None
        if more:  # where states are elsewhere it takes only its own
            params = {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
            config["optimizer"] = {"type": "AdamW", "params": params}
        else:
            optimizer = adamw(model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=optimizer,
            config=config,
            dist_init_required=False,
        )

        def step(tokens: Tensor, targets: Tensor) -> float:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return float(loss.item())

        return Training(step)

    return make


def zrun(
    stage: int,
    *,
    sockets: bool = False,
    offload: Mapping[str, str] | None = None,
    disk_folder: str | None = None,
) -> Make:
    from zrun_core.distributed.comm import Comm
    from zrun_core.distributed.mesh import Mesh
    from zrun_core.distributed.named_vector import NamedVector
    from zrun_core.optim.resolve import resolve_optimizer
    from zrun_core.spine import heap
    from zrun_core.spine.config import JobConfig
    from zrun_core.spine.parallel_dims import resolve_shard_size
    from zrun_core.train.parallelize import make_settings, parallelize
    from zrun_core.user_code.build import Built
    from zrun_core.zero.account import expected_traffic

    def make(model: nn.Module, seat: Seat) -> Training:
        # as a worker and `zrun_core.init` do, unless the environment has said more
        heap.keep_freed_memory()
        device, hosts = torch.device("cpu"), ["localhost"] * seat.world
        job = JobConfig.model_validate(
            zrun_job(stage, seat.bf16)
            | {"steps": 1, "batch": {"micro": seat.shape.batch}, "offload": offload or {}}
        )
        settings = make_settings(job, resolve_optimizer(job.optim, lambda name: None), device)
        settings = replace(settings, disk_folder=disk_folder)
        comm = Comm(device)
        mesh = Mesh.build(seat.rank, hosts, resolve_shard_size(job.zero, seat.world, seat.world))
        if not sockets:
            comm.use_cma(mesh.host, 60.0)
        built = Built(model, lambda name, param: param.detach())
        sharded, _ = parallelize(built, job, settings, mesh, comm)
        global_batch = seat.world * seat.shape.batch

        def step(tokens: Tensor, targets: Tensor) -> float:
            share = len(tokens) / global_batch
            sharded.begin_step()
            with sharded.forward() as micro:
                loss = sharded.module(tokens, targets)
            value = loss.item()
            sharded.backward(loss * share, micro, boundary=True)
            sums = NamedVector.of(comm.device, samples=len(tokens), loss=value * len(tokens))
            sharded.step(LR, sums, lambda totals: totals["samples"] / global_batch)
            return value

        def params() -> Iterable[Tensor]:
            with sharded.gathered() as whole:
                yield from whole.parameters()

        def counted(steps: int) -> tuple[int, int]:
            sent = sum(
                num_bytes for key, num_bytes in comm.sent_bytes.items() if key.kind != "small"
            )
            return sent, sum(expected_traffic(sharded, steps, steps).values())

        return Training(step, params, counted, sharded)

    return make


_LOADERS: dict[str, Callable[[], Make]] = {
    "single": single,
    "nocomm": nocomm,
    "ddp": ddp,
    **{f"zrun{stage}": partial(zrun, stage) for stage in range(4)},
    **{f"zrun{stage}-sockets": partial(zrun, stage, sockets=True) for stage in range(4)},
    "fsdp2-z2": partial(fsdp2, False),
    "fsdp2-z3": partial(fsdp2, True),
    **{f"ds{stage}": partial(deepspeed, stage) for stage in (1, 2, 3)},
}


def load(name: str) -> Make:
    """Import the system called `name`."""
    return _LOADERS[name]()
