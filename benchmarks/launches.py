"""Count what a step gives to a GPU, beside DDP and FSDP2: on simulated GPUs, without silicon.

    python benchmarks/launches.py                  fp32, two ranks: about 4 minutes
    python benchmarks/launches.py --bf16
    python benchmarks/launches.py --show bench-launches.json

What is counted holds for any GPU: kernels and operators that a rank's host gives to its device, and
how often it waits for it. A collective is one kernel; an operator on a list of tensors that is not
fused is one for each of them, on CUDA one for many. Two times on a core are told too, of the
threads that queue the work (the one that trains, and autograd's): most of such a time is the
simulated device's, which takes far longer for a launch than a driver does, so only the differences
of systems say something. Speed of a GPU is none of it.

All systems train one model on one batch with AdamW in one fused call, each in processes of its own,
in turns. The model is trained with two depths: what a block adds is the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import BETAS, LR, WEIGHT_DECAY, Shape, zrun_job
from render import render
from table import Spread

if TYPE_CHECKING:
    from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
SIMULATED_GPU = HERE.parent / "tests" / "simulated_gpu"
RANKS = 2
BASE = "fsdp2-z3"
SYSTEMS = ("plain", "ddp", "fsdp2-z2", BASE, "zrun0", "zrun1", "zrun2", "zrun3")
DEPTHS = (4, 12)
WARMUP = 4
TIMEOUT_S = 180.0
Records = Mapping[str, Sequence[dict[str, Any]]]  # by system, of each round


def main() -> int:
    """Measure, print, and write the results."""
    options = parse()
    if options.worker:
        work(options)
        return 0
    if options.show:
        print(report(json.loads(options.show.read_text())["records"]))
        return 0
    sys.path.insert(0, str(SIMULATED_GPU))
    import simulated_gpu

    reason = simulated_gpu.why_not()
    if reason is not None:
        print(f"there can be no simulated GPU here: {reason}", file=sys.stderr)
        return 1
    # FSDP2 frees gradients of the stream that reduces them while another one still reads them. That
    # is right, as whatever gets the memory follows both; but the device poisons it at once.
    environment = simulated_gpu.environment(devices=RANKS, delay_us=0, poison=0)
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in options.systems}
    for turn in range(options.rounds):
        for name in options.systems if turn % 2 == 0 else reversed(options.systems):
            records[name].append(measure(name, options, environment))
            print(f"round {turn + 1}  {name}", file=sys.stderr, flush=True)
            found = {"command": " ".join(sys.argv), "records": records}
            options.json.write_text(json.dumps(found))
    print(report(records))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of each run, beside the warm-up")
    parser.add_argument("--json", type=Path, default=Path("bench-launches.json"))
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(
    name: str, options: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a system with both depths, and return what its ranks have counted.

    Raises:
        RuntimeError: a rank has failed.
    """
    return {str(depth): run_ranks(name, depth, options, environment) for depth in DEPTHS}


def run_ranks(
    name: str, depth: int, options: argparse.Namespace, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--worker", name, "--depth", str(depth)]
    command += ["--steps", str(options.steps), *(["--bf16"] if options.bf16 else [])]
    with tempfile.TemporaryDirectory() as folder:
        own = {"STORE": f"{folder}/store", "WORLD_SIZE": str(RANKS)}
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, **own, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            told = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, error) in zip(ranks, told, strict=True):
        if rank.returncode:
            raise RuntimeError(f"{name}: {error}")
    return [json.loads(output.splitlines()[-1]) for output, _ in told]


# One rank


@dataclass
class Threads:
    """The threads that queue work: this one, and the one in which autograd calls hooks."""

    clocks: set[int] = field(default_factory=set)

    def know(self, _: Any = None) -> None:
        """Count the thread that calls."""
        self.clocks.add(time.pthread_getcpuclockid(threading.get_ident()))

    def seconds(self) -> float:
        """Return what they have taken of a core."""
        return sum(map(time.clock_gettime, self.clocks))


Step = Callable[["Tensor", "Tensor"], "Tensor"]  # returns the loss, on the device


def work(options: argparse.Namespace) -> None:
    """Train on this rank, and print what was counted."""
    import simulated_gpu
    import torch
    import torch.distributed as dist
    from model import GPT, SEED
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(os.environ["STORE"], RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS)
    shape = Shape(dim=64, depth=options.depth, heads=2, seq=16, batch=2)
    torch.manual_seed(SEED)
    model = GPT(shape)
    batch = torch.randint(0, 256, (shape.batch, shape.seq + 1), device=device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    step = make(options.worker, model, device, options.bf16, shape.batch)
    threads = Threads()
    threads.know()

    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            type(self).count += 1
            return func(*args, **(kwargs or {}))

    steps = []
    losses = []
    with sdpa_kernel(SDPBackend.MATH):
        for number in range(WARMUP + options.steps):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            before, begin = simulated_gpu.count(), threads.seconds()
            loss = step(tokens, targets)
            end, after = threads.seconds(), simulated_gpu.count()
            losses.append(float(loss))
            if number == 0:
                know_thread_of_autograd(threads, device)
            if number >= WARMUP:
                found = {key: after[key] - before[key] for key in ("kernels", "host_waits")}
                steps.append({**found, "seconds": end - begin})
        with Operators():
            step(tokens, targets)
    torch.cuda.synchronize()
    median = {key: statistics.median(each[key] for each in steps) for key in steps[0]}
    print(json.dumps({**median, "operators": Operators.count, "losses": losses}), flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


def know_thread_of_autograd(threads: Threads, device: Any) -> None:
    """Count autograd's thread of the device, which lives as long as the process."""
    import torch

    one = torch.ones(1, device=device, requires_grad=True)
    made = one * 2
    made.register_hook(threads.know)
    made.sum().backward()


def make(name: str, model: nn.Module, device: Any, bf16: bool, batch: int) -> Step:
    """Return what trains a step of a system."""
    if name.startswith("zrun"):
        return zrun(int(name[-1]), model, device, bf16, batch)
    import torch

    model.to(device)
    if name == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(
            model, device_ids=[device.index], gradient_as_bucket_view=True
        )
        # It takes times by a timer that only torch's wheel for CUDA has.
        model.logger = types.SimpleNamespace(set_runtime_stats_and_log=lambda: None)
    elif name.startswith("fsdp2"):
        shard(model, reshards=name.endswith("z3"), bf16=bf16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    casts = bf16 and not name.startswith("fsdp2")

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=casts):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def shard(model: nn.Module, *, reshards: bool, bf16: bool) -> None:
    """Have FSDP2 shard a model, block by block."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16 if bf16 else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
        "reshard_after_forward": reshards,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def zrun(stage: int, model: nn.Module, device: Any, bf16: bool, batch: int) -> Step:
    """Return a step of zrun, which reads the totals of the last one in the middle, as jobs do."""
    from zrun_core.distributed.comm import Comm
    from zrun_core.distributed.mesh import Mesh
    from zrun_core.distributed.named_vector import NamedVector
    from zrun_core.optim.resolve import resolve_optimizer
    from zrun_core.spine.config import JobConfig
    from zrun_core.spine.parallel_dims import resolve_shard_size
    from zrun_core.train.parallelize import make_settings, parallelize
    from zrun_core.train.step_runner import StepRunner
    from zrun_core.user_code.build import Built

    job = JobConfig.model_validate(zrun_job(stage, bf16) | {"steps": 1, "batch": {"micro": batch}})
    settings = make_settings(job, resolve_optimizer(job.optim, lambda name: None, device), device)
    comm = Comm(device)
    mesh = Mesh.build(
        int(os.environ["RANK"]), ["localhost"] * RANKS, resolve_shard_size(job.zero, RANKS, RANKS)
    )
    built = Built(model, lambda name, param: param.detach())
    sharded, _ = parallelize(built, job, settings, mesh, comm)
    runner = StepRunner(sharded)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        sums = NamedVector.of(device, weight=float(batch))
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module(tokens, targets)
        sharded.backward(loss / RANKS, micro, boundary=True)
        runner.read()
        runner.issue(LR, sums, lambda totals: totals["weight"] / (batch * RANKS))
        return loss.detach()

    return step


# The table


def report(records: Records) -> str:
    """Return the table."""
    rows = []
    for name, of_rounds in records.items():
        ranks = [rank for found in of_rounds for each in found.values() for rank in each]
        waits = max(rank["host_waits"] for rank in ranks)
        seconds = Spread.of(of_step(found, "seconds", DEPTHS[1]) * 1e3 for found in of_rounds)
        of_block = Spread.of(per_block(found, "seconds") * 1e6 for found in of_rounds)
        rows.append(
            [
                name,
                *(f"{of_step(of_rounds[0], 'kernels', depth):.0f}" for depth in DEPTHS),
                f"{per_block(of_rounds[0], 'kernels'):.1f}",
                f"{per_block(of_rounds[0], 'operators'):.1f}",
                *spread(seconds, ".1f"),
                *spread(of_block, ".0f"),
                *spread(ratio(records, name), ".2f"),
                f"{waits:.0f}",
                distance(records, name),
            ]
        )
    columns = [
        "system",
        *(f"kernels, {depth} blocks" for depth in DEPTHS),
        "of a block",
        "operators of a block",
        "ms on a core",
        "range",
        "us of a block",
        "range",
        f"/ {BASE}",
        "range",
        "host waits",
        "max|dL|",
    ]
    return render(columns, rows)


def of_step(found: dict[str, Any], key: str, depth: int) -> float:
    """Return what a step has of something, the mean of ranks."""
    return statistics.mean(rank[key] for rank in found[str(depth)])


def per_block(found: dict[str, Any], key: str) -> float:
    """Return what a block adds to it."""
    low, high = DEPTHS
    return (of_step(found, key, high) - of_step(found, key, low)) / (high - low)


def ratio(records: Records, name: str) -> Spread | None:
    """Return times of steps over those of FSDP2, round by round."""
    pairs = zip(records[name], records.get(BASE, ()), strict=False)
    times = [[of_step(each, "seconds", DEPTHS[1]) for each in pair] for pair in pairs]
    return Spread.of(own / other for own, other in times)


def spread(found: Spread | None, form: str) -> list[str]:
    """Return the cells of a median and its range."""
    if found is None:
        return ["", ""]
    return [f"{found.median:{form}}", f"{found.low:{form}}-{found.high:{form}}"]


def distance(records: Records, name: str) -> str:
    """Return how far losses are from those of the first system, in all rounds."""
    first = next(iter(records.values()))[0]
    apart = [
        abs(own - other)
        for found in records[name]
        for depth in map(str, DEPTHS)
        for rank, of_first in zip(found[depth], first[depth], strict=True)
        for own, other in zip(rank["losses"], of_first["losses"], strict=True)
    ]
    return f"{max(apart):.0e}" if not any(map(math.isnan, apart)) else "nan"


if __name__ == "__main__":
    sys.exit(main())
