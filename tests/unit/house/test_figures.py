"""The figures of the house are counted as their script says."""

from __future__ import annotations

from pathlib import Path

from figures import HOUSE, PACKAGES, Figures, attributes_of, by_room, figures_of, table

SOURCE = '''"""A module.

Of three lines.
"""

LIMIT = 3  # a comment


class Unit:
    """A unit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = [each for each in range(size) if each and each < LIMIT]

    def choose(self) -> int:
        if self.left or not self.size:
            return 1 if self.size else 2
        for each in self.left:
            self.seen = each
        return 0
'''


def test_docstrings_and_comments_are_no_code() -> None:
    found = figures_of(SOURCE)
    assert (found.files, found.lines, found.code, found.docstrings) == (1, 21, 11, 5)
    assert figures_of(SOURCE.replace("  # a comment", "")).tokens == found.tokens


def test_decisions_are_statements_that_choose_and_inline_ones() -> None:
    found = figures_of(SOURCE)
    assert found.inline == 4  # a condition, `and`, `or`, and `1 if ... else 2`
    assert found.decisions == found.inline + 2
    assert found.statements == 11


def test_attributes_are_what_a_class_gives_itself() -> None:
    assert attributes_of(SOURCE, "Unit") == ({"size", "left", "seen"}, {"choose"})


def test_each_module_is_in_one_room() -> None:
    rooms = by_room([HOUSE / name for name in PACKAGES])
    modules = [path for name in PACKAGES for path in (HOUSE / name).rglob("*.py")]
    assert sum(rooms.values(), Figures()).files == len(modules)
    assert len(table(rooms).splitlines()) == 2 + len(rooms)
    assert all(Path(HOUSE, room).is_dir() for room in rooms)
