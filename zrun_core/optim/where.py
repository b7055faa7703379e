"""The optimizer of a job, tried wherever it updates: on the device, on its host's CPU, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zrun_core.errors import JobError
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.optim.resolve import ELEMENTWISE_ADVICE, OptimizerSpec, resolve_optimizer
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.optimizer_args import why_not_on_disk


def resolve_where_placed(
    config: OptimConfig,
    load: Callable[[str], Any],
    device: torch.device,
    placement: Placement,
) -> OptimizerSpec:
    """Find the optimizer of a job, and try it on slices of a parameter wherever it will update.

    Args:
        load: resolves `module:attr`.
        placement: where the states live; those that are not on the device are updated on the CPU.

    Raises:
        JobError: there is no such optimizer, or it cannot do that.
    """
    tier = placement.optimizer
    if tier is Tier.DEVICE:
        return resolve_optimizer(config, load, device)
    try:
        on_host = resolve_optimizer(config, load)
    except JobError as error:
        if device.type == "cpu":
            raise
        problem = error.problem.removesuffix(f"; {ELEMENTWISE_ADVICE}")
        raise JobError(
            f"offload.optimizer: {tier}: its states are updated on the CPU, and {problem}; leave "
            "out what only a GPU can do, or write offload.optimizer: device"
        ) from None
    check_placed(on_host, config.name, placement)
    if placement.fraction == 1 or device.type == "cpu":
        return on_host
    both = (resolve_optimizer(config, load, device), on_host)
    return min(both, key=lambda each: bool(each.kwargs.get("fused")))  # fused if it is on both


def check_placed(optimizer: OptimizerSpec, name: str, placement: Placement) -> None:
    """Refuse an optimizer whose states cannot live where they are to.

    Raises:
        JobError: its states cannot live on a disk.
    """
    if optimizer.layer_wise and placement.optimizer is Tier.DISK:
        raise JobError(why_not_on_disk(name))
