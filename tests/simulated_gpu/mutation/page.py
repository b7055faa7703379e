"""The table as a page: docs/gpu-waits.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mutation.sites import Site

if TYPE_CHECKING:
    from mutation.table import Row

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu-waits.md"
_HEAD = """\
# Waits on GPUs

Every wait of the runtime, and what notices when it is not there. On a simulated GPU each one is
taken out, by itself, while small jobs train; collectives, copies, updates and the disk come late
there ([how](../tests/simulated_gpu/README.md#each-wait-is-needed)). A race is named by the device:
two accesses of the same bytes that nothing orders. Some waits are there for ranks without GPUs,
which read each other's memory: what notices is then said to be on CPUs, or through sockets. Seconds
are those of all runs until one noticed, on the CPUs of whoever wrote this page.

This page is written by `python tests/simulated_gpu/mutations.py --write`, in a quarter of an hour
on two quiet cores.
"""
_COLUMNS = """\
| in | wait | noticed by | how | seconds |
|---|---|---|---|---|
"""


def page(rows: Sequence[Row]) -> str:
    """Return the text of the page."""
    noticed = [row for row in rows if row.scenario]
    others = [row for row in rows if not row.scenario]
    text = f"{_HEAD}\n{len(noticed)} of {len(rows)} are noticed.\n"
    for file, of_file in groupby(noticed, key=lambda row: row.site.file):
        text += f"\n## {file}\n\n{_COLUMNS}"
        for row in of_file:
            name = f"`{row.site.function}` | {_code(row.site)}"
            text += f"| {name} | {row.scenario} | {_kind(row.how)} | {row.seconds:.1f} |\n"
    return text + _unreached(others)


def named(text: str) -> set[tuple[str, str, str]]:
    """Return the waits that a page has, each by file, function and call."""
    found = set()
    file = ""
    for line in text.splitlines():
        if line.startswith("## "):
            file = line.removeprefix("## ")
        if (cells := re.match(r"\| `([^`]+)` \| `([^`]+)` \|", line)) is not None:
            where, _, function = cells[1].rpartition(" ")
            found.add((where or file, function, cells[2]))
    return found


def key(site: Site) -> tuple[str, str, str]:
    """Return by which a site is among `named`."""
    return site.file, site.function, _call(site)


def _unreached(rows: Sequence[Row]) -> str:
    text = "\n## Where no scenario waits\n\n| in | wait | because |\n|---|---|---|\n"
    for row in rows:
        where = f"{row.site.file} {row.site.function}"
        text += f"| `{where}` | {_code(row.site)} | {row.reason or 'nobody knows'} |\n"
    return text


def _code(site: Site) -> str:
    return f"`{_call(site)}`"


def _call(site: Site) -> str:
    return site.call.replace("|", "\\|").replace("`", "'")


def _kind(how: str) -> str:
    """Return how it was noticed, without lines and folders: "a race", "an error: KeyError"."""
    kind, _, what = how.partition(": ")
    if kind != "an error":
        return kind
    named = re.match(r"(?:RuntimeError: )?(\w+)", what)
    return kind if named is None else f"{kind}: {named[1]}"
