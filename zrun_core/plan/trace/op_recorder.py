"""Follow one forward and backward pass of a model: which memory comes and goes, and what is computed.

A `OpRecorder` is a dispatch mode: it sees every operator below autograd, on fake tensors as well as on real ones. Memory
is followed by storage, so views take none, and a storage's end is seen when Python or autograd drops the last reference
to it. In backward, an operator belongs to the module that made the autograd node which runs: nodes are numbered in the
order of the forward pass.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zrun_core.plan.trace.allocation_probe import allocations, completed
from zrun_core.plan.trace.profile import EventKind, Family, TracePhase

_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv", "dot"}
_COPIES = {
    *(
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
    ),
    *(
        "constant_pad_nd",
        "embedding",
        "slice_backward",
        "select_backward",
        "repeat",
        "roll",
        "flip",
    ),
}
_INDEX = torch.ops.aten.index.Tensor
_MAKERS = ("empty", "new_empty")  # memory without work


class OpCall(NamedTuple):
    """One operator that ran. Bytes are those of its operands, read and written once."""

    name: str
    family: Family
    flops: float
    bytes_moved: float
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpRow:
    """One thing that happened, in order.

    Attributes:
        tensor: number of the memory that came or went; -1 for an operator.
        size: its bytes.
        op: the operator, where it is one.
        accumulates: as of an `Event`.
    """

    tensor: int
    size: int
    alloc: bool
    phase: TracePhase
    module: str
    block: int
    op: OpCall | None = None
    kind: EventKind = "temp"
    accumulates: bool = False


class OpRecorder(TorchDispatchMode):
    """Records what runs inside, from the forward pass of `model` to the end of its backward.

        recorder = Recorder(model, names, block_of, reduce_dtype=torch.float32)
        with recorder.following():
            loss = ...
            recorder.phase = Phase.BACKWARD
            loss.backward()
        rows = recorder.rows()

    Parameter gradients are taken away as soon as they are complete, as `FlatUnit.accumulate_grad` does.

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
        *,
        reduce_dtype: torch.dtype,
        probes: bool = False,
        products: bool = False,
    ) -> None:
        """
        Args:
            probes: whether what CPU kernels allocate inside is found out,
            products: those of matrix products too.
            names: of modules, by identity.
            block_of: number of the repeated block, by the name of any module in it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = TracePhase.FORWARD
        self.entered: list[int] = []
        self.follows_values = False
        self._model, self._names, self._block_of, self._reduce_dtype = (
            model,
            names,
            block_of,
            reduce_dtype,
        )
        self._probes, self._products = probes, products
        self._rows: list[OpRow] = []
        self._known: dict[
            int, Any
        ] = {}  # by storage: what keeps the weak reference, or the storage, alive
        self._numbers: dict[int, int] = {}  # of storages that came while this was recording
        self._num_tensors = 0
        self._grads: set[int] = set()  # numbers of memory that became a parameter's gradient
        self._stack: list[str] = []
        self._mark_numbers: list[int] = []  # autograd's number when a module began or ended,
        self._mark_modules: list[str] = []  # and what runs from then on
        self._owner_of_param: dict[int, str] = {}
        for name, module in model.named_modules():
            for param in module.parameters(recurse=False):
                self._owner_of_param.setdefault(id(param), names.get(id(module), name))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here: do not import the compiler to say so

    # What is there before

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors' memory is no event: parameters, buffers, the batch."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage

    # While it runs

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

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            name = self._stack[-1] if self._stack else ""
        block = self._block_of.get(name, -1)
        if self.phase is not TracePhase.BACKWARD and block >= 0 and block != self._current_block():
            self.entered.append(block)
        self._stack.append(name)
        self._mark(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark(self._stack[-1] if self._stack else "")

    def _mark(self, module: str) -> None:
        self._mark_numbers.append(torch._C._autograd._get_sequence_nr())
        self._mark_modules.append(module)

    def _current_block(self) -> int:
        return self._block_of.get(self._stack[-1], -1) if self._stack else -1

    def _module(self) -> str:
        """The module whose work is being done."""
        if self._stack or self.phase is not TracePhase.BACKWARD:
            return self._stack[-1] if self._stack else ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if (
            param := getattr(node, "variable", None)
        ) is not None:  # it accumulates a parameter's gradient
            return self._owner_of_param.get(id(param), "")
        place = bisect_right(self._mark_numbers, node._sequence_nr()) - 1
        return self._mark_modules[place] if place >= 0 else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        if (
            not func.is_view
            and (op := describe(func, args, kwargs, out, is_fresh=bool(fresh))) is not None
        ):
            self._rows.append(OpRow(-1, 0, False, self.phase, module, block, op))
        return out

    def _see_inside(
        self, inside: Sequence[int], outputs: list[torch.Tensor], module: str, block: int
    ) -> list[torch.Tensor]:
        """Follow what a kernel allocates while it runs. Of equal sizes, the last ones to come are its outputs."""
        waiting: dict[int, list[torch.Tensor]] = {}
        for tensor in outputs:
            waiting.setdefault(tensor.untyped_storage().nbytes(), []).append(tensor)
        last = {size: [n for n, other in enumerate(inside) if other == size] for size in waiting}
        is_output = {
            n: waiting[size].pop()
            for size, places in last.items()
            for n in places[-len(waiting[size]) :]
        }
        temporary: dict[int, list[int]] = {}
        for number, size in enumerate(inside):
            if number in is_output:
                self._see(is_output[number], module, block)
            elif size > 0:
                temporary.setdefault(size, []).append(self._num_tensors)
                self._rows.append(OpRow(self._num_tensors, size, True, self.phase, module, block))
                self._num_tensors += 1
            elif temporary.get(-size):
                tensor_number = temporary[-size].pop()
                self._rows.append(OpRow(tensor_number, -size, False, self.phase, module, block))
        for size, numbers in temporary.items():  # the profiler missed its end
            self._rows += [
                OpRow(number, size, False, self.phase, module, block) for number in numbers
            ]
        return [*is_output.values()]

    def _see(self, tensor: torch.Tensor, module: str, block: int) -> bool:
        """Follow the memory of `tensor`; whether it is new."""
        if not torch._C._has_storage(tensor):
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return False
        number, size = self._num_tensors, storage.nbytes()
        self._num_tensors += 1
        self._numbers[key] = number
        self._known[key] = weakref.ref(storage, lambda _: self._end(key, number, size))
        self._rows.append(OpRow(number, size, True, self.phase, module, block))
        return True

    def _end(self, key: int, number: int, size: int) -> None:
        if self._numbers.get(key) != number:
            return
        del self._known[key], self._numbers[key]
        module = self._module()
        self._rows.append(
            OpRow(number, size, False, self.phase, module, self._block_of.get(module, -1))
        )

    def _take(self, param: torch.Tensor) -> None:
        """A parameter's gradient is complete: it moves into the unit's flat one."""
        grad, param.grad = param.grad, None
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
            block, size = self._block_of.get(module, -1), grad.numel() * self._reduce_dtype.itemsize
            number = self._num_tensors
            self._num_tensors += 1
            come = OpRow(
                number, size, True, self.phase, module, block, kind="grad", accumulates=True
            )
            self._rows += [come, replace(come, alloc=False)]

    # Afterwards

    def rows(self) -> list[OpRow]:
        """What happened, with the kind of each tensor. Memory that is still there at the end goes with the last row."""
        came: dict[int, int] = {}
        kinds: dict[int, EventKind] = {}
        for number, row in enumerate(self._rows):
            if row.tensor < 0:
                continue
            if row.alloc:
                came[row.tensor] = number
                kinds[row.tensor] = (
                    "grad" if row.tensor in self._grads or row.kind == "grad" else "temp"
                )
            elif (
                kinds[row.tensor] == "temp" and self._rows[came[row.tensor]].phase is not row.phase
            ):
                kinds[row.tensor] = "activation"
        return [
            row if row.tensor < 0 else replace(row, kind=kinds[row.tensor]) for row in self._rows
        ]


def _follows_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the size of what an operator makes depends on the values that it is given."""
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


def describe(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, *, is_fresh: bool = True
) -> OpCall | None:
    """The work of one operator; None where there is none.

    Args:
        is_fresh: whether it made memory.
    """
    outputs = list(_tensors_in(out))
    packet = func._overloadpacket
    name: str = packet.__name__
    if name.startswith(_MAKERS) or name in ("detach", "alias", "lift_fresh"):
        return None
    inputs = [*_tensors_in(args), *_tensors_in(list(kwargs.values()))]
    if not inputs and not is_fresh:
        return None
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
    flops = 0.0
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    elif name == "_scaled_dot_product_flash_attention_for_cpu":
        flops = float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        flops = float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    first = outputs[0] if outputs else inputs[0]
    dtype = str(first.dtype).removeprefix("torch.")
    family = _family(name)
    shape = _shape(name, family, args, inputs, first)
    return OpCall(_named(func, name, args, kwargs), family, flops, float(moved), dtype, shape)


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
    if (
        "softmax" in name
        or "nll_loss" in name
        or "embedding" in name
        or "sort" in name
        or "index" in name
    ):
        return "other"
    return "elementwise"


def _named(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The operator's name; that of attention with what decides its work."""
    if "scaled_dot_product" not in name:
        return name
    given = (
        dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        | kwargs
    )
    is_causal = given.get("is_causal", False)
    return f"{name}[causal]" if is_causal else name


def _shape(
    name: str,
    family: Family,
    args: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> tuple[int, ...]:
    """(m, n, k) of a matrix product, or of each in a batch; the kernel's for a convolution; else that of the output."""
    if family == "conv":
        kernel = args[2 if name.endswith("backward") else 1]
        return tuple(kernel.shape) if isinstance(kernel, torch.Tensor) else tuple(out.shape)
    if family == "gemm" and out.dim() >= 2:
        factors = inputs[-2:] if name.startswith(("addmm", "baddbmm")) else inputs[:2]
        if len(factors) == 2 and factors[0].dim() >= 2:
            return (int(out.shape[-2]), int(out.shape[-1]), int(factors[0].shape[-1]))
    return tuple(out.shape)
