"""One rank of one system, started by `gpu_systems.py` as `gpu_rank.py request.json RANK`.

What each system does, all with `zrun_core.models.gpt`, clipping at 1 and AdamW in fused calls:

plain     autocast over fp32 weights, on one GPU: the loop of most tutorials.
ddp       the same in `DistributedDataParallel`: fp32 gradients are summed.
fsdp2-z2  `fully_shard` on each block and the model, as torchtitan has it: fp32 shards, gathered in
          bf16, gradients reduced in fp32; parameters stay whole between forward and backward.
fsdp2-z3  the same; parameters of blocks are gathered again in backward.
zrunN     the runtime at ZeRO stage N, as a worker sets it up with `precision: bf16`: bf16
          parameters, fp32 masters and moments, gradients reduced in fp32.

Memory is that of the timed steps: what building and compiling took has been given back before.
"""

from __future__ import annotations

import json
import math
import os
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_loops import (
    BETAS,
    CLIP,
    LR,
    MODELS,
    WEIGHT_DECAY,
    Loop,
    compile_blocks,
    gemm_tflops,
    zrun_loop,
)
from gpu_systems import LOOK, SIMULATED, Request
from torch import Tensor, nn

from zrun_core.hardware.catalogue import peak_flops

_NUM_BATCHES = 4


def main() -> None:
    """Do what the request asks for, and write the result beside it."""
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    request = Request(**json.loads(path.read_text()))
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    result = look(device) if request.system == LOOK else measure(request, rank, device)
    (path.parent / f"rank-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        _meet(device)
    sys.stdout.flush()
    os._exit(0)  # destroying a group may wait for ranks that are gone


def look(device: torch.device) -> dict[str, Any]:
    """What the machine is, and what a product of matrices reaches on it."""
    name = torch.cuda.get_device_name(device)
    numel = 64 if name == SIMULATED else 8192
    return {
        "device": name,
        "devices": torch.cuda.device_count(),
        "total_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "peak_flops": peak_flops(name, "bf16"),
        "gemm_tflops": gemm_tflops(device, numel),
    }


def measure(request: Request, rank: int, device: torch.device) -> dict[str, Any]:
    """Build, train, and time each step between events, so that the host never waits for it."""
    shape = MODELS[request.size]
    if request.ranks > 1 or request.system in ("ddp", "fsdp2-z2", "fsdp2-z3"):
        store = dist.FileStore(request.store, request.ranks)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=request.ranks)
    model = shape.build(device)
    params = sum(param.numel() for param in model.parameters())
    step = _set_up(request, rank, model, device)
    batches = [
        _tokens(number, rank, request.ranks, (request.batch, shape.seq + 1), shape.vocab, device)
        for number in range(_NUM_BATCHES)
    ]
    losses = [float(step(*batches[k % _NUM_BATCHES])) for k in range(request.warmup)]
    if not all(map(math.isfinite, losses)):
        sys.exit(f"Error: losses {losses}")
    if request.ranks > 1:
        _meet(device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    marks = []
    for number in range(request.steps + 1):  # the first one finds an empty queue
        step(*batches[number % _NUM_BATCHES])
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)
    torch.cuda.synchronize(device)
    return {
        "times": [start.elapsed_time(stop) / 1e3 for start, stop in pairwise(marks)],
        "losses": losses,
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "tokens": request.batch * shape.seq,
        "flops_per_token": shape.flops_per_token,
        "params": params,
    }


def _tokens(
    number: int, rank: int, ranks: int, shape: tuple[int, int], vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a rank: its part of a batch that is the same for all systems."""
    batch, length = shape
    generator = torch.Generator().manual_seed(1 + number)
    whole = torch.randint(0, vocab, (ranks * batch, length), generator=generator)
    own = whole[rank * batch : (rank + 1) * batch].to(device)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def _set_up(request: Request, rank: int, model: nn.Module, device: torch.device) -> Loop:
    if request.system.startswith("zrun"):
        stage = int(request.system.removeprefix("zrun"))
        return zrun_loop(
            model, device, request.compiled, stage=stage, rank=rank, ranks=request.ranks
        )
    if request.compiled:
        compile_blocks(model)
    if request.system == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
    if request.system.startswith("fsdp2"):
        _shard(model, request.ranks, reshard=request.system == "fsdp2-z3")
        return _loop(model, device, autocast=False)  # parameters are in bf16 already
    return _loop(model, device, autocast=True)


def _shard(model: nn.Module, ranks: int, *, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shard = partial(
        fully_shard,
        mesh=init_device_mesh("cuda", (ranks,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    for block in model.blocks:
        shard(block, reshard_after_forward=reshard)
    shard(model, reshard_after_forward=False)  # its parameters are needed at once in backward


def _loop(model: nn.Module, device: torch.device, *, autocast: bool) -> Loop:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _meet(device: torch.device) -> None:
    """Wait until all ranks are here."""
    number = torch.ones(1, device=device)
    dist.all_reduce(number)
    number.item()


if __name__ == "__main__":
    main()
