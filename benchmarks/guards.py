"""What comparing replicas costs, beside a training step of the same model.

    torchrun --nproc-per-node 2 benchmarks/guards.py    50M parameters, stages 0 to 2, fp32, bf16
    torchrun --nproc-per-node 2 benchmarks/guards.py --size 10m --steps 3

Prints the median of a step, of a check, and a check's share of a hundred steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median

import model
import torch
import torch.distributed as dist
from cases import LR, SHAPES, zrun_job

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.guards.replicas import ReplicaGuard
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import resolve_shard_size
from zrun_core.train.parallelize import make_settings, parallelize
from zrun_core.user_code.build import Built

INTERVAL = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="50m")
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="steps and checks that are timed, after one that is not",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for stage, bf16 in ((0, False), (0, True), (1, False), (2, True), (3, False)):
        step_s, check_s = measure(options.size, stage, bf16, options.steps)
        if dist.get_rank() == 0:
            share = check_s / (INTERVAL * step_s)
            formats = "bf16" if bf16 else "fp32"
            print(
                f"stage {stage} {formats}: step {step_s:.3f} s, check {check_s * 1e3:.2f} ms, "
                f"{share:.5%} of the time"
            )
    sys.stdout.flush()
    os._exit(0)  # destroying a gloo group sometimes aborts


def measure(size: str, stage: int, bf16: bool, steps: int) -> tuple[float, float]:
    """Median seconds of a step and of a check."""
    shape, rank, world = SHAPES[size], dist.get_rank(), dist.get_world_size()
    job = JobConfig.model_validate(
        zrun_job(stage, bf16) | {"steps": 1, "batch": {"micro": shape.batch}}
    )
    comm = Comm(torch.device("cpu"))
    settings = make_settings(job, resolve_optimizer(job.optim, lambda name: None), comm.device)
    mesh = Mesh.build(rank, ["localhost"] * world, resolve_shard_size(job.zero, world, world))
    sharded, _ = parallelize(
        Built(model.build(shape), lambda name, param: param.detach()), job, settings, mesh, comm
    )
    guard, step_times, check_times = ReplicaGuard(sharded), [], []
    share = slice(rank * shape.batch, (rank + 1) * shape.batch)
    for number in range(1 + steps):
        tokens, targets = (part[share] for part in model.global_batch(shape, number, world))
        comm.barrier(mesh.world)
        start = time.perf_counter()
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module(tokens, targets)
        sharded.backward(loss / world, micro, boundary=True)
        checking = time.perf_counter()
        guard.check(number, {"step": number, "lr": LR, "loss scale": 1.0})
        checked = time.perf_counter()
        sums = NamedVector.of(comm.device, weight=1.0)
        sharded.step(LR, sums, lambda sums: sums["weight"] / world)
        step_times.append(time.perf_counter() - checked + checking - start)
        check_times.append(checked - checking)
    return median(step_times[1:]), median(check_times[1:])


if __name__ == "__main__":
    main()
