"""The console on which tables and panels are printed, in colour if the user wants that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, RenderableType


def knows_ascii_only(console: Console) -> bool:
    """Return whether what is printed has to do without curves and bars of other characters."""
    return not console.encoding.lower().startswith("utf")


def print_table(out: TextIO, table: RenderableType) -> None:
    """Print a table; where `out` is no terminal, without blanks at the ends of its lines."""
    console = open_console(out)
    if out.isatty():
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip(), file=out)


def open_console(out: TextIO, environ: Mapping[str, str] = os.environ, wide: int = 1000) -> Console:
    """Open a console on `out`.

    Colours are for terminals that have them. NO_COLOR and CLICOLOR=0 take them away, and nothing
    else; FORCE_COLOR and CLICOLOR_FORCE ask for them in files and pipes too.

    Args:
        wide: columns of what is no terminal, so that nothing is folded there.
    """
    asking = environ.get("FORCE_COLOR"), environ.get("CLICOLOR_FORCE")
    forced = any(value not in (None, "", "0") for value in asking)
    unwanted = environ.get("CLICOLOR") == "0" and not forced
    return Console(
        file=out,
        highlight=False,
        width=None if out.isatty() else wide,
        force_terminal=True if forced else None,
        no_color=bool(environ.get("NO_COLOR")) or unwanted,
        _environ=environ,
    )
