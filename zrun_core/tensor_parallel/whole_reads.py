"""Whole parameters where they are read outside of their modules, on ranks that have slices.

    self.head.weight.norm()        in the forward of the model: all ranks of the group gather it

    forward     the slices of all ranks, as the plan cuts them
    backward    this rank's own slice of the gradient, which is the same on all ranks

What is read is known from a forward without values (`fake_outside.py`), and no other parameter is
looked after. A copy lasts as long as the call that has read it, and as its graph.

[Note: gradients that ranks add up]
See `fake_outside.py`: of such a parameter the read's gradient counts on the first rank alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart
from zrun_core.tensor_parallel.plan import TensorPlan
from zrun_core.tensor_parallel.reads import Read
from zrun_core.tensor_parallel.tensor_comm import TensorComm
from zrun_core.user_code.forward_layers import Layer, wrap_forward
from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.wrap.lookups import Lookups, is_asked_by_user

_Change = Callable[[torch.Tensor], torch.Tensor]
_Key = tuple[str, bool, bool]


@dataclass
class _Call:
    """A call of a module that is under way.

    Attributes:
        name: of the module.
        found: what it has read.
    """

    name: str
    found: dict[_Key, torch.Tensor] = field(default_factory=dict)


class WholeReads:
    """The reads of one rank."""

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        comm: TensorComm,
        table: Mapping[str, TensorPart],
    ) -> None:
        """Know the calls of modules that read, and of those that have what is read, in place.

        Args:
            model: this rank's part of it, before it is transformed and sharded.
            table: by name of a parameter, what this rank has of it.
        """
        self._reads = plan.reads
        self._comm = comm
        self._parts = [plan.parts(index) for index in range(comm.size)]
        self._undivided = {each for each in plan.reads.names if plan.tensors[each].cut is None}
        self._partial = {
            each for each, part in table.items() if each in plan.summed or part.partial_over
        }
        self._strides = {name: plan.tensors[name].stride for name in plan.reads.names}
        self._calls: list[_Call] = []
        self._outer = _Call("")  # of the loss function
        self._pass: object = None  # in which that reads
        self._running: RunningPass | None = None
        names = plan.reads.names & table.keys()
        params = {id(model.get_parameter(name)): name for name in names}
        self._holders: dict[str, set[str]] = {name: set() for name in names}
        self._keys: dict[str, dict[str, str]] = {}  # by module and key, the first name
        for prefix, module in model.named_modules():
            for key, param in module._parameters.items():
                name = params.get(id(param))
                if name is not None:
                    self._holders[name].add(prefix)
                    self._keys.setdefault(prefix, {})[key] = name
        for name in {"", *self._keys, *plan.reads.readers}:
            self._watch(name, model.get_submodule(name))

    def _watch(self, name: str, module: nn.Module) -> None:
        """Know when a module runs: its own code, also where it is recomputed."""
        inner = module.forward

        @functools.wraps(inner)
        def known_to_run(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(_Call(name))
            try:
                return inner(*args, **kwargs)
            finally:
                self._calls.pop()

        wrap_forward(module, Layer.READS, known_to_run)

    def install(self, model: nn.Module, running: RunningPass) -> None:
        """Hand out whole parameters from now on.

        Args:
            running: the pass that runs, of the model, which is sharded.
        """
        self._running = running
        for prefix, names in self._keys.items():
            module = model.get_submodule(prefix)
            of_module = module._parameters

            def look(key: str, names: Any = names, inner: Any = of_module) -> torch.Tensor | None:
                name = names.get(key)
                return None if name is None else self._look(name, lambda: inner[key])

            module._parameters = Lookups(of_module, look)

    def when_compiled(self) -> JobError:
        """Return the error of a job that compiles blocks, in which nobody sees what is read."""
        first, *others = sorted(self._reads.names)
        more = f" and {len(others)} more" if others else ""
        return JobError(
            f"compile: {first}{more} would be read outside of its module, where each rank has a "
            "slice of it (parallel.tp), which compiled blocks do not gather: write compile: false"
        )

    def _look(self, name: str, own: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return what is found in place of this rank's parameter; None: itself."""
        running = self._running
        assert running is not None
        holders = self._holders[name]
        if any(call.name in holders for call in self._calls):
            return None
        if not (self._calls or running.active) or not is_asked_by_user():
            return None
        call = self._calls[-1] if self._calls else self._of_loss(running)
        read = Read(call.name, name)
        is_shape = read in self._reads.shapes
        if read not in self._reads.whole and not is_shape:
            return None
        key = name, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if key not in call.found:
            param = own()
            whole = self._hollow(name, param) if is_shape else self._whole(name, param)
            whole._is_param = True
            call.found[key] = whole
        return call.found[key]

    def _of_loss(self, running: RunningPass) -> _Call:
        """Return the call of a loss function, which is what runs outside of all modules."""
        if self._pass is not running.micro:
            self._pass = running.micro
            self._outer = _Call("")
        return self._outer

    def _hollow(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape alone: NaN, and nothing to write to."""
        nowhere = torch.full((), float("nan"), dtype=param.dtype, device=param.device)
        hollow = nowhere.expand(self._parts[0][name].shape)
        return hollow.requires_grad_(param.requires_grad)

    def _whole(self, name: str, param: torch.Tensor) -> torch.Tensor:
        part = self._parts[self._comm.index][name]
        if name in self._undivided and name not in self._partial:
            return param.view_as(param)
        gather: _Change = functools.partial(self._gather, name)
        own: _Change = functools.partial(cut_out, part=part)
        if name in self._undivided:
            gather = _same
            own = functools.partial(_counted, counts=self._comm.index == 0)
        whole: torch.Tensor = _Whole.apply(param, gather, own)  # type: ignore[no-untyped-call]
        return whole

    def _gather(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter of which all ranks have slices."""
        part = self._parts[self._comm.index][name]
        rows = self._comm.gather_rows(param.detach(), f"{name}, read outside of its module")
        dim = dim_of(part)
        step = part.stride[dim]
        whole = torch.empty_strided(
            part.shape, self._strides[name], dtype=rows.dtype, device=rows.device
        )
        for row, parts in zip(rows, self._parts, strict=True):
            for run in parts[name].runs:
                length = run.length // step
                slices = row.narrow(dim, run.local // step, length)
                whole.narrow(dim, run.start // step, length).copy_(slices)
        return whole


class _Whole(torch.autograd.Function):
    """A whole parameter, of what each rank has; its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, gather: Any, own: Any) -> torch.Tensor:
        ctx.own = own
        whole: torch.Tensor = gather(param)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.own(grad), None, None


def _same(param: torch.Tensor) -> torch.Tensor:
    return param.view_as(param)


def _counted(grad: torch.Tensor, *, counts: bool) -> torch.Tensor:
    return grad if counts else torch.zeros_like(grad)


def dim_of(part: TensorPart) -> int:
    """Return the dimension along which a parameter is a slice."""
    (dim,) = (d for d, size in enumerate(part.shape) if size != part.local_shape[d])
    return dim


def cut_out(value: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """Return a part of a whole tensor, zeros where it is padding."""
    dim = dim_of(part)
    step = part.stride[dim]
    slices = [value.narrow(dim, run.start // step, run.length // step) for run in part.runs]
    missing = part.local_shape[dim] - sum(each.shape[dim] for each in slices)
    if missing:
        shape = list(part.local_shape)
        shape[dim] = missing
        slices.append(value.new_zeros(shape))
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim)
