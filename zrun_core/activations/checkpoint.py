"""Activation checkpointing: blocks recompute their activations in backward instead of keeping them.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the selective form, which keeps
what is expensive to recompute, follows Korthikanti et al. 2022, section 5. Torch's non-reentrant
API does the work.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zrun_core.activations.kv_cache import refuse_cache
from zrun_core.activations.offloaded_inputs import OffloadedInputs
from zrun_core.activations.recomputed_call import RecomputedForward
from zrun_core.errors import JobError
from zrun_core.hardware.spans import Spans
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

_OWN = "gradient_checkpointing"  # attribute of modules of transformers
_EXPENSIVE = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


def apply_checkpointing(
    model: nn.Module,
    config: ActivationsConfig,
    inputs: OffloadedInputs | None = None,
    *,
    compiles: bool = False,
    spans: Spans | None = None,
) -> ExitStack:
    """Have the repeated blocks of `model` recompute as `config` asks, not as the model would.

    Args:
        model: the user's module, before it is sharded.
        config: which blocks, and what they keep.
        inputs: moves what they are recomputed from; None: it stays on the device.
        compiles: blocks are compiled with their recomputation, and what they change beside their
            outputs is part of the graph.
        spans: name recomputations for a profile; None: there is none.

    Returns:
        a stack that undoes it when it is closed.

    Raises:
        JobError: the model has no repeated blocks.
    """
    undo = ExitStack()
    if config.checkpoint == "none":
        return undo
    blocks = repeated_blocks(model)
    if not blocks:
        raise JobError(
            "activations.checkpoint: the model has no repeated blocks (two members of one class in "
            "a ModuleList or Sequential, with modules inside); write activations.checkpoint: none"
        )
    for module in own_checkpointing(model):  # blocks would be recomputed in their recomputation
        vars(module)[_OWN] = False
        undo.callback(vars(module).update, {_OWN: True})
    every = config.n if config.checkpoint == "every_n" else 1
    options: dict[str, Any] = {"use_reentrant": False}
    if config.checkpoint == "selective":
        options["context_fn"] = selectively
    for name, block in blocks[::every]:
        forward = RecomputedForward(block, block.forward, options)
        if spans is not None:
            forward.named = functools.partial(spans.named, name, "recompute")
        if inputs is not None:
            moved = inputs.checkpointed(name, forward)
            undo.callback(wrap_forward(block, Layer.INPUT_ELSEWHERE, moved))
        elif compiles:
            in_graph = functools.partial(checkpoint, block.forward, **options)
            undo.callback(wrap_forward(block, Layer.RECOMPUTED_IN_GRAPH, in_graph))
        else:
            undo.callback(wrap_forward(block, Layer.RECOMPUTED, forward.recomputed))
        guard = functools.partial(refuse_cache, name)
        undo.callback(block.register_forward_pre_hook(guard, with_kwargs=True).remove)
    return undo


def own_checkpointing(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` whose own code recomputes.

    Those of transformers do after `gradient_checkpointing_enable()`.
    """
    return [module for module in model.modules() if vars(module).get(_OWN) is True]


def selectively() -> Any:
    """Return the contexts in which a block runs, and is recomputed: they keep what is expensive."""
    return create_selective_checkpoint_contexts(_keep_expensive)


def _keep_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and attention; recompute norms, activations and the rest."""
    name = ""
    if isinstance(op, torch._ops.OpOverload):
        name = op._schema.name.removeprefix("aten::")
    if name in _EXPENSIVE or name.startswith("_scaled_dot_product"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
