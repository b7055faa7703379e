"""Tensors without values: fake tensors that remember what follows from them.

Where a ghost stands in a forward, the operations around it run on fake tensors too, in each
micro-batch: `tokens(x) + positions(y)`. torch computes the shape of such a result in 0.15 ms, even
where it has seen the like. Here the result is remembered by what it depends on: of operations that
make new tensors of such tensors and numbers alone, or write to one of them. All others are torch's.

What is drawn for such a tensor, as where a dropout follows an embedding, is drawn and forgotten:
what the forward draws next is what it is where the tensor has values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zrun_core.errors import UserCodeError
from zrun_core.zero.wrap.fakes import FakeMode
from zrun_core.zero.wrap.lookups import users_line

_NUMBERS = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST_REMEMBERED = 4096  # of a stage, whatever lengths its batches have


class ValuelessMode(FakeMode):
    """The mode of a stage's tensors without values.

    Attributes:
        results: by operation and what it was given, the result and what it was then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Hashable, tuple[Any, Hashable]] = {}
        self._names: dict[int, str] = {}  # by storage, of what nobody may write to
        self._lets_write = False

    def refuse_writes(self, fake: torch.Tensor, name: str) -> None:
        """Refuse what is written to a parameter of another stage: it would be lost."""
        self._names[fake.untyped_storage()._cdata] = name

    @contextmanager
    def letting_write(self) -> Iterator[None]:
        """Let what runs inside write to any of them."""
        before, self._lets_write = self._lets_write, True
        try:
            yield
        finally:
            self._lets_write = before

    def check_write(self, tensor: Any) -> None:
        """Check that an operation may write to a tensor.

        Raises:
            UserCodeError: another stage has it.
        """
        if self._lets_write or not isinstance(tensor, torch.Tensor):
            return
        name = self._names.get(tensor.untyped_storage()._cdata)
        if name is not None:
            raise UserCodeError(
                f"parallel.pp: {name} is written to outside of its module ({users_line()}), on a "
                "stage that does not have it: write to it in the forward of a module that has it, "
                "or by a hook of the job after the step; or write pp: 1"
            )


class Valueless(FakeTensor):
    """A tensor without values."""

    @classmethod
    def of(cls, fake: Any) -> Any:
        """Return a fake tensor as one of this class, and anything else as it is."""
        if type(fake) is FakeTensor:
            fake.__class__ = cls
        return fake

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            _draw_alike(func, args, kwargs)
        effect = _effects.get(func) or _effect_of(func)
        given = None if effect is _Effect.OTHER else _traits((args, *kwargs.items()))
        if effect is not _Effect.MAKES_TENSORS and func._schema.is_mutable:
            _check_writes(args)
        mode = None if given is None else _mode_of(args)
        if mode is None or mode.in_kernel_invocation:
            return cls.of(super().__torch_dispatch__(func, types, args, kwargs))
        key = (func, given)
        result, traits = mode.results.get(key, (None, None))
        if traits is None or traits != _traits(result):  # it may have been written to
            result = super().__torch_dispatch__(func, types, args, kwargs)
            result = tuple(map(cls.of, result)) if isinstance(result, tuple) else cls.of(result)
            if len(mode.results) == _MOST_REMEMBERED:
                mode.results.clear()
            mode.results[key] = (result, _traits(result))
        return args[0] if effect is _Effect.WRITES_FIRST else result


def _draw_alike(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Draw from torch's generators as the operation does on tensors that have values."""

    def with_values(value: Any) -> Any:
        if type(value) is not Valueless:
            return value
        like = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return like.fill_(1)  # a probability, a weight, a spread: of each a good one

    with torch.no_grad():
        func(*map(with_values, args), **{key: with_values(arg) for key, arg in kwargs.items()})


def _check_writes(args: Sequence[Any]) -> None:
    """Check what an operation writes to: its first argument, or the tensors in it.

    Raises:
        UserCodeError: another stage has one of them.
    """
    first = args[0] if args else None
    for tensor in first if isinstance(first, list | tuple) else [first]:
        if type(tensor) is Valueless and isinstance(tensor.fake_mode, ValuelessMode):
            tensor.fake_mode.check_write(tensor)


def _mode_of(args: Sequence[Any]) -> ValuelessMode | None:
    """Return the mode of the first tensor among the arguments of a call."""
    for arg in args:
        first = arg[0] if isinstance(arg, list | tuple) and arg else arg
        if type(first) is Valueless:
            mode = first.fake_mode
            return mode if isinstance(mode, ValuelessMode) else None
    return None


class _Effect(Enum):
    """The effect of an operation."""

    MAKES_TENSORS = "it returns new tensors, and changes none"
    WRITES_FIRST = "it writes values to its first argument, and returns that"
    OTHER = "another one"


_effects: dict[Any, _Effect] = {}


def _effect_of(func: Any) -> _Effect:
    schema = func._schema
    returns, arguments = schema.returns, schema.arguments
    changed = [number for number, each in enumerate(arguments) if each.alias_info is not None]
    effect = _Effect.OTHER
    if not returns or not all(isinstance(each.type, torch.TensorType) for each in returns):
        pass
    elif not changed and all(each.alias_info is None for each in returns):
        effect = _Effect.MAKES_TENSORS
    elif changed == [0] and schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags:
        effect = _Effect.WRITES_FIRST
    _effects[func] = effect
    return effect


def _traits(value: Any) -> Hashable | None:
    """Return all that a result depends on; None: it depends on more than is known here."""
    if type(value) is Valueless:
        if value.requires_grad and torch.is_grad_enabled():
            return None  # autograd would make a result part of its graph
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _NUMBERS) or value is None:
        return type(value), value
    if isinstance(value, list | tuple):
        traits = tuple(map(_traits, value))
        return None if None in traits else traits
    return None
