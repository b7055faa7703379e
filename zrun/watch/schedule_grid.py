"""Draw the schedule of a job's pipeline in text: a row per stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from zrun.watch.console import open_console
from zrun.watch.preface import width_of

if TYPE_CHECKING:
    from zrun.placement.plan import ResolvedJob
    from zrun_core.pipeline.grid import Grid

_WIDTH = 120  # of lines that no terminal shows
_SLICES = 4  # drawn of a model, which is not known here
_STYLES = {r"F\S+": "cyan", r"B\S+|-+": "green", r"W\S+": "yellow", r"\.\.+|~": "dim"}


def show_grid(resolved: ResolvedJob, out: TextIO) -> None:
    """Draw the schedule of a job.

    Args:
        out: where; coloured if that is a terminal.
    """
    heading, grid = _grid_of(resolved)
    console = open_console(out)
    print(f"schedule: {heading}", file=out)
    for number, line in enumerate(grid.text(width_of(out) or _WIDTH).splitlines()):
        text = Text(line)
        if number < grid.stages:
            for pattern, style in _STYLES.items():
                text.highlight_regex(pattern, style)
        console.print(text, soft_wrap=True)


def _grid_of(resolved: ResolvedJob) -> tuple[str, Grid]:
    """Return the schedule of a job in words, and drawn."""
    from zrun_core.pipeline.grid import Grid

    parallel = resolved.job.parallel
    name = parallel.schedule
    virtual = parallel.virtual
    micro_batches = resolved.batch.accumulation
    stages = "1 stage" if parallel.pp == 1 else f"{parallel.pp} stages"
    if parallel.facts.goes_in_slices:
        virtual = _SLICES
        stages = f"a model of {_SLICES} blocks"
    elif virtual > 1:
        stages += f" of {virtual} chunks"
    counted = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    when = f"{counted} per step"
    if parallel.facts.updates_each:
        micro_batches = 2 * parallel.pp + 2
        when = f"the first {micro_batches} steps, each of 1 micro-batch"
    return f"{name}, {stages}, {when}", Grid.of(name, parallel.pp, virtual, micro_batches)
