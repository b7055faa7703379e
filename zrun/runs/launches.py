"""The launches of a run: the commands that started it or went on with it, and how each ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zrun.runs.listing import RunStatus, headline, read_json, read_run, state_of
from zrun.runs.rundir import LAUNCH


@dataclass(frozen=True)
class Launch:
    """One launch, as its files tell of it.

    Attributes:
        number: from 1, in order.
        state: how it ended, or that it goes on.
        code: its exit code; None: it goes on, or it is not known.
        headline: why it ended early, in one line; empty: it did not.
        message: all that was said of that on the terminal; empty: the same.
        command: by which it was started, without secrets; empty: not known.
        time: at which it began, in unix seconds by its own clock; None: not known.
        first_event: where its events begin in the run's record, in bytes; None: not known.
        has_record: the run's record has its events: no later launch began anew.
    """

    number: int
    state: RunStatus
    code: int | None
    headline: str
    message: str
    command: str
    time: float | None
    first_event: int | None
    has_record: bool = True


def read_launches(path: Path) -> list[Launch]:
    """Return the launches of the run at `path`, oldest first; the last one is the newest."""
    run = read_run(path)
    earlier = sorted(
        (each for each in (path / "attempts").glob("*") if each.name.isdigit()),
        key=lambda each: int(each.name),
    )
    found = []
    num_anew = 0  # launches before one that began anew: it has set their record aside
    for number, folder in enumerate(earlier, 1):
        report = read_json(folder / "failure.json")
        code = read_json(folder / "exit.json").get("exit_code", report.get("exit_code"))
        found.append(_launch(number, folder, state_of(code), code, report))
        if (folder / "events.jsonl").exists():
            num_anew = number
    report = read_json(path / "failure.json")
    found.append(_launch(len(found) + 1, path, run.state, run.exit_code, report))
    return [replace(each, has_record=each.number > num_anew) for each in found]


def _launch(
    number: int, folder: Path, state: RunStatus, code: int | None, report: dict[str, Any]
) -> Launch:
    told = read_json(folder / LAUNCH)
    is_early = state is not RunStatus.FINISHED
    began = told.get("time")
    offset = told.get("first_event")
    return Launch(
        number=number,
        state=state,
        code=code,
        headline=headline(report) if is_early else "",
        message=_message(report) if is_early else "",
        command=str(told.get("command") or ""),
        time=float(began) if isinstance(began, int | float) else None,
        first_event=offset if isinstance(offset, int) else None,
    )


def _message(report: dict[str, Any]) -> str:
    """Return what was told of a failure; of older versions, what its parts say."""
    if told := report.get("told"):
        return str(told)
    lines = report.get("last_lines")
    body = report.get("traceback") or ("\n".join(map(str, lines)) if lines else "")
    parts = [
        str(body or "").strip(),
        headline(report) or str(report.get("message") or ""),
        f"  log: {report['log']}" if report.get("log") else "",
        f"  next: {report['what_to_do']}" if report.get("what_to_do") else "",
    ]
    return "\n".join(part for part in parts if part)
