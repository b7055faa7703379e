"""Memory-centric tiling: a large linear as tiles that run one after the other, each its own unit.

Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall", section 5.1.3. At stage 3
the parameters of one module are unsharded together, so the largest one sets the room that gathers
need. In tiles it needs that of a few tiles, in forward, in recomputation and in backward:

    head [50304, 1024]         gather, run, reshard  ->   head.0 [16768, 1024]    columns 0 to 16767
                                                          head.1 [16768, 1024]    16768 to 33535
                                                          head.2 [16768, 1024]    33536 to 50303

    y[:, rows of a tile] = tile(x)      each output is the same sum of products
    dx = sum of the tiles' dx           added up tile by tile, last one first

`tiled_linear.py` has such a linear; here is which linears of a model become one. The parameters of
a tile are parts of the tensors that the linear had (`tensors_of_tiles`): for checkpoints,
optimizers and names there is one `head.weight`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart
from zrun_core.sizes import format_size
from zrun_core.spine.sections.zero import TileConfig
from zrun_core.zero.wrap.tiled_linear import TiledLinear, output_dim

_ALIGN = 64  # output features: matrix products are fastest in multiples of it
# They hand the weights of their linears to functions and kernels of their own.
_READ_WEIGHTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


@dataclass
class Tiling:
    """Record of what was tiled.

    Attributes:
        notes: for the user.
    """

    notes: list[str] = field(default_factory=list)
    _replaced: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    def undo(self) -> None:
        """Put the linears back."""
        for parent, key, linear in self._replaced:
            parent._modules[key] = linear


def tile_linears(
    model: nn.Module, config: TileConfig | None, compute: torch.dtype, leaf_names: Sequence[str]
) -> Tiling:
    """Replace the large linears of `model` by tiled ones, in place.

    Args:
        model: on any device, also meta; not sharded.
        config: which ones, and how large a tile may be; None: nothing is tiled.
        compute: dtype in which the model computes.
        leaf_names: regexes of modules that are gathered as a whole: inside nothing is tiled.

    Raises:
        JobError: a regex matches no linear, or one that cannot be tiled; or a tile cannot be so
            small.
    """
    tiling = Tiling()
    if config is None:
        return tiling
    linears = {
        name: module
        for name, module in model.named_modules()
        if name and output_dim(module) is not None
    }
    whole = _cannot_be_tiled(model, linears, leaf_names)
    _check_patterns(config.modules, model, linears, whole)
    limit = format_size(config.bytes)
    num_tiled = 0
    for name, linear in linears.items():
        is_named = any(re.fullmatch(pattern, name) for pattern in config.modules)
        num_bytes = linear.get_parameter("weight").numel() * compute.itemsize
        if num_bytes <= config.bytes or (config.modules and not is_named):
            continue
        if name in whole:
            tiling.notes.append(
                f"zero.tile: {name} ({format_size(num_bytes)}) stays whole: {whole[name]}"
            )
            continue
        num_tiled += 1
        _replace(model, name, linear, compute.itemsize, config.bytes, tiling)
    done = f"{num_tiled} of {len(linears)} linears run in tiles of at most {limit}"
    if not num_tiled:
        done = f"none of {len(linears)} linears is tiled: no weight that could be is over {limit}"
    tiling.notes.append(f"zero.tile: {done}")
    return tiling


def _replace(
    model: nn.Module,
    name: str,
    linear: nn.Module,
    itemsize: int,
    tile_bytes: int,
    tiling: Tiling,
) -> None:
    """Replace one linear. Raises JobError where a tile cannot be so small."""
    dim = output_dim(linear)
    assert dim is not None
    weight = linear.get_parameter("weight")
    features = weight.shape[dim]
    feature_bytes = weight.numel() // features * itemsize
    most = tile_bytes // feature_bytes
    if not most:
        raise JobError(
            f"zero.tile: {format_size(tile_bytes)} is less than one row of {name}, which takes "
            f"{feature_bytes} bytes: write {format_size(feature_bytes)} or more"
        )
    size = math.ceil(features / math.ceil(features / most))  # of all tiles about the same
    size = min(most, math.ceil(size / _ALIGN) * _ALIGN)
    path, _, key = name.rpartition(".")
    parent = model.get_submodule(path)
    parent._modules[key] = TiledLinear(linear, dim, size)
    tiling._replaced.append((parent, key, linear))


def _cannot_be_tiled(
    model: nn.Module, linears: Mapping[str, nn.Module], leaf_names: Sequence[str]
) -> dict[str, str]:
    """Return why some linears cannot be tiled, by name."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    leaves = [
        name
        for name, _ in model.named_modules()
        if any(re.fullmatch(pattern, name) for pattern in leaf_names)
    ]
    found = {}
    for name, linear in linears.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        params = [param for param in linear._parameters.values() if param is not None]
        tied = [other for p in params for other in names[id(p)] if not other.startswith(f"{name}.")]
        leaf = next((leaf for leaf in leaves if f"{name}.".startswith(f"{leaf}.")), None)
        if tied:
            found[name] = f"it is tied to {tied[0]}"
        elif leaf is not None:
            found[name] = f"zero.leaf has {leaf} gathered as a whole"
        elif isinstance(parent, _READ_WEIGHTS):
            found[name] = f"{type(parent).__name__} reads its weight"
        elif any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
            found[name] = "its parameters have hooks"
    return found


def _check_patterns(
    patterns: Sequence[str],
    model: nn.Module,
    linears: Mapping[str, nn.Module],
    whole: Mapping[str, str],
) -> None:
    """Check that each pattern names linears, all of which can be tiled.

    Raises:
        JobError: it does not.
    """
    key = "zero.tile.modules"
    for pattern in patterns:
        matched = [name for name in linears if re.fullmatch(pattern, name)]
        for name in matched:
            if name in whole:
                raise JobError(f"{key}: {pattern!r} names {name}, and {whole[name]}: leave it out")
        if matched:
            continue
        for name, module in model.named_modules():
            if re.fullmatch(pattern, name):
                kind = type(module).__name__
                raise JobError(
                    f"{key}: {pattern!r} matches {name}, a {kind}, and no linear; linears are "
                    f"named {_some(linears)}"
                )
        raise JobError(
            f"{key}: {pattern!r} matches no module's whole name; linears are named {_some(linears)}"
        )


def _some(linears: Mapping[str, nn.Module]) -> str:
    """Return a few of the names, the largest ones' first."""
    by_size = sorted(linears, key=lambda name: -linears[name].get_parameter("weight").numel())
    return ", ".join(by_size[:3]) or "nothing: there are none"


# Tiles as parts of tensors


def tiled_linears(model: nn.Module) -> list[tuple[str, TiledLinear]]:
    """Return name and module of the tiled linears."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, TiledLinear):
            found.append((name, module))
    return found


def tensors_of_tiles(model: nn.Module) -> dict[str, TensorPart]:
    """Return, by name of a tile's parameter, what it is of a tensor of the model."""
    return dict(part for name, tiled in tiled_linears(model) for part in tiled.parts(name))


Read = Callable[[str, nn.Parameter], torch.Tensor]


def read_tiles(model: nn.Module, read: Read) -> Read:
    """Return a function that reads parameters of `model` where `read` knows those of the linears.

    Args:
        read: value of a parameter by its name in the untiled model: looked up by name, or that of
            the parameter itself.
    """
    parts = tensors_of_tiles(model)

    def read_part(name: str, param: nn.Parameter) -> torch.Tensor:
        part = parts.get(name)
        if part is None:
            return read(name, param)
        value = read(part.tensor, param)
        if value.shape == param.shape:
            return value  # of the parameter itself, a view of its rows
        dim = next(d for d, size in enumerate(part.shape) if size != param.shape[d])
        return value.narrow(dim, part.runs[0].start // part.stride[dim], param.shape[dim])

    return read_part
