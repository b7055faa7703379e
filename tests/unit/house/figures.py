"""Count the house: lines, tokens, docstrings and decisions, as a whole and by room.

    python tests/unit/house/figures.py [FOLDER ...]

prints them of `zrun` and `zrun_core`, or of other folders, such as an installed package. Code lines
and tokens are those without docstrings, comments and blank lines. A decision is a statement that
chooses or repeats (`if`, `for`, `while`, a case, a handler), or an inline one: `a if b else c`,
each `and` and `or`, a condition in a comprehension.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[3]
PACKAGES = ("zrun", "zrun_core")
PLANNER = ("zrun/estimate", "zrun_core/plan")
UNIT = "zrun_core/zero/unit/flat_unit.py"
_NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_CHOOSES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """Sums over files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    tokens: int = 0
    docstrings: int = 0
    statements: int = 0
    decisions: int = 0
    inline: int = 0

    def __add__(self, other: Figures) -> Figures:
        names = [field.name for field in fields(self)]
        return Figures(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def row(self) -> tuple[str, ...]:
        """Its cells in the table."""
        per_100_lines = 100 * self.docstrings / max(self.code, 1)
        per_100 = 100 / max(self.statements, 1)
        return (
            f"{self.files:,}",
            f"{self.lines:,}",
            f"{self.code:,}",
            f"{self.tokens:,}",
            f"{per_100_lines:.0f}",
            f"{per_100 * self.decisions:.0f}",
            f"{per_100 * self.inline:.0f}",
        )


HEAD = ("files", "lines", "code lines", "tokens", "docstrings", "decisions", "inline")


def figures_of(source: str) -> Figures:
    """Count a module."""
    tree = ast.parse(source)
    of_docstrings = {line for first, last in docstrings(tree) for line in range(first, last + 1)}
    code: set[int] = set()
    num_tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NOT_CODE or token.start[0] in of_docstrings:
            continue
        num_tokens += 1
        code |= set(range(token.start[0], token.end[0] + 1))
    counted = Counter(kind for node in ast.walk(tree) for kind in _kinds(node))
    return Figures(
        1,
        source.count("\n"),
        len(code),
        num_tokens,
        len(of_docstrings),
        counted["statement"] - sum(1 for _ in docstrings(tree)),
        counted["decision"] + counted["inline"],
        counted["inline"],
    )


def docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            yield first.lineno, first.end_lineno or first.lineno


def _kinds(node: ast.AST) -> Iterator[str]:
    """Yield what a node counts as, once for each."""
    if isinstance(node, ast.stmt):
        yield "statement"
    if isinstance(node, _CHOOSES):
        yield "decision"
    if isinstance(node, ast.IfExp):
        yield "inline"
    if isinstance(node, ast.BoolOp):
        yield from ["inline"] * (len(node.values) - 1)
    if isinstance(node, ast.comprehension):
        yield from ["inline"] * len(node.ifs)


def attributes_of(source: str, name: str) -> tuple[set[str], set[str]]:
    """Return the attributes that a class gives itself, and its methods and properties."""
    tree = ast.parse(source)
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    given = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return given, methods - {"__init__"}


def by_room(folders: Iterable[Path]) -> dict[str, Figures]:
    """Count folders, by the first two names of a module's path below the folder's parent."""
    rooms: dict[str, Figures] = defaultdict(Figures)
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).parent.parts
            rooms["/".join(parts[:2])] += figures_of(path.read_text())
    return rooms


def table(rooms: dict[str, Figures]) -> str:
    """Return the figures as lines, the whole first, then the largest room."""
    rows = [("", *HEAD), ("all", *sum(rooms.values(), Figures()).row)]
    largest = sorted(rooms.items(), key=lambda room: -room[1].tokens)
    rows += [(name, *figures.row) for name, figures in largest]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    folders = parser.parse_args().folders
    rooms = by_room(folders or [HOUSE / name for name in PACKAGES])
    print(table(rooms))
    print(
        "docstrings: their lines for each 100 of code; decisions, inline: for each 100 statements"
    )
    if folders:
        return
    all_tokens = sum(figures.tokens for figures in rooms.values())
    share = 100 * sum(rooms[name].tokens for name in PLANNER) / all_tokens
    given, methods = attributes_of((HOUSE / UNIT).read_text(), "FlatUnit")
    print(f"the planner has {share:.1f} % of all tokens")
    print(f"FlatUnit has {len(given)} attributes, {len(methods)} methods and properties")


if __name__ == "__main__":
    main()
