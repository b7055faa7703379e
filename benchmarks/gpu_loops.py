"""The training loops that `gpu.py` compares, and how one of its child processes measures them.

All train `zrun_core.models.gpt` from the same first values on the same tokens, with every block
compiled, clipping at 1 and AdamW in fused calls. What they hold per parameter, between steps:

torch     bf16 weights, fp32 masters, fp32 gradients of the masters, two fp32 moments: 18 bytes.
          Forward under autocast; then the bf16 gradients are copied into the fp32 ones, and the
          updated masters back into the weights, each in one foreach call. This is what
          `precision: bf16` of zrun means, written by hand.
zrun      the same 18 bytes, in flat units, through `ShardedModel` as a worker sets it up.
autocast  fp32 weights cast to bf16 in every forward, no masters: 12 bytes and 4 of gradient during
          a step. This is the loop of most tutorials, shown for orientation.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

LR, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
WARMUP = (
    4  # steps of each loop before anything is timed: compilation, and the losses that are compared
)
BLOCK_S = 1.5  # seconds that a loop runs before the next one takes its turn
NUM_BATCHES = 4

Loop = Callable[
    [Tensor, Tensor], Tensor
]  # one step: (tokens, targets) [B, T] -> loss, 0-d, on the device
Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Model:
    """A GPT-2, how many sequences it gets per step, and which loops are compared on it."""

    dim: int
    depth: int
    heads: int
    seq: int
    batch: int
    loops: tuple[str, ...]
    vocab: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for everyone

    @property
    def flops_per_token(self) -> int:
        """Forward and backward, nothing recomputed.

        6 per weight of a matrix product, and causal attention.
        """
        return (
            6 * (12 * self.dim**2 * self.depth + self.vocab * self.dim)
            + 6 * self.depth * self.dim * self.seq
        )

    def build(self, device: torch.device) -> nn.Module:
        """The model on `device`, always with the same first values."""
        torch.manual_seed(0)
        with device:
            return gpt_of(self)


def gpt_of(shape: Any, **more: Any) -> nn.Module:
    """A GPT-2 as large as `shape` says, with other arguments of `gpt` as given."""
    from zrun_core.models.gpt import gpt

    return gpt(
        "gpt2",
        vocab_size=shape.vocab,
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        seq_len=shape.seq,
        **more,
    )


MODELS = {
    "tiny": Model(64, 3, 2, 32, 2, ("torch", "zrun", "autocast"), vocab=128),
    "124m": Model(768, 12, 12, 1024, 32, ("torch", "zrun", "autocast")),
    "1.5b": Model(1600, 48, 25, 1024, 16, ("torch", "zrun")),
}


def torch_loop(model: nn.Module, device: torch.device, compiled: bool) -> Loop:
    """bf16 weights with fp32 masters, by hand."""
    if compiled:
        compile_blocks(model)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().clone()) for param in params]
    for param, master in zip(params, masters, strict=True):
        param.data = param.data.bfloat16()
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(
        masters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss = model(tokens, targets)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(
                [master.grad for master in masters], [param.grad for param in params]
            )
        for param in params:
            param.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss.detach()

    return step


def autocast_loop(model: nn.Module, device: torch.device, compiled: bool) -> Loop:
    """fp32 weights under autocast."""
    if compiled:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def zrun_loop(
    model: nn.Module,
    device: torch.device,
    compiled: bool,
    *,
    stage: int = 2,
    rank: int = 0,
    ranks: int = 1,
) -> Loop:
    """The runtime, set up as a worker does it; of several ranks each has a part of the batch."""
    from zrun_core.distributed.comm import Comm
    from zrun_core.distributed.communicators import connect
    from zrun_core.distributed.mesh import Mesh
    from zrun_core.distributed.named_vector import NamedVector
    from zrun_core.optim.resolve import resolve_optimizer
    from zrun_core.spine.config import JobConfig
    from zrun_core.spine.parallel_dims import resolve_shard_size
    from zrun_core.train.parallelize import make_settings, parallelize
    from zrun_core.user_code.build import Built

    job = JobConfig.model_validate(
        {
            "name": "bench",
            "model": "bench:model",
            "data": "bench:data",
            "steps": 1,
            "batch": 1,
            "precision": "bf16",
            "zero": stage,
            "compile": compiled,
            "optim": {
                "name": "adamw",
                "lr": LR,
                "betas": list(BETAS),
                "weight_decay": WEIGHT_DECAY,
                "clip": CLIP,
            },
        }
    )
    settings = make_settings(job, resolve_optimizer(job.optim, lambda name: None), device)
    built = Built(model, lambda name, param: param.detach())
    comm = Comm(device)
    mesh = Mesh.build(rank, ["localhost"] * ranks, resolve_shard_size(job.zero, ranks, ranks))
    if ranks > 1:
        connect(comm, mesh)
    sharded, _ = parallelize(built, job, settings, mesh, comm)
    sharded.module.to(device)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        global_batch = len(tokens) * ranks
        sums = NamedVector.of(device, samples=0.0, loss=0.0)
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module(tokens, targets)
        sums.add(samples=len(tokens), loss=loss.detach().double() * len(tokens))
        sharded.backward(loss / ranks, micro, boundary=True)
        sharded.step(LR, sums, lambda totals: totals["samples"] / global_batch)
        return loss.detach()

    return step


def compile_blocks(model: nn.Module) -> None:
    """Compile every block by itself, as zrun does it: all blocks share one graph."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


LOOPS = {"torch": torch_loop, "zrun": zrun_loop, "autocast": autocast_loop}


@dataclass
class Entrant:
    """A loop that takes its turns."""

    step: Loop
    state_bytes: int  # what it holds between steps
    start_s: float  # building and compiling
    losses: list[float]
    times: list[float]  # of single steps, all rounds
    medians: list[float]  # by rounds
    peak_bytes: int = 0


class Comparison:
    """Loops on one model that are all in memory and take turns, so that they see the same clocks
    and temperature.
    """

    def __init__(
        self, size: str, batch: int, device: torch.device, compiled: bool, emit: Emit
    ) -> None:
        self.size, self.model, self.batch, self.device, self._emit = (
            size,
            MODELS[size],
            batch,
            device,
            emit,
        )
        generator = torch.Generator(device).manual_seed(1)
        shape = (NUM_BATCHES, batch, self.model.seq + 1)
        tokens = torch.randint(0, self.model.vocab, shape, generator=generator, device=device)
        self._batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
        self.entrants = {name: self._enter(name, compiled) for name in self.model.loops}

    def _enter(self, name: str, compiled: bool) -> Entrant:
        start, before = time.perf_counter(), self._allocated()
        step = LOOPS[name](self.model.build(self.device), self.device, compiled)
        losses = [float(step(*self._batches[k % NUM_BATCHES])) for k in range(WARMUP)]
        entrant = Entrant(
            step, self._allocated() - before, time.perf_counter() - start, losses, [], []
        )
        self._emit(
            {
                "size": self.size,
                "loop": name,
                "event": "ready",
                "start_s": round(entrant.start_s, 1),
                "losses": losses,
                "state_gib": gib(entrant.state_bytes),
            }
        )
        return entrant

    def run(self, rounds: int, deadline: float) -> None:
        """Turns of every loop until `rounds` or `deadline` (in `time.monotonic`).

        Emits after each round.
        """
        num_steps = self._steps_per_turn()
        for number in range(rounds):
            start = time.monotonic()
            names = list(self.entrants)
            for name in names if number % 2 == 0 else reversed(names):
                self._turn(self.entrants[name], num_steps)
            self._emit(
                {
                    "size": self.size,
                    "event": "round",
                    "round": number + 1,
                    "ms": {
                        name: round(1e3 * each.medians[-1], 3)
                        for name, each in self.entrants.items()
                    },
                }
            )
            if time.monotonic() + 1.2 * (time.monotonic() - start) > deadline:
                break

    def _steps_per_turn(self) -> int:
        slowest = max(statistics.median(self._time(each, 3)) for each in self.entrants.values())
        return max(4, min(40, round(BLOCK_S / slowest)))

    def _turn(self, entrant: Entrant, num_steps: int) -> None:
        others = sum(each.state_bytes for each in self.entrants.values()) - entrant.state_bytes
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        times = self._time(entrant, num_steps + 1)[1:]  # the first follows another loop
        if self.device.type == "cuda":
            entrant.peak_bytes = max(
                entrant.peak_bytes, torch.cuda.max_memory_allocated(self.device) - others
            )
        entrant.times += times
        entrant.medians.append(statistics.median(times))

    def _time(self, entrant: Entrant, num_steps: int) -> list[float]:
        """Seconds of each step: on CUDA between events, so that the host never waits."""
        marks: list[Any] = [self._mark()]
        for k in range(num_steps):
            entrant.step(*self._batches[k % NUM_BATCHES])
            marks.append(self._mark())
        if self.device.type != "cuda":
            return [stop - start for start, stop in pairwise(marks)]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairwise(marks)]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _allocated(self) -> int:
        """Bytes in tensors now; what is kept for later is given back."""
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device)

    def results(self, peak_flops: float | None) -> list[dict[str, Any]]:
        """One line per loop. `ratio` is its throughput in units of the torch loop's, by rounds."""
        base, graphs = self.entrants["torch"], num_graphs()
        found = []
        for name, each in self.entrants.items():
            tokens_per_s = self.batch * self.model.seq / statistics.median(each.times)
            flops = tokens_per_s * self.model.flops_per_token
            ratios = [
                theirs / ours for theirs, ours in zip(base.medians, each.medians, strict=True)
            ]
            found.append(
                {
                    "size": self.size,
                    "loop": name,
                    "event": "result",
                    "batch": self.batch,
                    "seq": self.model.seq,
                    "ms": round(1e3 * statistics.median(each.times), 3),
                    "ms_range": [
                        round(1e3 * min(each.medians), 3),
                        round(1e3 * max(each.medians), 3),
                    ],
                    "rounds": len(each.medians),
                    "steps": len(each.times),
                    "tokens_per_s": round(tokens_per_s, 1),
                    "tflops": round(flops / 1e12, 2),
                    "mfu": round(flops / peak_flops, 4) if peak_flops else None,
                    "ratio": round(statistics.median(ratios), 4),
                    "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
                    "peak_gib": gib(each.peak_bytes),
                    "state_gib": gib(each.state_bytes),
                    "start_s": round(each.start_s, 1),
                    "max_loss_difference": max(
                        abs(a - b) for a, b in zip(each.losses, base.losses, strict=True)
                    ),
                    "graphs": graphs,
                }
            )
        return found


def num_graphs() -> int:
    """Graphs that were compiled in this process.

    One per number format if all blocks share theirs.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 3)


def gemm_tflops(device: torch.device, numel: int = 8192) -> float:
    """What a large bf16 matrix product of random numbers reaches: the practical ceiling."""
    a, b = (torch.randn(numel, numel, device=device, dtype=torch.bfloat16) for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(3):
        a @ b
    events[0].record()
    for _ in range(10):
        a @ b
    events[1].record()
    torch.cuda.synchronize(device)
    return 10 * 2 * numel**3 / (events[0].elapsed_time(events[1]) / 1e3) / 1e12
