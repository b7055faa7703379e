"""One rank of one case, started as `worker.py request.json`: its numbers go beside the request."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import model
import systems
import torch
import torch.distributed as dist
from cases import SHAPES, Request
from procfs import busy_s, loopback_bytes, memory_mb, restart_peak, socket_bytes
from torch import Tensor


def main(
    measure: Callable[[systems.Make, Request, int], object],
    load: Callable[[str], systems.Make] = systems.load,
) -> None:
    """Meet the other ranks, and write what `measure` returns: (how to set up, request, rank).

    Args:
        load: imports a system by its name.
    """
    request_path = Path(sys.argv[1])
    request = Request(**json.loads(request_path.read_text()))
    rank = int(os.environ.get("RANK", "0"))
    with suppress(OSError):  # `nice` orders processes only inside one session: tell the session too
        Path("/proc/self/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    torch.set_num_threads(request.threads)
    make = load(request.system)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    result = measure(make, request, rank)
    (request_path.parent / f"rank-{rank}.json").write_text(json.dumps(result))
    barrier()
    sys.stdout.flush()
    os._exit(0)  # destroying a gloo group sometimes aborts


def measure(make: systems.Make, request: Request, rank: int) -> dict[str, object]:
    """Build, train, and look at the machine around every step."""
    shape, world = SHAPES[request.size], request.ranks
    share = (
        slice(None)
        if request.system == "single"
        else slice(rank * shape.batch, (rank + 1) * shape.batch)
    )
    model.corpus()
    torch.randn(256, 256) @ torch.randn(256, 256)  # loads the mathematical libraries
    barrier()
    base = memory_mb("VmRSS")
    training = make(model.build(shape), systems.Seat(rank, world, shape, request.bf16))
    record: dict[str, list[float]] = {
        "losses": [],
        "times": [],
        "cpu": [],
        "busy": [],
        "payload": [],
        "loopback": [],
    }
    first = start_peak = 0.0
    for number in range(request.steps):
        tokens, targets = (part[share] for part in model.global_batch(shape, number, world))
        if number == request.warmup:
            start_peak = memory_mb("VmHWM")
            restart_peak()
        barrier()
        sent = (socket_bytes(), loopback_bytes())
        before = (busy_s(), time.process_time(), time.perf_counter())
        loss = training.step(tokens, targets)
        after = (busy_s(), time.process_time(), time.perf_counter())
        first = first or time.time() - request.launched
        barrier()  # everybody has sent everything
        record["losses"].append(loss)
        for key, start, stop in zip(("busy", "cpu", "times"), before, after, strict=True):
            record[key].append(stop - start)
        record["payload"].append(socket_bytes() - sent[0])
        record["loopback"].append((loopback_bytes() - sent[1]) / world)
    peak = memory_mb("VmHWM")
    return {
        **record,
        "first_s": first,
        "base_mb": base,
        "start_mb": start_peak - base,
        "peak_mb": peak - base,
        "counted": training.counted(request.steps) if training.counted else None,
        "digest": digest(training.params),
        "torch": torch.__version__,
    }


def measure_steps(
    training: systems.Training,
    steps: int,
    batch: Callable[[int], tuple[Tensor, Tensor]],
) -> dict[str, list[Any]]:
    """Train, and look at the machine around every step.

    Args:
        batch: tokens and targets of a step.

    Returns:
        By step what it took by the clock and on a core, how busy the machine was, the loss, and of
        a stage of zrun the actions.
    """
    found: dict[str, list[Any]] = {key: [] for key in ("times", "cpu", "busy", "losses", "actions")}
    for number in range(steps):
        tokens, targets = batch(number)
        barrier()
        before = (time.perf_counter(), time.process_time(), busy_s())
        loss = training.step(tokens, targets)
        after = (time.perf_counter(), time.process_time(), busy_s())
        for key, start, end in zip(("times", "cpu", "busy"), before, after, strict=True):
            found[key].append(end - start)
        found["losses"].append(loss)
        found["actions"].append(training.actions() if training.actions else [])
    return found


def digest(params: Callable[[], Iterable[Tensor]] | None) -> str | None:
    """A hash of every bit of every parameter."""
    if params is None:
        return None
    found = hashlib.sha256()
    for param in params():
        found.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def barrier() -> None:
    """Return when every rank is here."""
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main(measure)
