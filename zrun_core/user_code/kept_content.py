"""What is inside of an attribute, to any depth: kept, compared, and put back in place.

    self.state = {"n": {"calls": 0}}      a dict, a dict; numbers are part of what holds them
    self.ema = torch.zeros(1)             a tensor that forward may write in place
    self.rng = np.random.default_rng(3)   a generator, by its position
    self.counter = Counter()              an object of the user's own: what its `__dict__` holds

Objects stay the same ones, whoever else holds them; each is kept once. Left out are

- parameters and buffers, and what shares their memory: others look after them
- objects of Python's library and of torch's
- data: memory maps, datasets, samplers, loaders, and trainers of other packages, which hold them
- threads and processes, objects that hold one, and deques beside one: they fill meanwhile
- what cannot be read

[Note: how much is copied]
Tensors and arrays up to `MOST_BYTES` in all. Of those beyond it is seen whether they were written,
which nothing can undo then: that is an error. So is an iterator that was advanced. Of one attribute
the `_MOST_OBJECTS` objects that are nearest are kept: data lies deep, counters do not.
"""

from __future__ import annotations

import mmap
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset, Sampler

from zrun_core.errors import JobError
from zrun_core.user_code.object_kinds import (
    ARRAY,
    ATOM_TYPES,
    ATOMS,
    BASES,
    ITERATOR,
    KINDS,
    MODULE,
    MOST_BYTES,
    NUMPY_GENERATOR,
    NUMPY_STATE,
    OBJECT,
    TENSOR,
    WORKERS,
    Container,
    Kind,
    Part,
    are_atoms,
    is_iterator,
    is_users,
    memory_of,
    slots_of,
)

_MOST_OBJECTS = 50_000  # of one attribute
_MANY = 1_000  # objects or items of an attribute that takes time to go through
_OF_TRAINERS = frozenset(
    {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed"}
    | {"datasets", "wandb"}
)
_DATA = (Dataset, Sampler, DataLoader)


class Content(NamedTuple):
    """What is inside of an attribute: the objects in it, those nearest first."""

    parts: tuple[Part, ...]

    def put_back(self, name: str) -> None:
        """Make each of the objects what it was.

        Args:
            name: of the attribute, for the user.

        Raises:
            JobError: one was written of which there is no copy.
        """
        for value, kind, mark, state in self.parts:
            if state is not None:
                kind.set(value, state)
            elif kind.mark(value) != mark:
                raise JobError(kind.refusal(value, name))

    def is_same(self, other: Content) -> bool:
        """Return whether these are the same objects as then, with the same in them."""
        return len(self.parts) == len(other.parts) and all(
            now.value is was.value and now.is_same(was)
            for now, was in zip(self.parts, other.parts, strict=True)
        )

    @property
    def items(self) -> int:
        """How many objects there are, and items in them."""
        sizes = (part.mark for part in self.parts if isinstance(part.kind, Container))
        return len(self.parts) + sum(size or 0 for size in sizes)

    def marked(self) -> Content:
        """Return the same objects as they are now, of which none is copied."""
        parts = self.parts
        return Content(tuple(Part(v, kind, kind.mark(v), None) for v, kind, *_ in parts))

    def without_graphs(self) -> Content:
        """Return the same, with tensors that hold no graph."""
        return Content(tuple(part.kind.without_graphs(part) for part in self.parts))

    def writes_tensors(self, before: Content | None) -> bool:
        """Return whether a tensor in it was written in place since `before`."""
        return any(now.kind is TENSOR and not now.is_same(was) for now, was in self._since(before))

    def counted_on(self, before: Content) -> bool:
        """Return whether a number, a tensor or a generator in it went on since `before`."""
        return any(now.kind.counts(now, was) for now, was in self._since(before))

    def _since(self, before: Content | None) -> Iterator[tuple[Part, Part]]:
        known = {id(part.value): part for part in (before.parts if before is not None else ())}
        for part in self.parts:
            if id(part.value) in known:
                yield part, known[id(part.value)]


class Walk:
    """Goes through what attributes hold.

    Each object is part of the first attribute that holds it.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, enters_modules: bool, most_bytes: int | None
    ) -> None:
        """
        Args:
            modules: whose attributes are kept; whoever holds one of them holds nothing by that.
            enters_modules: modules that are not among these are looked into, as in a plain list.
            most_bytes: of tensors and arrays that are copied; None: `MOST_BYTES`.
        """
        self._modules = list(modules)
        self._known = {id(module) for module in self._modules}
        self._enters_modules = enters_modules
        self._most_bytes = most_bytes
        self._storages: set[int] | None = None  # of parameters and buffers
        self._bytes = 0
        self._seen: set[int] = set()
        # By id, of what forwards do not write: tensors that are not copied, and attributes of many
        # objects, which are not gone through.
        self._steady: dict[int, torch.Tensor] = {}
        self._left: dict[int, tuple[Any, Content]] = {}

    def begin(self) -> None:
        """Begin a copy of all attributes."""
        self._bytes = 0
        self._storages = None
        self._seen = {id(part.value) for _, left in self._left.values() for part in left.parts}

    def end(self) -> None:
        """Forget what the copy has gone through."""
        self._seen = set()

    def content(self, value: Any) -> Content | None:
        """Return what is inside of a value; None: nothing."""
        if type(value) in ATOM_TYPES:
            return None
        if id(value) in self._left:
            return self._left[id(value)][1].marked()
        with _disable_current_modes():
            parts = tuple(self._parts(value))
        return Content(parts) if parts else None

    def _parts(self, value: Any) -> Iterator[Part]:
        waiting = deque([value])  # those nearest first
        last = len(self._seen) + _MOST_OBJECTS
        while waiting and len(self._seen) < last:
            each = waiting.popleft()
            if id(each) in self._seen or type(each) in ATOM_TYPES:
                continue
            self._seen.add(id(each))
            if type(each) is tuple:
                _add(waiting, each)
                continue
            try:
                part = self._part(each, waiting)
            except Exception:  # as of a dead weak reference, and of whatever users' classes do
                continue
            if part is not None:
                yield part

    def _part(self, value: Any, waiting: deque[Any]) -> Part | None:
        """Return an object as it is now; None: it is not kept. What is in it waits."""
        if isinstance(value, ATOMS):
            return None
        kind = self._kind_of(value)
        if kind is None:
            if isinstance(value, tuple | frozenset):
                _add(waiting, value)
            elif isinstance(value, types.MethodType):
                waiting.append(value.__self__)
            return None
        part = kind.keep(value, self)
        if part is not None:
            _add(waiting, kind.inside(part))
            if isinstance(value, BASES) and getattr(value, "__dict__", None) is not None:
                waiting.append(value.__dict__)  # of a class of the user's own
        return part

    def _kind_of(self, value: Any) -> Kind | None:
        if isinstance(value, torch.Tensor):
            return None if isinstance(value, nn.Parameter) else TENSOR
        if isinstance(value, nn.Module):
            enters = self._enters_modules and id(value) not in self._known
            return MODULE if enters else None
        if isinstance(value, (*_DATA, *WORKERS)):
            return None
        for types_of, kind in KINDS:
            if isinstance(value, types_of):
                return kind
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if isinstance(value, numpy.ndarray):
                return None if value.dtype.hasobject or _is_mapped(value) else ARRAY
            if isinstance(value, numpy.random.Generator):
                return NUMPY_GENERATOR
            if isinstance(value, numpy.random.BitGenerator | numpy.random.RandomState):
                return NUMPY_STATE
        if not is_users(type(value)):
            return ITERATOR if is_iterator(value) else None
        if any(_is_of_trainers(each) for each in type(value).__mro__):
            return None
        has_state = hasattr(value, "__dict__") or any(True for _ in slots_of(value))
        return OBJECT if has_state else None

    def leave_out(self, value: Any, content: Content) -> None:
        """Keep of an attribute only marks, as far as that saves time: forwards do not write it."""
        for part in content.parts:
            if part.kind in (TENSOR, ARRAY):
                self._steady[id(part.value)] = part.value
        if content.items > _MANY:
            tensors = [each for each in content.parts if each.kind is TENSOR]
            others = [each for each in content.parts if isinstance(each.kind, Container)]
            marked = Content((*tensors, *others[:_MANY])).marked()  # which holds no copies
            self._left[id(value)] = (value, marked)

    def is_steady(self, value: Any) -> bool:
        """Return whether forwards do not write a tensor or an array."""
        return id(value) in self._steady

    def may_copy(self, size: int) -> bool:
        """Return whether there is room for a copy of so many bytes, and count it."""
        most = MOST_BYTES if self._most_bytes is None else self._most_bytes
        if self._bytes + size > most:
            return False
        self._bytes += size
        return True

    def is_of_modules(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares its memory with a parameter or a buffer."""
        if self._storages is None:
            self._storages = {
                memory_of(each)
                for module in self._modules
                # Without unsharding any.
                for each in (*dict.values(module._parameters), *module._buffers.values())
            }
        return memory_of(tensor) in self._storages


def _add(waiting: deque[Any], items: Collection[Any]) -> None:
    """Have objects wait, if there are any among these."""
    if not are_atoms(items):
        waiting.extend(items)


def _is_of_trainers(cls: type) -> bool:
    name = cls.__module__
    return name.partition(".")[0] in _OF_TRAINERS or name == "transformers.trainer"


def _is_mapped(array: Any) -> bool:
    """Return whether an array, or that of which it is a view, lies in a file."""
    while array is not None:
        if isinstance(array, mmap.mmap):
            return True
        array = getattr(array, "base", getattr(array, "obj", None))  # `obj`: of a memory view
    return False
