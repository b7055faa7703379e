"""Measure a case of `gpu_offload.py`, in one of its child processes."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import offload_update
import torch
from gpu_loops import BETAS, CLIP, LR, WEIGHT_DECAY, gemm_tflops, gib, gpt_of
from limits import median_s
from offload_step import ALONE, RawDisk
from torch import Tensor, nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.config import JobConfig
from zrun_core.spine.memory_limits import host_available
from zrun_core.tiers.copies import ThreadCopier
from zrun_core.train.parallelize import make_settings, transform
from zrun_core.zero.sharded_model import ShardedModel

SCHEDULES = ("serial", "overlap", "delayed")
_GB, _MIB = 1e9, 1 << 20
_RECORD, _PARAM, _GRAD = 12, 2, 2  # bytes per parameter: fp32 master and moments; bf16; bf16
_BESIDE_STATES = 14 << 30  # bytes of a device: activations, logits, the library, units in flight
_HOST_SHARE = 0.85  # of the host's free memory, for states
Step = Callable[[], Tensor]  # -> loss, 0-d, of the last micro-batch


@dataclass(frozen=True)
class Shape:
    """A GPT, and what it trains on in a step."""

    dim: int = 4096
    depth: int = 32
    heads: int = 32
    vocab: int = 50304
    seq: int = 2048
    micro: int = 4  # sequences of a micro-batch
    accumulation: int = 2

    @property
    def params(self) -> int:
        """Those of matrices and embeddings."""
        return 12 * self.dim**2 * self.depth + (2 * self.vocab + self.seq) * self.dim

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro * self.accumulation * self.seq

    @property
    def step_flops(self) -> int:
        """6 per weight of a matrix product and token, and causal attention; nothing repeated."""
        per_token = 6 * (12 * self.dim**2 * self.depth + self.vocab * self.dim)
        return self.tokens * (per_token + 6 * self.depth * self.dim * self.seq)

    def build(self, device: str) -> nn.Module:
        """Return the model with undefined values."""
        with torch.device(device):
            return gpt_of(self, tied=False, loss_chunk=2048)


TINY = Shape(dim=64, depth=3, heads=2, vocab=128, seq=32, micro=2)


class Bench(NamedTuple):
    """The setting of every case.

    Attributes:
        options: of the command line.
        ceilings: as measured before; empty if they were not.
        emit: keeps a line.
    """

    options: argparse.Namespace
    ceilings: dict[str, Any]
    emit: Callable[[dict[str, Any]], None]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.options.smoke else torch.device("cuda", 0)

    @property
    def shape(self) -> Shape:
        return TINY if self.options.smoke else Shape()


# Ceilings


def measure_ceilings(bench: Bench) -> None:
    """Measure what no schedule can exceed."""
    smoke = bench.options.smoke
    cores = torch.get_num_threads()
    counts = sorted({1, 4, 8, cores} if cores >= 8 else {1, cores})
    found: dict[str, Any] = {"event": "ceilings", "torch": torch.__version__, "cores": cores}
    if not smoke:
        found["device"] = torch.cuda.get_device_name(bench.device)
        found["gemm_tflops"] = gemm_tflops(bench.device)
    found["copies_gb_s"] = copies(bench.device, pinned=not smoke)
    found["host_copy_gb_s"] = by_threads(counts, host_copy(64 * _MIB if smoke else 1 << 30))
    found["adamw_gparam_s"] = by_threads(counts, host_adamw(256 if smoke else 4096))
    found["disk_gb_s"] = RawDisk(bench.options.dir, 4 if smoke else 64).rate() / _GB
    bench.emit(found)


def copies(device: torch.device, *, pinned: bool) -> dict[str, float]:
    """Return GB/s between host and device, at 64 MiB."""
    on_device = torch.empty(64 * _MIB, dtype=torch.uint8, device=device)
    rates = {}
    for name, is_pinned in (("pageable", False), ("pinned", True)):
        if is_pinned and not pinned:
            continue
        on_host = torch.empty(64 * _MIB, dtype=torch.uint8, pin_memory=is_pinned).random_(0, 256)
        ways = {"up": (on_device, on_host), "down": (on_host, on_device)}
        for way, (target, source) in ways.items():

            def copy(target: Tensor = target, source: Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                synchronize(device)

            rates[f"{name} {way}"] = on_device.nbytes / median_s(copy, 0.3) / _GB
    return rates


def by_threads(counts: list[int], rate: Callable[[], float]) -> dict[str, float]:
    """Return a rate by number of threads."""
    before, rates = torch.get_num_threads(), {}
    for count in counts:
        torch.set_num_threads(count)
        rates[str(count)] = rate()
    torch.set_num_threads(before)
    return rates


def host_copy(num_bytes: int) -> Callable[[], float]:
    """Return what measures GB/s of the host's memory, reads and writes together."""
    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    return lambda: 2 * num_bytes / median_s(lambda: target.copy_(source), 0.3) / _GB


def host_adamw(width: int) -> Callable[[], float]:
    """Return what measures zrun's update on the host, in Gparam/s."""
    sharded = offload_update.make(width)
    numel = sum(unit.layout.numel for unit in sharded.units)
    return lambda: numel / median_s(lambda: offload_update.zrun(sharded), 0.3) / _GB


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# zrun


class Trainer:
    """zrun's runtime on one rank, with optimizer and gradients of a fraction on the host."""

    def __init__(self, shape: Shape, fraction: float, bench: Bench) -> None:
        job = JobConfig.model_validate(
            {
                "name": "bench",
                "model": "bench:model",
                "data": "bench:data",
                "steps": 1,
                "batch": {"micro": shape.micro},
                "precision": {"compute": "bf16", "reduce": "compute"},
                "zero": 2,
                "activations": {"checkpoint": "full"},
                "offload": {"optimizer": "host", "fraction": fraction},
                "optim": {
                    "name": "adamw",
                    "lr": LR,
                    "betas": list(BETAS),
                    "weight_decay": WEIGHT_DECAY,
                    "clip": CLIP,
                },
            }
        )
        device = bench.device
        optimizer = resolve_optimizer(job.optim, lambda name: None)
        host = Placement(grad=Tier.HOST, optimizer=Tier.HOST, fraction=fraction)
        settings = replace(make_settings(job, optimizer, device), placement=host, delay_after=0)
        model = shape.build("meta")
        transform(model, job.zero, job.precision, job.activations, compile=False)
        self.device = device
        self.sharded = ShardedModel(
            model,
            lambda name, param: first_values(param, device),
            settings,
            Mesh.build(0, ["localhost"], 1),
            Comm(device),
            apart=ThreadCopier() if bench.options.smoke else None,
        )
        self._batches = batches(shape, device)

    def use(self, schedule: str) -> None:
        """Choose the schedule of the steps that follow."""
        self.sharded.settle_updates()
        self.sharded.settings = replace(self.sharded.settings, schedule=schedule)

    def step(self) -> Tensor:
        """Train on all micro-batches."""
        sharded, count = self.sharded, len(self._batches)
        sums = NamedVector.of(self.device, samples=0.0, loss=0.0)
        sharded.begin_step()
        for number, (tokens, targets) in enumerate(self._batches):
            with sharded.forward() as micro:
                loss = sharded.module(tokens, targets)
            sums.add(samples=len(tokens), loss=loss.detach().double() * len(tokens))
            sharded.backward(loss * len(tokens), micro, boundary=number == count - 1)
        sharded.step(LR, sums, lambda totals: totals["samples"])
        return loss.detach()


def first_values(param: Tensor, device: torch.device) -> Tensor:
    """Return random values of a matrix, ones of a vector."""
    values = torch.empty(param.shape, device=device)
    return values.normal_(std=0.02) if param.dim() > 1 else values.fill_(1.0)


def batches(shape: Shape, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return (tokens, targets), int64 [micro, seq], of each micro-batch of a step."""
    size = (shape.accumulation, shape.micro, shape.seq + 1)
    tokens = torch.randint(0, shape.vocab, size, device=device)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def run_7b(bench: Bench) -> None:
    """Measure each schedule with everything but the parameters on the host."""
    run_zrun(bench, bench.shape, 1.0)


def run_split(bench: Bench) -> None:
    """Measure the largest model whose states device and host hold together."""
    if bench.options.smoke:
        run_zrun(bench, bench.shape, 0.5)
        return
    total = torch.cuda.get_device_properties(bench.device).total_memory
    shape, fraction = largest(total - _BESIDE_STATES, int(_HOST_SHARE * host_available()))
    run_zrun(bench, shape, fraction)


def largest(device_bytes: int, host_bytes: int) -> tuple[Shape, float]:
    """Return the deepest model that fits, and the least fraction that leaves the device."""
    depth = 1
    while True:
        shape = Shape(dim=5120, depth=depth + 1, heads=40)
        leaving = (_PARAM + _RECORD + _GRAD) * shape.params - device_bytes
        moves_most = (_RECORD + _GRAD) * shape.params
        if leaving > min(host_bytes, moves_most):
            break
        depth += 1
    shape = Shape(dim=5120, depth=depth, heads=40)
    leaving = (_PARAM + _RECORD + _GRAD) * shape.params - device_bytes
    return shape, max(0.0, leaving / ((_RECORD + _GRAD) * shape.params))


def run_zrun(bench: Bench, shape: Shape, fraction: float) -> None:
    """Measure all schedules on one model: making and pinning its memory takes longest."""
    start = time.perf_counter()
    trainer = Trainer(shape, fraction, bench)
    bench.emit({"event": "built", "seconds": time.perf_counter() - start})
    for schedule in SCHEDULES:
        trainer.use(schedule)
        turn = measure_steps(trainer.step, bench)
        moved = fraction * shape.params
        bound = roofline_s(bench.ceilings, shape, moved, schedule)
        bench.emit(result(shape, fraction, schedule, turn, bound))
    trainer.sharded.settle_updates()


class Turn(NamedTuple):
    """Seconds of steps, the losses before and after, and what the device's allocator did."""

    times: list[float]
    losses: tuple[float, float]
    allocated: int
    reserved: int
    retries: int


def measure_steps(step: Step, bench: Bench) -> Turn:
    """Time steps in their steady state: two are made before."""
    device = bench.device
    first = float(step())
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    marks = [time.perf_counter()]
    for _ in range(bench.options.steps):
        loss = step()
        synchronize(device)
        marks.append(time.perf_counter())
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return Turn(
        [stop - start for start, stop in pairwise(marks)],
        (first, float(loss)),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("reserved_bytes.all.peak", 0),
        stats.get("num_alloc_retries", 0),
    )


def roofline_s(ceilings: dict[str, Any], shape: Shape, moved: float, schedule: str) -> float | None:
    """Return the seconds of a step at the ceilings; None: they were not measured on a device.

    A block is recomputed, so forward is a quarter of the computing. `overlap` hides an update
    behind the forward of the first micro-batch, `delayed` behind everything. Gradients go down
    behind backward, and parameters up behind the update, where a link is as fast as those.

    Args:
        moved: how many parameters are updated on the host.
    """
    if "gemm_tflops" not in ceilings:
        return None
    computing = shape.step_flops * 8 / 6 / (ceilings["gemm_tflops"] * 1e12)
    link = ceilings["copies_gb_s"]
    down = shape.accumulation * _GRAD * moved / (link["pinned down"] * _GB)
    up = _PARAM * moved / (link["pinned up"] * _GB)
    update = max(moved / (max(ceilings["adamw_gparam_s"].values()) * _GB), up)
    computing = max(computing, down)
    if schedule == "serial":
        return computing + update
    if schedule == "delayed":
        return max(computing, update)
    first_forward = computing / 4 / shape.accumulation
    return computing + max(0.0, update - first_forward)


def result(
    shape: Shape, fraction: float, schedule: str, turn: Turn, bound: float | None
) -> dict[str, Any]:
    """Return the line of a case and schedule."""
    seconds = statistics.median(turn.times)
    slack = 1 - turn.allocated / turn.reserved if turn.reserved else 0.0
    return {
        "event": "result",
        "schedule": schedule,
        "params": shape.params,
        "fraction": fraction,
        "tokens": shape.tokens,
        "step_s": seconds,
        "step_s_range": [min(turn.times), max(turn.times)],
        "tokens_per_s": shape.tokens / seconds,
        "tflops": shape.step_flops / seconds / 1e12,
        "roofline_s": bound,
        "of_roofline": bound and bound / seconds,
        "losses": turn.losses,
        "peak_gib": gib(turn.allocated),
        "slack": slack,
        "retries": turn.retries,
    }


# Peers


def plain_model(bench: Bench) -> nn.Module:
    """Return the model in bf16 on the device, with blocks that are recomputed as zrun's are."""
    model = bench.shape.build("meta").bfloat16()
    checkpointed = JobConfig.model_validate(
        {
            "name": "bench",
            "model": "bench:model",
            "data": "bench:data",
            "steps": 1,
            "batch": 1,
            "activations": {"checkpoint": "full"},
        }
    )
    sections = (checkpointed.zero, checkpointed.precision, checkpointed.activations)
    transform(model, *sections, compile=False)
    model.to_empty(device=bench.device)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(first_values(param, bench.device))
    return model


def run_torchao(bench: Bench) -> None:
    """Measure torchao's optimizer, which keeps its bf16 states on the host."""
    from torchao.optim import CPUOffloadOptimizer

    model = plain_model(bench)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LR, betas=BETAS, fused=True
    )
    given = batches(bench.shape, bench.device)

    def step() -> Tensor:
        for tokens, targets in given:
            loss = model(tokens, targets)
            (loss / len(given)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    bench.emit(result(bench.shape, 1.0, "", measure_steps(step, bench), None))


def run_deepspeed(bench: Bench) -> None:
    """Measure ZeRO-2 of DeepSpeed with its optimizer on the host."""
    import deepspeed

    os.environ.update(ALONE)
    model, shape = plain_model(bench), bench.shape
    config = {
        "train_micro_batch_size_per_gpu": shape.micro,
        "gradient_accumulation_steps": shape.accumulation,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    given = batches(shape, bench.device)

    def step() -> Tensor:
        for tokens, targets in given:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    bench.emit(result(shape, 1.0, "", measure_steps(step, bench), None))


RUN = {
    "ceilings": measure_ceilings,
    "7b": run_7b,
    "split": run_split,
    "torchao": run_torchao,
    "deepspeed": run_deepspeed,
}
