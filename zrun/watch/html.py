"""Pages that need nothing else: no script, no font, no network. Light or dark, as the reader is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d8dee4; \
--back: #ffffff; --card: #f6f8fa; --good: #1a7f37; --bad: #c1121f; --chosen: #ddebf7; \
--c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #a8518a; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa4af; --line: #353c45; \
--back: #0d1117; --card: #161b22; --good: #4ac26b; --bad: #ff7b72; --chosen: #16324c; \
--c0: #56b4e9; --c1: #e69f00; --c2: #2fc79b; --c3: #e29ac6; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 74em; padding: 0 1.2em; \
color: var(--text); background: var(--back); }
h1 { font-size: 1.6em; margin: 0 0 .2em; } h2 { font-size: 1.15em; margin: 2em 0 .4em; }
h3 { font-size: 1em; margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
.facts th, .facts td { text-align: left; vertical-align: top; } .facts th { white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
tr.chosen { background: var(--chosen); font-weight: 600; }
.no { color: var(--bad); } .yes { color: var(--good); } .soft { color: var(--soft); }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; \
vertical-align: -1px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .8em 1em; \
border-left: 3px solid var(--bad); font-size: .87em; }
svg text { font: 13px system-ui, sans-serif; fill: var(--text); }
"""


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a whole page.

    Args:
        title: of the window.
        body: its parts, in HTML.
        style: that this page has beside the common one.
    """
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>"
    )
    parts = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{parts}\n</body></html>\n'


def table(head: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table of numbers, from the names of its columns and from rows by `row`."""
    return f'<div class="wide"><table>{row(head, tag="th")}{"".join(rows)}</table></div>'


def row(cells: Sequence[str], name: str = "", tag: str = "td") -> str:
    """Return a row of a table.

    Args:
        cells: as text.
        name: of its style; empty: none.
        tag: of its cells.
    """
    inside = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f'<tr class="{name}">{inside}</tr>' if name else f"<tr>{inside}</tr>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and texts."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<table class="facts">{"".join(lines)}</table>'
