"""Values of a whole model, undivided, from where its run begins or goes on, tensor by tensor.

What ranks have parts of is compared with it: see `train/value_check.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.checkpoint.folder import read_step
from zrun_core.checkpoint.initial_weights import Weights, match, open_weights
from zrun_core.checkpoint.manifest_fields import VALUE
from zrun_core.checkpoint.manifest_parts import TensorInfo
from zrun_core.checkpoint.model_state import persistent_buffers
from zrun_core.checkpoint.reader import Reader, Target, by_name
from zrun_core.checkpoint.resume import candidates
from zrun_core.checkpoint.shard_file import DTYPES
from zrun_core.checkpoint.step_index import open_index
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError
from zrun_core.spine.sections.checkpoint import InitFromConfig
from zrun_core.spine.spec import ResumeSpec

_ALONE = Group("world", (0,), 0, None)


class WholeValues(NamedTuple):
    """Values in files.

    Attributes:
        read: returns that of a parameter or buffer, by its name in the model and like a tensor, on
            the CPU; None: the files do not have it.
        path: where they are.
    """

    read: Callable[[str, torch.Tensor], torch.Tensor | None]
    path: Path


def within(values: WholeValues, limit_s: float, since: float) -> WholeValues:
    """Return values that are read for no longer than a time, while other ranks wait.

    Args:
        since: when that began, by `time.monotonic`. It is looked at between two tensors.

    Raises:
        CheckpointError: from `read`: the time is over.
    """

    def read(name: str, like: torch.Tensor) -> torch.Tensor | None:
        if time.monotonic() - since > limit_s:
            raise CheckpointError(f"reading {values.path} on one rank takes more than {limit_s:g}s")
        return values.read(name, like)

    return values._replace(read=read)


def weights_of(config: InitFromConfig, module: nn.Module) -> WholeValues:
    """Return the values that `init_from` names.

    Raises:
        CheckpointError: as of `load_weights`.
    """
    path = Path(config.path).expanduser()
    weights: Weights = open_weights(path, _ALONE)
    chosen, _ = match(weights.shapes, _tensors(module), config)

    def read(name: str, like: torch.Tensor) -> torch.Tensor | None:
        return _filled(weights, chosen[name], like) if name in chosen else None

    return WholeValues(read, path)


def newest_step(source: ResumeSpec) -> WholeValues:
    """Return the values of the step that a run goes on from, if it is the first that is tried.

    Raises:
        CheckpointError: there is none.
    """
    paths = json.loads(candidates(source))["paths"]
    if not paths:
        raise CheckpointError(f"{source.folder} holds no step")
    path = Path(paths[0][1])
    manifest = read_step(path)
    known = by_name(manifest.tensors)
    reader = Reader(open_index(path, manifest), _ALONE)

    def read(name: str, like: torch.Tensor) -> torch.Tensor | None:
        if name not in known:
            return None
        shape = known[name].shape
        if shape != tuple(like.shape):
            raise CheckpointError(
                f"{name} is {list(shape)} in {path}, and {list(like.shape)} in the model"
            )
        return _filled(reader, name, like)

    return WholeValues(read, path)


def _filled(source: Weights | Reader, name: str, like: torch.Tensor) -> torch.Tensor:
    value = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    flat = value.view(-1)
    source.fill([Target((name,), VALUE, tuple(like.shape), value.stride(), 0, flat)])
    return value


def _tensors(module: nn.Module) -> list[TensorInfo]:
    """Return the parameters and persistent buffers of a model that is whole."""
    params = module.named_parameters(remove_duplicate=False)
    saved = dict(chain(params, persistent_buffers(module)))
    names: dict[int, list[str]] = {}
    for name, tensor in saved.items():
        names.setdefault(id(tensor), []).append(name)
    found = []
    for first, *aliases in names.values():
        tensor = saved[first]
        kind = "param" if isinstance(tensor, nn.Parameter) else "buffer"
        shape = tuple(tensor.shape)
        dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
        found.append(TensorInfo(first, shape, shape, dtype, kind, tuple(aliases), {}))
    return found
