"""Allocations inside of CPU kernels, found out by running them: fake tensors cannot tell.

Convolutions change the layout of their operands, and how depends on sizes, formats and the
processor; so do matrix products of 16 bits, in blocks of less than a megabyte for each thread.
Recurrent layers keep a workspace for backward. Each distinct call runs once, on zeros, under
torch's profiler, with as many threads as torch has in this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zrun_core.telemetry.flops import FlopCounter

_ATEN = torch.ops.aten
_RNN = _ATEN.mkldnn_rnn_layer.default
_RNN_BACKWARD = _ATEN.mkldnn_rnn_layer_backward.default
_ALWAYS = {
    _ATEN.convolution.default,
    _ATEN.convolution_backward.default,
    _RNN,
    _RNN_BACKWARD,
}
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
}
_MAX_FLOPS = 2e10  # half a second
_MAX_FLOPS_OF_PRODUCT = 2e9
_found: dict[Any, tuple[int, ...]] = {}
_workspaces: dict[Any, int] = {}  # bytes


def allocations(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    *,
    products: bool = False,
) -> tuple[int, ...]:
    """Return the bytes that come (positive) and go (negative) while an operator runs, in order.

    Its outputs are among them. Empty where nothing but the outputs is known: for operators that
    need no probe, and those that would take long.

    Args:
        products: whether matrix products are probed too.
    """
    is_product = products and func in _PRODUCTS and out.dtype in (torch.bfloat16, torch.float16)
    if func not in _ALWAYS and not is_product:
        return ()
    most = _MAX_FLOPS_OF_PRODUCT if is_product else _MAX_FLOPS
    if _flops(func, args, kwargs, out) > most:
        return ()
    named = ((name, _key(value)) for name, value in sorted(kwargs.items()))
    key = (func, *(_key(arg) for arg in args), *named)
    found = _found.get(key)
    if found is None:
        found = _found[key] = _run(func, args, kwargs)
    return found


def completed(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Return `out` of an operator, with the workspace that a fake recurrent layer leaves empty."""
    if func is not _RNN or out[-1].numel() or _flops(func, args, {}, out) > _MAX_FLOPS:
        return out
    key = (func, *(_key(arg) for arg in args))
    if key not in _workspaces:
        with _disable_current_modes(), _as_in_training():
            _workspaces[key] = func(*(_zeros(arg) for arg in args))[-1].numel()
    *others, workspace = out
    return (*others, workspace.new_empty(_workspaces[key]))


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of a call; infinity if they cannot be counted."""
    if func in (_RNN, _RNN_BACKWARD):  # each position passes two matrices, twice in backward
        positions = args[0].numel() // args[0].shape[-1]
        flops = 2.0 * positions * (args[1].numel() + args[2].numel())
        if func is _RNN_BACKWARD:
            flops *= 2
        return float(flops)
    counter = FlopCounter()
    flops = counter.of(func, args, kwargs, out)
    return math.inf if counter.note else flops


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    with _disable_current_modes(), _as_in_training(), _silent():
        real = [_zeros(arg) for arg in args]
        named = {name: _zeros(value) for name, value in kwargs.items()}
        func(*real, **named)  # what is made once, is made now
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            out = func(*real, **named)
        del out
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    )
    return tuple(num_bytes for _, num_bytes in events)


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Run inside below autograd, with gradients enabled: else a recurrent layer keeps nothing."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep from the screen that the profiler begins and ends."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
