"""A configuration of another tool, key by key: each as the type that it must have.

    source.whole("zero_optimization.stage", "zero.stage") == 2

Nothing that is read by nobody is lost: `leave_the_rest` says of each other key why it is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zrun.job.problems import shown_text, shown_value
from zrun.job.scalars import resolve, write
from zrun.peers.draft import Draft
from zrun_core.errors import JobError

_T = TypeVar("_T")
_MOST = 1e30  # as of numbers in a job
_AUTO = "auto: the Trainer fills it in from its arguments"


class Source:
    """The keys of a configuration, as dotted names.

    Args:
        draft: of the job that is made of it.
        label: stands before keys of a file that another one names.
    """

    def __init__(
        self, path: Path, tool: str, value: Mapping[str, Any], draft: Draft, label: str = ""
    ) -> None:
        self.path = path
        self.draft = draft
        self._tool = tool
        self._value = value
        self._label = label
        self._asked: set[str] = set()

    def whole(self, key: str, to: str) -> int | None:
        """Return a whole number; None: the file does not say.

        Args:
            to: the key of a job that is meant, for messages. So for the other types.
        """
        return self._get(key, to, "a whole number", 2, _as_whole)

    def number(self, key: str, to: str) -> float | None:
        """Return a number, whole or not."""
        return self._get(key, to, "a number", 0.1, _as_number)

    def flag(self, key: str, to: str) -> bool | None:
        """Return true or false."""
        return self._get(key, to, "true or false", True, _as_flag)

    def word(self, key: str, to: str) -> str | None:
        """Return a text."""
        return self._get(key, to, "text", to, _as_word)

    def words(self, key: str, to: str) -> list[str] | None:
        """Return a list of texts. One text is a list too, which commas and blanks divide."""
        return self._get(key, to, "a list of words", [to], _as_words)

    def pair(self, key: str, to: str) -> list[float] | None:
        """Return two numbers."""
        return self._get(key, to, "two numbers", [0.9, 0.95], _as_pair)

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a mapping; an empty one where the file has none."""
        return self._get(key, "", "a mapping", {"enabled": True}, _as_mapping) or {}

    def raw(self, key: str) -> Any:
        """Return a value of any type; None: the file does not say."""
        self._asked.add(key)
        return self._find(key)

    def copy(self, key: str, to: str, kind: str = "whole", note: str = "") -> None:
        """Give the key `to` of the job what the file says, if it does.

        Args:
            kind: the name of the method that reads it.
        """
        value = getattr(self, kind)(key, to)
        if value is not None:
            self.put(to, value, key, note)

    def put(self, to: str, value: Any, key: str, note: str = "") -> None:
        """Give a key of the job a value that `key` means."""
        self.draft.put(to, value, self.named(key), note)

    def leave(self, key: str, why: str) -> None:
        """Say why `key` is not in the job."""
        self._asked.add(key)
        self.draft.leave(self.named(key), why)

    def named(self, key: str) -> str:
        """Return a key as messages and comments have it."""
        return f"{self._label}{shown_text(key)}"

    def error(self, message: str) -> JobError:
        """Return an error of this file."""
        return JobError(f"{self.path}: {message}")

    def leave_the_rest(self, known: Mapping[str, str]) -> None:
        """Say of each key that nobody has read why it is left out.

        Args:
            known: keys without a counterpart, each with why. One may be that of a section, which
                is told once.
        """
        self._leave_below(self._value, "", known)

    def _leave_below(self, value: Mapping[str, Any], above: str, known: Mapping[str, str]) -> None:
        for name, item in value.items():
            key = f"{above}{name}"
            if self.named(key) in self.draft.left:
                continue  # with all below it
            if key in known:
                if _asks_for_something(item):
                    self.leave(key, known[key])
            elif isinstance(item, dict) and self._is_known_below(f"{key}.", known):
                self._leave_below(item, f"{key}.", known)
            elif key not in self._asked and item is not None:
                self.draft.leave(self.named(key), self._unknown(key, known))

    def _is_known_below(self, prefix: str, known: Mapping[str, str]) -> bool:
        return any(key.startswith(prefix) for key in (*self._asked, *known))

    def _unknown(self, key: str, known: Mapping[str, str]) -> str:
        near = difflib.get_close_matches(key, [*self._asked, *known], 1, 0.8)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"not a key of {self._tool} that is known here{hint}"

    def _get(
        self, key: str, to: str, wanted: str, example: Any, convert: Callable[[Any], _T | None]
    ) -> _T | None:
        self._asked.add(key)
        found = self._find(key)
        if found is None:
            return None
        if found == "auto" and to:
            if not self.draft.says(to):
                self.leave(key, f"{_AUTO}; write {to}")
            return None
        value = convert(found)
        if value is None:
            raise self.error(
                f"{self.named(key)}: expected {wanted}, found {shown_value(found)}; write for "
                f"example {key.rpartition('.')[2]}: {write(example)}"
            )
        return value

    def _find(self, key: str) -> Any:
        found: Any = self._value
        above: list[str] = []
        for name in key.split("."):
            if found is None:
                return None
            if not isinstance(found, dict):
                raise self.error(
                    f"{self.named('.'.join(above))}: expected a mapping with {name}, found "
                    f"{shown_value(found)}; write for example {above[-1]}: {{{name}: ...}}"
                )
            above.append(name)
            found = found.get(name)
        return found


def _asks_for_something(value: Any) -> bool:
    """Return whether a value says more than that a thing is off, or not given."""
    if isinstance(value, dict):
        switches = [item for key, item in value.items() if key.startswith("enable")]
        return bool(value) and (not switches or any(map(_asks_for_something, switches)))
    return value not in (None, False, "", "no", [])


def _plain(value: Any) -> Any:
    """Return the number that a text says, such as "1e-4", which YAML 1.1 takes for text."""
    if not isinstance(value, str):
        return value
    try:
        return resolve(value)
    except ValueError:
        return value


def _as_whole(value: Any) -> int | None:
    number = _as_number(value)
    return None if number is None or number != number // 1 else int(number)


def _as_number(value: Any) -> float | None:
    number = _plain(value)
    if type(number) not in (int, float):
        return None
    return number if -_MOST <= number <= _MOST else None  # nan is not either


def _as_flag(value: Any) -> bool | None:
    known = {"true": True, "yes": True, "false": False, "no": False}
    return value if isinstance(value, bool) else known.get(str(value).lower())


def _as_word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _as_words(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    return None


def _as_pair(value: Any) -> list[float] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    numbers = [_as_number(item) for item in value]
    return None if None in numbers else [number for number in numbers if number is not None]


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None
