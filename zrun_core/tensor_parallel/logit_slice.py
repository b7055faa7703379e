"""Logits that say they are those of the whole vocabulary, of which each rank holds a slice.

    logits = head(x)                   [2, 1024, 128256], of which 1/tp is here
    logits.float().view(-1, 128256)    the same: nothing moves, and nothing is copied
    F.cross_entropy(logits, labels)    three messages of a number per position
    logits.softmax(-1)                 anything else: one gather, and the numbers of whole logits

So a model's own loss runs as its author wrote it. To autograd, to hooks and to functions of others
they are a tensor like any other; their gradient is a slice too. What stays a slice is up to
`slice_operators.py`.

Every rank must do the same with them: a gather that one rank alone asks for waits for the others.
Printing asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from zrun_core.errors import UserCodeError
from zrun_core.tensor_parallel.cross_entropy import Target, position_losses
from zrun_core.tensor_parallel.slice_operators import Slice, slices_of
from zrun_core.tensor_parallel.vocabulary import Vocabulary


class LogitSlice(Tensor):
    """A tensor with an index for each entry of a vocabulary, of which this rank has a slice.

    In place it changes as a tensor of its own. A view of it, or what it is a view of, is not
    changed along, and is refused from then on.
    """

    _slice: Slice
    _writes: int  # the version of this tensor, as far as we know of it

    @staticmethod
    def __new__(cls, found: Slice, writes: int = 0) -> LogitSlice:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            found.shape,
            strides=found.stride,
            dtype=found.dtype,
            device=found.local.device,
        )
        made._slice = found
        made._writes = writes
        return cast(LogitSlice, made)

    def whole(self) -> Tensor:
        """Return all logits, as a plain tensor: one gather."""
        return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def local(self) -> Tensor:
        """Return this rank's slice, as a plain tensor. It may be of a narrower format."""
        return _Local.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def slice(self) -> Slice:
        """Return what this rank has.

        Raises:
            UserCodeError: it is not what was written last.
        """
        if not self.is_inference() and self._version > self._writes:
            raise UserCodeError(
                f"{self._slice.vocabulary.name}: these logits have been changed in place through "
                "another tensor that is a view of them, or the other way round. With tensor "
                "parallelism each rank has a slice, and views are copies: change them out of "
                "place, as in logits = logits.masked_fill(...)"
            )
        return self._slice

    def write(self, found: Slice) -> None:
        """Become another slice. Torch counts that as a change in place when the operator ends."""
        self._slice = found
        if not self.is_inference():
            self._writes = self._version + 1

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        vocabulary = self._slice.vocabulary
        stop = vocabulary.start + vocabulary.num_own
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            local = self._slice.local.narrow(self._slice.dim, 0, vocabulary.num_own)
            held = f"entries {vocabulary.start} to {stop - 1} are here: {local}"
        return f"LogitSlice(shape={list(self.shape)}, dtype={self.dtype}, {held})"

    def __setitem__(self, index: Any, value: Any) -> None:
        index, value, whole = tree_map_only(LogitSlice, LogitSlice.whole, (index, value, self))
        whole[index] = value
        self.copy_(whole)

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]  # refuses it
        found = self.slice()
        return LogitSlice(replace(found, local=found.local.clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return all logits as an array: one gather."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """Return all logits as numbers: one gather."""
        return self.whole().tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        writes = 0

        def known(one: LogitSlice) -> Slice:
            nonlocal writes
            writes = max(writes, one._writes)
            return one.slice()

        made = slices_of(func, *tree_map_only(LogitSlice, known, (args, kwargs)))
        if made is NotImplemented:
            args, kwargs = tree_map_only(LogitSlice, _gathered, (args, kwargs))
            return func(*args, **kwargs)
        return tree_map_only(Slice, lambda each: LogitSlice(each, writes), made)


def logit_slice(local: Tensor, vocabulary: Vocabulary) -> LogitSlice:
    """Return logits of which this rank has computed its own.

    Args:
        local: [..., vocabulary.length].
    """
    return _FromLocal.apply(local, vocabulary)  # type: ignore[no-any-return, no-untyped-call]


def _gathered(one: LogitSlice) -> Tensor:
    return one.slice().whole()


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute an operator that writes. Slices become others; their memory may be shared."""
    target = args[0] if args else None
    if isinstance(target, LogitSlice):
        known = target.slice()
        own = replace(known, local=known.cast.clone())
        rest = tree_map_only(LogitSlice, LogitSlice.slice, (args[1:], kwargs))
        made = slices_of(func, (own, *rest[0]), rest[1])
        if isinstance(made, Slice):
            target.write(made)
            return target
    wholes: dict[int, tuple[LogitSlice, Tensor]] = {}

    def whole(one: LogitSlice) -> Tensor:
        if id(one) not in wholes:
            wholes[id(one)] = one, _gathered(one).clone()
        return wholes[id(one)][1]

    new_args, new_kwargs = tree_map_only(LogitSlice, whole, (args, kwargs))
    result = func(*new_args, **new_kwargs)
    values = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            tree_map_only(LogitSlice, lambda one: _become(one, whole(one)), values[argument.name])
    originals = {id(made): one for one, made in wholes.values()}
    return tree_map_only(Tensor, lambda each: originals.get(id(each), each), result)


def _become(one: LogitSlice, whole: Tensor) -> None:
    known = one._slice
    if whole.shape != one.shape:
        raise UserCodeError(
            f"{known.vocabulary.name}: the shape of these logits was to change in place, from "
            f"{list(one.shape)} to {list(whole.shape)}. With tensor parallelism each rank has a "
            "slice: change it out of place, as in logits = logits.unsqueeze(0)"
        )
    local = known.vocabulary.own(whole, known.dim)
    one.write(replace(known, local=local, dtype=local.dtype))


# Into slices and out of them, for autograd


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, vocabulary: Vocabulary) -> LogitSlice:
        ctx.vocabulary = vocabulary
        return LogitSlice(Slice(local.detach(), vocabulary, -1, local.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        vocabulary: Vocabulary = ctx.vocabulary
        if not isinstance(grad, LogitSlice):
            return vocabulary.own(grad, -1), None
        local = grad.slice().cast
        if vocabulary.num_own < vocabulary.length:
            if not local.is_contiguous():  # it may show one number in many places
                local = local.contiguous()
            local[..., vocabulary.num_own :] = 0.0
        return local, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: LogitSlice) -> Tensor:
        ctx.like = replace(logits.slice(), local=None)  # type: ignore[arg-type]
        return logits.slice().local.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> LogitSlice:
        return LogitSlice(replace(ctx.like, local=grad))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: LogitSlice) -> Tensor:
        found = logits.slice()
        ctx.vocabulary, ctx.dim = found.vocabulary, found.dim
        return found.whole().clone() if found.vocabulary.comm.size == 1 else found.whole()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> LogitSlice:
        vocabulary: Vocabulary = ctx.vocabulary
        return LogitSlice(Slice(vocabulary.own(grad, ctx.dim), vocabulary, ctx.dim, grad.dtype))


# Functions that are more than one operator


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `F.cross_entropy`, whose arguments these are."""
    asked = (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    is_usual = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not is_usual or not _has_classes(input, target, weight):
        whole: Any = tree_map_only(LogitSlice, LogitSlice.whole, asked)
        return F.cross_entropy(*whole)
    logits = cast(LogitSlice, input)
    known = logits.slice()
    rows = logits.local().movedim(known.dim, -1).reshape(-1, known.vocabulary.length)
    aim = Target(target.reshape(-1), ignore_index, weight, label_smoothing)
    losses = position_losses(rows, aim, known.vocabulary)
    if reduction == "none":
        found = losses.reshape(target.shape)
    elif reduction == "sum":
        found = losses.sum()
    else:
        found = losses.sum() / aim.label_weights(losses.dtype).sum()
    device = losses.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return found
    return found.to(known.dtype)


def _has_classes(logits: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether logits are slices along the classes, of which the target names one each."""
    if not isinstance(logits, LogitSlice) or isinstance(target, LogitSlice):
        return False
    if weight is not None and weight.shape != (logits.slice().vocabulary.size,):
        return False
    shape = list(logits.shape)
    classes = min(1, len(shape) - 1)
    del shape[classes]
    is_along = logits.slice().dim == classes - logits.dim()
    return is_along and list(target.shape) == shape and target.dtype in (torch.int64, torch.uint8)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {F.cross_entropy: _cross_entropy}
