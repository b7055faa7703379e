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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zrun_core.distributed.rng import Streams
from zrun_core.spine.sections.tensor_roles import Role
from zrun_core.tensor_parallel.borders import copy_border, sum_out
from zrun_core.tensor_parallel.column_grads import ColumnGrads
from zrun_core.tensor_parallel.linear_product import PRODUCT, plain_product
from zrun_core.tensor_parallel.region_plan import Region
from zrun_core.tensor_parallel.sequence import SequenceSlices
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.tensor_parallel.torch_attention import replace_forward
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.zero.passes.graph_breaks import outside_graphs


class Regions:
    """The regions of a model on one rank, and the random stream within them.

    Attributes:
        comm: of the ranks that have slices of the same layers.
        slices: of the sequence, around regions that have them.
        streams: of this rank; None: regions draw from the model's.
    """

    def __init__(self, comm: TensorComm) -> None:
        self.comm = comm
        self.slices = SequenceSlices(comm)
        self.streams: Streams | None = None
        self._is_watched = False
        self._leave: Callable[[], None] | None = None

    def install(self, model: nn.Module, region: Region, *, is_sliced: bool) -> None:
        """Put f and g where a region begins and ends, by hooks and in place of its row's forward.

        Args:
            is_sliced: around it, each rank has a slice of the sequence: see `sequence.py`.
        """
        columns = _columns_by_entry(model, region)
        send = functools.partial(
            self._send_out, columns=list(columns.values()), is_sliced=is_sliced
        )
        send = outside_graphs(send)
        row = model.get_submodule(region.row)
        for number, name in enumerate(region.entries):
            enter = functools.partial(
                self._enter_at,
                columns=columns[name],
                is_first=number == 0,
                is_sliced=is_sliced,
                is_hidden=region.role is Role.EXPERTS,
                name=f"input of {name}",
            )
            hook = outside_graphs(enter)
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        if region.role is Role.EXPERTS:
            _send_results(row, functools.partial(send, name=region.row))
            return
        if region.role is Role.ATTENTION:
            attention: Any = model.get_submodule(region.around)
            replace_forward(attention, self.comm, region.around)

        @outside_graphs
        def rows_summed(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = send(vars(row)[PRODUCT](row, x, None), name=region.row)
            bias = row._parameters.get("bias")
            return y if bias is None else y + bias.to(y.dtype)

        vars(row)[PRODUCT] = plain_product
        wrap_forward(row, Layer.ROW, rows_summed)

    def _send_out(
        self, part: torch.Tensor, *, name: str, columns: Sequence[ColumnGrads], is_sliced: bool
    ) -> torch.Tensor:
        """Return the sum of all ranks' parts, and draw as outside of the region."""
        what = f"output of {name}"
        for each in columns:
            each.leave()
        if is_sliced and not self.slices.are_off:
            return self.slices.scatter_out(part, what)
        self.leave()
        return sum_out(part, self.comm, what)

    def _enter_at(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        columns: ColumnGrads,
        is_first: bool,
        is_sliced: bool,
        is_hidden: bool,
        name: str,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring what a module of a region is given into it.

        With `is_first` it is the first of the modules where the region begins; with `is_sliced`
        this rank has a slice of the sequence around it. All tensors are of that slice if
        `is_hidden`; else the first one is, and others are whole.
        """
        is_sliced = is_sliced and not self.slices.are_off
        if is_first and not is_sliced:
            self.enter(is_training=module.training)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        tensors = {id(each): each for each in given}  # queries, keys and values may be one tensor
        borders = []
        for number, tensor in enumerate(tensors.values()):
            is_slice = is_sliced and (is_hidden or number == 0)
            if is_slice:
                borders.append(self.slices.gather_border(tensor, name))
            else:
                borders.append(copy_border(self.comm, name))
        inside = columns.enter(list(tensors.values()), borders)
        brought = dict(zip(tensors, inside, strict=True))

        def bring(value: Any) -> Any:
            return brought.get(id(value), value)

        return tuple(map(bring, args)), {key: bring(value) for key, value in kwargs.items()}

    def draw_in(self, block: nn.Module) -> None:
        """Draw from the stream of regions in all of a block: each rank has other tokens there."""
        forward = block.forward
        enter = outside_graphs(self._enter_block)
        leave = outside_graphs(self.leave)

        def draws_inside(*args: Any, **kwargs: Any) -> Any:
            enter(is_training=block.training)
            try:
                return forward(*args, **kwargs)
            finally:
                leave()

        wrap_forward(block, Layer.DRAWS_INSIDE, draws_inside)

    def _enter_block(self, *, is_training: bool) -> None:
        """Draw as in a region, unless all ranks have the same tokens."""
        if not self.slices.are_off:
            self.enter(is_training=is_training)

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Draw as in training in the forward inside; yield what says whether it has drawn."""
        streams = self.streams
        assert streams is not None
        self._is_watched = True
        streams.has_drawn_inside = False
        try:
            yield lambda: streams.has_drawn_inside
        finally:
            self._is_watched = False

    def enter(self, *, is_training: bool) -> None:
        """Draw from the stream of regions, unless the model is only evaluated."""
        self._leave = None  # see [Note: regions that are left early]
        if self.streams is not None and (is_training or self._is_watched):
            self._leave = self.streams.enter_inside()

    def leave(self) -> None:
        """Draw from the model's stream again."""
        if self._leave is not None:
            self._leave()
        self._leave = None


def _send_results(module: nn.Module, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module return what becomes of its results."""
    inner = module.forward

    @functools.wraps(inner)
    def experts_summed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return send(inner(*args, **kwargs))

    wrap_forward(module, Layer.EXPERTS, experts_summed)


def _columns_by_entry(model: nn.Module, region: Region) -> dict[str, ColumnGrads]:
    """Return the column linears that begin at each entry of a region, none of modules' own."""
    if region.role is not None:
        return {name: ColumnGrads([]) for name in region.entries}
    if len(region.entries) > 1:
        return {name: ColumnGrads([model.get_submodule(name)]) for name in region.entries}
    columns = [model.get_submodule(name) for name in region.columns]
    return {region.entries[0]: ColumnGrads(columns)}


def count_once(model: nn.Module, names: Iterable[str], degree: int) -> None:
    """Let modules and parameters of experts count once, where ranks sum what they make with them.

    Each rank has an equal part of them, and so has a part of their gradients.
    """
    params: dict[nn.Module, list[str]] = {}
    for name in names:
        prefix, _, key = name.rpartition(".")
        owner = model.get_submodule(prefix)
        if key in owner._modules:
            owner.get_submodule(key).register_forward_hook(lambda module, args, out: out / degree)
        elif owner._parameters.get(key) is not None:  # else it is of another stage
            params.setdefault(owner, []).append(key)
    for owner, keys in params.items():
        _divide_while_called(owner, keys, degree)


def _divide_while_called(owner: nn.Module, keys: Sequence[str], degree: int) -> None:
    inner = owner.forward

    @functools.wraps(inner)
    def counted_once(*args: Any, **kwargs: Any) -> Any:
        whole = owner._parameters
        part: dict[str, Any] = {key: owner.get_parameter(key) / degree for key in keys}
        owner._parameters = {**whole, **part}
        try:
            return inner(*args, **kwargs)
        finally:
            owner._parameters = whole

    wrap_forward(owner, Layer.ONCE, counted_once)
