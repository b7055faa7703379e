"""AdamW's update on one core: bf16 gradients, fp32 masters and moments, bf16 parameters.

All ways update the same memory in turns. `zrun` is what a step calls, once with gradients as they
are and once divided by a scale, as clipping does. The others take whole tensors: they cast the
gradient of a unit, update, and cast its masters. `fused` is torch's fused kernel, `loop` torch's
loop over operations; what is called `fp32` has fp32 gradients and casts nothing. DeepSpeed takes
part if this Python has it; its first call compiles it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from render import render
from torch import nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.sharding_config import ShardingConfig

LR = 1e-4
# Per parameter: the gradient is read, master and moments are read and written, and the parameter is
# written: 28 bytes. The next use of the gradient's memory writes it again.
BYTES = 30
LEAST_RATE, LEAST_OF_LOOP, MOST_OF_COPY = 1.3, 7.0, 1.25


def make(width: int) -> ShardedModel:
    """Return four units of `width` squared parameters, with moments and gradients."""
    config = OptimConfig.model_validate({"name": "adamw", "lr": LR, "weight_decay": 0.1})
    precision = PrecisionConfig.model_validate({"compute": "bf16", "reduce": "compute"})
    settings = ShardingConfig(
        zero=ZeroPolicy(2),
        precision=Precision.of(precision),
        optimizer=resolve_optimizer(config, lambda name: None),
        bucket=2 * width * width,
    )
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    comm = Comm(torch.device("cpu"))
    mesh = Mesh.build(0, ["host"], 1)
    sharded = ShardedModel(module, lambda name, param: param.detach(), settings, mesh, comm)
    for unit in sharded.units:
        unit.grad.local.normal_(std=1e-2)
    zrun(sharded)  # makes the moments
    return sharded


def zrun(sharded: ShardedModel, scale: torch.Tensor | None = None) -> None:
    """Make an update as a step does."""
    sharded.optimizer.step(LR, [b"\1"] * len(sharded.units), scale, None)


class WholeTensors:
    """Casts a unit's whole gradient, updates, and casts its masters."""

    def __init__(
        self, units: list[FlatUnit], build: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:
        self._units = units
        self._wide = torch.empty(max(unit.master.numel() for unit in units))
        self._params = [nn.Parameter(unit.master) for unit in units]
        self._optimizers = [build([param], lr=LR, **options) for param in self._params]
        for unit, param, optimizer in zip(units, self._params, self._optimizers, strict=True):
            zero = 0 if "adamw_mode" in options else torch.zeros(())
            optimizer.state[param] = {"step": zero, **unit.record.moments}

    def step(self) -> None:
        """Update all units."""
        for unit, param, optimizer in zip(self._units, self._params, self._optimizers, strict=True):
            param.grad = self._wide[: param.numel()].copy_(unit.grad.local)
            optimizer.step()
            unit.param.updated.copy_(unit.master)

    def step_in_fp32(self) -> None:
        """Update all units with gradients that are in fp32 already, and cast nothing."""
        for param, optimizer in zip(self._params, self._optimizers, strict=True):
            param.grad = self._wide[: param.numel()]
            optimizer.step()


def ways_of(sharded: ShardedModel) -> dict[str, Callable[[], None]]:
    """Return what makes one update of all units, by name."""
    units = sharded.units
    fused = WholeTensors(units, torch.optim.AdamW, fused=True)
    loop = WholeTensors(units, torch.optim.AdamW, foreach=False, fused=False)
    ways = {
        "zrun": partial(zrun, sharded),
        "zrun, scaled": partial(zrun, sharded, torch.tensor(1.7)),
        "fused": fused.step,
        "fused, fp32": fused.step_in_fp32,
        "loop": loop.step,
        "loop, fp32": loop.step_in_fp32,
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        print(f"without DeepSpeed: {error}")
    else:
        ways["DeepSpeed"] = WholeTensors(units, DeepSpeedCPUAdam, adamw_mode=True).step
    return ways


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per way, with the parameters, or bytes of a copy, per second in each round."""
    rounds = 1 if options.quick else options.rounds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sharded = make(256 if options.quick else 4096)
    numel = sum(unit.layout.numel for unit in sharded.units)
    source, target = torch.ones(numel), torch.zeros(numel)
    amounts = dict.fromkeys(ways := ways_of(sharded), numel)
    ways["copy"] = partial(target.copy_, source)
    amounts["copy"] = 2 * target.nbytes
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            start = time.perf_counter()
            ways[name]()
            rates[name].append(amounts[name] / (time.perf_counter() - start))
    torch.set_num_threads(threads)
    return [{"way": name, "numel": numel, "rates": found} for name, found in rates.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return each way's parameters per second, zrun's in units of that, and the targets."""
    rates = {row["way"]: row["rates"] for row in rows}
    copies = rates.pop("copy")
    rates[f"a copy's bytes / {BYTES}"] = [rate / BYTES for rate in copies]
    lines = []
    for name, found in rates.items():
        ratios = ratios_of(rates["zrun"], found)
        lines.append(
            [
                name,
                f"{statistics.median(found) / 1e9:.2f}",
                f"{min(found) / 1e9:.2f}-{max(found) / 1e9:.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
            ]
        )
    columns = ("one core", "Gparam/s", "range", "zrun / it", "range")
    floor = [rate / BYTES for rate in copies]
    return "\n".join(
        [
            render(columns, lines),
            verdict("Gparam/s", statistics.median(rates["zrun"]) / 1e9, LEAST_RATE),
            verdict(
                "times the loop",
                statistics.median(ratios_of(rates["zrun"], rates["loop"])),
                LEAST_OF_LOOP,
            ),
            verdict(
                "of what a copy's bandwidth allows",
                statistics.median(ratios_of(rates["zrun"], floor)),
                1 / MOST_OF_COPY,
            ),
        ]
    )


def ratios_of(these: list[float], those: list[float]) -> list[float]:
    """Return the ratio of two ways in each round."""
    return [this / that for this, that in zip(these, those, strict=True)]


def verdict(what: str, value: float, least: float) -> str:
    """Return a line that says whether a target is met."""
    word = "met" if value >= least else "MISSED"
    return f"{value:.2f} {what}, at least {least:.2f}: {word}"
