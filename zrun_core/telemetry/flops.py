"""Count the floating-point operations of operators: for reports, and to weigh parts of a model.

torch has a formula for most operators that have any. A formula may fail, as those of attention do
in torch 2.11 where heads are grouped. No count is worth a run: what cannot be counted is left out,
and `FlopCounter.note` says so.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ATTENTION = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}


class FlopCounter:
    """Returns the FLOPs of operators' calls, and remembers whether it could.

    Attributes:
        note: what could not be counted first, and why; empty: nothing.
    """

    def __init__(self) -> None:
        self.note = ""

    def of(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
        """Return the FLOPs of a call: a matrix product, convolution or attention, or its backward.

        Args:
            func: an overload, as `__torch_dispatch__` gets it.

        Returns:
            0 for what computes no products, and for what cannot be counted.
        """
        packet = func._overloadpacket
        name: str = packet.__name__
        try:
            if name in _ATTENTION:
                return _attention(args[:3], queries=1, values=1)
            if name.removesuffix("_backward") in _ATTENTION:
                return _attention(args[1:4], queries=3, values=2)
            if packet in flop_registry:
                return float(flop_registry[packet](*args, **kwargs, out_val=out))
        except Exception as error:  # of a formula of torch's, or of the user's own
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self.note = self.note or f"torch {torch.__version__} cannot count {name} ({why})"
        return 0.0


def _attention(tensors: Any, *, queries: int, values: int) -> float:
    """Return the FLOPs of attention, as if no key were masked. Several query heads may share a key.

    `tensors` are queries, keys and values, [batch, heads, positions, width]. `queries` products are
    as wide as queries and keys are, `values` products as wide as values are.
    """
    query, key, value = (tensor.shape for tensor in tensors)
    width = queries * query[-1] + values * value[-1]
    return float(2 * prod(query[:-1]) * key[-2] * width)


class FlopCount(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention of what computes inside.

    Attributes:
        flops: so far.
        note: as of `FlopCounter`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self._counter = FlopCounter()

    @property
    def note(self) -> str:
        return self._counter.note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here: do not import the compiler, a second, to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _has_values(out):
            self.flops += self._counter.of(func, args, kwargs or {}, out)
        return out


def _has_values(out: Any) -> bool:
    """Return whether an operator has computed: ghosts of other stages have shapes alone."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    return type(first) is torch.Tensor
