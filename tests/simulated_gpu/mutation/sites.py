"""Where the runtime waits, found in its source: a wait that is added is a site by itself.

A site is a call whose name says that it waits, or `settle`, which does so for all that is under
way, or one by which the host reads numbers of the device: `accelerator.fetch`, and `read` of a
`Comm`. A wait with a time, as of an event or a condition, is a pause between two looks and no site.
Waits lie in one another: `wait_for_unshard()` waits by `self._handle.wait()`, and that by
`work.wait()`. Each of them is a site: what is called in one place may be needed there and not in
another. `table.py` refuses a run in which something waits that is no site.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3] / "zrun_core"
# `wait_for_tier` is a context that tells others of a wait inside.
_WAITS = re.compile(r"(?!wait_for_tier)(wait|synchronize)(_.*)?|record_stream|settle")
_READS = re.compile(r"accelerator\.fetch|(.*\.)?_?comm\.read")
_COMM = "distributed/comm.py"  # in which a `Comm` is `self`
# The functions that a site ends in: what they do for their caller is taken out there.
ENDS = ("hardware/accelerator.py",)


class Site(NamedTuple):
    """A call that waits.

    Attributes:
        file: below `zrun_core`.
        function: "FlatUnit.settle".
        call: its text, with "#2" behind it for the second one in its function.
        first, last: lines.
    """

    file: str
    function: str
    call: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """Return what stays the same when lines move."""
        return f"{self.file} {self.function}: {self.call}"

    @property
    def place(self) -> str:
        """Return where it is now."""
        return f"{self.file}:{self.first}"


def find() -> list[Site]:
    """Return all sites, by file and line."""
    found: list[Site] = []
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if file not in ENDS:
            found.extend(_of_file(file, path.read_text(encoding="utf-8")))
    return found


@cache
def _of_file(file: str, source: str) -> list[Site]:
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    own_reads = "self.read" if file == _COMM else ""
    for function, call in _calls(ast.parse(source), (), own_reads):
        text = " ".join(ast.unparse(call).split())
        text = text if len(text) <= 60 else text[:57] + "..."
        seen[function, text] += 1
        if seen[function, text] > 1:
            text += f" #{seen[function, text]}"
        found.append(Site(file, function, text, call.lineno, call.end_lineno or call.lineno))
    return found


def _calls(
    node: ast.AST, within: tuple[str, ...], own_reads: str
) -> Iterator[tuple[str, ast.Call]]:
    """Yield the waits below a node, each with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = (*within, child.name)
        yield from _calls(child, inner, own_reads)
        if isinstance(child, ast.Call) and _is_site(child, own_reads):
            yield ".".join(within), child


def _is_site(call: ast.Call, own_reads: str) -> bool:
    return _is_wait(call.func, own_reads) and not _is_pause(call)


def _is_pause(call: ast.Call) -> bool:
    """Return whether a call is a wait for so many seconds."""
    if any(keyword.arg == "timeout" for keyword in call.keywords):
        return True
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "wait"
    return is_method and len(call.args) == 1  # `Tiers.wait` has two


def _is_wait(function: ast.expr, own_reads: str) -> bool:
    name = ""
    if isinstance(function, ast.Attribute):
        name = function.attr
    elif isinstance(function, ast.Name):
        name = function.id
    if name in ("fetch", "read"):
        text = ast.unparse(function)
        return text == own_reads or _READS.fullmatch(text) is not None
    return _WAITS.fullmatch(name) is not None
