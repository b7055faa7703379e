"""Print every text of both packages that a user can meet: where it is, how it is said, its words.

python tests/unit/house/texts.py                    sentences, and labels of two words and more
python tests/unit/house/texts.py --short            single words too, as the labels of the panel
python tests/unit/house/texts.py --kind error anew  the errors that say "anew"
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("zrun", "zrun_core")
_SENTENCE = re.compile(r"[A-Za-z]{2,}[,:;]? [A-Za-z{(]")
_WORD = re.compile(r"[A-Za-z]{2}")
_PATTERNS = {"compile", "match", "search", "fullmatch", "sub", "findall", "finditer", "split"}


class Text(NamedTuple):
    """A text in the source."""

    path: str
    line: int
    kind: str  # error, help, or the name of the function that it is given to
    words: str  # with {expression} where a value is put in


def texts(*, short: bool = False) -> Iterator[Text]:
    """Yield all texts in the order of files and lines: strings of two words, or `short` of one."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            name = path.relative_to(ROOT).as_posix()
            found = _Strings(_WORD if short else _SENTENCE)
            found.visit(tree)
            yield from (Text(name, line, kind, words) for line, kind, words in found.strings)


class _Strings(ast.NodeVisitor):
    """Collects what a module may say; docstrings, asserts and patterns are for its readers."""

    def __init__(self, wanted: re.Pattern[str]) -> None:
        self.strings: list[tuple[int, str, str]] = []
        self._wanted = wanted
        self._kinds = [""]

    def visit_Raise(self, node: ast.Raise) -> None:
        self._within("error", node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node.func)
        if name not in _PATTERNS or not isinstance(node.func, ast.Attribute):
            self._within(self._kinds[-1] or name, node)

    def visit_keyword(self, node: ast.keyword) -> None:
        is_help = node.arg in ("help", "description", "metavar", "short_help")
        self._within("help" if is_help else self._kinds[-1], node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring, or words about an attribute
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        del node

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = _words(node)
        if words is None:
            self.generic_visit(node)
        else:
            self._add(node.lineno, words)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add(node.lineno, _words(node) or "")

    def visit_Constant(self, node: ast.Constant) -> None:
        self._add(node.lineno, _words(node) or "")

    def _within(self, kind: str, node: ast.AST) -> None:
        self._kinds.append(kind)
        self.generic_visit(node)
        self._kinds.pop()

    def _add(self, line: int, words: str) -> None:
        if self._wanted.search(words):
            self.strings.append((line, self._kinds[-1], words))


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _words(node: ast.expr) -> str | None:
    """Return the words of a string, of one with values or of a sum of them; None of all else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{" + _value(part) + "}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_words(side) for side in (node.left, node.right)]
        if any(side is not None for side in sides):
            values = (ast.unparse(side) for side in (node.left, node.right))
            pairs = zip(sides, values, strict=True)
            return "".join("{" + value + "}" if side is None else side for side, value in pairs)
    return None


def _value(part: ast.expr) -> str:
    return ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else "?"


def main() -> None:
    """Print the texts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", help="only those of a kind: error, help, a function's name")
    parser.add_argument("--short", action="store_true", help="single words too")
    parser.add_argument("words", nargs="*", help="only those with one of these words")
    asked = parser.parse_args()
    for text in texts(short=asked.short):
        is_kind = asked.kind in (None, text.kind)
        if is_kind and (not asked.words or any(word in text.words for word in asked.words)):
            print(f"{text.path}:{text.line}: {text.kind or '-'}: {' '.join(text.words.split())}")


if __name__ == "__main__":
    main()
