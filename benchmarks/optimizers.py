"""Seconds that one update takes on one CPU rank, beside torch's fused AdamW.

`python benchmarks/optimizers.py`.

The model is the main job's, in fp32, with gradients that are there already. Optimizers take turns,
so that what else runs meets all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from render import render

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.memory.buffers import Kind
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.models.gpt import gpt
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.zero.account import allocated_memory
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.sharding_config import ShardingConfig

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw, bf16 moments": {"name": "adamw", "moments": "bf16"},
    "adamw, a loop over tensors": {"name": "adamw", "args": {"fused": False, "foreach": False}},
    "lamb": {"name": "lamb"},
    "lamb, bf16 moments": {"name": "lamb", "moments": "bf16"},
    "lars": {"name": "lars"},
    "lion": {"name": "lion"},
    "lion, bf16 moments": {"name": "lion", "moments": "bf16"},
    "sgd, momentum": {"name": "sgd", "args": {"momentum": 0.9}},
}


def make(optim: dict[str, Any]) -> ShardedModel:
    """The main job's model at stage 0 on one rank, with a gradient everywhere."""
    config = OptimConfig.model_validate({"weight_decay": 0.1, "no_decay": ["norm"], **optim})
    settings = ShardingConfig(
        zero=ZeroPolicy(0),
        precision=Precision.of(PrecisionConfig()),
        optimizer=resolve_optimizer(config, lambda name: None),
        bucket=12 << 20,
        no_decay=config.no_decay,
    )
    torch.manual_seed(0)
    model = gpt(flavour="llama", vocab_size=256, dim=384, depth=6, heads=6, seq_len=256)
    comm = Comm(torch.device("cpu"))
    return ShardedModel(
        model, lambda name, param: param.detach(), settings, Mesh.build(0, ["host"], 1), comm
    )


def seconds(sharded: ShardedModel) -> float:
    """One update with new gradients."""
    got = []
    for unit in sharded.units:
        unit.grad.local.normal_(std=1e-3)
        got.append(bytes([1] * len(unit.params)))
    start = time.perf_counter()
    with torch.no_grad():
        sharded.optimizer.step(1e-4, got, None, None)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: make(optim) for name, optim in CASES.items()}
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(args.rounds + 2):
        for name, sharded in models.items():
            taken = seconds(sharded)
            if number >= 2:  # moments are made in the first step
                times[name].append(taken)
    numel = sum(layout.numel for layout in models["adamw"].layouts)
    base, rows = statistics.median(times["adamw"]), []
    for name, taken in times.items():
        median = statistics.median(taken)
        ratios = [a / b for a, b in zip(taken, times["adamw"], strict=True)]
        state = allocated_memory(models[name]).by_kind[Kind.OPTIM] / numel
        rows.append(
            [
                name,
                f"{1e3 * median:.1f}",
                f"{numel / median / 1e9:.2f}",
                f"{median / base:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{state:.0f}",
            ]
        )
    print(f"{numel / 1e6:.1f} million parameters, one thread, median of {args.rounds}")
    print(render(["", "ms", "G/s", "of adamw", "extremes", "bytes"], rows))


if __name__ == "__main__":
    main()
