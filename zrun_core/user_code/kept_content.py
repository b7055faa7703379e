"""What is inside of an attribute, to any depth: kept, compared, and put back in place.

    self.state = {"n": {"calls": 0}}      a dict, a dict; numbers are part of what holds them
    self.ema = torch.zeros(1)             a tensor that forward may write in place
    self.rng = np.random.default_rng(3)   a generator, by its position
    self.counter = Counter()              an object of the user's own: what its `__dict__` holds

Objects stay the same ones, whoever else holds them; each is kept once. Parameters are left out, and
what shares their memory; so are objects of Python's library and of torch's.

[Note: how much is copied]
Tensors up to `_MOST_BYTES` in all. Of those beyond it is seen whether they were written, which
nothing can undo then: that is an error. So is an iterator that was advanced.
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import sys
import types
import warnings
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zrun_core.errors import JobError
from zrun_core.sizes import format_size

PLAIN = (bool, int, float, str, bytes)
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, hooks, modules
_IN_HIDDEN_MODULES = frozenset({"_buffers", "_modules", "training"})  # of what nobody trains
_ATOMS = (*PLAIN, type(None), complex, torch.dtype, torch.device, torch.Size, Enum, type)
_MOST_BYTES = 256 << 20
_MOST_OBJECTS = 1_000_000
_OTHERS = sys.stdlib_module_names | {"torch", "numpy", "zrun_core"}  # whose objects are left alone
_DEEPEST = 8
_EMPTY: tuple[Iterable[Any], ...] = ([], (), "", range(0), {}, set())
_REDUCED: tuple[Any, ...] = (  # iterators that tell where they are
    *(type(iter(each)) for each in _EMPTY),
    *(map, zip, filter, enumerate, reversed),
    *(itertools.count, itertools.cycle, itertools.repeat, itertools.chain, itertools.islice),
    *(itertools.product, itertools.permutations, itertools.combinations, itertools.accumulate),
)
_BASES = (dict, list, set, deque)
_ABSENT = object()


class ClassVariables(tuple[type, ...]):
    """Classes, of which a forward may write what is theirs: `Block.calls += 1`."""

    @classmethod
    def of(cls, values: Iterable[object]) -> ClassVariables:
        """Return the classes of these objects that are the user's."""
        classes: dict[type, None] = {}
        for value in values:
            classes |= dict.fromkeys(each for each in type(value).__mro__ if _is_users(each))
        return cls(classes)


def _is_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _OTHERS


def _class_variables(classes: ClassVariables) -> dict[tuple[type, str], Any]:
    return {
        (cls, key): value
        for cls in classes
        for key, value in vars(cls).items()
        if not (key.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


def _set_class_variables(classes: ClassVariables, values: Mapping[tuple[type, str], Any]) -> None:
    now = _class_variables(classes)
    for cls, key in now.keys() - values.keys():
        delattr(cls, key)
    for (cls, key), value in values.items():
        if now.get((cls, key), _ABSENT) is not value:
            setattr(cls, key, value)


class Part(NamedTuple):
    """An object that may be written in place.

    Attributes:
        value: itself.
        kind: how it is kept.
        state: what it was.
        version: of a tensor.
    """

    value: Any
    kind: _Kind
    state: Any
    version: int = 0


class Content(NamedTuple):
    """What is inside of an attribute: the objects in it, in order."""

    parts: tuple[Part, ...]

    def put_back(self, name: str) -> None:
        """Make each of the objects what it was.

        Args:
            name: of the attribute, for the user.

        Raises:
            JobError: one was written of which there is no copy.
        """
        for part in self.parts:
            part.kind.put_back(part, name)

    def is_same(self, other: Content) -> bool:
        """Return whether these are the same objects as then, with the same in them."""
        return len(self.parts) == len(other.parts) and all(
            now.value is was.value and now.kind.is_same(now, was)
            for now, was in zip(self.parts, other.parts, strict=True)
        )

    def without_graphs(self) -> Content:
        """Return the same, with tensors that hold no graph."""
        return Content(tuple(part.kind.without_graphs(part) for part in self.parts))

    def writes_tensors(self, before: Content | None) -> bool:
        """Return whether a tensor in it was written in place since `before`."""
        known = {id(part.value): part for part in (before.parts if before is not None else ())}
        return any(
            part.kind is _TENSOR and not part.kind.is_same(part, known[id(part.value)])
            for part in self.parts
            if id(part.value) in known
        )

    def counted_on(self, before: Content) -> bool:
        """Return whether a number, a tensor or a generator in it went on since `before`."""
        known = {id(part.value): part for part in before.parts}
        return any(
            part.kind.counts(part, known[id(part.value)])
            for part in self.parts
            if id(part.value) in known
        )


class Walk:
    """Goes through what attributes hold.

    Each object is part of the first attribute that holds it.
    """

    def __init__(self, modules: Iterable[nn.Module], *, enters_modules: bool) -> None:
        """
        Args:
            modules: whose attributes are kept; whoever holds one of them holds nothing by that.
            enters_modules: modules that are not among these are looked into, as in a plain list.
        """
        self._modules = list(modules)
        self._known = {id(module) for module in self._modules}
        self._enters_modules = enters_modules
        self._storages: set[int] | None = None  # of parameters
        self._bytes = 0
        # By id, tensors that are not copied: forwards do not write them.
        self._steady: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a copy of all attributes."""
        self._seen: dict[int, Any] = {}
        self._bytes = 0
        self._storages = None

    def content(self, value: Any) -> Content | None:
        """Return what is inside of a value; None: nothing."""
        if isinstance(value, _ATOMS):
            return None
        with _disable_current_modes():
            parts = tuple(self._parts(value))
        return Content(parts) if parts else None

    def _parts(self, value: Any) -> Iterator[Part]:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if isinstance(each, _ATOMS) or id(each) in self._seen:
                continue
            if len(self._seen) >= _MOST_OBJECTS:
                raise JobError(
                    f"attributes of the model hold more than {_MOST_OBJECTS:,} objects, which "
                    "forwards before training may change: keep data in the dataset, not the model"
                )
            self._seen[id(each)] = each
            kind = self._kind_of(each)
            if kind is None:
                if isinstance(each, tuple | frozenset):
                    waiting += reversed(list(each))
                elif isinstance(each, types.MethodType):
                    waiting.append(each.__self__)
                continue
            part = kind.keep(each, self)
            if part is None:
                continue
            yield part
            waiting += reversed(list(kind.inside(part)))
            if isinstance(each, _BASES) and getattr(each, "__dict__", None) is not None:
                waiting.append(each.__dict__)  # of a class of the user's own

    def _kind_of(self, value: Any) -> _Kind | None:
        if isinstance(value, torch.Tensor):
            return None if isinstance(value, nn.Parameter) else _TENSOR
        if isinstance(value, nn.Module):
            enters = self._enters_modules and id(value) not in self._known
            return _MODULE if enters else None
        for types_of, kind in _KINDS:
            if isinstance(value, types_of):
                return kind
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if isinstance(value, numpy.ndarray):
                return _ARRAY if value.dtype != object else None
            if isinstance(value, numpy.random.Generator):
                return _NUMPY_GENERATOR
            if isinstance(value, numpy.random.BitGenerator | numpy.random.RandomState):
                return _NUMPY_STATE
        if not _is_users(type(value)):
            return _ITERATOR if is_iterator(value) else None
        has_state = hasattr(value, "__dict__") or any(True for _ in _slots(value))
        return _OBJECT if has_state else None

    def leave_out(self, content: Content) -> None:
        """Copy the tensors of a content no more: forwards do not write them."""
        for part in content.parts:
            if part.kind is _TENSOR:
                self._steady[id(part.value)] = part.value

    def may_copy(self, tensor: torch.Tensor) -> bool:
        """Return whether there is room for a copy of a tensor, and count it."""
        if id(tensor) in self._steady or self._bytes + tensor.nbytes > _MOST_BYTES:
            return False
        self._bytes += tensor.nbytes
        return True

    def is_of_parameters(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares its memory with a parameter."""
        if self._storages is None:
            self._storages = {
                param.untyped_storage()._cdata
                for module in self._modules
                for param in dict.values(module._parameters)  # without unsharding it
                if param is not None
            }
        return tensor.untyped_storage()._cdata in self._storages


class _Kind:
    """How a kind of object is kept; this one is kept by its state alone."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        """Return the object as it is now; None: it is not kept."""
        return Part(value, self, self.state(value))

    def state(self, value: Any) -> Any:
        """Return a copy of what it holds."""
        raise NotImplementedError

    def set(self, value: Any, state: Any) -> None:
        """Make it hold what `state` has."""
        raise NotImplementedError

    def inside(self, part: Part) -> Iterable[Any]:
        """Return the objects that it holds."""
        return ()

    def put_back(self, part: Part, name: str) -> None:
        """Make it what it was. `name` is the attribute's that holds it."""
        self.set(part.value, part.state)

    def is_same(self, now: Part, was: Part) -> bool:
        """Return whether it is what it was."""
        return bool(now.state == was.state)

    def without_graphs(self, part: Part) -> Part:
        """Return the same, with tensors that hold no graph."""
        return part

    def counts(self, now: Part, was: Part) -> bool:
        """Return whether it went on from what it was, so that who comes next begins elsewhere."""
        return not self.is_same(now, was)


class _Container(_Kind):
    """A list, dict, set or deque, of whatever class: its items, by identity."""

    def __init__(
        self, items: Callable[[Any], Any], refill: Callable[[Any, Any], None] | None = None
    ) -> None:
        self._items = items
        self._refill = refill

    def state(self, value: Any) -> Any:
        return self._items(value)

    def set(self, value: Any, state: Any) -> None:
        if _are_same(self._items(value), state):
            return  # a subclass may do more when it is filled
        if self._refill is not None:
            self._refill(value, state)
            return
        # By the class below it: that of the user, or of transformers, may forbid it.
        if isinstance(value, dict):
            base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            base.clear(value)
            for key, each in state.items():
                base.__setitem__(value, key, each)
        elif isinstance(value, set):
            set.clear(value)
            set.update(value, state)
        else:
            base = deque if isinstance(value, deque) else list
            base.clear(value)
            base.extend(value, state)

    def inside(self, part: Part) -> Iterable[Any]:
        return part.state.values() if isinstance(part.state, Mapping) else part.state

    def is_same(self, now: Part, was: Part) -> bool:
        return _are_same(now.state, was.state)

    def without_graphs(self, part: Part) -> Part:
        state = part.state
        if isinstance(state, Mapping):
            return part._replace(state={key: leaf(value) for key, value in state.items()})
        return part._replace(state=type(state)(map(leaf, state)))

    def counts(self, now: Part, was: Part) -> bool:
        if not isinstance(now.state, Mapping):
            return False
        return any(
            isinstance(value, int | float) and value != was.state[key]
            for key, value in now.state.items()
            if isinstance(was.state.get(key), int | float)
        )


def _are_same(now: Any, was: Any) -> bool:
    if len(now) != len(was):
        return False
    if isinstance(now, Mapping):
        return list(now) == list(was) and all(
            is_same_value(value, was[key]) for key, value in now.items()
        )
    if isinstance(now, set):
        return bool(now == was)
    return all(is_same_value(*pair) for pair in zip(now, was, strict=True))


def is_same_value(now: Any, was: Any) -> bool:
    """Return whether two values are the same object, or plain and equal."""
    if now is was:
        return True
    return type(now) is type(was) and isinstance(now, PLAIN) and bool(now == was)


def leaf(value: Any) -> Any:
    """Return a value, without its graph if it is a tensor that has one."""
    has_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach() if has_graph else value


def _slots(value: Any) -> Iterator[str]:
    for each in type(value).__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{each.__name__.lstrip('_')}{name}" if _is_private(name) else name


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _fields(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for name in _slots(value):
        own = getattr(value, name, _ABSENT)
        if own is not _ABSENT:
            found[name] = own
    return found


def _set_fields(value: Any, fields: Mapping[str, Any]) -> None:
    slots = set(_slots(value))
    if hasattr(value, "__dict__"):
        own = value.__dict__
        own.clear()
        own.update({key: each for key, each in fields.items() if key not in slots})
    for name in slots:
        if name in fields:
            if getattr(value, name, _ABSENT) is not fields[name]:
                object.__setattr__(value, name, fields[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _fields_of_module(module: Any) -> dict[str, Any]:
    own = vars(module)
    return {k: v for k, v in own.items() if k in _IN_HIDDEN_MODULES or k not in OF_MODULES}


def _set_fields_of_module(module: Any, fields: Mapping[str, Any]) -> None:
    own = vars(module)
    for key in _fields_of_module(module).keys() - fields.keys():
        del own[key]
    own.update(fields)


def _cells(function: Any) -> list[Any]:
    """Return what a function has closed over, and what it holds as attributes."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty
            found.append(_ABSENT)
    return [*found, function.__dict__]


def _set_cells(function: Any, values: list[Any]) -> None:
    for cell, value in zip(function.__closure__ or (), values, strict=False):
        if value is not _ABSENT:
            cell.cell_contents = value


class _Function(_Container):
    """A function of the user's: the variables that it has closed over."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        if str(value.__module__).partition(".")[0] in _OTHERS:
            return None
        return super().keep(value, walk)


class _Tensor(_Kind):
    """A tensor: its values, if it has any that nobody differentiates."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not is_plain or value.is_meta or value.grad_fn is not None or value.is_inference():
            return None
        if value.untyped_storage().nbytes() == 0 or walk.is_of_parameters(value):
            return None
        copy = value.detach().clone() if walk.may_copy(value) else None
        return Part(value, self, copy, value._version)

    def is_same(self, now: Part, was: Part) -> bool:
        if now.version != was.version:
            return False
        # Versions do not count what is written through `.data`.
        has_both = now.state is not None and was.state is not None
        return not has_both or _has_bits_of(now.state, was.state)

    def counts(self, now: Part, was: Part) -> bool:
        if now.state is None or was.state is None:
            return not self.is_same(now, was)
        return not _has_bits_of(now.state, was.state)

    def put_back(self, part: Part, name: str) -> None:
        tensor, state = part.value.detach(), part.state
        if state is None:
            if part.value._version != part.version:
                raise JobError(
                    f"a forward writes in place to {name}, a tensor of {list(tensor.shape)} "
                    f"({format_size(tensor.nbytes)}), which cannot be put back after a forward "
                    f"that is no part of training: of attributes {format_size(_MOST_BYTES)} are "
                    "copied, and of those only that the first forward writes; make it a buffer "
                    "(self.register_buffer)"
                )
            return
        with _disable_current_modes(), torch.no_grad():
            if not _has_bits_of(tensor, state):
                tensor.copy_(state)


def _has_bits_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with _disable_current_modes():
        if torch.equal(one, other):
            return True
        are_not_numbers = one.isnan() & other.isnan()
        return bool(((one == other) | are_not_numbers).all())


class _Array(_Kind):
    """An array of numpy's."""

    def state(self, value: Any) -> Any:
        return value.copy()

    def set(self, value: Any, state: Any) -> None:
        if value.flags.writeable and not self._are_equal(value, state):
            value[...] = state

    def is_same(self, now: Part, was: Part) -> bool:
        return self._are_equal(now.state, was.state)

    @staticmethod
    def _are_equal(one: Any, other: Any) -> bool:
        return one.shape == other.shape and bool(one.tobytes() == other.tobytes())


class _By(_Kind):
    """An object whose state can be read and set, as of a generator."""

    def __init__(self, read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> None:
        self._read = read
        self._write = write

    def state(self, value: Any) -> Any:
        return self._read(value)

    def set(self, value: Any, state: Any) -> None:
        self._write(value, state)

    def is_same(self, now: Part, was: Part) -> bool:
        return _are_equal_states(now.state, was.state)


def _are_equal_states(now: Any, was: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return bool(torch.equal(now, was))
    if isinstance(now, Mapping):
        return now.keys() == was.keys() and all(_are_equal_states(now[k], was[k]) for k in now)
    if isinstance(now, tuple):
        return all(_are_equal_states(*pair) for pair in zip(now, was, strict=True))
    return bool((now == was).all()) if hasattr(now, "all") else bool(now == was)


class _Iterator(_Kind):
    """An iterator: where it is, as far as that can be told."""

    def state(self, value: Any) -> Any:
        return _position(value)

    def put_back(self, part: Part, name: str) -> None:
        if _position(part.value) != part.state:
            raise JobError(
                f"a forward goes on with {name}, an iterator ({type(part.value).__name__}), which "
                "cannot be put back after a forward that is no part of training: keep what it goes "
                "through, and a number that says how far"
            )


def _position(value: Any, depth: int = 0) -> Any:
    """Return what changes when an iterator goes on."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return len(value) if depth else id(value)
    if isinstance(value, types.GeneratorType):
        if value.gi_frame is None:
            return "ended"
        own = value.gi_frame.f_locals.items()
        return value.gi_frame.f_lasti, {k: _position(v, depth + 1) for k, v in own}
    if not is_iterator(value) or depth > _DEEPEST or not isinstance(value, _REDUCED):
        return id(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12: these will be no longer copied
        _, given, *state = value.__reduce__()
    flat = [*given, *state]
    return [_position(each, depth + 1) for each in flat]


def _set_numpy_state(value: Any, state: Any) -> None:
    if hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value.state = state


_TENSOR = _Tensor()
_ARRAY = _Array()
_ITERATOR = _Iterator()
_OBJECT = _Container(_fields, _set_fields)
_MODULE = _Container(_fields_of_module, _set_fields_of_module)
_FUNCTION = _Function(_cells, _set_cells)
_NUMPY_GENERATOR = _By(
    lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)
)
_NUMPY_STATE = _By(
    lambda g: g.get_state() if hasattr(g, "get_state") else g.state, _set_numpy_state
)
_KINDS: tuple[tuple[Any, _Kind], ...] = (
    (torch.Generator, _By(lambda g: g.get_state(), lambda g, state: g.set_state(state))),
    (random.Random, _By(lambda g: g.getstate(), lambda g, state: g.setstate(state))),
    (dict, _Container(dict)),
    (list, _Container(list)),
    (set, _Container(set)),
    (deque, _Container(list)),
    (bytearray, _By(bytes, lambda value, state: value.__setitem__(slice(None), state))),
    (types.FunctionType, _FUNCTION),
    (types.SimpleNamespace | argparse.Namespace | UserDict | UserList, _OBJECT),
    (ClassVariables, _Container(_class_variables, _set_class_variables)),
)


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python's own, which cannot go back."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
