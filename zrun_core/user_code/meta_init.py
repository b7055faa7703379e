"""`init: meta`: build the structure on the meta device, and never hold the model whole.

Each module's own `reset_parameters` makes its values when a unit asks for them, seeded by the
module's number, so the values are the same on any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zrun_core.distributed.rng import kept_position, mix
from zrun_core.distributed.rng import seed as begin_stream
from zrun_core.errors import JobError, UserCodeError
from zrun_core.memory.arena import byte_buffer
from zrun_core.user_code.build import Built, Factory, check, no_value
from zrun_core.user_code.on_meta import on_meta

_ADVICE = "write init: factory"
_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_HARMLESS = {"requires_grad_", "detach_"}


def build_on_meta(factory: Factory, seed: int, *, values: bool = True) -> Built:
    """Build the structure only.

    Args:
        seed: of the values: each module has a seed of its own, made of this and of its number.
        values: False if the parameters get their values from elsewhere.

    Raises:
        JobError: a module cannot reset itself, or the factory changes parameters after it has
            built them.
    """
    torch.manual_seed(seed)
    watch = _WatchWrites()
    try:
        with on_meta(), watch:
            module = factory()
    except UserCodeError as error:
        raise JobError(
            f"init: meta: the factory cannot run on the meta device; write init: factory\n{error}"
        ) from None
    check(module)
    for name, param in module.named_parameters():
        if (change := watch.change_of(param)) is not None:
            raise JobError(
                f"init: meta: the factory itself changes parameters ({change} on {name}); {_ADVICE}"
            )
    for name, inner in module.named_modules():
        _check_resets(name, inner)
    numbers = {id(inner): number for number, inner in enumerate(module.modules())}
    for inner in module.modules():
        if any(True for _ in inner.buffers(recurse=False)):
            made = _reset(inner, mix(seed, numbers[id(inner)]))
            for key in inner._buffers:
                if key in made:
                    inner._buffers[key] = made[key]
    return Built(module, _ResetOnDemand(module, seed, numbers) if values else no_value)


def _check_resets(name: str, module: nn.Module) -> None:
    """Refuse a module that `reset_parameters` would not give all of its values.

    Raises:
        JobError: it has none, or the factory has given values by itself.
    """
    owns = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if owns and not callable(getattr(module, "reset_parameters", None)):
        raise JobError(
            f"init: meta: {name or 'the model'} ({type(module).__name__}) has no reset_parameters, "
            f"so {owns[0][0]} would have no value; {_ADVICE}"
        )
    real = [key for key, tensor in owns if tensor.device.type != "meta"]
    if real:
        owner = f"{name}." if name else ""
        raise JobError(f"init: meta: {owner}{real[0]} was given values by the factory; {_ADVICE}")


class _WatchWrites(TorchFunctionMode):
    """Notes writes outside of `reset_parameters`, to memory that turns out to be a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        # By storage: writing to `param.data` or to a view counts too. The tensor keeps the storage
        # alive, so that its address is not used again.
        self._changes: dict[int, tuple[str, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _writes(name):
            target = args[0] if args else kwargs.get("tensor")  # nn.init passes it by name
            on_meta = isinstance(target, torch.Tensor) and target.is_meta
            if on_meta and not _in_module_reset():
                self._changes.setdefault(target.untyped_storage()._cdata, (name, target.detach()))
        return func(*args, **kwargs)

    def change_of(self, param: nn.Parameter) -> str | None:
        """Return the function that wrote to `param`; None if nothing did."""
        if not param.is_meta:
            return None
        change = self._changes.get(param.untyped_storage()._cdata)
        return None if change is None else change[0]


def _writes(function: str) -> bool:
    """Return whether a function of torch writes to its first argument, by its name."""
    if function in _OPERATORS:
        return True
    return function.endswith("_") and not function.endswith("__") and function not in _HARMLESS


def _in_module_reset() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "reset_parameters":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _reset(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return real values of a module's own parameters and buffers, by attribute name.

    The module itself stays on meta.

    Raises:
        JobError: its `reset_parameters` leaves one of them without a value.
    """
    params = dict(module._parameters)
    buffers = dict(module._buffers)
    try:
        for key, param in params.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(_unset_like(param), param.requires_grad)
        for key, buffer in buffers.items():
            if buffer is not None:
                module._buffers[key] = _unset_like(buffer)
        with _seeded(seed), torch.device("cpu"):
            module.reset_parameters()  # type: ignore[operator]
        made = {**module._parameters, **module._buffers}
        for key, value in made.items():
            if value is not None and _has_nan(value):
                raise JobError(
                    f"init: meta: {type(module).__name__}.reset_parameters leaves {key} unset; "
                    f"{_ADVICE}"
                )
        return {key: value.detach() for key, value in made.items() if value is not None}
    finally:
        module._parameters.update(params)
        module._buffers.update(buffers)


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape on the CPU: of NaN where there is such a number.

    It lies apart from the heap. There, small things that last would settle in what it leaves, the
    values of the next module would not fit in between, and the heap would grow with the model.
    """
    like = torch.empty_like(tensor, device="meta")
    memory = byte_buffer(like.nbytes, torch.device("cpu"))
    unset = memory.view(like.dtype).as_strided(like.shape, like.stride())
    if unset.is_floating_point():
        unset.fill_(float("nan"))
    return unset


def _has_nan(tensor: torch.Tensor) -> bool:
    """Return whether a number is NaN, without a mask of the tensor's size."""
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.min().isnan())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw the same numbers inside whenever it is entered, also from Python and from numpy."""
    with kept_position(torch.device("cpu")):
        begin_stream(seed)
        torch.manual_seed(seed)  # accelerators, too
        yield


class _ResetOnDemand:
    """Reads parameters of a meta model by resetting their module.

    It holds the values of one module at a time: units ask for parameters in the model's order.
    """

    def __init__(self, module: nn.Module, seed: int, numbers: dict[int, int]) -> None:
        self._seed = seed
        self._numbers = numbers  # of modules, by id
        self._owner: dict[str, tuple[nn.Module, str]] = {}
        for prefix, inner in module.named_modules():
            for key, _ in inner.named_parameters(recurse=False):
                self._owner[f"{prefix}.{key}" if prefix else key] = (inner, key)
        self._held: tuple[nn.Module, dict[str, torch.Tensor]] | None = None

    def __call__(self, name: str, param: nn.Parameter) -> torch.Tensor:
        owner, key = self._owner[name]
        if self._held is None or self._held[0] is not owner:
            self._held = None
            self._held = (owner, _reset(owner, mix(self._seed, self._numbers[id(owner)])))
        return self._held[1][key]
