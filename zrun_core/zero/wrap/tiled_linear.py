"""A large linear module in tiles, which run one after the other: see `tiling.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zrun_core.memory.tensors import TensorPart, sliced_part
from zrun_core.zero.wrap.lookups import Lookups, is_asked_by_user

_TENSORS = ("weight", "bias")
_REGISTERED = ("_parameters", "_buffers", "_modules")  # what is not copied from a linear
_RUNS = "_zrun_runs"  # attribute: whether the model runs
_FEATURES = ("out_features", "nf")  # attribute with the number of output features, by dimension


class TiledLinear(nn.Module):
    """A linear module in tiles, which are its children: each has some of the output features.

    Where the user's code reads its weight in a forward, as a penalty does, it finds one: the tiles'
    joined.

    Attributes:
        dim: of the weight, along which it is divided: that of the output features.
        sizes: output features of each tile.
    """

    def __init__(self, linear: nn.Module, dim: int, tile_features: int) -> None:
        """Divide a linear. The tiles' parameters are views of its own.

        Args:
            linear: one that `output_dim` knows; it is left as it is.
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
        if name not in _TENSORS:
            return super().__getattr__(name)
        if not self._is_read_whole():
            raise AttributeError(
                f"this linear runs in tiles, by zero.tile: its {name} is in parts, and cannot be "
                "read outside of a forward; name the other linears in zero.tile.modules"
            )
        return self._joined(name)

    def read_whole_while(self, is_running: Callable[[], bool]) -> None:
        """Have the user's code find one weight in place of those of the tiles.

        Args:
            is_running: whether a forward or a backward of the model is under way.
        """
        vars(self)[_RUNS] = is_running
        self._parameters = _OneForAll(self)
        for tile in self.children():
            tile._parameters = _OfTile(tile._parameters, self._is_read_whole)

    def _is_read_whole(self) -> bool:
        is_running = vars(self).get(_RUNS)
        if torch.compiler.is_compiling() or (is_running is not None and not is_running()):
            return False
        return is_asked_by_user()

    def _joined(self, key: str) -> torch.Tensor | None:
        """Return a tensor of the linear, made of those of its tiles."""
        parts = [tile._parameters[key] for tile in self.children()]
        present: list[torch.Tensor] = [part for part in parts if part is not None]
        if not present:
            return None
        whole = torch.cat(present, self._dim_of(key))
        whole._is_param = True
        return whole

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


class _OneForAll(dict[str, Any]):
    """The parameters of a tiled linear: none, and to the user's code those of the linear."""

    def __init__(self, tiled: TiledLinear) -> None:
        super().__init__()
        self._tiled = tiled

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()

    def items(self) -> Any:
        if not self._tiled._is_read_whole():
            return []
        return [(key, self._tiled._joined(key)) for key in _TENSORS]

    def values(self) -> Any:
        return [value for _, value in self.items()]


class _OfTile(Lookups):
    """The parameters of a tile, which the user's code finds in the linear's."""

    def __init__(self, inner: Mapping[str, Any], is_read_whole: Callable[[], bool]) -> None:
        super().__init__(inner, lambda key: None)
        self._is_read_whole = is_read_whole

    def items(self) -> Any:
        return [] if self._is_read_whole() else super().items()

    def values(self) -> Any:
        return [] if self._is_read_whole() else super().values()


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


def output_dim(module: nn.Module) -> int | None:
    """Return the dimension of the weight that has the output features; None: not a linear."""
    owns_more = any(module.children()) or module._buffers or {*module._parameters} - {*_TENSORS}
    if owns_more or "forward" in vars(module) or module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return 0
    kind = (type(module).__module__, type(module).__name__)
    return 1 if kind == ("transformers.pytorch_utils", "Conv1D") else None
