"""Functions of Python that run as kernels on a stream, and operators that CPU kernels spoil."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

_library = torch.library.Library("simulated_gpu", "DEF")
_library.define("call(Tensor[] reads, Tensor(a!)[] writes, int number, str name) -> ()")
_calls: dict[int, Callable[..., object]] = {}
_numbers = itertools.count()


def _on_host(reads: list[torch.Tensor], writes: list[torch.Tensor], number: int, name: str) -> None:
    _calls.pop(number)(*reads, *writes)


def _on_meta(reads: list[torch.Tensor], writes: list[torch.Tensor], number: int, name: str) -> None:
    pass


_library.impl("call", _on_host, "CPU")
_library.impl("call", _on_meta, "Meta")


def launch(
    call: Callable[..., object],
    *,
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    name: str = "python",
) -> None:
    """Call a function on the thread of the current stream.

    Args:
        call: is given the memory of `reads` and then of `writes`, as tensors of the CPU.
        reads: tensors of the device that it only reads.
        writes: tensors of the device that it writes, and may read.
    """
    number = next(_numbers)
    _calls[number] = call
    torch.ops.simulated_gpu.call(list(reads), list(writes), number, name)


_aten = torch.library.Library("aten", "IMPL")


def _mse_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    # That of the CPU resizes what it writes to on its way, which aliases refuse.
    square = (x - y).square()
    if reduction == 0:
        return square
    return square.mean() if reduction == 1 else square.sum()


_aten.impl("mse_loss", _mse_loss, "CUDA")


def _in_place(*_: object, **__: object) -> None:
    pass


# torch has no shapes for these: it returns nothing, and the host need not wait to know that.
for _name in ("_fused_adagrad_", "_fused_adagrad_.tensor_lr"):
    _aten.impl(_name, _in_place, "Meta")
