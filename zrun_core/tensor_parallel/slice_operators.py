"""Operators of torch's on slices along a vocabulary: the result is a slice again, where it can be.

    elementwise, with numbers, with other slices, with what is whole     each on its slice
    copies, casts                                                        likewise
    views, indices, joins and sums that leave the vocabulary alone       likewise
    anything else                                                        needs the whole

`slices_of` knows aten's operators, which are few: what a user writes as `float()`, `logits[:, -1]`
or `flatten(0, 1)` comes as one of them, and so does what autograd computes of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from zrun_core.tensor_parallel.vocabulary import Vocabulary

aten = torch.ops.aten


@dataclass(frozen=True)
class Slice:
    """A rank's slice of a tensor that has an index for each entry of a vocabulary.

    Attributes:
        local: the slice. Nobody writes to it.
        vocabulary: the entries.
        dim: of them, counted from the end.
        dtype: of the tensor. `local` may have one whose numbers this one can all represent: a cast
            of bf16 to fp32 needs no memory until somebody computes with it.
    """

    local: torch.Tensor
    vocabulary: Vocabulary
    dim: int
    dtype: torch.dtype

    @property
    def cast(self) -> torch.Tensor:
        """Return the slice in the format of the tensor."""
        return self.local.to(self.dtype)

    @property
    def shape(self) -> list[int]:
        """Return the shape of the tensor."""
        shape = list(self.local.shape)
        shape[self.dim] = self.vocabulary.size
        return shape

    @property
    def stride(self) -> list[int]:
        """Return the stride of the tensor, if it lay in memory as its slice does."""
        local = self.local.stride()
        unit = local[self.dim]
        length, size = self.vocabulary.length, self.vocabulary.size
        return [each if each <= unit else each // (unit * length) * (unit * size) for each in local]

    def whole(self) -> torch.Tensor:
        """Return the tensor: one gather. It may share memory with the slice."""
        vocabulary, local = self.vocabulary, self.local
        if vocabulary.comm.size > 1:
            is_bool = local.dtype == torch.bool
            sent = local.view(torch.uint8) if is_bool else local
            rows = vocabulary.comm.all_gather(sent, self.dim, f"{vocabulary.name}: whole logits")
            local = rows.narrow(self.dim, 0, vocabulary.size)
            local = local.view(torch.bool) if is_bool else local
        return local.to(self.dtype).contiguous()


def slices_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator makes of slices: slices, or NotImplemented if it needs the whole.

    Args:
        func: an operator of aten's. Of one that writes, what it writes to is a slice of its own.
        args, kwargs: of it, with a `Slice` in place of each such tensor.
    """
    handler = _HANDLERS.get(func.overloadpacket)
    if handler is not None:
        return handler(func, *args, **kwargs)
    is_alike = torch.Tag.nondeterministic_seeded not in func.tags and len(func._schema.returns) == 1
    if torch.Tag.pointwise in func.tags and is_alike:
        return _elementwise(func, *args, **kwargs)
    return NotImplemented


# Elementwise


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    slices = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Slice)]
    first = slices[0]
    vocabulary, dim = first.vocabulary, first.dim
    if any(each.vocabulary != vocabulary or each.dim != dim for each in slices):
        return NotImplemented

    def local(value: Any) -> Any:
        if isinstance(value, Slice):
            return value.cast
        if _is_along(value, dim) and value.shape[dim] == vocabulary.size:
            return vocabulary.own(value, dim)
        return value

    def fits(value: Any) -> bool:
        return not _is_along(value, dim) or value.shape[dim] in (1, vocabulary.size)

    if not all(fits(each) for each in tree_leaves((args, kwargs))):
        return NotImplemented  # torch says what is wrong
    made = func(*tree_map(local, args), **tree_map(local, kwargs))
    return _like(first, made)


def _is_along(value: Any, dim: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= -dim


def _like(one: Slice, local: torch.Tensor, dim: int | None = None) -> Slice:
    """Return a slice of the same vocabulary."""
    return Slice(local, one.vocabulary, one.dim if dim is None else dim, local.dtype)


def _alias(func: Any, one: Slice) -> Slice:
    return one


def _clone(func: Any, one: Slice, **kwargs: Any) -> Slice:
    return replace(one, local=func(one.local, **kwargs))


def _cast(func: Any, one: Slice, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Slice:
    dtype = dtype or one.dtype
    moves = kwargs.get("device") not in (None, one.local.device) or kwargs.get("pin_memory")
    is_laid_out = kwargs.get("memory_format") not in (None, torch.preserve_format)
    is_exact = torch.promote_types(one.local.dtype, dtype) == dtype
    if is_exact and not moves and not is_laid_out:
        return replace(one, dtype=dtype)
    return _like(one, func(one.cast, dtype=dtype, **kwargs))


def _filled(func: Any, one: Slice, *args: Any, dtype: Any = None, **kwargs: Any) -> Slice:
    return _like(one, func(one.local, *args, dtype=dtype or one.dtype, **kwargs))


# Views. `p` is a dimension counted from the end.


def _view(func: Any, one: Slice, size: Any) -> Any:
    if isinstance(size, torch.dtype):
        return NotImplemented
    shape = one.shape
    new = list(size)
    if -1 in new:
        rest = -math.prod(new)
        new[new.index(-1)] = math.prod(shape) // rest if rest else 0
    if new == shape:
        return replace(one, local=func(one.local, one.local.shape))
    if one.dim != -1 or not new or new[-1] != shape[-1]:
        return NotImplemented
    new[-1] = one.vocabulary.length
    return replace(one, local=func(one.local, new))


def _transpose(func: Any, one: Slice, first: int, second: int) -> Slice:
    ends = {_p(first, one): _p(second, one), _p(second, one): _p(first, one)}
    return replace(one, local=func(one.local, first, second), dim=ends.get(one.dim, one.dim))


def _t(func: Any, one: Slice) -> Slice:
    return _transpose(aten.transpose.int, one, 0, 1) if one.local.dim() == 2 else one


def _permute(func: Any, one: Slice, dims: Sequence[int]) -> Slice:
    place = [_p(dim, one) for dim in dims].index(one.dim)
    return replace(one, local=func(one.local, dims), dim=place - len(dims))


def _unsqueeze(func: Any, one: Slice, dim: int) -> Slice:
    p = dim if dim < 0 else dim - one.local.dim() - 1
    return replace(one, local=func(one.local, dim), dim=_after_adding(p, one.dim))


def _squeeze(func: Any, one: Slice, dim: int | Sequence[int] | None = None) -> Any:
    dims = range(one.local.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    shape = one.shape
    gone = [_p(each, one) for each in dims if shape[each] == 1]
    if one.dim in gone:
        return NotImplemented
    local = aten.squeeze.dims(one.local, gone)
    return replace(one, local=local, dim=_after_removing(gone, one.dim))


def _expand(func: Any, one: Slice, size: Sequence[int], **kwargs: Any) -> Slice:
    new = list(size)
    new[one.dim] = -1
    return replace(one, local=func(one.local, new, **kwargs))


def _slice(
    func: Any, one: Slice, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if _p(dim, one) == one.dim:
        return NotImplemented
    return replace(one, local=func(one.local, dim, start, end, step))


def _select(func: Any, one: Slice, dim: int, index: int) -> Any:
    if _p(dim, one) == one.dim:
        return NotImplemented
    local = func(one.local, dim, index)
    return replace(one, local=local, dim=_after_removing([_p(dim, one)], one.dim))


def _split(func: Any, one: Slice, size: Any, dim: int = 0) -> Any:
    if _p(dim, one) == one.dim:
        return NotImplemented
    return [replace(one, local=local) for local in func(one.local, size, dim)]


def _unbind(func: Any, one: Slice, dim: int = 0) -> Any:
    if _p(dim, one) == one.dim:
        return NotImplemented
    left = _after_removing([_p(dim, one)], one.dim)
    return [replace(one, local=local, dim=left) for local in func(one.local, dim)]


# Indices


def _index(func: Any, one: Any, indices: Sequence[Any]) -> Any:
    if not isinstance(one, Slice) or not _leaves_last(one, indices):
        return NotImplemented
    return replace(one, local=func(one.local, indices))


def _index_put(
    func: Any, one: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *more: bool
) -> Any:
    if not isinstance(one, Slice) or not _leaves_last(one, indices):
        return NotImplemented
    if isinstance(values, Slice):
        values = values.cast if values.dim == -1 else None
    elif values.dim() and values.shape[-1] == one.vocabulary.size:
        values = one.vocabulary.own(values, -1)
    if values is None:
        return NotImplemented
    return _like(one, func(one.cast, indices, values, accumulate, *more))


def _leaves_last(one: Slice, indices: Sequence[Any]) -> bool:
    """Return whether indices choose among all dimensions but the last, the vocabulary's."""
    if one.dim != -1 or tree_any(lambda each: isinstance(each, Slice), indices):
        return False
    num_dims = 0
    last = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        num_dims += index.dim() if is_mask else 1
        if index is not None:
            last = num_dims
    return last < one.local.dim()


# Joins, sums, and what autograd needs


def _cat(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    first = tensors[0]
    is_alike = all(isinstance(each, Slice) and each.dim == first.dim for each in tensors)
    if not is_alike or _p(dim, first) == first.dim:
        return NotImplemented
    return _like(first, func([each.cast for each in tensors], dim))


def _stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(each, Slice) for each in tensors):
        return NotImplemented
    raised = [_unsqueeze(aten.unsqueeze.default, each, dim) for each in tensors]
    return _cat(aten.cat.default, raised, dim)


def _sum(
    func: Any, one: Slice, dims: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    gone = [_p(dim, one) for dim in dims or ()]
    if not gone or one.dim in gone:
        return NotImplemented
    dim = one.dim if keepdim else _after_removing(gone, one.dim)
    return _like(one, func(one.cast, dims, keepdim, **kwargs), dim)


def _slice_backward(func: Any, one: Slice, sizes: Sequence[int], dim: int, *args: int) -> Any:
    if _p(dim, one) == one.dim:
        return NotImplemented
    return replace(one, local=func(one.local, _local_sizes(one, sizes, one.dim), dim, *args))


def _select_backward(func: Any, one: Any, sizes: Sequence[int], dim: int, index: int) -> Any:
    p = dim if dim < 0 else dim - len(sizes)
    place = _after_adding(p, one.dim)
    local = func(one.local, _local_sizes(one, sizes, place), dim, index)
    return replace(one, local=local, dim=place)


def _new_zeros(func: Any, one: Slice, size: Sequence[int], *, dtype: Any = None, **kw: Any) -> Any:
    """Return zeros, of which only the shape is known: where it fits, they are a slice."""
    dtype = dtype or one.dtype
    if len(size) < -one.dim or size[one.dim] != one.vocabulary.size:
        return func(one.local, size, dtype=dtype, **kw)
    return _like(one, func(one.local, _local_sizes(one, size, one.dim), dtype=dtype, **kw))


def _local_sizes(one: Slice, sizes: Sequence[int], dim: int) -> list[int]:
    local = list(sizes)
    local[dim] = one.vocabulary.length
    return local


def _p(dim: int, one: Slice) -> int:
    """Return a dimension of a slice, counted from the end."""
    return dim if dim < 0 else dim - one.local.dim()


def _after_adding(p: int, dim: int) -> int:
    """Return where dimension `dim` is when another one was added at `p`."""
    return dim if dim > p else dim - 1


def _after_removing(gone: Sequence[int], dim: int) -> int:
    """Return where dimension `dim` is without those that are `gone`."""
    return dim + sum(p > dim for p in gone)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.alias: _alias,
    aten.detach: _alias,
    aten.clone: _clone,
    aten._to_copy: _cast,
    aten.copy_: _elementwise,
    aten.fill_: _elementwise,
    aten.zero_: _elementwise,
    aten.masked_fill_: _elementwise,
    aten.masked_fill: _elementwise,
    aten.zeros_like: _filled,
    aten.ones_like: _filled,
    aten.empty_like: _filled,
    aten.full_like: _filled,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.permute: _permute,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.expand: _expand,
    aten.slice: _slice,
    aten.select: _select,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.unbind: _unbind,
    aten.index: _index,
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten._index_put_impl_: _index_put,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.sum: _sum,
    aten.mean: _sum,
    aten.slice_backward: _slice_backward,
    aten.select_backward: _select_backward,
    aten.new_zeros: _new_zeros,
}
