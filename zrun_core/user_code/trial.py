"""What forwards of the user's code change of attributes: put back, or kept for each micro-batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, str, bytes)
_ABSENT: tuple[Any, Any] = (object(), None)  # of an attribute that is not there
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

    def changed(self, before: AttributesCopy) -> AttributesCopy:
        """Return those that are others than at a `copy`, as they are now."""
        found: AttributesCopy = []
        for owner, was in zip(self._owners, before, strict=True):
            now = _attributes(owner)
            own = {key: now.get(key, _ABSENT) for key in now.keys() | was.keys()}
            found.append(
                {key: each for key, each in own.items() if not _is_same(each, was.get(key))}
            )
        return found

    def put_back_only(self, values: AttributesCopy) -> None:
        """Give some their values, as `changed` or `as_in` returned them."""
        for owner, attributes in zip(self._owners, values, strict=True):
            for key, (value, content) in attributes.items():
                if value is _ABSENT[0]:
                    owner.pop(key, None)
                    continue
                owner[key] = value
                if content is not None:
                    _refill(value, content)

    def put_back(self, values: AttributesCopy) -> None:
        """Make them what they were at a `copy`."""
        for owner, attributes in zip(self._owners, values, strict=True):
            for key in _attributes(owner).keys() - attributes.keys():
                del owner[key]
            for key, (value, content) in attributes.items():
                owner[key] = value
                if content is not None:
                    _refill(value, content)


def as_in(values: AttributesCopy, keys: AttributesCopy) -> AttributesCopy:
    """Return of `values` those attributes that `keys` has."""
    return [
        {key: was.get(key, _ABSENT) for key in wanted}
        for was, wanted in zip(values, keys, strict=True)
    ]


def joined(first: AttributesCopy, second: AttributesCopy) -> AttributesCopy:
    """Return the attributes of both; those of `second` count."""
    return [one | other for one, other in zip(first, second, strict=True)]


def _is_same(now: tuple[Any, Any], was: tuple[Any, Any] | None) -> bool:
    if was is None:
        return False
    value, content = now
    if value is not was[0]:
        is_plain = type(value) is type(was[0]) and isinstance(value, _PLAIN)
        return is_plain and bool(value == was[0])
    if content is None:
        return True
    return len(content) == len(was[1]) and all(
        each is other for each, other in zip(_items(content), _items(was[1]), strict=True)
    )


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [item for pair in container.items() for item in pair]
    return list(container)


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
