"""Activation checkpointing: which blocks recompute their activations in backward instead of keeping them.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the selective form, which keeps what is expensive to
recompute, follows Korthikanti et al. 2022, section 5. Torch's non-reentrant API does the work.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zrun_core.config import ActivationsConfig
from zrun_core.errors import JobError
from zrun_core.zero.cut import repeated_blocks

_EXPENSIVE = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


def apply_checkpointing(model: nn.Module, config: ActivationsConfig) -> None:
    """Make the repeated blocks of `model` recompute, as `config` asks.

    Raises:
        JobError: the model has no repeated blocks.
    """
    if config.checkpoint == "none":
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise JobError(
            "activations.checkpoint: the model has no repeated blocks (two members of one class in a ModuleList or "
            "Sequential, with modules inside); write activations.checkpoint: none"
        )
    every = config.n if config.checkpoint == "every_n" else 1
    options: dict[str, Any] = {"use_reentrant": False}
    if config.checkpoint == "selective":
        options["context_fn"] = selectively
    for _, block in blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, **options)


def selectively() -> Any:
    """The contexts in which a block runs, and is recomputed, that keeps what is expensive."""
    return create_selective_checkpoint_contexts(_keep_expensive)


def _keep_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and attention; recompute norms, activations and the rest."""
    name = op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else ""
    if name in _EXPENSIVE or name.startswith("_scaled_dot_product"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
