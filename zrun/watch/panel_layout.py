"""The common ground of the panel's rows: facts of the run, space, colours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

LABEL = 9  # columns
GAP = "  "  # between two values
# Okabe and Ito's colours, told apart by any eye; words and letters carry the meaning without them.
GOOD = "#56B4E9"
ALERT = "#E69F00"
QUIET = "grey62"


@dataclass(frozen=True)
class Facts:
    """A run as it is known before its first event.

    Attributes:
        hosts: of each rank.
        places: of each rank along the axes, as in "pp 1 tp 0"; none where all are data-parallel.
        is_script: its ranks run a script, which may never tell of a step.
    """

    name: str
    run_id: str
    hosts: tuple[str, ...]
    places: tuple[str, ...] = ()
    is_script: bool = False

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    def rank(self, number: int) -> str:
        """Return `rank 3`, or `rank 3 on n01 (pp 1 tp 0)` with several hosts and axes."""
        name = f"rank {number}"
        if len(set(self.hosts)) > 1:
            name += f" on {self.hosts[number]}"
        return f"{name} ({self.places[number]})" if self.places else name


@dataclass(frozen=True)
class PanelSpace:
    """The space of a row: `width` columns beside its label, on at most `height` lines."""

    width: int
    height: int
    ascii_only: bool = False


def packed(fields: Iterable[Text | str], width: int, gap: str = GAP) -> list[Text]:
    """Put values side by side on as few lines as they need.

    Args:
        fields: the values. One that does not fit on a line by itself is broken between its words.
        width: of a line, in columns.
    """
    lines: list[Text] = []
    for field in fields:
        added = field if isinstance(field, Text) else Text(field)
        if lines and len(lines[-1]) + len(gap) + len(added) <= width:
            lines[-1].append(gap).append_text(added)
        elif len(added) > width and " " in added.plain:
            lines += packed(added.split(" "), width, " ")
        else:
            lines.append(added.copy())
    return lines
