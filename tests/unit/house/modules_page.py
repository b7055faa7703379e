"""Write docs/modules.md: a line for each module, the first one of its docstring.

python tests/unit/house/modules_page.py
"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "modules.md"
_HEAD = """\
# Modules

Every module of both packages, with the first line of its docstring. What a folder is about, and
where to begin to read it: [architecture](architecture.md#folders). This page is written by
`python tests/unit/house/modules_page.py`.
"""


def page() -> str:
    """Return the text of the page."""
    modules = [
        path.relative_to(ROOT)
        for package in ("zrun", "zrun_core")
        for path in sorted((ROOT / package).rglob("*.py"), key=lambda path: path.parts)
        if path.name != "__init__.py"
    ]
    modules.sort(key=lambda path: (path.parent.parts, path.name))
    parts = [_HEAD]
    for folder, paths in groupby(modules, key=lambda path: path.parent):
        rows = "".join(f"| `{path.name}` | {_purpose(ROOT / path)} |\n" for path in paths)
        parts.append(f"## {folder.as_posix()}/\n\n| module | |\n|---|---|\n{rows}")
    return "\n".join(parts)


def _purpose(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
