"""Forwards of the user's code that are no part of training, and leave nothing behind."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (list, dict, set, deque)
# By owner and name: the value, and a copy of it if it is a container.
AttributesCopy = list[dict[str, tuple[Any, Any]]]
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, hooks, modules


@contextmanager
def kept_attributes(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Put back what a forward inside does to attributes: counters, flags, lists of values.

    Parameters and buffers are not looked at.

    Args:
        model: whose modules may change.
        loss: the loss function, which may be an object with attributes.
    """
    attributes = Attributes(model.modules(), loss)
    before = attributes.copy()
    try:
        yield
    finally:
        attributes.put_back(before)


class Attributes:
    """The attributes of modules and of a loss function, without parameters, buffers and hooks."""

    def __init__(self, modules: Iterable[nn.Module], loss: object) -> None:
        """
        Args:
            modules: whose own attributes they are, not those of modules inside.
            loss: a function, a module, or an object with attributes.
        """
        self._owners = [vars(module) for module in modules]
        if isinstance(loss, nn.Module):
            self._owners += map(vars, loss.modules())
        elif hasattr(loss, "__dict__"):
            self._owners.append(vars(loss))

    def copy(self) -> AttributesCopy:
        """Return what they are now."""
        return [_attributes(owner) for owner in self._owners]

    def put_back(self, values: AttributesCopy) -> None:
        """Make them what they were at a `copy`."""
        for owner, attributes in zip(self._owners, values, strict=True):
            for key in _attributes(owner).keys() - attributes.keys():
                del owner[key]
            for key, (value, content) in attributes.items():
                owner[key] = value
                if content is not None:
                    _refill(value, content)


def _attributes(owner: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return attributes by name: the value, and a copy of it if it is a container."""
    return {
        key: (value, copy.copy(value) if type(value) in _CONTAINERS else None)
        for key, value in owner.items()
        if key not in _OF_MODULES
    }


def _refill(container: Any, content: Any) -> None:
    """Give a container the content that it had."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content)
