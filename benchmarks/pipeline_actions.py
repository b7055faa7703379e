"""One rank of a pipeline, started by `pipelines.py --actions`: the CPU time of its actions.

Seconds are those of the thread that trains: what other programs do on the cores changes them
little, and waiting takes none. In each step the forwards and backwards of a stage are timed one by
one, and afterwards the same modules in a plain loop, whose gradients add up in `param.grad`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import model
import pipeline_worker
import torch
import worker
from cases import SHAPES, Request
from pipeline_worker import STAGES, layers, loss_of
from systems import Make, Seat
from torch import Tensor, nn

FORWARD, BACKWARD = "F", "B"
Seconds = dict[str, list[float]]  # by kind of action


def measure(make: Make, request: Request, rank: int) -> dict[str, Any]:
    """Train, and time the actions.

    Returns:
        By step, the seconds of each forward and backward, by kind: `actions` in the pipeline,
        `modules` in a plain loop, and of zrun `units` in a loop over the modules that it trains,
        with the hooks by which it gathers parameters and takes gradients.
    """
    shape = SHAPES[request.size]
    micro_batches = int(request.system.partition("/")[2])
    seat = Seat(rank, request.ranks, shape, request.bf16)
    plain = _own(model.build(shape), rank)
    training = make(model.build(shape), seat)
    seconds: Seconds = defaultdict(list)
    if training.sharded is not None:
        _time_ours(training.runner, rank, micro_batches, seconds)
    else:
        _time_torchs(training.runner, seconds)
    found: dict[str, list[Seconds]] = {"actions": [], "modules": [], "units": []}
    for number in range(request.steps):
        tokens, targets = model.global_batch(shape, number, micro_batches)
        worker.barrier()
        training.step(tokens, targets)
        found["actions"].append(dict(seconds))
        seconds.clear()
        batches = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        found["modules"].append(_looped(plain, batches, seat, None))
        plain.zero_grad()
        if training.sharded is not None:
            ours = _own(training.sharded.module, rank)
            found["units"].append(_looped(ours, batches, seat, training.sharded))
    return found


def _own(gpt: Any, rank: int) -> nn.Module:
    """Return the modules of a stage as one, which calls one after the other."""
    half = len(layers(gpt)) // STAGES
    return nn.Sequential(*layers(gpt)[rank * half : (rank + 1) * half])


def _looped(
    own: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], seat: Seat, sharded: Any
) -> Seconds:
    """Time the forwards and backwards of a stage's modules in a loop, without messages.

    `sharded` is zrun's model, which is told of each pass; None: nobody is told.
    """
    hidden = torch.randn(*batches[0][0].shape, seat.shape.dim)
    is_first, is_last = seat.rank == 0, seat.rank == STAGES - 1
    seconds: Seconds = defaultdict(list)
    under_way: deque[tuple[Any, Any]] = deque()
    for tokens, targets in batches:
        given = tokens if is_first else hidden.clone().requires_grad_()
        begin = time.thread_time()
        with nullcontext() if sharded is None else sharded.forward() as micro:
            result = own(given)
            if is_last:
                result = loss_of(result, targets) / len(batches)
        seconds[FORWARD].append(time.thread_time() - begin)
        under_way.append((micro, result))
        del result
    while under_way:
        grad = None if is_last else hidden.clone()
        begin = time.thread_time()
        micro, result = under_way.popleft()
        with nullcontext() if sharded is None else sharded.backward_pass(micro, boundary=False):
            torch.autograd.backward(result, grad)
        del result  # and its graph
        seconds[BACKWARD].append(time.thread_time() - begin)
    return dict(seconds)


def _time_ours(runner: Any, rank: int, micro_batches: int, seconds: Seconds) -> None:
    """Time zrun's actions. One stage runs at a time, so that none looks for messages in vain."""
    execute = runner._execute
    num_run = 0

    def timed(action: Any, *args: Any) -> Any:
        nonlocal num_run
        if rank and not num_run:
            worker.barrier()  # the first stage's forwards are over
        begin = time.thread_time()
        result = execute(action, *args)
        seconds[action.kind.value].append(time.thread_time() - begin)
        num_run += 1
        if num_run == micro_batches and not rank:
            worker.barrier()
            worker.barrier()
        if num_run == 2 * micro_batches:
            num_run = 0
            if rank:
                worker.barrier()  # the last stage's backwards are over
        return result

    runner._execute = timed


def _time_torchs(schedule: Any, seconds: Seconds) -> None:
    """Time what torch's stages do, without their messages."""

    def time_as(kind: str, owner: Any, name: str, *, adds: bool = False) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            result = call(*args, **kwargs)
            took = time.thread_time() - begin
            if adds:
                seconds[kind][-1] += took
            else:
                seconds[kind].append(took)
            return result

        setattr(owner, name, timed)

    time_as(FORWARD, schedule._stage, "forward_one_chunk")
    time_as(FORWARD, schedule, "_maybe_compute_loss", adds=True)
    time_as(BACKWARD, schedule._stage, "backward_one_chunk")


if __name__ == "__main__":
    worker.main(measure, pipeline_worker.load)
