"""`python -m zrun_core.library.device_check`: a rank of the check that `zrun doctor --gpu` makes.

It computes on its device what the CPU computes too, and trains a small model with the runtime and,
on the CPU, without it. Its argument is a `DeviceCheck` as JSON; torchrun's variables say which of
how many ranks it is. What each check came to goes to a file, a line of JSON each, as soon as it is
known: a check that stands still leaves those before it.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zrun_core
from zrun_core.errors import PreflightError
from zrun_core.hardware import accelerator
from zrun_core.library.run import Run
from zrun_core.models.gpt import gpt

_STEPS = 6
_LR = 1e-2
_BATCH = 8
_LENGTH = 32
_VOCAB = 96
_REPEATS = 10
# the largest differences to the CPU, of the largest number that it computes
_TOLERATED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_LOSS_TOLERATED = 2e-3  # of a loss, between devices, after `_STEPS` steps
_REDUCTIONS = 5  # that are timed
_BLOCK = 1 << 24  # elements of memory that are written and read at a time


@dataclass(frozen=True)
class DeviceCheck:
    """What a rank is to check.

    Attributes:
        part: alone: what one device computes; training: the runtime on these ranks; messages: how
            fast all of them exchange data.
        folder: for the results; the ranks meet there too.
        memory_bytes: of a device, that are written and read again.
        message_bytes: that an all-reduce sums.
        side: of the square matrices that operators are given.
        limit_s: after which it tells where it stands, and ends.
    """

    part: Literal["alone", "training", "messages"]
    device: Literal["cpu", "cuda"]
    folder: str
    memory_bytes: int = 1 << 30
    message_bytes: int = 1 << 28
    side: int = 1024
    limit_s: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a check came to.

    Attributes:
        found: in words.
        problem: what is wrong; None: nothing.
        rate: bytes per second, where it measures some.
    """

    check: str
    found: str
    problem: str | None = None
    rate: float | None = None


def main() -> None:
    asked = DeviceCheck(**json.loads(sys.argv[1]))
    faulthandler.dump_traceback_later(asked.limit_s, exit=True)
    run = _join(asked)
    checks = {"alone": _alone, "training": _training, "messages": _messages}[asked.part]
    with Path(asked.folder, f"{asked.part}-{run.rank}.jsonl").open("w") as told:
        for outcome in checks(asked, run):
            print(json.dumps(vars(outcome)), file=told, flush=True)
    run._meet("the end")
    sys.stdout.flush()
    os._exit(0)  # libraries of devices may stand still where they are taken apart


def _join(asked: DeviceCheck) -> Run:
    """Meet the other ranks in a file: no port is needed, and no name that resolves."""
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        device = torch.device("cpu")
        if asked.device == "cuda":
            device = accelerator.device_at(int(os.environ["LOCAL_RANK"]))
            if (why_not := accelerator.why_not(device, size)) is not None:
                raise PreflightError(why_not)
            accelerator.set_device(device)
        dist.init_process_group(
            accelerator.backend_name(device),
            init_method=f"file://{asked.folder}/store",
            rank=int(os.environ["RANK"]),
            world_size=size,
        )
    return zrun_core.init(device=asked.device)


# One device.


def _alone(asked: DeviceCheck, run: Run) -> Iterator[Outcome]:
    yield _compare_operators(run.device, asked.side)
    yield _repeat(run.device, 2 * asked.side)
    yield _fill_memory(run.device, asked.memory_bytes)
    yield _train_and_compare("training", run, zero=0)


def _operators() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return operators that training is made of, each a function of a square matrix."""

    def attention(x: Tensor) -> Tensor:
        heads = x.view(8, 8, -1, 64)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    def backward(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        hidden = functional.gelu(functional.layer_norm(leaf @ x, x.shape[-1:]))
        (found,) = torch.autograd.grad(hidden.square().mean() * 1e3, leaf)
        return found

    return {
        "product": lambda x: x @ x.t(),
        "sum": lambda x: x.sum(dim=0),
        "softmax": lambda x: functional.softmax(x, dim=-1),
        "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
        "attention": attention,
        "backward": backward,
    }


def _compare_operators(device: torch.device, side: int) -> Outcome:
    """Compare operators with those of the CPU, which computes them in 64 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(side, side, generator=generator) / side**0.5
    worst = 0.0
    for dtype, tolerated in _TOLERATED.items():
        given = source.to(dtype)
        for name, operator in _operators().items():
            right = operator(given.double())
            found = operator(given.to(device)).double().cpu()
            difference = float((found - right).abs().max() / right.abs().max())
            if not difference <= tolerated:  # nan too
                text = f"{name} in {str(dtype).removeprefix('torch.')}"
                problem = f"{text} is off by {difference:.1e} of its largest value"
                return Outcome("arithmetic", problem, problem)
            if dtype is torch.float32:
                worst = max(worst, difference)
    return Outcome("arithmetic", f"fp32 within {worst:.0e} of the CPU's 64 bits")


def _repeat(device: torch.device, side: int) -> Outcome:
    """Compute the same several times: a device that is well gives the same bits."""
    generator = torch.Generator().manual_seed(2)
    source = torch.randn(side, side, generator=generator).to(device)
    first = source @ source
    for number in range(_REPEATS):
        again = source @ source
        differ = int((first != again).sum())
        if differ:
            problem = f"the same product had {differ} other numbers when it was repeated"
            return Outcome("repetition", f"{problem} ({number + 1} times)", problem)
    return Outcome("repetition", f"a product has the same bits {_REPEATS + 1} times")


def _fill_memory(device: torch.device, num_bytes: int) -> Outcome:
    """Write a part of the memory, all of it, and read it again."""
    count = max(1, num_bytes // (4 * _BLOCK))
    pattern = torch.arange(_BLOCK, dtype=torch.int32).to(device)
    keys = [0x5A5A5A5A ^ (number * 0x01010101 & 0x7FFFFFFF) for number in range(count)]
    blocks = [pattern.bitwise_xor(key) for key in keys]
    for key, block in zip(keys, blocks, strict=True):
        wrong = int((block.bitwise_xor(key) != pattern).sum())
        if wrong:
            problem = f"{wrong} numbers were read back from its memory otherwise than written"
            return Outcome("memory", problem, problem)
    return Outcome("memory", f"{count * 4 * _BLOCK >> 20} MiB are read as they were written")


# The runtime.


def _training(asked: DeviceCheck, run: Run) -> Iterator[Outcome]:
    if run.world_size > 1:
        yield _train_and_compare("ZeRO-3", run, zero=3)
    where = {"optimizer on the host": {"optimizer": "host"}}
    where["parameters on the host"] = {"optimizer": "host", "grad": "host", "param": "host"}
    for name, offload in where.items():
        yield _train_and_compare(name, run, zero=3, offload=offload)


def _train_and_compare(check: str, run: Run, **settings: Any) -> Outcome:
    """Train by the runtime, and compare losses with those of a plain loop on the CPU."""
    expected = _plain_losses()
    try:
        found = _losses(run, settings)
    except (zrun_core.ZrunError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
        return Outcome(check, problem, problem)
    differences = [abs(a - b) / b for a, b in zip(found, expected, strict=True)]
    worst = max(differences, key=lambda each: float("inf") if each != each else each)
    text = f"{_STEPS} losses within {worst:.0e} of plain torch on the CPU"
    if not worst <= _LOSS_TOLERATED:
        step = differences.index(worst)
        problem = (
            f"the loss of step {step + 1} is {found[step]:.5f}, and plain torch on the CPU has "
            f"{expected[step]:.5f}"
        )
        return Outcome(check, problem, problem)
    return Outcome(check, text)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return gpt(vocab_size=_VOCAB, dim=64, depth=4, heads=4, seq_len=_LENGTH)


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Return what all ranks together read, of a rule that can be learnt."""
    generator = torch.Generator().manual_seed(4)
    starts = torch.randint(_VOCAB, (_STEPS, _BATCH, 1), generator=generator)
    ids = (starts + 7 * torch.arange(_LENGTH + 1)) % _VOCAB
    return [(each[:, :-1], each[:, 1:]) for each in ids]


def _plain_losses() -> list[float]:
    """Return the losses of a loop without the runtime, on the CPU."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    losses = []
    for ids, labels in _batches():
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _losses(run: Run, settings: Mapping[str, Any]) -> list[float]:
    """Return the losses of the runtime, over all ranks."""
    model = zrun_core.shard(copy.deepcopy(_model()), **settings)
    optimizer = zrun_core.optimizer(model, "adamw", lr=_LR)
    losses = []
    for ids, labels in _batches():
        mine = slice(run.rank, None, run.world_size)
        loss = model(ids[mine].to(run.device), labels[mine].to(run.device))
        loss.backward()
        optimizer.step()
        losses.append(run.mean(loss.detach()))
    return losses


# Messages.


def _messages(asked: DeviceCheck, run: Run) -> Iterator[Outcome]:
    world = run._mesh(1).world
    numel = asked.message_bytes // 4 // run.world_size * run.world_size
    values = torch.empty(numel, device=run.device)
    scratch = torch.empty(
        run._comm.num_recv_shards(world) * (numel // run.world_size), device=run.device
    )
    times = []
    problem = None
    for number in range(_REDUCTIONS + 1):  # the first one makes connections
        values.fill_(run.rank + number)
        right = sum(range(run.world_size)) + number * run.world_size
        run._comm.barrier(world)
        start = time.perf_counter()
        run._comm.all_reduce(values, scratch, world, tag=0, name="check").wait()
        last = float(values[-1])  # waits for the device
        times.append(time.perf_counter() - start)
        wrong = int((values != right).sum())
        if wrong and problem is None:
            problem = f"a sum over all ranks is wrong in {wrong} of {numel} numbers: {last}"
    # As NCCL's tests count: bytes that leave each rank.
    moved = 2 * (run.world_size - 1) / run.world_size * values.nbytes
    rate = moved / min(times[1:])
    yield Outcome("all-reduce", problem or f"{rate / 1e9:.1f} GB/s", problem, rate)


if __name__ == "__main__":
    main()
