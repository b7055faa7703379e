"""`zrun report`: a run, or several side by side, as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMPARISON = "comparison.html"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="A run directory, a run id or prefix, or a job name.",
            show_default=False,
        ),
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN...",
            help="Other runs: all of them in one page, a chart for the curves of all.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The page; - is standard output.",
            show_default="report.html of the run, comparison.html with --compare",
        ),
    ] = None,
) -> None:
    """Write what a run has told as one page, at any time: curves, memory, speed, its job.

    Example: zrun report gpt -o gpt.html
    """
    from zrun.pages.document import check_target
    from zrun.runs.listing import find_run
    from zrun.runs.rundir import PAGE
    from zrun_core.errors import JobError

    if len(runs) > 1 and not compare:
        raise JobError(
            f"zrun report: name one run; to compare: zrun report {runs[0]} --compare {runs[1]}"
        )
    first, *others = runs
    paths = [find_run(run) for run in (first, *(compare or ()), *others)]
    if out is not None and out != "-":
        check_target(Path(out), "-o")  # before a long record is read
    if compare:
        text = _comparison(paths)
        standard = paths[0] / _COMPARISON
    else:
        text = _page(paths[0])
        standard = paths[0] / PAGE
    if out == "-":
        sys.stdout.buffer.write(text.encode())
        return
    print(_write(text, standard, out))


def _page(path: Path) -> str:
    from zrun.pages.outcome import Outcome
    from zrun.pages.run_page import page
    from zrun.runs.launches import read_launches
    from zrun.watch.run_record import read_record
    from zrun_core.errors import JobError

    try:
        record = read_record(path)
    except OSError as error:
        raise JobError(f"{path / 'events.jsonl'}: {error.strerror}") from None
    if not record.num_events:
        raise JobError(_nothing_told(path))
    return page(record, Outcome.of_launch(read_launches(path)[-1]))


def _comparison(paths: Sequence[Path]) -> str:
    from zrun.pages.comparison_page import MOST_RUNS, page
    from zrun.watch.compared import read_compared
    from zrun_core.errors import JobError

    twice = [path for number, path in enumerate(paths) if path.resolve() in _real(paths[:number])]
    if twice:
        raise JobError(f"--compare: {twice[0]} is named twice: name another run")
    if len(paths) > MOST_RUNS:
        raise JobError(f"--compare: a chart tells {MOST_RUNS} runs apart, not {len(paths)}")
    try:
        compared = read_compared(paths)
    except OSError as error:
        raise JobError(f"{error.filename}: {error.strerror}") from None
    for path, run in zip(paths, compared, strict=True):
        if not run.num_events:
            raise JobError(_nothing_told(path))
    return page(compared)


def _real(paths: Sequence[Path]) -> set[Path]:
    return {path.resolve() for path in paths}


def _nothing_told(path: Path) -> str:
    from zrun.runs.listing import is_script

    if is_script(path):
        return f"run {path.name} is of a script that reports no steps: only those with zrun_core do"
    return (
        f"{path / 'events.jsonl'} has no event: the run has not begun to train; zrun logs "
        f"{path.name} shows how far it is"
    )


def _write(text: str, standard: Path, out: str | None) -> Path:
    """Write the page; return where it is."""
    from zrun.pages.document import save
    from zrun.runs.rundir import write_page
    from zrun_core.errors import JobError

    if out is not None:
        save(Path(out), text, "-o")
        return Path(out)
    try:
        return write_page(standard, text)
    except OSError as error:
        raise JobError(f"{standard}: {error.strerror}: name another file with -o") from None
