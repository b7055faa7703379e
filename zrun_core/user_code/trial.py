"""What forwards of the user's code change of attributes: put back, or kept for each micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.user_code.kept_content import Content, Walk
from zrun_core.user_code.object_kinds import (
    OF_MODULES,
    WORKERS,
    ClassVariables,
    is_a,
    is_same_value,
    leaf,
    memory_of,
)

_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_ABSENT: Attribute = (object(), None)  # of an attribute that is not there
Attribute = tuple[Any, Content | None]  # the value, and what is inside of it
Holder = tuple[Any, Any]  # a dict or a list, and a key or a place in it
AttributesCopy = list[dict[str, Attribute]]  # by owner and name


@contextmanager
def kept_attributes(model: nn.Module, loss: object = None, batch: object = None) -> Iterator[None]:
    """Put back what a forward inside does to attributes: counters, flags, lists, tensors, hooks.

    Parameters and buffers are not looked at.

    A hook belongs to the flag that says that it is there: where only the flag was put back, as of
    a model of transformers that notes what its layers return, the next forward would register it
    once more, and would note everything twice.

    Args:
        model: whose modules may change.
        loss: the loss function, which may be an object with attributes.
        batch: which the forward is given, or a copy of its tensors: objects in it may change.

    Raises:
        JobError: something has changed that cannot be put back.
    """
    attributes = Attributes(model.modules(), loss, batch)
    before = attributes.copy()
    owners = [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    hooks = [(of_kind, dict(of_kind)) for of_kind in _hooks_of(owners)]
    try:
        yield
    finally:
        for of_kind, registered in hooks:
            if of_kind.keys() != registered.keys():
                of_kind.clear()  # handles of hooks know this very mapping
                of_kind.update(registered)
        attributes.put_back(before)


def watched_state(model: nn.Module, loss: object) -> Callable[[], list[str]]:
    """Return what names the attributes and buffers that forwards have changed since now."""
    attributes = Attributes(model.modules(), loss)
    before = attributes.copy()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def names_of_changed() -> list[str]:
        found = attributes.names_of(attributes.changed(before))
        now = dict(model.named_buffers())  # a forward may have given it another
        for name in sorted(now.keys() | buffers.keys()):
            if not _have_same_values(now.get(name), buffers.get(name)):
                found.append(name)
        return found

    return names_of_changed


def _hooks_of(modules: Iterable[nn.Module]) -> Iterator[dict[int, Any]]:
    """Yield the mappings in which modules have their hooks, by the number of each."""
    for module in modules:
        own = vars(module)
        yield from (own[name] for name in _HOOKS if isinstance(own.get(name), dict))


class Attributes:
    """The attributes of modules and of a loss function, without parameters, buffers and hooks."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        loss: object,
        batch: object = None,
        *,
        enters_modules: bool = True,
        most_bytes: int | None = None,
    ) -> None:
        """
        Args:
            modules: whose own attributes they are, not those of modules inside.
            loss: a function, a module, or an object with attributes.
            batch: what is in it belongs to them.
            enters_modules: modules in a plain list and the like belong to the attributes.
            most_bytes: of tensors and arrays that are copied; None: as many as `Walk` says.
        """
        own = list(modules)
        self._owners = [vars(module) for module in own]
        self._names = [type(module).__name__ for module in own]
        if isinstance(loss, nn.Module):
            own += loss.modules()
            self._owners += map(vars, loss.modules())
        elif hasattr(loss, "__dict__"):
            self._owners.append(vars(loss))
        self._names += ["loss"] * (len(self._owners) - len(self._names))
        self._walk = Walk(own, enters_modules=enters_modules, most_bytes=most_bytes)
        # What nobody has as an attribute.
        others = {"batch": batch, "classes": ClassVariables.of([*own, loss])}
        if isinstance(loss, FunctionType | MethodType):
            others["loss"] = loss
        self._owners.append(others)
        self._names.append("")

    def copy(self) -> AttributesCopy:
        """Return what they are now."""
        self._walk.begin()
        try:
            return [self._attributes(owner) for owner in self._owners]
        finally:
            self._walk.end()

    def _attributes(self, owner: dict[str, Any]) -> dict[str, Attribute]:
        """Return attributes by name: the value, and a copy of what is inside of it.

        Of a module that has a thread, a deque is what that one fills.
        """
        is_fed = any(is_a(value, *WORKERS) for value in owner.values())
        return {
            key: (value, None if is_fed and is_a(value, deque) else self._walk.content(value))
            for key, value in list(owner.items())
            if key not in OF_MODULES
        }

    def changed(self, before: AttributesCopy) -> AttributesCopy:
        """Return those that are others than at a `copy`, as they are now."""
        found: AttributesCopy = []
        for now, was in zip(self.copy(), before, strict=True):
            own = {key: now.get(key, _ABSENT) for key in now.keys() | was.keys()}
            found.append(
                {key: each for key, each in own.items() if not _is_same(each, was.get(key))}
            )
        return found

    def names_of(self, values: AttributesCopy) -> list[str]:
        """Return the names of attributes, as of `changed`, with the classes of their modules."""
        pairs = zip(self._names, values, strict=True)
        found = [f"{label}.{key}" if label else key for label, own in pairs for key in sorted(own)]
        return ["a class variable" if name == "classes" else name for name in found]

    def leave_out_steady(self, before: AttributesCopy, changed: AttributesCopy) -> None:
        """Copy no more of what takes time and no forward between these two has written."""
        for was, now in zip(before, changed, strict=True):
            for key, (value, content) in was.items():
                if key not in now and content is not None:
                    self._walk.leave_out(value, content)

    def holders_of(self, tensor: torch.Tensor, values: AttributesCopy) -> list[Holder]:
        """Return what held a tensor at a `copy`, and by which key.

        Raises:
            JobError: what holds it cannot be given another, or it holds a view of it.
        """
        found: list[Holder] = []
        memory = memory_of(tensor)
        for owner, label, attributes in zip(self._owners, self._names, values, strict=True):
            for key, (value, content) in attributes.items():
                held: list[tuple[Any, Any, Any]] = [(owner, key, value)]
                for part in content.parts if content is not None else ():
                    held += part.kind.held(part)
                for holder, place, each in held:
                    if each is tensor and holder is not None:
                        found.append((holder, place))
                    elif memory and any(memory_of(own) == memory for own in _tensors_of(each)):
                        raise JobError(
                            f"a recomputed block writes in place to a buffer that {label}.{key} "
                            "holds too, in a tuple or the like or as a view, where it cannot be "
                            "kept apart: hold it in a list or a dict, or write "
                            "activations.checkpoint: none"
                        )
        return found

    def put_back_only(self, values: AttributesCopy) -> None:
        """Give some their values, as `changed` or `as_in` returned them."""
        for owner, label, attributes in zip(self._owners, self._names, values, strict=True):
            for key, (value, content) in attributes.items():
                if value is _ABSENT[0]:
                    owner.pop(key, None)
                    continue
                owner[key] = value
                if content is not None:
                    content.put_back(f"{label}.{key}" if label else key)

    def put_back(self, values: AttributesCopy) -> None:
        """Make them what they were at a `copy`.

        Raises:
            JobError: something has changed that cannot be put back.
        """
        for owner, attributes in zip(self._owners, values, strict=True):
            for key in owner.keys() - attributes.keys() - OF_MODULES:
                del owner[key]
        self.put_back_only(values)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a value is, or holds where nothing can be replaced."""
    if is_a(value, torch.Tensor):
        return [value]
    if is_a(value, tuple, frozenset):
        return [tensor for each in value for tensor in _tensors_of(each)]
    return []


def as_in(values: AttributesCopy, keys: AttributesCopy) -> AttributesCopy:
    """Return of `values` those attributes that `keys` has."""
    return [
        {key: was.get(key, _ABSENT) for key in wanted}
        for was, wanted in zip(values, keys, strict=True)
    ]


def joined(first: AttributesCopy, second: AttributesCopy) -> AttributesCopy:
    """Return the attributes of both; those of `second` count."""
    return [one | other for one, other in zip(first, second, strict=True)]


def goes_on(now: Attribute, before: Attribute) -> bool:
    """Return whether an attribute has a number, a tensor or a generator that went on."""
    value, content = now
    if is_a(value, int, float):
        return bool(value != before[0])
    return content is not None and before[1] is not None and content.counted_on(before[1])


def without_graphs(values: AttributesCopy) -> AttributesCopy:
    """Return values whose tensors hold no graph: that of one call would hold the one before."""
    return [
        {
            key: (leaf(value), content.without_graphs() if content is not None else None)
            for key, (value, content) in own.items()
        }
        for own in values
    ]


def first_written_tensor(changed: AttributesCopy, before: AttributesCopy) -> str:
    """Return the attribute in which a tensor was written in place; "": there is none."""
    for now, was in zip(changed, before, strict=True):
        for key, (_, content) in now.items():
            if content is not None and key in was and content.writes_tensors(was[key][1]):
                return key
    return ""


def _have_same_values(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)


def _is_same(now: Attribute, was: Attribute | None) -> bool:
    if was is None:
        return False
    (value, content), (before, content_before) = now, was
    if value is not before:
        return is_same_value(value, before)
    if content is None or content_before is None:
        return content is content_before
    return content.is_same(content_before)
