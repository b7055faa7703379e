"""States of an optimizer as checkpoints have them: numbers of a parameter, and one per element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_fields import VALUE, number_class
from zrun_core.checkpoint.reader import by_name
from zrun_core.checkpoint.shard_file import DTYPES
from zrun_core.errors import CheckpointError, SaveError
from zrun_core.memory.layout import Piece
from zrun_core.optim import lightweight
from zrun_core.optim.resolve import OptimizerSpec
from zrun_core.tiers.stored import Stored, StoredOnDisk, StoredOnHost

_SCALAR = "a number"


def state_once_updated(optimizer: OptimizerSpec | None, device: torch.device) -> dict[str, Any]:
    """Return the state that an optimizer has of a parameter on `device` after an update."""
    if optimizer is None:
        return {}
    param = nn.Parameter(torch.zeros(2, device=device))
    made = optimizer.make([param])
    param.grad = torch.zeros_like(param)
    lightweight.step(made)
    return dict(made.state.get(param, {}))


def check_same(manifest: Manifest, asked: str | None, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another optimizer, or of one that keeps something else.

    Args:
        state: as of `state_once_updated`.

    Raises:
        CheckpointError: the optimizer differs, or what it keeps of a tensor.
    """
    used = manifest.layout.get("optimizer")
    if used is None and asked is not None:
        raise CheckpointError(
            "the checkpoint was made without an optimizer: start from its weights with init_from"
        )
    if used != asked:
        raise CheckpointError(
            f"the checkpoint was made with the optimizer {used}, and optim.name is {asked}: "
            f"write optim.name: {used}, or start from its weights alone with init_from"
        )
    expected = {key: _kind(value) for key, value in state.items() if value is not None}
    for name, info in by_name(manifest.tensors).items():
        kept = {key: number_class(dtype) for key, dtype in info.states.items() if key != VALUE}
        kept |= dict.fromkeys(info.scalars, _SCALAR)
        if kept and kept != expected:
            keeps = ", ".join(sorted(expected)) or "nothing"
            raise CheckpointError(
                f"the optimizer kept {_kinds(kept, expected)} of {name} in the checkpoint, and "
                f"keeps {keeps} with the options of this job: give optim the same options"
            )


def per_element(piece: Piece, state: Mapping[str, Any]) -> dict[str, torch.Tensor | Stored]:
    """Return the states that have a number for every element of the part of a parameter.

    Raises:
        SaveError: the optimizer keeps something else of the parameter.
    """
    found: dict[str, torch.Tensor | Stored] = {}
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == (piece.stop - piece.start,):
            found[key] = value.detach()
        elif isinstance(value, StoredOnHost | StoredOnDisk):
            found[key] = value
        elif value is not None and not is_scalar(value):
            form: object = type(value).__name__
            if isinstance(value, torch.Tensor):
                form = list(value.shape)
            what = f"the optimizer's {key} of {piece.slot.name} ({form})"
            raise SaveError(f"cannot save {what}: write checkpoint: null")
    return found


def is_scalar(value: Any) -> bool:
    """Return whether a state is one number."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def like(value: Any, number: float) -> Any:
    """Return `number` as what `value` is: a tensor, an int or a float."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def _kind(value: Any) -> str:
    """Return what a state of the optimizer is: one number, or the class of its elements."""
    if isinstance(value, torch.Tensor) and value.dim():
        return number_class(DTYPES[value.dtype])
    return _SCALAR


def _kinds(kept: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """List the states by name, each with its kind where that is not the usual one."""
    words = []
    for key, kind in sorted(kept.items()):
        is_usual = usual.get(key, kind) == kind
        words.append(key if is_usual else f"{key} ({kind})")
    return ", ".join(words)
