"""What a rank holds in memory when that runs out, as it tells its launcher: `HeldMemory`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from zrun_core.sizes import format_size

SHOWN = 5  # holders


@dataclass(frozen=True)
class Holder:
    """One thing that holds memory.

    Attributes:
        name: in words.
        kind: of `memory/buffers.py`; "activations", "tensors" of the user's, or "rest".
        planned: bytes by the layouts of the model's units; None: they do not tell.
        place: file and line of the user's code that it belongs to; empty: unknown.
    """

    name: str
    kind: str
    num_bytes: int
    planned: int | None = None
    place: str = ""

    def __str__(self) -> str:
        planned = "" if self.planned is None else f", planned {format_size(self.planned)}"
        place = f" ({self.place})" if self.place else ""
        return f"{self.name}{planned}{place}"


@dataclass(frozen=True)
class Change:
    """A change of a job that lowers memory.

    Attributes:
        key, value: of the job file.
        why: in words.
        saves: bytes, about; None: unknown.
    """

    key: str
    value: str
    why: str
    saves: int | None = None

    def __str__(self) -> str:
        saves = "" if self.saves is None else f", about {format_size(self.saves)} less here"
        return f"{self.key}: {self.value}  # {self.why}{saves}"


@dataclass(frozen=True)
class HeldMemory:
    """What one rank holds.

    Attributes:
        num_bytes: in all: of the process on a CPU, of tensors on a GPU.
        place: where the user's code stands; empty: in none.
        by_kind: bytes by the kinds of `Holder`.
        holders: the largest, largest first.
        changes: of the job, the cheapest first.
    """

    rank: int
    num_bytes: int
    place: str = ""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    changes: tuple[Change, ...] = ()

    def lines(self) -> list[str]:
        """Return the holders, and the changes that would help."""
        found = [f"  {format_size(each.num_bytes):>10}  {each}" for each in self.holders]
        if self.changes:
            found.append("What would help, in the job file, the cheapest first:")
            found += [f"  {change}" for change in self.changes]
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self | None:
        """Read what `to_json` gave as text; None: it is something else."""
        with suppress(ValueError):
            return cls.of_data(json.loads(text))
        return None

    @classmethod
    def of_data(cls, data: Any) -> Self | None:
        """Read what `to_json` gave, as it came through a frame; None: it is something else."""
        with suppress(TypeError, KeyError, ValueError, AttributeError):
            return cls(
                rank=int(data["rank"]),
                num_bytes=int(data["num_bytes"]),
                place=str(data["place"]),
                by_kind={str(kind): int(size) for kind, size in data["by_kind"].items()},
                holders=tuple(Holder(**each) for each in data["holders"]),
                changes=tuple(Change(**each) for each in data["changes"]),
            )
        return None


def testimony_file(run_dir: Path, rank: int) -> Path:
    """Return the file in which a rank says what it holds. Empty: it was not asked."""
    return run_dir / "memory" / f"rank-{rank}.json"
