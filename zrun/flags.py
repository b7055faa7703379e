"""Options that several commands take, and how all commands read them.

Those of hosts together are a `HostOptions`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from zrun_core.errors import JobError
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


class Command(TyperCommand):
    """A command none of whose options takes the name of another one for its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read a command line.

        Raises:
            JobError: an option has no value: the next one follows, or nothing.
        """
        options = {name: each for each in self.get_params(ctx) for name in each.opts}
        words = iter(args)
        for word in words:
            if word == "--":
                break
            option = options.get(word)
            if option is None or getattr(option, "is_flag", True):
                continue
            value = next(words, None)
            if value is None or value in options:
                example = (option.metavar or "VALUE").partition("|")[0]
                raise JobError(_no_value(f"{word} {example}", value, list(words)))
        return super().parse_args(ctx, args)


def _no_value(meant: str, following: str | None, rest: list[str]) -> str:
    """Return the message for an option without a value.

    Args:
        meant: the option with a value, as it is to be written.
        following: the option that follows.
        rest: what follows that.
    """
    name = meant.partition(" ")[0]
    if following is None:
        return f"{name} takes a value, and none follows: write {meant}"
    written = [meant, following, *(each for each in rest[:1] if not each.startswith("-"))]
    return f"{name} takes a value, and the option {following} follows: write {' '.join(written)}"
