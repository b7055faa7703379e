"""The output of `zrun estimate`: an answer as text, JSON, keys, a job file, a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from zrun.estimate.answer import Answer, as_data
from zrun.estimate.bars import bars
from zrun.estimate.course import lines_at_peak
from zrun.estimate.patch import as_overrides, as_yaml, write_job
from zrun.estimate.plan_tables import (
    CHOICES,
    buffer_table,
    choice_table,
    cost_of_tokens,
    fullest,
    offloaded,
    pipeline_table,
    stage_table,
    sweep_table,
    tier_lines,
    time_lines,
    whole_run,
)
from zrun.watch.console import knows_ascii_only, open_console
from zrun.watch.formatting import count
from zrun_core.errors import JobError
from zrun_core.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from zrun.estimate.compare_run import RunComparison
    from zrun_core.plan.answer.outcome import Estimate

_WIDE = 120  # columns where there is no terminal
_WIDEST_BAR = 100
_FEW = 5  # rows of a table of configurations that is not asked for as a whole


def print_answer(found: Answer, tokens: str | None, price: float | None) -> None:
    """Print an answer for a person.

    Args:
        tokens: --tokens: so many take how long?
        price: --price: of a device for an hour.

    Raises:
        JobError: `tokens` is no number.
    """
    console = open_console(sys.stdout, wide=_WIDE)
    _print_lines(console, _head(found))
    console.print()
    console.print(stage_table(found.stages, found.chosen.candidate, console.width))
    console.print()
    ascii_only = knows_ascii_only(console)
    for bar in bars(found.chosen, min(console.width, _WIDEST_BAR), ascii_only):
        console.print(bar, no_wrap=True, overflow="crop")
    console.print()
    if found.chosen.stages:
        console.print(pipeline_table(found.chosen, console.width))
        console.print()
    _print_lines(console, time_lines(found.chosen))
    hardware = found.question.hardware
    _print_lines(console, tier_lines(found.chosen, hardware, found.tokens_per_sample))
    _print_lines(console, found.lines_of_scale)
    if found.num_steps is not None and found.chosen.time.seconds:
        _print_lines(console, [whole_run(found.chosen.time, found.num_steps)])
    if tokens is not None:
        _print_lines(console, [_budget(found.chosen, tokens, price)])
    if found.verdict:
        _print_lines(console, [found.verdict])
    if found.found is not None:
        _print_search(console, found, tokens, price)
    _print_changes(console, found)
    _print_lines(console, [f"note: {note}" for note in found.notes])


def print_fit(found: Answer, tokens: str | None, price: float | None) -> None:
    """Print whether a job fits and what would make it, and few of the ways to.

    Args:
        found: the answer of a search for what fits.
        tokens, price: as for `print_answer`.
    """
    console = open_console(sys.stdout, wide=_WIDE)
    chosen = found.chosen
    answer = found.verdict or f"it fits as it is: {_room(chosen)}"
    if found.fits and found.fix is not None:
        answer += f", less than --headroom {_wanted(found):.0%}; this change leaves that:"
    if found.is_interrupted:
        answer += " (interrupted: best of those tried so far)"
    _print_lines(console, [answer, *_head(found)])
    if found.fits:
        _print_lines(console, time_lines(chosen)[:1])
    if tokens is not None:
        _print_lines(console, [_budget(found.target or chosen, tokens, price)])
    _print_changes(console, found)
    assert found.found is not None
    ways = found.found.best or found.found.rejected
    if ways and not found.fits:
        what = (
            "what fits, cheapest change first:" if found.found.best else "none fits; the closest:"
        )
        _print_lines(console, [f"\n{what}"])
        console.print(choice_table(ways[:_FEW], console.width))
    _print_lines(console, [f"note: {note}" for note in found.notes])
    _print_lines(console, ["--all shows the memory of each part and every configuration"])


def _room(chosen: Estimate) -> str:
    """Return `61.2 GiB of 79.2 GiB, 23% free`."""
    used = fullest(chosen).device_used
    sizes = f"{format_size(used)} of {format_size(chosen.capacity)}"
    return f"{sizes}, {1 - used / chosen.capacity:.0%} free" if chosen.capacity else sizes


def print_buffers(found: Answer, pattern: str) -> None:
    """Print the buffers with this in their name, or of this kind.

    Raises:
        JobError: there are none.
    """
    table = buffer_table(found.chosen, pattern)
    if not table.row_count:
        buffers = [buffer for rank in found.chosen.ranks for buffer in rank.buffers]
        names = sorted({buffer.kind.value for buffer in buffers})
        raise JobError(
            f"--explain {pattern}: no buffer has this in its name; kinds are {', '.join(names)}"
        )
    open_console(sys.stdout, wide=_WIDE).print(table)


def print_at_peak(found: Answer) -> None:
    """Print what the fullest rank holds through a step, and at the moment of most.

    Raises:
        JobError: the model was not traced.
    """
    console = open_console(sys.stdout, wide=_WIDE)
    width = min(console.width, _WIDEST_BAR)
    lines = lines_at_peak(found, width, ascii_only=knows_ascii_only(console))
    _print_lines(console, [*_head(found), "", *lines])


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _print_search(console: Console, found: Answer, tokens: str | None, price: float | None) -> None:
    result = found.found
    assert result is not None
    console.print(
        f"\n{result.tried + result.pruned:,} configurations, {result.tried:,} of them estimated",
        markup=False,
    )
    if result.is_interrupted:
        console.print("interrupted: the best of the configurations tried so far")
    if result.keeps_base or (found.goal == "fit" and found.fits):
        _print_lines(console, [_why_it_stays(found)])
    if not result.best:
        console.print("none of them fits; the closest:")
        console.print(choice_table(result.rejected, console.width))
    else:
        console.print(choice_table(result.best, console.width))
        console.print("the fastest for each amount of free memory (the Pareto front)")
        console.print(choice_table(result.pareto, console.width))
    if result.best and tokens is not None:
        _print_lines(console, [_budget(result.best[0], tokens, price)])
    console.print(fill(CHOICES, console.width), markup=False)


def _wanted(found: Answer) -> float:
    """Return the share of a device's memory that a search was to leave free."""
    from zrun_core.plan.answer.choice import HEADROOM

    return HEADROOM if found.headroom is None else found.headroom


def _why_it_stays(found: Answer) -> str:
    """Return why a job that fits stays as it is, or what more headroom takes."""
    from zrun_core.plan.answer.choice import margins_of

    chosen = found.chosen
    free = chosen.headroom / chosen.capacity
    wanted = _wanted(found)
    less = f"only {free:.0%} of memory stays free, less than --headroom {wanted:.0%}"
    if found.goal == "fit":
        if free >= wanted:
            return f"it fits as it is, with {free:.0%} left free"
        more = ": row 1 is the cheapest change that leaves more" if found.fix else ""
        return f"it fits as it is, but {less}{more}"
    alike, otherwise = margins_of(found.question.hardware)
    line = (
        "your job is as fast as anything found: a gain counts above the error of estimates, "
        f"{alike:.0%} of a step where dp, tp and pp are the same, {otherwise:.0%} where they differ"
    )
    return line if free >= wanted else f"{line}; {less}"


def _print_changes(console: Console, found: Answer) -> None:
    changes = found.changes
    config = found.question.config
    if not changes or config is None:
        return
    overrides = " ".join(as_overrides(changes))
    _print_lines(console, [f"\nwith {overrides}, or in the job file:"])
    keys = as_yaml(changes, config).splitlines()
    console.print("\n".join(f"  {line}" for line in keys), markup=False)


def _head(found: Answer) -> list[str]:
    """Return the lines that say what was estimated, and on what."""
    question = found.question
    hardware = question.hardware
    chosen = found.chosen
    dims = chosen.candidate.dims
    ranks = f"{dims.world_size} rank{'s' if dims.world_size > 1 else ''}"
    if dims.model_ranks > 1:
        ranks += f" = dp {dims.dp} x tp {dims.tp} x pp {dims.pp}"
    placement = chosen.candidate.placement
    homes = ""
    if moved := offloaded(chosen.candidate):
        homes = f"; on the {moved}"
        if not question.names_share:
            homes += f" (offload.fraction: auto = {placement.fraction:g}, the least that fits)"
    tokens = f" of {found.tokens_per_sample:,} tokens" if found.tokens_per_sample else ""
    share = "a rank's share of memory" if hardware.shares_memory else hardware.device.name
    late = question.job.changes_numerics
    return [
        f"{question.title}: {count(found.num_params)} parameters, {ranks} on {hardware.name} "
        f"({share}: {format_size(chosen.capacity)})",
        f"batch: {question.batch}{tokens}; {question.job.precision.compute}, "
        f"{question.job.optim.name}, checkpoint {chosen.candidate.checkpoint}; "
        f"activations: {chosen.source}{homes}",
        *([f"changes numerics ({late})"] if late else []),
    ]


def _budget(chosen: Estimate, tokens: str, price: float | None) -> str:
    from zrun_core.plan.question.size import parse_count

    world_size = chosen.candidate.dims.world_size
    return cost_of_tokens(chosen.time, parse_count(tokens), world_size, price)


def print_sweep(key: str, rows: Sequence[tuple[str, Estimate | str]], *, as_json: bool) -> None:
    """Print the estimates of several values of a key.

    Args:
        rows: a value, and its estimate or why there is none.
    """
    if as_json:
        found = [{"value": value, "estimate": as_data(estimate)} for value, estimate in rows]
        print(json.dumps(found, indent=2))
        return
    console = open_console(sys.stdout, wide=_WIDE)
    console.print(sweep_table(key, rows, console.width))
    reasons = [(value, found) for value, found in rows if isinstance(found, str)]
    _print_lines(console, [f"{value}: {reason}" for value, reason in reasons])


def print_comparison(found: RunComparison, *, as_json: bool) -> None:
    """Print a run beside its estimate."""
    if as_json:
        comparison = {
            "run": str(found.run),
            "source": found.source,
            "lines": [line.to_json() for line in found.lines],
            "notes": found.notes,
            "is_right": found.is_right,
        }
        print(json.dumps(comparison, indent=2))
        return
    print(f"{found.run.name}: activations {found.source}")
    print("\n".join(map(str, found.lines)))
    for note in found.notes:
        print(f"note: {note}")


def to_json(found: Answer, tokens: str | None, price: float | None) -> dict[str, Any]:
    """Return an answer as JSON takes it, every buffer included."""
    data = {
        "title": found.question.title,
        "hardware": as_data(found.question.hardware),
        "parameters": found.num_params,
        "batch": found.question.batch.model_dump(),
        "changes_numerics": found.question.job.changes_numerics or None,
        "steps": found.num_steps,
        "estimate": as_data(found.chosen),
        "fits": found.fits,
        "sentence": found.sentence or None,
        "stages": [as_data(each) for each in found.stages],
        "changes": found.changes,
        "fix": as_data(found.fix),
        "search": as_data(found.found),
        "budget": None if tokens is None else _budget(found.chosen, tokens, price),
    }
    if found.measured is not None:
        data["measured"] = found.measured.to_json()
    if found.history is not None:
        data["earlier_runs"] = list(found.history.ratios)
    return data


def print_changes(found: Answer) -> None:
    """Print the keys that must change, as YAML.

    Raises:
        JobError: there is no job that has keys.
    """
    config = found.question.config
    if config is None:
        raise JobError("--emit patch: there is no job to change; name a job file")
    if found.changes:
        print(as_yaml(found.changes, config))
    else:
        print(found.verdict or "nothing has to change", file=sys.stderr)


def write_changed_job(found: Answer, source: Path, target: Path, overrides: list[str]) -> None:
    """Write the job with the keys that must change; nothing where nothing is known to fit.

    Args:
        overrides: of the command line, which the new file has, too.

    Raises:
        JobError: there is no job, or the file cannot be written.
    """
    if found.question.config is None:
        raise JobError("--write: there is no job to write; name a job file")
    if found.target is None and (not found.fits or found.goal == "best"):
        return  # the answer says that nothing is known to fit, or nothing is faster
    write_job(source, target, found.changes, overrides)
    print(f"wrote {target}", file=sys.stderr)


def write_page(found: Answer, target: Path) -> None:
    """Write an answer as one HTML file.

    Raises:
        JobError: the file cannot be written.
    """
    from zrun.estimate.html import page
    from zrun.pages import document

    lines = [*_head(found), *found.lines_of_scale, *(f"note: {note}" for note in found.notes)]
    title = f"zrun estimate: {found.question.title}"
    text = page(title, lines, found.stages, found.chosen, found.verdict or "fits")
    document.save(target, text, "--html")
    print(f"wrote {target}", file=sys.stderr)
