"""Runs side by side: the keys in which they differ, then what they came to. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

from zrun.watch import formatting
from zrun.watch.axis_traffic import num_steps, sent_rows
from zrun.watch.curves import Curves
from zrun.watch.run_state import RunState
from zrun_core.sizes import format_size

_MOST_STEPS = 5  # of which losses are compared
_MOST_METRICS = 20  # of the user's own
_NOT_OF_TRAINING = ("name", "log.", "env.")  # keys


@dataclass(frozen=True)
class ComparedRun:
    """A run, as far as it is compared.

    Attributes:
        name: in the head of its column.
        outcome: running, finished, failed, ...
        keys: of its job, flat, as they ran.
        state: at its end, or now.
        curves: of all its launches.
        seconds: of training.
        num_events: that it has told.
    """

    name: str
    outcome: str
    keys: Mapping[str, Any]
    state: RunState
    curves: Curves
    seconds: float | None
    num_events: int


class Row(NamedTuple):
    """A line of the comparison.

    Attributes:
        values: of each run; None: it has none.
        text: of a value.
        is_key: it is a key of the job.
    """

    name: str
    values: Sequence[Any]
    text: Callable[[Any], str]
    is_key: bool = False


def rows(runs: Sequence[ComparedRun]) -> list[Row]:
    """Return what differs in the jobs, and what the runs came to."""
    return [*_keys(runs), *_results(runs)]


def _keys(runs: Sequence[ComparedRun]) -> list[Row]:
    names = dict.fromkeys(key for run in runs for key in run.keys)
    found = []
    for name in names:
        values = [run.keys.get(name) for run in runs]
        if name.startswith(_NOT_OF_TRAINING) or all(each == values[0] for each in values):
            continue
        found.append(Row(name, values, _key_text, is_key=True))
    return found


def _key_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _results(runs: Sequence[ComparedRun]) -> list[Row]:
    made: list[Row] = [
        Row("outcome", [run.outcome for run in runs], str),
        Row("steps", [run.state.step.step or None for run in runs], str),
        *_losses(runs),
        Row("loss", [_finite(run.state.step.loss) for run in runs], "{:.5g}".format),
        Row("evaluation", [_last_evaluation(run) for run in runs], "{:.5g}".format),
        Row("best evaluation", [_best_evaluation(run) for run in runs], "{:.5g}".format),
        *_metrics(runs),
        Row("tokens", [run.state.step.total_tokens or None for run in runs], formatting.count),
        Row("time", [run.seconds for run in runs], formatting.duration),
        Row("step", [_median(run, "step_s") for run in runs], formatting.seconds),
        Row("tokens/s", [_median(run, "tokens_per_s") for run in runs], formatting.count),
        Row("samples/s", [_median(run, "samples_per_s") for run in runs], formatting.count),
        *_sent(runs),
        Row("peak in tensors", [_measured(run, "peak_bytes") for run in runs], _size),
        Row("peak of a process", [_measured(run, "process_bytes") for run in runs], _size),
        Row("ranks", [(run.state.start or {}).get("world_size") for run in runs], str),
        Row("device", [(run.state.start or {}).get("device") for run in runs], str),
        Row("torch", [_version(run, "torch") for run in runs], str),
        Row("zrun", [_version(run, "zrun") for run in runs], str),
    ]
    found = [row for row in made if any(value is not None for value in row.values)]
    alike = ("ranks", "device", "torch", "zrun")  # of no interest where they are the same
    return [row for row in found if row.name not in alike or len(set(row.values)) > 1]


def _losses(runs: Sequence[ComparedRun]) -> list[Row]:
    """Return the losses at some steps that all runs have made."""
    told = [
        {step: loss for step, loss in run.curves.of("loss").points if math.isfinite(loss)}
        for run in runs
    ]
    common = sorted(set.intersection(*(set(each) for each in told))) if told else []
    if not common:
        return []
    count = min(_MOST_STEPS, len(common))
    places = {round(number * (len(common) - 1) / max(1, count - 1)) for number in range(count)}
    return [
        Row(f"loss at step {step}", [each[step] for each in told], "{:.5g}".format)
        for step in (common[place] for place in sorted(places))
    ]


def _metrics(runs: Sequence[ComparedRun]) -> list[Row]:
    """Return the newest of the user's own numbers."""
    names = dict.fromkeys(name for run in runs for name in run.state.newest_metrics)
    return [
        Row(name, [run.state.newest_metrics.get(name) for run in runs], "{:.5g}".format)
        for name in list(names)[:_MOST_METRICS]
    ]


def _sent(runs: Sequence[ComparedRun]) -> list[Row]:
    """Return what rank 0 has sent in a step, by axis, of runs that have reached their end."""
    sums: list[dict[str, float]] = []
    for run in runs:
        by_axis: dict[str, float] = {}
        steps = num_steps(run.state)
        for row in sent_rows(run.state) if steps > 0 else []:
            by_axis[row.axis] = by_axis.get(row.axis, 0.0) + (row.measured or 0) / steps
        sums.append(by_axis)
    axes = dict.fromkeys(axis for by_axis in sums for axis in by_axis)
    return [
        Row(f"sent along {axis}, a step", [by_axis.get(axis) for by_axis in sums], _size)
        for axis in axes
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _evaluations(run: ComparedRun) -> list[float]:
    return [loss for _, loss in run.curves.of("eval loss").points if math.isfinite(loss)]


def _last_evaluation(run: ComparedRun) -> float | None:
    found = _evaluations(run)
    return found[-1] if found else None


def _best_evaluation(run: ComparedRun) -> float | None:
    return min(_evaluations(run), default=None)


def _median(run: ComparedRun, name: str) -> float | None:
    """Return the median of a number of the steps after the first two, which warm up."""
    values = [value for _, value in run.curves.of(name).points[2:] if math.isfinite(value)]
    return statistics.median(values) if values and any(values) else None


def _measured(run: ComparedRun, name: str) -> int | None:
    return ((run.state.estimate or {}).get("measured") or {}).get(name)


def _version(run: ComparedRun, package: str) -> str | None:
    return ((run.state.start or {}).get("versions") or {}).get(package)


def _size(value: float) -> str:
    return format_size(int(value))


# As a table, and as JSON


def comparison_table(runs: Sequence[ComparedRun]) -> Table:
    """Return a column for each run; behind a number its ratio to that of the first run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.name, overflow="fold")
    made = rows(runs)
    for row in made:
        cells = [cell(row, number) for number in range(len(runs))]
        table.add_row(row.name, *cells, style="bold" if row.is_key else "")
    if not any(row.is_key for row in made):
        table.add_row("keys", *["the same"] * len(runs))
    return table


def cell(row: Row, number: int) -> str:
    """Return the value of a run as text, behind a number its ratio to that of the first run."""
    value = row.values[number]
    if value is None:
        return "-"
    text = row.text(value)
    first = row.values[0]
    is_number = not row.is_key and isinstance(value, float) and isinstance(first, float)
    if number and is_number and first:
        return f"{text} ({value / first:.3g}x)"
    return text


def to_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    made = rows(runs)
    return {
        "runs": [run.name for run in runs],
        "keys": {row.name: list(row.values) for row in made if row.is_key},
        "results": {row.name: list(row.values) for row in made if not row.is_key},
    }
