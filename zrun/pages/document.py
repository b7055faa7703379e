"""Pages that need nothing else: no script, no font, no network. Light or dark, as the reader is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from zrun_core.errors import JobError

# Colours that any eye tells apart, each of which stands out from its ground:
# `tests/unit/watch/test_pages.py` computes both.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#ca699f", "#995e34", "#258dfb", "#58299e", "#5e6770", \
"#7a1f2b")  # fmt: skip
DARK = ("#56b4e9", "#e69f00", "#aeff9d", "#d4afaa", "#f8ff1c", "#2469ad", "#b352ff", "#6b6a66", \
"#fb6352")  # fmt: skip
NUM_COLORS = len(LIGHT)


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--c{number}: {color};" for number, color in enumerate(colors))


_STYLE = f"""
:root {{ color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d8dee4; \
--back: #ffffff; --card: #f6f8fa; --good: #1a7f37; --bad: #c1121f; --chosen: #ddebf7; \
{_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #e6edf3; --soft: #9aa4af; --line: #353c45; \
--back: #0d1117; --card: #161b22; --good: #4ac26b; --bad: #ff7b72; --chosen: #16324c; \
{_variables(DARK)} }} }}
"""
_STYLE += """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 120em; padding: 0 1.2em; \
color: var(--text); background: var(--back); }
h1, p { overflow-wrap: anywhere; }
h1 { font-size: 1.6em; margin: 0 0 .2em; } h2 { font-size: 1.15em; margin: 2em 0 .4em; }
h3 { font-size: 1em; margin: 0; } h3.part { margin-top: 1.2em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
.facts th, .facts td, .words th, .words td { text-align: left; vertical-align: top; }
.facts th { white-space: nowrap; }
.facts td, .words td { overflow-wrap: anywhere; max-width: 75em; }
.words td:first-child { overflow-wrap: normal; }
tr.chosen { background: var(--chosen); font-weight: 600; }
.no { color: var(--bad); } .yes { color: var(--good); } .soft { color: var(--soft); }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; \
vertical-align: -1px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .8em 1em; \
border-left: 3px solid var(--bad); font-size: .87em; }
details { margin: .8em 0; } summary { cursor: pointer; }
svg text { font: 13px system-ui, sans-serif; fill: var(--text); }
@media (max-width: 40em) { body { margin: 1em auto; padding: 0 .8em; } \
th, td { padding: .25em .5em; } .words td { overflow-wrap: break-word; } \
.words td:first-child { overflow-wrap: anywhere; min-width: 8em; } }
"""


def whole(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a page.

    Args:
        body: its parts, in HTML.
        style: that this page has beside the common one.
    """
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>"
    )
    parts = "\n".join(body)
    text = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{parts}\n</body></html>\n'
    return text.encode(errors="backslashreplace").decode()  # half a surrogate pair is no text


def table(head: Sequence[str], rows: Iterable[str], name: str = "") -> str:
    """Return a table, from the names of its columns and from rows by `row`.

    Args:
        name: of its style: `words`; empty: it is one of numbers.
    """
    kind = f' class="{name}"' if name else ""
    return f'<div class="wide"><table{kind}>{row(head, tag="th")}{"".join(rows)}</table></div>'


def row(cells: Sequence[str], name: str = "", tag: str = "td") -> str:
    """Return a row of a table.

    Args:
        cells: as text.
        name: of its style; empty: none.
    """
    inside = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f'<tr class="{name}">{inside}</tr>' if name else f"<tr>{inside}</tr>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and texts."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<table class="facts">{"".join(lines)}</table>'


def soft(text: str) -> str:
    """Return a remark."""
    return f'<p class="soft">{escape(text)}</p>'


def details(summary: str, inside: str) -> str:
    """Return a part that opens when its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def check_target(target: Path, option: str) -> None:
    """Refuse a file that cannot be one.

    Args:
        option: that has named the file, such as `-o`.

    Raises:
        JobError: it is a folder, or its folder does not exist.
    """
    if os.path.isdir(target):  # Path.is_dir raises where a name is too long
        raise JobError(f"{option} {target} is a folder: name a file in it")
    if not os.path.isdir(target.parent):
        raise JobError(f"{option} {target}: there is no folder {target.parent}: make it first")


def save(target: Path, text: str, option: str) -> None:
    """Write a page to a file of the user's choice.

    Args:
        option: that has named the file, such as `-o`.

    Raises:
        JobError: the file cannot be written.
    """
    check_target(target, option)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"{option} {target}: {error.strerror}") from None
