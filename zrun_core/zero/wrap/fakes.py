"""A model without its values: fake tensors in place of its parameters, for forwards to watch.

Whatever depends on the batch alone (masks, positions, labels) has values then, and the rest has
none and takes no time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zrun_core.memory.layout import dense_stride
from zrun_core.zero.wrap.auto_wrap import running_norm_params

_NO_SHAPES: Mapping[int, tuple[int, ...]] = {}
_ROW_BYTES = 16  # of what rows of groups are multiples
_here = threading.local()  # `is_dispatching`: a `FakeMode` runs an operation in this thread


class FakeMode(FakeTensorMode):
    """torch's mode of fake tensors, for forwards that stand in for real ones. It differs in that

    - products with the weight of each token's expert (`_grouped_mm`) are of any kind of float, as
      kernels have them; torch's rule for their shapes knows bf16 alone, in aligned rows;
    - what fails is raised, and not logged beside, with its traceback for each attempt.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = getattr(_here, "is_dispatching", False)
        _here.is_dispatching = True
        try:
            if func is torch.ops.aten._grouped_mm.default:
                with self:
                    return _grouped_product(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            _here.is_dispatching = before


def _is_no_attempt(record: logging.LogRecord) -> bool:
    """Keep what torch logs of its fake tensors, but for those of a `FakeMode`."""
    return not getattr(_here, "is_dispatching", False)


logging.getLogger(FakeTensorMode.__module__).addFilter(_is_no_attempt)


def _grouped_product(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a tensor like the product of groups, whose rows or columns may lie in one matrix.

        [tokens, in]     @ [groups, in, out]   ->  [tokens, out]           a forward
        [out, tokens]    @ [tokens, in]        ->  [groups, out, in]       gradients of weights
        [groups, m, in]  @ [in, tokens]        ->  [m, tokens]
        [groups, m, in]  @ [groups, in, out]   ->  [groups, m, out]

    Rows begin at multiples of 16 bytes, in what is given as in what is made.

    Raises:
        RuntimeError: they do not; a kernel would refuse them.
    """
    for matrices in (tokens, weights):
        apart, along = sorted(matrices.stride()[-2:], reverse=True)
        if along != 1 or apart * matrices.dtype.itemsize % _ROW_BYTES:
            raise RuntimeError("strides should be multiple of 16 bytes")  # as kernels say it
    is_matrix = tokens.dim() == 2, weights.dim() == 2
    shape = [tokens.shape[-2], weights.shape[-1]]
    if is_matrix == (True, True):
        assert offs is not None  # torch has checked it
        shape.insert(0, offs.shape[0])
    elif is_matrix == (False, False):
        shape.insert(0, tokens.shape[0])
    dtype = out_dtype or tokens.dtype
    unit = _ROW_BYTES // dtype.itemsize
    row = -(-shape[-1] // unit) * unit
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=tokens.device)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Leave the model its buffers, with their values, whatever a forward inside does to them."""
    kept = [
        (module, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, key, buffer, values in kept:
            module._buffers[key] = buffer
            if not _is_expanded(buffer):  # nobody can write there
                buffer.copy_(values)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several of its elements have the same place in memory, as of `expand`."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


@contextmanager
def fake_parameters(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    shapes: Mapping[int, tuple[int, ...]] = _NO_SHAPES,
) -> Iterator[dict[int, torch.Tensor]]:
    """Replace parameters by fake ones inside; yield these by identity of the true ones.

    Args:
        model: on any device; it may be fake already, as in a trace.
        dtype: that parameters have in training; those of norms with running statistics are fp32.
        shapes: by identity of a parameter, another shape than its own.
    """
    mode = _mode_of(model) or FakeMode()
    in_fp32 = running_norm_params(model)
    fakes: dict[int, torch.Tensor] = {}
    true: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            true.append((module, key, param))
            if id(param) not in fakes:
                own = torch.float32 if id(param) in in_fp32 else dtype
                with mode:
                    if id(param) in shapes:
                        fake = torch.empty(shapes[id(param)], dtype=own, device=device)
                    else:
                        stride = dense_stride(param)
                        fake = torch.empty_strided(param.shape, stride, dtype=own, device=device)
                fakes[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
            module._parameters[key] = fakes[id(param)]  # type: ignore[assignment]
    try:
        yield fakes
    finally:
        for module, key, param in true:
            module._parameters[key] = param


def _mode_of(model: nn.Module) -> FakeTensorMode | None:
    """Return the mode of parameters that are fake already, as in a trace; None: they are not."""
    first = next(model.parameters(), None)
    return first.fake_mode if isinstance(first, FakeTensor) else None
