"""Parameters as the user's code finds them: a module's dictionary that may hand out others.

    for param in model.parameters()        self.head.weight        self.named_parameters()

All of these ask the dictionary of a module. What zrun itself asks for stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# Code that is not the user's, though it may be on the way to theirs.
_TORCH = str(Path(torch.__file__).parent) + "/"
_PACKAGE = Path(__file__).parents[2]
_OURS = f"{_PACKAGE}/"
_MODELS = f"{_PACKAGE}/models/"  # written as a user's
_WHO_LOOKS = tuple(
    str(_PACKAGE / name)
    for name in (
        "zero/wrap/lookups.py",
        "zero/wrap/tiled_linear.py",
        "tensor_parallel/fake_outside.py",
        "tensor_parallel/late_reads.py",
        "tensor_parallel/whole_reads.py",
    )
)


class Lookups(dict[str, Any]):
    """A module's parameters. What `look` returns for a name is found in place of its parameter."""

    def __init__(self, inner: Mapping[str, Any], look: Callable[[str], Any]) -> None:
        """
        Args:
            inner: the module's dictionary before.
            look: None: the parameter is found.
        """
        super().__init__(dict(inner))
        self.inner: Any = inner
        self._look = look

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copy as a plain dictionary: a copied module has no one who looks."""
        return dict, (dict(super().items()),)

    def __getitem__(self, key: str) -> Any:
        found = self._look(key)
        return self.inner[key] if found is None else found

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self.inner[key]

    def pop(self, key: str, *default: Any) -> Any:
        self.inner.pop(key, *default)
        return super().pop(key, *default)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


class WithOthers(Lookups):
    """A module's parameters, and those that another rank has where the user's code asks for all.

    What asks for one by its name finds it without: it is an attribute (`foreign.py`).
    """

    def __init__(
        self,
        inner: Mapping[str, Any],
        others: Mapping[str, Any],
        order: Sequence[str],
        is_shown: Callable[[], bool],
    ) -> None:
        """
        Args:
            others: what stands for them.
            order: names of all, as the module had them.
            is_shown: whether a forward runs, and not what surrounds it, as a hook.
        """
        super().__init__(inner, lambda key: None)
        self._others = others
        self._order = order
        self._is_shown = is_shown

    def items(self) -> Any:
        own = dict(self.inner.items())
        if not self._is_shown() or not is_asked_by_user():
            return list(own.items())
        found = own | dict(self._others)
        known = {key: found[key] for key in self._order if key in found}
        return list({**known, **found}.items())

    def values(self) -> Any:
        return [value for _, value in self.items()]


class WithStandIns(Lookups):
    """A module's buffers, some of which are old: the user's code finds what stands for them."""

    def __init__(
        self, inner: Mapping[str, Any], stand_ins: Mapping[str, Any], hides: Callable[[], bool]
    ) -> None:
        """
        Args:
            hides: whether it does find them now.
        """
        super().__init__(inner, self._stand_in)
        self._stand_ins = stand_ins
        self._hides = hides

    def _stand_in(self, key: str) -> Any:
        if key in self._stand_ins and self._hides() and is_asked_by_user():
            return self._stand_ins[key]
        return None


def is_asked_by_user() -> bool:
    """Return whether the user's code asks, by itself or by what torch does for it.

    It is called by what looks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and file not in _WHO_LOOKS:
            return _is_users(file)
        frame = frame.f_back
    return False


def users_line() -> str:
    """Return the file and line of the innermost code that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and _is_users(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _is_users(file: str) -> bool:
    return not file.startswith(_OURS) or file.startswith(_MODELS)
