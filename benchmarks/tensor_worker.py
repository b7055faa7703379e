"""One rank of a tensor group, started by `tensor_parallel.py`: how each system divides one model.

The model is zrun's own GPT, whole on each rank before it is divided:

    zrun, zrun-sequence    a worker of `zrun train`
    dtensor                torch's DTensor, by `parallelize_module`
    bare                   the same slices by hand, and nothing else: Megatron's f and g over gloo
    plain                  one process that has all
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import model
import torch
import torch.distributed as dist
import torch.nn.functional as F
import worker
from cases import SHAPES, VOCAB, Request, Shape, zrun_job
from systems import Make, Seat, Training, adamw
from torch import Tensor, nn

RANKS = 2
_COLUMNS = ("qkv", "up")
_ROWS = ("out", "down")


def arguments(shape: Shape) -> dict[str, Any]:
    """Return what the model is made of."""
    sizes = {"dim": shape.dim, "depth": shape.depth, "heads": shape.heads, "seq_len": shape.seq}
    return {"vocab_size": VOCAB, "tied": False, **sizes}


def whole(shape: Shape) -> nn.Module:
    from zrun_core.models.gpt import gpt

    torch.manual_seed(model.SEED)
    return gpt(**arguments(shape))


def loop(module: nn.Module) -> Training:
    """Return the loop that everyone writes."""
    optimizer = adamw(module.parameters())

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = module(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return Training(step)


def plain() -> Make:
    return lambda _, seat: loop(whole(seat.shape))


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _summed(grad)


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return _summed(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def bare() -> Make:
    """Return linears that are slices, embedding and head whole: what a script does by hand."""

    def make(_: nn.Module, seat: Seat) -> Training:
        module = whole(seat.shape)
        for name, linear in list(module.named_modules()):
            kind = name.rpartition(".")[2]
            if kind not in (*_COLUMNS, *_ROWS):
                continue
            dim = 0 if kind in _COLUMNS else 1
            linear.weight = nn.Parameter(linear.weight.chunk(RANKS, dim)[seat.rank].contiguous())
            if kind in _COLUMNS:
                linear.bias = nn.Parameter(linear.bias.chunk(RANKS)[seat.rank].clone())
                linear.forward = partial(_column, linear)
            else:
                linear.forward = partial(_row, linear)
        return loop(module)

    return make


def _column(linear: Any, x: Tensor) -> Tensor:
    entered = _CopyIn.apply(x)  # type: ignore[no-untyped-call]
    return F.linear(entered, linear.weight, linear.bias)


def _row(linear: Any, x: Tensor) -> Tensor:
    y: Tensor = _SumOut.apply(F.linear(x, linear.weight))  # type: ignore[no-untyped-call]
    return y + linear.bias


def dtensor() -> Make:
    """Return torch's own: the linears of each block, as its tutorial divides them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def make(_: nn.Module, seat: Seat) -> Training:
        module = whole(seat.shape)
        mesh = init_device_mesh("cpu", (RANKS,))
        plan = {}
        for name, _linear in module.named_modules():
            kind = name.rpartition(".")[2]
            if kind in _COLUMNS:
                plan[name] = ColwiseParallel()
            elif kind in _ROWS:
                plan[name] = RowwiseParallel()
        parallelize_module(module, mesh, plan)
        sharded = [p for p in module.parameters() if hasattr(p, "device_mesh")]
        others = [p for p in module.parameters() if not hasattr(p, "device_mesh")]
        optimizers = [adamw(sharded), adamw(others)]  # one call takes tensors of one kind

        def step(tokens: Tensor, targets: Tensor) -> float:
            loss = module(tokens, targets)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return float(loss.item())

        return Training(step)

    return make


def zruns(*, sequence: bool = False) -> Make:
    """Return a worker of `zrun train`, which divides its model and is given its batches."""
    import joined

    from zrun_core.data.batch import MicroBatch

    def make(_: nn.Module, seat: Seat) -> Training:
        size = next(name for name, shape in SHAPES.items() if shape == seat.shape)
        data = {"size": size, "ranks": 1, "steps": 1}
        keys = zrun_job(0, seat.bf16) | {
            "model": {"call": "zrun_core.models.gpt:gpt", "args": arguments(seat.shape)},
            "data": {"call": "model.py:JobData", "args": data},
            "steps": 1,
            "batch": {"micro": seat.shape.batch, "global": seat.shape.batch},
            "checkpoint": None,
            "seed": model.SEED,
            "parallel": {"tp": RANKS, "sequence": sequence},
        }
        trainer = joined.prepare(keys, "tp", RANKS, seat.rank)

        def step(tokens: Tensor, targets: Tensor) -> float:
            trainer.step([MicroBatch.of((tokens, targets), len(tokens))])
            return trainer.recorder.progress.loss

        return Training(step)

    return make


_LOADERS: dict[str, Callable[[], Make]] = {
    "plain": plain,
    "bare": bare,
    "dtensor": dtensor,
    "zrun": zruns,
    "zrun-sequence": partial(zruns, sequence=True),
}


def load(name: str) -> Make:
    """Import the system called `name`."""
    return _LOADERS[name]()


def measure(make: Make, request: Request, rank: int) -> dict[str, Any]:
    """Train as one rank of the group."""
    shape = SHAPES[request.size]
    model.corpus()
    training = make(nn.Identity(), Seat(rank, request.ranks, shape, request.bf16))
    return worker.measure_steps(
        training,
        request.steps,
        lambda number: model.global_batch(shape, number, 1),  # all ranks see the same
    )


if __name__ == "__main__":
    worker.main(measure, load)
