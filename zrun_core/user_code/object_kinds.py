"""How each kind of object that an attribute may hold is kept, compared and put back in place."""

from __future__ import annotations

import argparse
import io
import itertools
import operator
import random
import sys
import types
import warnings
import zlib
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from enum import Enum
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from zrun_core.user_code.kept_content import Walk


PLAIN = (bool, int, float, str, bytes)
ATOMS = (*PLAIN, type(None), complex, torch.dtype, torch.device, torch.Size, Enum, type)
ATOM_TYPES = frozenset({*PLAIN, type(None), complex})
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, hooks, modules
WORKERS = (Thread, Executor, BaseProcess)
_IN_HIDDEN_MODULES = frozenset({"_buffers", "_modules", "training"})  # of what nobody trains
MOST_BYTES = 256 << 20
_MOST_ITEMS = 1_000_000  # of one list or dict
_MOST_READ = 64 << 20  # bytes of an array that is not copied, by which it is known again
_OTHERS = sys.stdlib_module_names | {"torch", "numpy", "zrun_core"}  # whose objects are left alone
_DEEPEST = 8
_EMPTY: tuple[Iterable[Any], ...] = ([], (), "", range(0), {}, set())
_REDUCED: tuple[Any, ...] = (  # iterators that tell where they are
    *(type(iter(each)) for each in _EMPTY),
    *(map, zip, filter, enumerate, reversed),
    *(itertools.count, itertools.cycle, itertools.repeat, itertools.chain, itertools.islice),
    *(itertools.product, itertools.permutations, itertools.combinations, itertools.accumulate),
)
BASES: tuple[Any, ...] = (dict, list, set, deque)
_ABSENT = object()


class ClassVariables(tuple[type, ...]):
    """Classes, of which a forward may write what is theirs: `Block.calls += 1`."""

    @classmethod
    def of(cls, values: Iterable[object]) -> ClassVariables:
        """Return the classes of these objects that are the user's."""
        classes: dict[type, None] = {}
        for value in values:
            classes |= dict.fromkeys(each for each in type(value).__mro__ if is_users(each))
        return cls(classes)


def is_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _OTHERS


def _class_variables(classes: ClassVariables) -> dict[str, Any]:
    """Return what classes have, by the number of the class and the name: "0.calls"."""
    return {
        f"{number}.{key}": value
        for number, cls in enumerate(classes)
        for key, value in vars(cls).items()
        if not (key.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


def _set_class_variables(classes: ClassVariables, values: Mapping[str, Any]) -> None:
    now = _class_variables(classes)
    for name in now.keys() - values.keys():
        number, _, key = name.partition(".")
        delattr(classes[int(number)], key)
    for name, value in values.items():
        if now.get(name, _ABSENT) is not value:
            number, _, key = name.partition(".")
            setattr(classes[int(number)], key, value)


class Part(NamedTuple):
    """An object that may be written in place.

    Attributes:
        value: itself.
        kind: how it is kept.
        mark: what is another once it was written, as far as that is seen without a copy.
        state: a copy of what it holds; None: there is none.
    """

    value: Any
    kind: Kind
    mark: Any
    state: Any

    def is_same(self, was: Part) -> bool:
        """Return whether the object is what it was."""
        if self.mark != was.mark:
            return False
        if self.state is None or was.state is None:
            return True
        return self.kind.are_equal(self.state, was.state)


def memory_of(tensor: torch.Tensor | None) -> int:
    """Return what tensors that share their memory have in common; 0: it has none."""
    try:
        return 0 if tensor is None else tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # as of a sparse one
        return 0


class Kind:
    """How a kind of object is kept; this one is copied whatever its size.

    Attributes:
        instead: what the user may do about one that is not copied.
    """

    instead = "write it in the first forward too, or not at all"

    def keep(self, value: Any, walk: Walk) -> Part | None:
        """Return the object as it is now; None: it is not kept."""
        return Part(value, self, self.mark(value), self.state(value))

    def mark(self, value: Any) -> Any:
        """Return what is another once it was written; None: nothing is known."""
        return None

    def state(self, value: Any) -> Any:
        """Return a copy of what it holds."""
        raise NotImplementedError

    def set(self, value: Any, state: Any) -> None:
        """Make it hold what `state` has."""
        raise NotImplementedError

    def are_equal(self, now: Any, was: Any) -> bool:
        """Return whether two copies are."""
        return bool(now == was)

    def inside(self, part: Part) -> Collection[Any]:
        """Return the objects that it holds."""
        return ()

    def held(self, part: Part) -> Iterator[tuple[Any, Any, Any]]:
        """Return each object in it, where another can take its place, and by which key."""
        for each in self.inside(part):
            yield None, None, each

    def without_graphs(self, part: Part) -> Part:
        """Return the same, with tensors that hold no graph."""
        return part

    def counts(self, now: Part, was: Part) -> bool:
        """Return whether it went on from what it was, so that who comes next begins elsewhere."""
        return not now.is_same(was)

    def refusal(self, value: Any, name: str) -> str:
        """Say that it was written and cannot be put back. `name` is the attribute's."""
        return (
            f"a forward writes in place to {name}, {self.words(value)}, which cannot be put back "
            "after a forward that is no part of training: of attributes "
            f"{format_size(MOST_BYTES)} are copied, and of those only what the first forward "
            f"writes; {self.instead}"
        )

    def words(self, value: Any) -> str:
        """Return what it is, for the user."""
        return f"a {type(value).__name__}"


class Container(Kind):
    """A list, dict, set or deque, of whatever class: its items, by identity."""

    instead = "change it in the first forward too, or keep data in the dataset, not the model"

    def __init__(
        self, items: Callable[[Any], Any], refill: Callable[[Any, Any], None] | None = None
    ) -> None:
        self._items = items
        self._refill = refill

    def keep(self, value: Any, walk: Walk) -> Part | None:
        mark = self.mark(value)
        is_huge = mark is not None and mark > _MOST_ITEMS
        return Part(value, self, mark, None if is_huge else self.state(value))

    def mark(self, value: Any) -> Any:
        for base in BASES:
            if isinstance(value, base):
                return base.__len__(value)
        return None

    def state(self, value: Any) -> Any:
        return self._items(value)

    def set(self, value: Any, state: Any) -> None:
        if self.are_equal(self._items(value), state):
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

    def inside(self, part: Part) -> Collection[Any]:
        if part.state is None:
            return ()
        return part.state.values() if isinstance(part.state, Mapping) else part.state

    def are_equal(self, now: Any, was: Any) -> bool:
        if isinstance(now, set):
            return bool(now == was)
        if isinstance(now, Mapping):
            return _are_same(now, was) and _are_same(now.values(), was.values())
        return _are_same(now, was)

    def held(self, part: Part) -> Iterator[tuple[Any, Any, Any]]:
        value, state = part.value, part.state
        if isinstance(value, list | deque) and state is not None:
            yield from ((value, place, each) for place, each in enumerate(state))
        elif isinstance(value, dict) and state is not None:
            yield from ((value, key, each) for key, each in state.items())
        elif isinstance(state, Mapping) and hasattr(value, "__dict__"):
            own = vars(value)
            for key, each in state.items():
                yield (own if key in own else None), key, each
        else:
            yield from super().held(part)

    def without_graphs(self, part: Part) -> Part:
        state = part.state
        if state is None or are_atoms(self.inside(part)):
            return part
        if isinstance(state, Mapping):
            return part._replace(state={key: leaf(value) for key, value in state.items()})
        return part._replace(state=type(state)(map(leaf, state)))

    def counts(self, now: Part, was: Part) -> bool:
        if not (isinstance(now.state, Mapping) and isinstance(was.state, Mapping)):
            return False
        return any(
            is_a(value, int, float) and value != was.state[key]
            for key, value in now.state.items()
            if is_a(was.state.get(key), int, float)
        )

    def words(self, value: Any) -> str:
        return f"a {type(value).__name__} of {len(value):,} items"


def _are_same(now: Collection[Any], was: Collection[Any]) -> bool:
    """Return whether the items are the same in order. By identity: those of users may not equal."""
    if len(now) != len(was):
        return False
    return all(map(operator.is_, now, was)) or all(map(is_same_value, now, was))


def _items_of_dict(value: Any) -> dict[Any, Any]:
    """Return a copy that does not run what a class of the user's own does when it is read."""
    return dict(OrderedDict.items(value)) if isinstance(value, OrderedDict) else dict.copy(value)


def are_atoms(items: Iterable[Any]) -> bool:
    """Return whether nothing in these can be written."""
    return ATOM_TYPES.issuperset(map(type, items))


def is_same_value(now: Any, was: Any) -> bool:
    """Return whether two values are the same object, or plain and equal."""
    if now is was:
        return True
    return type(now) is type(was) and isinstance(now, PLAIN) and bool(now == was)


def is_a(value: Any, *types_of: type) -> bool:
    """Return whether a value is an instance, by its own type: a dead reference has that."""
    return issubclass(type(value), types_of)


def leaf(value: Any) -> Any:
    """Return a value, without its graph if it is a tensor that has one."""
    has_graph = is_a(value, torch.Tensor) and value.grad_fn is not None
    return value.detach() if has_graph else value


def slots_of(value: Any) -> Iterator[types.MemberDescriptorType]:
    """Return the slots of a user's object, also those that a property of its class hides."""
    for cls in filter(is_users, type(value).__mro__):
        for each in vars(cls).values():
            if isinstance(each, types.MemberDescriptorType):
                yield each


def _fields(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = dict(getattr(value, "__dict__", {}))
    for slot in slots_of(value):
        try:
            found[slot] = slot.__get__(value)
        except AttributeError:  # it is empty
            continue
    return found


def _set_fields(value: Any, fields: Mapping[Any, Any]) -> None:
    if hasattr(value, "__dict__"):
        own = value.__dict__
        own.clear()
        own.update({key: each for key, each in fields.items() if isinstance(key, str)})
    now = _fields(value)
    for slot in slots_of(value):
        if slot in fields:
            slot.__set__(value, fields[slot])
        elif slot in now:
            slot.__delete__(value)


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


class _Object(Container):
    """An object of the user's: what its `__dict__` and its slots hold, but no thread."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        part = super().keep(value, walk)
        is_at_work = part is not None and any(is_a(x, *WORKERS) for x in self.inside(part))
        return None if is_at_work else part


class _Function(Container):
    """A function of the user's: the variables that it has closed over."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        if str(value.__module__).partition(".")[0] in _OTHERS:
            return None
        return super().keep(value, walk)


class _Tensor(Kind):
    """A tensor: its values, if it has any that nobody differentiates."""

    instead = "make it a buffer (self.register_buffer)"

    def keep(self, value: Any, walk: Walk) -> Part | None:
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return None
        if value.is_meta or value.grad_fn is not None or value.is_inference():
            return None
        if value.untyped_storage().nbytes() == 0 or walk.is_of_modules(value):
            return None
        is_copied = not walk.is_steady(value) and walk.may_copy(value.nbytes)
        return Part(value, self, self.mark(value), self.state(value) if is_copied else None)

    def mark(self, value: Any) -> Any:
        return value._version

    def state(self, value: Any) -> Any:
        return _once(value).clone()

    def set(self, value: Any, state: Any) -> None:
        own = _once(value)
        with _disable_current_modes(), torch.no_grad():
            if not self.are_equal(own, state):
                own.copy_(state)

    def are_equal(self, now: Any, was: Any) -> bool:  # what `.data` writes counts in no version
        if now.shape != was.shape or now.dtype != was.dtype:
            return False
        with _disable_current_modes():
            return torch.equal(_bits(now), _bits(was))

    def counts(self, now: Part, was: Part) -> bool:
        if now.state is None or was.state is None:
            return not now.is_same(was)
        return not self.are_equal(now.state, was.state)

    def words(self, value: Any) -> str:
        return f"a tensor of {list(value.shape)} ({format_size(value.nbytes)})"


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph, and each value once where it was expanded."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: those of what is not a number are equal."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # also where there is but one value
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


class _Array(Kind):
    """An array of numpy's."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        if value.nbytes == 0 or walk.is_steady(value):
            return None
        if walk.may_copy(value.nbytes):
            return Part(value, self, None, self.state(value))
        return Part(value, self, self.mark(value), None)

    def mark(self, value: Any) -> Any:
        """Return a sum of its bytes, or of as many as are read in a moment."""
        step = -(-value.nbytes // _MOST_READ)
        some = value.reshape(-1)[::step] if value.flags.c_contiguous else value.flat[::step]
        return zlib.crc32(some.tobytes())

    def state(self, value: Any) -> Any:
        return value.copy()

    def set(self, value: Any, state: Any) -> None:
        if value.flags.writeable and not self.are_equal(value, state):
            value[...] = state

    def are_equal(self, now: Any, was: Any) -> bool:
        if now.shape != was.shape or now.dtype != was.dtype:
            return False
        one, other = (each.reshape(-1).view("u1") for each in (now, was))
        return bool((one == other).all())

    def words(self, value: Any) -> str:
        return f"an array of {list(value.shape)} ({format_size(value.nbytes)})"


class _By(Kind):
    """An object whose state can be read and set, as of a generator."""

    def __init__(self, read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> None:
        self._read = read
        self._write = write

    def state(self, value: Any) -> Any:
        return self._read(value)

    def set(self, value: Any, state: Any) -> None:
        self._write(value, state)

    def are_equal(self, now: Any, was: Any) -> bool:
        return _are_equal_states(now, was)


def _are_equal_states(now: Any, was: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return bool(torch.equal(now, was))
    if isinstance(now, Mapping):
        return now.keys() == was.keys() and all(_are_equal_states(now[k], was[k]) for k in now)
    if isinstance(now, tuple):
        return all(_are_equal_states(*pair) for pair in zip(now, was, strict=True))
    return bool((now == was).all()) if hasattr(now, "all") else bool(now == was)


class _Iterator(Kind):
    """An iterator: where it is, as far as that can be told."""

    def keep(self, value: Any, walk: Walk) -> Part | None:
        return Part(value, self, self.mark(value), None)

    def mark(self, value: Any) -> Any:
        return _position(value)

    def refusal(self, value: Any, name: str) -> str:
        return (
            f"a forward goes on with {name}, an iterator ({type(value).__name__}), which "
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


TENSOR = _Tensor()
ARRAY = _Array()
ITERATOR = _Iterator()
OBJECT = _Object(_fields, _set_fields)
MODULE = Container(_fields_of_module, _set_fields_of_module)
FUNCTION = _Function(_cells, _set_cells)
NUMPY_GENERATOR = _By(
    lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)
)
NUMPY_STATE = _By(lambda g: g.get_state() if hasattr(g, "get_state") else g.state, _set_numpy_state)
KINDS: tuple[tuple[Any, Kind], ...] = (
    (torch.Generator, _By(lambda g: g.get_state(), lambda g, state: g.set_state(state))),
    (random.Random, _By(lambda g: g.getstate(), lambda g, state: g.setstate(state))),
    (dict, Container(_items_of_dict)),
    (list, Container(list)),
    (set, Container(set)),
    (deque, Container(list)),
    (bytearray, _By(bytes, lambda value, state: value.__setitem__(slice(None), state))),
    (types.FunctionType, FUNCTION),
    (types.SimpleNamespace | argparse.Namespace | UserDict | UserList, OBJECT),
    (ClassVariables, Container(_class_variables, _set_class_variables)),
)


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python's own, which cannot go back."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
