"""What every row of the panel needs: what is known beforehand, how much room there is, colours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

LABEL = 9  # columns
GAP = "  "  # between two values
# Okabe and Ito's colours, told apart by any eye; words and letters carry the meaning without them.
GOOD, ALERT, QUIET = "#56B4E9", "#E69F00", "grey62"


@dataclass(frozen=True)
class Facts:
    """What is known before the first event.

    Attributes:
        hosts: of each rank.
    """

    name: str
    run_id: str
    hosts: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    def rank(self, number: int) -> str:
        """Return `rank 3`, or `rank 3 on n01` where there are several hosts."""
        host = f" on {self.hosts[number]}" if len(set(self.hosts)) > 1 else ""
        return f"rank {number}{host}"


@dataclass(frozen=True)
class PanelSpace:
    """What a row may fill: `width` columns beside its label, on at most `height` lines."""

    width: int
    height: int
    ascii_only: bool = False


def packed(fields: Iterable[Text | str], width: int, gap: str = GAP) -> list[Text]:
    """Put values side by side on as few lines as they need.

    One that does not fit on a line by itself is broken between its words.
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
