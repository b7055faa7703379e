"""Options that several commands take: those of hosts together are a `HostOptions`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from zrun_core.spine.hostname import MAX_SLOTS

HostsFile = Annotated[
    Path | None,
    typer.Option(
        "--hosts",
        metavar="FILE",
        help="Host file, a line for each: name slots=N.",
        show_default=False,
    ),
]
HostList = Annotated[
    str | None,
    typer.Option("-H", metavar="HOSTS", help="Hosts and slots: h1:8,h2:8.", show_default=False),
]
Include = Annotated[
    str | None,
    typer.Option(
        "--include", "-i", metavar="PICKS", help="Only these: h1:0,1@h2.", show_default=False
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option("--exclude", "-e", metavar="PICKS", help="All but these.", show_default=False),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="The first N hosts.", show_default=False)
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_SLOTS, metavar="N", help="GPUs 0 to N-1 of each host.", show_default=False
    ),
]

MOST_SECONDS = 1e6  # as of the limits of a job


def is_finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which are within any bounds. A callback of options."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no such number")
    return value
