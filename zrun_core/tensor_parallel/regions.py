"""Regions: where activations are slices, between linears that are divided.

    x ── f ──► columns of q, k, v ──► attention of own heads ──► rows of out ── g ──► y

    f     forward: nothing                  backward: sum over ranks of the gradient of x
    g     forward: sum over ranks of y      backward: nothing

(Shoeybi et al. 2019, Megatron-LM, section 3.) Outside of regions all ranks compute the same, and
draw the same random numbers; between f and g each draws from a stream of its own, so that dropout
of one rank's heads is not that of another's.

[Note: regions that are left early]
A recomputation stops as soon as it has what backward needs (`torch.utils.checkpoint`), and may do
so within a region. It sets torch's generators back itself: what the region would have set back is
forgotten, by the next one that is entered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zrun_core.distributed.rng import Streams
from zrun_core.tensor_parallel.borders import copy_in, sum_out
from zrun_core.tensor_parallel.region import Region
from zrun_core.tensor_parallel.sequence import gather_in, scatter_out
from zrun_core.tensor_parallel.tensor_comm import TensorComm


class Regions:
    """The regions of a model on one rank, and the random stream within them.

    Attributes:
        comm: of the ranks that have slices of the same layers.
        slices_sequence: outside of regions, blocks have slices of the sequence: see `sequence.py`.
        streams: of this rank; None: regions draw from the model's.
    """

    def __init__(self, comm: TensorComm, *, slices_sequence: bool = False) -> None:
        self.comm = comm
        self.slices_sequence = slices_sequence
        self.streams: Streams | None = None
        self._leave: Callable[[], None] | None = None

    def install(self, model: nn.Module, region: Region) -> None:
        """Put f and g where a region begins and ends, by hooks and in place of its row's forward.

        Args:
            model: whose linears are divided already.
            region: of it.
        """
        row = model.get_submodule(region.row)
        for number, name in enumerate(region.entries):
            enter = functools.partial(self._enter_at, is_first=number == 0, name=f"input of {name}")
            hook = torch.compiler.disable(enter)
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self.slices_sequence:
                self.leave()
            send = scatter_out if self.slices_sequence else sum_out
            y = send(_product(row, x), self.comm, f"output of {region.row}")
            bias = row._parameters.get("bias")
            return y if bias is None else y + bias.to(y.dtype)

        vars(row)["forward"] = forward

    def _enter_at(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_first: bool,
        name: str,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring what a module of a region is given into it."""
        if is_first and not self.slices_sequence:
            self.enter(is_training=module.training)
        is_hidden = self.slices_sequence  # the first tensor; others are whole

        def brought(value: Any) -> Any:
            nonlocal is_hidden
            if not isinstance(value, torch.Tensor):
                return value
            bring = gather_in if is_hidden else copy_in
            is_hidden = False
            return bring(value, self.comm, name)

        return tuple(map(brought, args)), {key: brought(value) for key, value in kwargs.items()}

    def draw_in(self, block: nn.Module) -> None:
        """Draw from the stream of regions in all of a block: each rank has other tokens there."""
        forward = block.forward

        def drawing(*args: Any, **kwargs: Any) -> Any:
            self.enter(is_training=block.training)
            try:
                return forward(*args, **kwargs)
            finally:
                self.leave()

        block.forward = drawing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, *, is_training: bool) -> None:
        """Draw from the stream of regions, unless the model is only evaluated."""
        self._leave = None  # see [Note: regions that are left early]
        if self.streams is not None and is_training:
            self._leave = self.streams.enter_inside()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """Draw from the model's stream again."""
        if self._leave is not None:
            self._leave()
        self._leave = None


def _product(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the product with the weight of a linear, without its bias."""
    weight = linear.get_parameter("weight")
    if isinstance(linear, nn.Linear):
        return nn.functional.linear(x, weight)
    return x @ weight  # transformers' Conv1D has it transposed
