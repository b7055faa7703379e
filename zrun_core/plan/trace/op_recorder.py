"""Record one forward and backward pass of a model: which memory comes and goes, what is computed.

An `OpRecorder` is a dispatch mode: it sees every operator below autograd, on fake tensors as well
as on real ones. Memory is followed by storage, so views take none, and a storage's end is seen when
Python or autograd drops the last reference to it. In backward, an operator belongs to the module
that made the autograd node which runs: nodes are numbered in the order of the forward pass.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zrun_core.plan.trace.allocation_probe import allocations, completed
from zrun_core.plan.trace.rows import (
    KIND_NUMBER,
    Family,
    Operator,
    Rows,
    RowWriter,
    TracePhase,
    Vocabulary,
)
from zrun_core.telemetry.flops import FlopCounter
from zrun_core.tensor_parallel.logit_slice import LogitSlice

_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv", "dot"}
_COPIES = {
    "clone",
    "copy_",
    "_to_copy",
    "cat",
    "stack",
    "contiguous",
    "index_select",
    "gather",
    "index",
    "fill_",
    "zero_",
    "constant_pad_nd",
    "embedding",
    "slice_backward",
    "select_backward",
    "repeat",
    "roll",
    "flip",
}
_OTHERS = ("softmax", "nll_loss", "embedding", "sort", "index")  # parts of names
_NO_WORK = ("detach", "alias", "lift_fresh")
_MAKERS = ("empty", "new_empty")  # beginnings of names: memory without work
_INDEX = torch.ops.aten.index.Tensor


class OpCall(NamedTuple):
    """An operator that ran, and its work. Bytes are those of its operands, each counted once."""

    operator: Operator
    flops: float
    bytes_moved: float


class OpRecorder(TorchDispatchMode):
    """Records what runs inside, from the forward pass of `model` to the end of its backward.

        recorder = OpRecorder(model, names, block_of, vocabulary, counter, reduce_dtype=...)
        with recorder.following():
            loss = ...
            recorder.phase = TracePhase.BACKWARD
            loss.backward()
        rows = recorder.rows()

    Parameter gradients are taken away as soon as they are complete, as the flat units take them.

    Attributes:
        phase: to be set by who runs the passes.
        follows_values: whether the size of a tensor has depended on values so far.
        entered: numbers of the blocks that were called in forward, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        names: dict[int, str],
        block_of: dict[str, int],
        vocabulary: Vocabulary,
        counter: FlopCounter,
        *,
        reduce_dtype: torch.dtype,
        probes: bool = False,
        products: bool = False,
    ) -> None:
        """
        Args:
            names: of modules, by identity.
            block_of: number of the repeated block, by the name of any module in it.
            vocabulary: numbers modules and operators, for this pass and others.
            probes: whether what CPU kernels allocate inside is found out.
            products: whether that of matrix products is found out too.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = TracePhase.FORWARD
        self.entered: list[int] = []
        self.follows_values = False
        self._model = model
        self._names = names
        self._counter = counter
        self._block_of = block_of
        self._reduce_dtype = reduce_dtype
        self._probes = probes
        self._products = products
        self._rows = RowWriter(vocabulary)
        self._num_tensors = 0
        # By storage: a weak reference that tells of its end, or the storage itself.
        self._known: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # of storages that came while this was recording
        self._grads: set[int] = set()  # numbers of memory that became a parameter's gradient
        self._stack: list[str] = []  # modules that run
        # In forward: autograd's sequence number when a module began or ended, and what runs after.
        self._mark_numbers: list[int] = []
        self._mark_modules: list[str] = []
        self._owner_of_param: dict[int, str] = {}
        self._recurrent: set[str] = set()  # layers
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                self._recurrent.add(names.get(id(module), name))
            for param in module.parameters(recurse=False):
                self._owner_of_param.setdefault(id(param), names.get(id(module), name))

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make no event of the memory of `tensors`: parameters, buffers, the batch."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record what runs inside."""
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        hooks += [
            param.register_post_accumulate_grad_hook(self._take)
            for param in self._model.parameters()
            if param.requires_grad
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    # Which module runs

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:  # one that was made meanwhile counts as the module that made it
            name = self._innermost()
        block = self._block_of.get(name, -1)
        is_another_block = block >= 0 and block != self._block_of.get(self._innermost(), -1)
        if self.phase is not TracePhase.BACKWARD and is_another_block:
            self.entered.append(block)
        self._stack.append(name)
        self._mark(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark(self._innermost())

    def _mark(self, module: str) -> None:
        self._mark_numbers.append(torch._C._autograd._get_sequence_nr())
        self._mark_modules.append(module)

    def _innermost(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _module(self) -> str:
        """Return the module whose work is being done."""
        if self._stack or self.phase is not TracePhase.BACKWARD:
            return self._innermost()
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        param = getattr(node, "variable", None)
        if param is not None:  # the node accumulates a parameter's gradient
            return self._owner_of_param.get(id(param), "")
        place = bisect_right(self._mark_numbers, node._sequence_nr()) - 1
        return self._mark_modules[place] if place >= 0 else ""

    # What it does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, LogitSlice) for kind in types):
            return NotImplemented  # what it does with the tensor that it holds comes here too
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._probes:
            out = completed(func, args, out)
        self.follows_values = self.follows_values or _follows_values(func, args)
        # A sparse one is made of two that were there before, and has no memory of its own.
        tensors = [tensor for tensor in _tensors_in(out) if torch._C._has_storage(tensor)]
        module = self._module()
        block = self._block_of.get(module, -1)
        inside: tuple[int, ...] = ()
        if self._probes:
            inside = allocations(func, args, kwargs, out, products=self._products)
        fresh = self._see_inside(inside, tensors, module, block)
        fresh += [tensor for tensor in tensors if self._see(tensor, module, block)]
        if func.is_view:
            return out
        flops = self._counter.of(func, args, kwargs, out)
        call = _describe(func, args, kwargs, out, flops, is_fresh=bool(fresh))
        if call is not None:
            self._rows.op(
                call.operator._replace(is_inner=module in self._recurrent),
                flops=(call.flops, 0.0),
                bytes_moved=(call.bytes_moved, 0.0),
                phase=self.phase,
                module=module,
                block=block,
            )
        return out

    def _event(self, tensor: int, size: int, alloc: bool, module: str, block: int) -> None:
        self._rows.event(tensor, size, alloc=alloc, phase=self.phase, module=module, block=block)

    def _see_inside(
        self, inside: Sequence[int], outputs: list[torch.Tensor], module: str, block: int
    ) -> list[torch.Tensor]:
        """Follow what a kernel allocates while it runs, and return the outputs among it.

        Of equal sizes, the last ones to come are its outputs: of [+64, +64, -64] and one output of
        64 bytes, the second allocation is the output, and the first one is freed. `block` is the
        number of the repeated block around it; -1 outside.
        """
        waiting: dict[int, list[torch.Tensor]] = {}  # outputs by size
        for tensor in outputs:
            waiting.setdefault(tensor.untyped_storage().nbytes(), []).append(tensor)
        is_output: dict[int, torch.Tensor] = {}  # by place in `inside`
        for size, tensors in waiting.items():
            places = [place for place, other in enumerate(inside) if other == size]
            for place in places[-len(tensors) :]:
                is_output[place] = tensors.pop()
        temporary: dict[int, list[int]] = {}  # numbers of tensors, by size
        for place, size in enumerate(inside):
            if place in is_output:
                self._see(is_output[place], module, block)
            elif size > 0:
                temporary.setdefault(size, []).append(self._num_tensors)
                self._event(self._num_tensors, size, True, module, block)
                self._num_tensors += 1
            elif temporary.get(-size):
                self._event(temporary[-size].pop(), -size, False, module, block)
        for size, numbers in temporary.items():  # the profiler missed its end
            for number in numbers:
                self._event(number, size, False, module, block)
        return [*is_output.values()]

    def _see(self, tensor: torch.Tensor, module: str, block: int) -> bool:
        """Follow the memory of `tensor`, and return whether it is new."""
        if not torch._C._has_storage(tensor):
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return False
        number = self._num_tensors
        size = storage.nbytes()
        self._num_tensors += 1
        self._numbers[key] = number
        self._known[key] = weakref.ref(storage, lambda _: self._end(key, number, size))
        self._event(number, size, True, module, block)
        return True

    def _end(self, key: int, number: int, size: int) -> None:
        """Write down that a storage is gone."""
        if self._numbers.get(key) != number:
            return
        del self._known[key]
        del self._numbers[key]
        module = self._module()
        self._event(number, size, False, module, self._block_of.get(module, -1))

    def _take(self, param: torch.Tensor) -> None:
        """Take a parameter's complete gradient away: it moves into the unit's flat one."""
        grad = param.grad
        param.grad = None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        number = self._numbers.get(grad.untyped_storage()._cdata)
        if number is not None:
            self._grads.add(number)
        if grad.dtype != self._reduce_dtype and grad.device.type == "cpu":
            # Added to an earlier micro-batch's, it is cast as a whole first.
            module = self._owner_of_param.get(id(param), "")
            for alloc in (True, False):
                self._rows.event(
                    self._num_tensors,
                    grad.numel() * self._reduce_dtype.itemsize,
                    alloc=alloc,
                    phase=self.phase,
                    module=module,
                    block=self._block_of.get(module, -1),
                    kind="grad",
                    accumulates=True,
                )
            self._num_tensors += 1

    # Afterwards

    def rows(self) -> Rows:
        """Return what happened, with the kind of each tensor. What stays to the end never goes."""
        rows = self._rows.rows()
        comes = rows["alloc"]
        goes = (rows["tensor"] >= 0) & ~comes
        kind = np.full(self._num_tensors, KIND_NUMBER["temp"])
        phase = np.zeros(self._num_tensors, dtype=np.int64)
        kind[rows["tensor"][comes]] = rows["kind"][comes]
        phase[rows["tensor"][comes]] = rows["phase"][comes]
        kind[list(self._grads)] = KIND_NUMBER["grad"]
        gone = rows["tensor"][goes]
        outlives_phase = gone[phase[gone] != rows["phase"][goes]]
        is_temp = kind[outlives_phase] == KIND_NUMBER["temp"]
        kind[outlives_phase[is_temp]] = KIND_NUMBER["activation"]
        is_event = comes | goes
        rows["kind"][is_event] = kind[rows["tensor"][is_event]]
        return rows


def _follows_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the size of what an operator makes depends on the values given to it."""
    if func is _INDEX:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _describe(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    flops: float,
    *,
    is_fresh: bool = True,
) -> OpCall | None:
    """Return the work of one operator; None where there is none.

    `func` is the overload that ran, such as `aten.mm.default`; `is_fresh` says whether it made
    memory.
    """
    outputs = list(_tensors_in(out))
    packet = func._overloadpacket
    name: str = packet.__name__
    if name.startswith(_MAKERS) or name in _NO_WORK:
        return None
    inputs = [*_tensors_in(args), *_tensors_in(list(kwargs.values()))]
    if not inputs and not is_fresh:
        return None
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
    first = outputs[0] if outputs else inputs[0]
    dtype = str(first.dtype).removeprefix("torch.")
    family: Family = _family(name)
    shape = _shape(name, family, args, inputs, first)
    if func.namespace == "zrun_collective":
        family = "collective"
    operator = Operator(_named(func, name, args, kwargs), family, dtype, shape)
    return OpCall(operator, flops, float(moved))


def _family(name: str) -> Family:
    if name in _GEMMS:
        return "gemm"
    if "scaled_dot_product" in name or "_attention_" in name:
        return "attention"
    if "conv" in name:
        return "conv"
    if "norm" in name:
        return "norm"
    if name in _COPIES:
        return "copy"
    if any(part in name for part in _OTHERS):
        return "other"
    return "elementwise"


def _named(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the operator's name; that of attention with what decides its work."""
    if "scaled_dot_product" not in name:
        return name
    parameters = [argument.name for argument in func._schema.arguments]
    given = dict(zip(parameters, args, strict=False)) | kwargs
    return f"{name}[causal]" if given.get("is_causal", False) else name


def _shape(
    name: str,
    family: Family,
    args: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> tuple[int, ...]:
    """Return the shape of an `Operator`: see there."""
    if family == "conv":
        is_backward = name.endswith("backward")  # which takes the output's gradient first
        kernel = args[2] if is_backward else args[1]
        return tuple(kernel.shape) if isinstance(kernel, torch.Tensor) else tuple(out.shape)
    if family == "gemm" and out.dim() >= 2:
        factors = inputs[:2]
        if name.startswith(("addmm", "baddbmm")):  # after what the product is added to
            factors = inputs[-2:]
        if len(factors) == 2 and factors[0].dim() >= 2:
            return (int(out.shape[-2]), int(out.shape[-1]), int(factors[0].shape[-1]))
    return tuple(out.shape)
