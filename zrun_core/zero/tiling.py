"""Memory-centric tiling: a large linear as tiles that run one after the other, each its own unit.

Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall", section 5.1.3. At stage 3
the parameters of one module are unsharded together, so the largest one sets the room that gathers
need. In tiles it needs that of a few tiles, in forward, in recomputation and in backward:

    head [50304, 1024]         gather, run, reshard  ->   head.0 [16768, 1024]    columns 0 to 16767
                                                          head.1 [16768, 1024]    16768 to 33535
                                                          head.2 [16768, 1024]    33536 to 50303

    y[:, rows of a tile] = tile(x)      each output is the same sum of products
    dx = sum of the tiles' dx           added up tile by tile, last one first

The parameters of a tile are parts of the tensors that the linear had (`tensors_of_tiles`): for
checkpoints, optimizers and names there is one `head.weight`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart, sliced_part
from zrun_core.spine.config import TileConfig
from zrun_core.spine.sizes import format_size

_ALIGN = 64  # output features: matrix products are fastest in multiples of it
_TENSORS = ("weight", "bias")
_REGISTERED = ("_parameters", "_buffers", "_modules")  # what is not copied from a linear
# They hand the weights of their linears to functions and kernels of their own.
_READ_WEIGHTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class TiledLinear(nn.Module):
    """A linear module in tiles, which are its children: each has some of the output features.

    Attributes:
        dim: of the weight, along which it is divided: that of the output features.
        sizes: output features of each tile.
    """

    def __init__(self, linear: nn.Module, dim: int, tile_features: int) -> None:
        """Divide a linear. The tiles' parameters are views of its own.

        Args:
            linear: of a kind of `_output_dim`; it is left as it is.
            dim: of its weight, that of the output features.
            tile_features: output features of each tile; the last may have fewer.
        """
        super().__init__()
        kept = {key: value for key, value in vars(linear).items() if key not in _REGISTERED}
        vars(self).update(kept)  # mode, the user's hooks and attributes
        self.dim = dim
        features = linear.get_parameter("weight").shape[dim]
        starts = range(0, features, tile_features)
        self.sizes = [min(tile_features, features - start) for start in starts]
        for number, (start, size) in enumerate(zip(starts, self.sizes, strict=True)):
            self.add_module(str(number), _tile(linear, dim, start, size))

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            raise AttributeError(
                f"this linear runs in tiles, by zero.tile: its {name} is in parts, and cannot be "
                "read from outside; name the other linears in zero.tile.modules"
            )
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the linear would return of `x` [..., in]: [..., out]."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))  # once: each tile would keep a copy
        whole: torch.Tensor | None = None
        start = 0
        for tile in self.children():
            # Of an alias the gradient is complete when this tile's backward is over.
            part = tile(x.view_as(x))
            if whole is None:
                whole = part.new_empty((*part.shape[:-1], sum(self.sizes)))
            whole = _Place.apply(whole, part, start)  # type: ignore[no-untyped-call]
            start += part.shape[-1]
        assert whole is not None
        return whole

    # The names of tensors are those of one linear

    def parts(self, name: str) -> Iterator[tuple[str, TensorPart]]:
        """Yield the name of each parameter of a tile, and what it is of the tensors of `name`."""
        ends = list(itertools.accumulate(self.sizes))
        for number, tile in self.named_children():
            stop = ends[int(number)]
            rows = [(stop - self.sizes[int(number)], stop)]
            for key, param in tile.named_parameters():
                dim = self._dim_of(key)
                shape = (*param.shape[:dim], ends[-1], *param.shape[dim + 1 :])
                yield f"{name}.{number}.{key}", sliced_part(f"{name}.{key}", shape, dim, rows)

    def _dim_of(self, key: str) -> int:
        return self.dim if key == "weight" else 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with one weight, as the linear's."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for key in _TENSORS:
            values = [found.pop(f"{prefix}{n}.{key}", None) for n in self._modules]
            present = [value for value in values if value is not None]
            if present:
                found[prefix + key] = _joined(present, self._dim_of(key))
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for key in _TENSORS:
            value = state_dict.pop(prefix + key, None)
            if value is None:
                continue
            for number, part in enumerate(value.split(self.sizes, self._dim_of(key))):
                state_dict[f"{prefix}{number}.{key}"] = part
        super()._load_from_state_dict(state_dict, prefix, *args)


def _tile(linear: nn.Module, dim: int, start: int, size: int) -> nn.Module:
    """Return a linear of the same class that has output features [start, start + size)."""
    tile = type(linear).__new__(type(linear))
    nn.Module.__init__(tile)
    own = vars(tile).keys()
    vars(tile).update({key: value for key, value in vars(linear).items() if key not in own})
    tile.training = linear.training
    vars(tile)[_FEATURES[dim]] = size
    for key in _TENSORS:
        whole = linear._parameters[key]
        param = None
        if whole is not None:
            rows = _rows(whole.detach(), dim if key == "weight" else 0, start, size)
            param = nn.Parameter(rows, requires_grad=whole.requires_grad)
            vars(param).update(vars(whole))
        tile.register_parameter(key, param)
    return tile


def _rows(whole: torch.Tensor, dim: int, start: int, size: int) -> torch.Tensor:
    """Return a range along `dim`: a view, or without memory where `whole` has none."""
    if whole.untyped_storage().nbytes():
        return whole.narrow(dim, start, size)
    shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
    hollow = whole.new_empty(shape)
    hollow.untyped_storage().resize_(0)
    return hollow


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the tensor of which these are parts along `dim`."""
    if any(any(part.stride()) for part in parts):
        return torch.cat(list(parts), dim)
    # Placeholders of parameters that are resharded: one element in memory.
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].as_strided(shape, [0] * len(shape))


class _Place(torch.autograd.Function):
    """Write a tile's output to its place in the whole one, of which there is one in memory."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
        ctx.columns = (start, part.shape[-1])
        whole.narrow(-1, *ctx.columns).copy_(part)
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad.narrow(-1, *ctx.columns), None


# Kinds of linear modules


_FEATURES = ("out_features", "nf")  # attribute with the number of output features, by dimension


def _output_dim(module: nn.Module) -> int | None:
    """Return the dimension of the weight that has the output features; None: not a linear."""
    owns_more = any(module.children()) or module._buffers or {*module._parameters} - {*_TENSORS}
    if owns_more or "forward" in vars(module) or module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return 0
    kind = (type(module).__module__, type(module).__name__)
    return 1 if kind == ("transformers.pytorch_utils", "Conv1D") else None


# A model's linears


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
        if name and _output_dim(module) is not None
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
    dim = _output_dim(linear)
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
        model: with tiled linears.
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
