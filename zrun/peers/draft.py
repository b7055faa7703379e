"""A job that is being made of a configuration: its keys, their origins, what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zrun.job.problems import shown_value
from zrun_core.errors import JobError


@dataclass(frozen=True)
class Written:
    """A value of the job.

    Attributes:
        value: as the job has it.
        origin: the key of the configuration that means it; empty: none does.
        note: what a reader of the job should know of it; may be empty.
    """

    value: Any
    origin: str
    note: str = ""

    @property
    def comment(self) -> str:
        """What stands beside the value in the job file."""
        return ": ".join(part for part in (self.origin, self.note) if part)


@dataclass
class Draft:
    """A job under way.

    Attributes:
        file: of the configuration, for messages.
        ranks: that train, where that is known.
        keys: of the job, by dotted name.
        left: keys of the configuration without a counterpart, each with why.
    """

    file: str
    ranks: int | None = None
    keys: dict[str, Written] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, origin: str, note: str = "") -> None:
        """Give a key of the job its value.

        Raises:
            JobError: another key of the configuration has given it another one.
        """
        earlier = self.keys.get(key)
        if earlier is not None and earlier.value != value:
            raise JobError(
                f"{self.file}: {earlier.origin} and {origin} contradict each other: {key} would "
                f"be both {shown_value(earlier.value)} and {shown_value(value)}; keep one of them"
            )
        if earlier is None:
            self.keys[key] = Written(value, origin, note)

    def leave(self, origin: str, why: str) -> None:
        """Say why a key of the configuration is not in the job. The first reason counts."""
        self.left.setdefault(origin, why)

    @property
    def replicas(self) -> int | None:
        """Ranks that have samples of their own; None: it is not known how many train."""
        if self.ranks is None:
            return None
        axes = (self.value("parallel.tp") or 1) * (self.value("parallel.pp") or 1)
        return max(1, self.ranks // axes)

    def value(self, key: str) -> Any:
        """Return the value of a key of the job; None: it has none."""
        written = self.keys.get(key)
        return None if written is None else written.value

    def says(self, key: str) -> bool:
        """Return whether the job has a value of `key`, or of a key below it."""
        return any(known == key or known.startswith(f"{key}.") for known in self.keys)


def tree(keys: Mapping[str, Written]) -> dict[str, Any]:
    """Return the keys of a job as nested mappings, whose leaves are values with their origins."""
    top: dict[str, Any] = {}
    for key, written in keys.items():
        *above, last = key.split(".")
        below = top
        for name in above:
            below = below.setdefault(name, {})
        below[last] = written
    return top


def plain(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a tree with bare values."""
    for name, item in found.items():
        yield name, item.value if isinstance(item, Written) else dict(plain(item))
