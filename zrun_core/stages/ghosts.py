"""Ghosts: modules of other stages, which hand out tensors of the right shapes without values.

Their own forward runs, on fake parameters, once for each shape of what it is given. Where it looks
at values, as experts do that pick their tokens, it runs on zeros in place of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.weak import WeakTensorKeyDictionary

from zrun_core.data.batch import map_tensors
from zrun_core.distributed.rng import kept_position
from zrun_core.stages.node_calls import Node
from zrun_core.stages.valueless import Valueless, ValuelessMode
from zrun_core.user_code.trial import kept_attributes
from zrun_core.zero.passes.module_hooks import tensors_in

T = TypeVar("T")

_PLAIN = (str, bytes, int, float, bool, Enum, torch.dtype, torch.device, type(None))


class Ghosts:
    """The ghosts of one stage.

    Attributes:
        mode: of all fake tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode = ValuelessMode()
        self._device = device
        # Of parameters, by identity, while they live: those that are divided are replaced.
        self._fakes = WeakTensorKeyDictionary()
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}  # of modules inside of nodes
        self._attributes: dict[nn.Module, dict[str, Any]] = {}  # as the user's forwards know them
        self._hands_on: dict[tuple[type, torch.Size], bool] = {}  # by class and shape
        # By node and what it was given; with the shapes of what it hands out.
        self._handed_out: dict[Hashable, tuple[Any, object]] = {}

    def fake_like(self, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the fake tensor that stands for a parameter, always the same."""
        fake: torch.Tensor | None = self._fakes.get(param)
        if fake is None:
            with _disable_current_modes(), self.mode:  # one of formats would make another one
                empty = torch.empty_strided(
                    param.shape, param.stride(), dtype=dtype, device=self._device
                )
            fake = Valueless.of(empty.requires_grad_(param.requires_grad))
            fake._is_param = True  # to `isinstance(..., nn.Parameter)`
            self._fakes[param] = fake
        return fake

    def stand_for(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Have the fake tensor of a parameter stand for the part of it that replaces it, too."""
        self._fakes[part] = self.fake_like(whole, whole.dtype)

    def keep_forwards(self, node: nn.Module) -> None:
        """Remember the forwards of the modules inside of a node, before any layer is around them.

        This stage may have the node too, for another chunk, and then with layers that meet other
        ranks.
        """
        self._forwards.update({module: module.forward for module in node.modules()})

    def know_attribute(self, module: nn.Module, key: str, whole: object) -> None:
        """Have ghosts find an attribute of a module as it is of the whole layer."""
        self._attributes.setdefault(module, {})[key] = whole

    def hand_out(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what a ghost of `node` hands out."""
        signature: Hashable | None
        try:
            own = _signature((args, kwargs))
            signature = (node.name, node.module.training, _are_formats_changed(), own)
        except TypeError:
            signature = None
        template, shapes = self._handed_out.get(signature, (None, None))
        if template is None or shapes != _shapes(template):  # it may have been changed in place
            with torch.no_grad(), kept_position(self._device):
                args, kwargs = map_tensors(_apart, (args, kwargs))
                template = map_tensors(self._as_fake, self._run(node, args, kwargs))
            if signature is not None and _follows_from_shapes(template):
                self._handed_out[signature] = (template, _shapes(template))
        if isinstance(template, torch.Tensor):
            return template
        return map_tensors(lambda tensor: tensor, template)  # containers are the caller's own

    def hands_on(self, node: Node, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether what a ghost hands out is like the first argument, a tensor.

        It was so in the forward that was followed; lengths may differ now. Modules of one class are
        taken to do the same, so that few of them run.
        """
        first = args[0]
        key = (type(node.module), first.shape)
        known = self._hands_on.get(key)
        if known is None:
            output = self.hand_out(node, args, kwargs)
            known = isinstance(output, torch.Tensor) and output.shape == first.shape
            self._hands_on[key] = known
        return known

    def _run(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a node's own forward without values; modules inside have no hooks, and are no nodes.

        Also where this stage has its parameters: they are not looked at.
        """
        stand_ins: list[tuple[nn.Module, str, Any]] = []
        for module in node.module.modules():
            stand_ins += [(module, *each) for each in self._attributes.get(module, {}).items()]
            if module is not node.module:
                # Not a layer: for this call it has no hooks. See `forward_layers.py`.
                forward = self._forwards.get(module, module.forward)
                stand_ins.append((module, "_call_impl", forward))
            buffers = {key: b if b is None else b.clone() for key, b in module._buffers.items()}
            stand_ins.append((module, "_buffers", buffers))  # a ghost leaves the true ones alone
            for key in dict.keys(module._parameters):
                param = dict.__getitem__(module._parameters, key)  # without unsharding it
                if param is not None:
                    stand_ins.append((module, key, self.fake_like(param, param.dtype)))
        with (
            kept_attributes(node.module),
            _in_place_of_attributes(stand_ins),
            self.mode.letting_write(),  # what the stage that has them does
        ):
            try:
                return node.forward(*args, **kwargs)
            except RuntimeError as error:
                return run_on_zeros(node, node.forward, args, kwargs, error)

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        is_fake = isinstance(tensor, FakeTensor)
        fake: torch.Tensor = Valueless.of(tensor if is_fake else self.mode.from_tensor(tensor))
        return fake


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a ghost may hang hooks on: not one that the stage itself works with."""
    return tensor if isinstance(tensor, FakeTensor) else tensor.detach()


def _are_formats_changed() -> bool:
    """Return whether a mode has operators return other formats than they were asked for."""
    modes = _get_current_dispatch_mode_stack()
    return any(getattr(mode, "changes_formats", False) for mode in modes)


def run_on_zeros(
    node: Node, call: Callable[..., T], args: Any, kwargs: dict[str, Any], error: RuntimeError
) -> T:
    """Run a node on zeros in place of fake tensors, those that it is given and its own.

    Args:
        node: whose forward looks at values, or does what fake tensors cannot.

    Raises:
        RuntimeError: `error`: the node cannot run on zeros either.
    """
    stand_ins = [
        (module, key, _zeros_for(tensor))
        for module in node.module.modules()
        for held in (dict(module._parameters), dict(vars(module)))
        for key, tensor in held.items()
        if isinstance(tensor, FakeTensor)
    ]
    args, kwargs = map_tensors(_zeros_for, (args, kwargs))
    try:
        with _in_place_of_attributes(stand_ins):
            return call(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        raise error from None


def _zeros_for(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(zeros, requires_grad=tensor.requires_grad)
    return zeros.requires_grad_(tensor.requires_grad)


@contextmanager
def _in_place_of_attributes(stand_ins: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Let modules have other attributes inside; parameters and buffers stay where they are."""
    before = [vars(module).get(key) for module, key, _ in stand_ins]
    for module, key, stand_in in stand_ins:
        vars(module)[key] = stand_in
    try:
        yield
    finally:
        for (module, key, _), value in zip(reversed(stand_ins), reversed(before), strict=True):
            if value is None:
                vars(module).pop(key, None)
            else:
                vars(module)[key] = value


def _signature(value: Any) -> Hashable:
    """Return what the shapes that come out of a call depend on.

    Raises:
        TypeError: it is not known of `value`.
    """
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    raise TypeError


def _shapes(value: Any) -> object:
    return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors_in(value)]


def _follows_from_shapes(value: Any) -> bool:
    """Return whether `value` is tensors without values alone: a number may be of the batch."""
    if value is None or isinstance(value, torch.Tensor | str):
        return True
    if isinstance(value, Mapping):
        return all(_follows_from_shapes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_follows_from_shapes(item) for item in value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return all(_follows_from_shapes(getattr(value, field.name)) for field in fields)
    return False
