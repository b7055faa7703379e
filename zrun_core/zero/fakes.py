"""A model without its values: fake tensors in place of its parameters, for forwards to watch.

Whatever depends on the batch alone (masks, positions, labels) has values then, and the rest has
none and takes no time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zrun_core.memory.layout import dense_stride
from zrun_core.zero.auto_wrap import running_norm_params

_NO_SHAPES: Mapping[int, tuple[int, ...]] = {}


def leave_failures_to_exceptions() -> None:
    """Have torch raise what fails on fake tensors, and not log it with a traceback as well."""
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_no_failure)


def _is_no_failure(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("failed while attempting to run meta")


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
            module._buffers[key] = buffer.copy_(values)


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
        device: that trains.
        shapes: by identity of a parameter, another shape than its own.
    """
    leave_failures_to_exceptions()
    mode = _mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
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
