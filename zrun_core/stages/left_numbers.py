"""Numbers that a node leaves as an attribute, and that others read: no border is crossed by them.

    block      self.aux = float(x.pow(2).mean())
    the model  loss * (1 + sum(block.aux for block in self.blocks))

A tensor that is left so is followed like any other. A number has no memory to be known by: so what
nodes write is noted in one forward, and whether anybody else reads that in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from zrun_core.user_code.trial import Attributes

Where = tuple[nn.Module, str]  # a module, and the name of an attribute


class LeftNumbers:
    """The attributes that nodes write in a forward, and those of them that are read outside.

    Attributes:
        is_in_node: returns whether a node runs.
    """

    def __init__(self, model: nn.Module, is_in_node: Callable[[], bool]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.is_in_node = is_in_node
        self._written: dict[Where, None] = {}
        self._read: dict[Where, None] = {}

    @contextmanager
    def noting_writes(self) -> Iterator[None]:
        """Note what nodes write in the forward inside."""
        set_attribute = nn.Module.__setattr__

        def noting(module: nn.Module, name: str, value: Any) -> None:
            if self.is_in_node() and not isinstance(value, torch.Tensor | nn.Module):
                self._written[module, name] = None
            set_attribute(module, name, value)

        with patch.object(nn.Module, "__setattr__", noting):
            yield

    @contextmanager
    def noting_changes(self, node: nn.Module) -> Iterator[None]:
        """Note which lists and the like a call of a node changes, which runs inside."""
        modules = list(node.modules())
        attributes = Attributes(modules, None, enters_modules=False)
        before = attributes.copy()
        yield
        changed = attributes.changed(before)[: len(modules)]
        for module, now in zip(modules, changed, strict=True):
            for name, (value, content) in now.items():
                if content is not None and not isinstance(value, torch.Tensor):
                    self._written[module, name] = None

    @property
    def is_any_written(self) -> bool:
        """True if a node has written anything."""
        return bool(self._written)

    @contextmanager
    def noting_reads(self) -> Iterator[None]:
        """Note which of it the forward inside reads outside of nodes."""
        by_module: dict[nn.Module, list[str]] = {}
        for module, name in self._written:
            if not hasattr(
                _of_class(module, name), "__set__"
            ):  # else the class stores it elsewhere
                by_module.setdefault(module, []).append(name)
        classes = {module: type(module) for module in by_module}
        for module, names in by_module.items():
            noting = {name: self._property(name) for name in names}
            module.__class__ = type(type(module).__name__, (type(module),), noting)
        try:
            yield
        finally:
            for module, own in classes.items():
                module.__class__ = own

    def _property(self, name: str) -> property:
        def read(module: nn.Module) -> Any:
            if not self.is_in_node():
                self._read[module, name] = None
            if name in vars(module):
                return vars(module)[name]
            default = _of_class(module, name)  # as of `aux = 0.0` in the class
            if default is None:
                raise AttributeError(name)
            return default

        def write(module: nn.Module, value: Any) -> None:
            vars(module)[name] = value

        return property(read, write)

    @property
    def first_read(self) -> str:
        """The first attribute that is read outside, as the model names it; empty: none is."""
        for module, name in self._read:
            return f"{self._names[module]}.{name}"
        return ""


def _of_class(module: nn.Module, name: str) -> Any:
    """Return what the user's class has under a name, None if that is nothing."""
    for cls in type(module).__mro__:
        found = vars(cls).get(name)
        is_ours = isinstance(found, property) and getattr(found.fget, "__module__", "") == __name__
        if found is not None and not is_ours:
            return found
    return None
