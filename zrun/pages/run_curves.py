"""The curves of a run: loss, speed, memory, and the numbers of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from zrun.pages import chart, document
from zrun.pages.chart import Line
from zrun.watch import formatting
from zrun.watch.curves import OF_STEPS, Curves
from zrun.watch.memory_kinds import KINDS, MEANINGS, PARTS
from zrun.watch.run_record import RunRecord
from zrun.watch.run_state import SPLIT
from zrun.watch.tiers import ELSEWHERE
from zrun_core.sizes import several

TIERS = ("device", *ELSEWHERE)
SPLIT_COLORS = {"data": 7, "forward": 5, "backward": 0, "comm": 1, "optim": 2}
_FEW_POINTS = 64  # of which each is shown
_OF_STEPS = (*OF_STEPS, "sent", *(f"split {part}" for part in SPLIT))


def curves_of_training(record: RunRecord) -> str:
    """Return the charts of what was trained, and how fast."""
    curves = record.curves
    marks = curves.went_on
    speed, unit = speed_of(curves)
    losses = [line(curves, "loss", "training"), line(curves, "eval loss", "evaluation", 1)]
    if not losses[1].points:
        losses = [line(curves, "loss")]
    drawn = [
        chart.chart("Loss", losses, chart.short, marks=marks),
        chart.chart("Gradient norm", [line(curves, "grad_norm")], chart.short, marks=marks),
        chart.chart(
            f"{unit} per second", [line(curves, speed)], chart.short, from_zero=True, marks=marks
        ),
        chart.chart("Seconds of a step", [line(curves, "step_s")], chart.short, marks=marks),
        chart.chart("Learning rate", [line(curves, "lr")], chart.short, marks=marks),
    ]
    found = "".join(drawn)
    if not found:
        return document.soft("No step was made, so there are no curves.")
    return _charts(found) + _notes(record)


def curves_of_metrics(record: RunRecord) -> str:
    """Return a chart for each number of the user's own."""
    curves = record.curves
    return _charts(
        "".join(
            chart.chart(name, [line(curves, f"metric {name}")], chart.short, marks=curves.went_on)
            for name in curves.metrics
        )
    )


def curves_of_memory(record: RunRecord) -> str:
    """Return the charts of rank 0's memory, beside its plan."""
    curves = record.curves
    marks = curves.went_on
    title = "Whole process of rank 0"
    whole = [line(curves, "process")]
    if curves.of("torch").points:
        title = "Rank 0's process, and its GPU"
        whole = [line(curves, "process", "process"), line(curves, "torch", "held by torch", 1)]
    tiers = dict.fromkeys(tier for _, held in curves.memory.moments for tier in held)
    stacks = [_kinds(curves, tier, _place(record, tier)) for tier in TIERS if tier in tiers]
    return _charts("".join([*stacks, memory_chart(title, whole, marks)]))


def curves_of_times(record: RunRecord) -> str:
    """Return the charts of how steps were spent, and of what was waited for."""
    curves = record.curves
    marks = curves.went_on
    parts = [line(curves, f"split {part}", part, SPLIT_COLORS[part]) for part in SPLIT]
    waits = [
        line(curves, "wait host", "for host memory", 0),
        line(curves, "wait disk", "for disk", 1),
        line(curves, "wait updates", "for updates beside training", 2),
    ]
    ranks = record.ranks
    busy = [
        Line("least", ranks.least.points, 2),
        Line("median", ranks.median.points, 0),
        Line("most", ranks.most.points, 1),
    ]
    drawn = [
        chart.chart("Parts of a step, seconds of rank 0", parts, chart.short, marks=marks),
        chart.chart("Seconds that ranks are busy in a step", busy, chart.short, marks=marks),
        chart.chart(
            "Seconds of waiting in a step, rank 0",
            [each for each in waits if any(value for _, value in each.points)],
            chart.short,
            from_zero=True,
            marks=marks,
        ),
        memory_chart("Sent by rank 0 in a step", [line(curves, "sent")], marks),
    ]
    return _charts("".join(drawn))


def speed_of(curves: Curves) -> tuple[str, str]:
    """Return the series of the speed, and what it counts."""
    if any(value for _, value in curves.of("tokens_per_s").points):
        return "tokens_per_s", "Tokens"
    return "samples_per_s", "Samples"


def line(curves: Curves, series: str, name: str = "", color: int = 0) -> Line:
    """Return a series as a line; few points that are not of each step are shown one by one."""
    points = curves.of(series).points
    is_of_each_step = series in _OF_STEPS or series.startswith("wait ")
    has_dots = not is_of_each_step and len(points) <= _FEW_POINTS
    return Line(name, points, color, has_dots=has_dots)


def memory_chart(title: str, lines: Sequence[Line], marks: Sequence[int]) -> str:
    """Return a chart of bytes, in a unit that suits them."""
    unit = formatting.Unit.of([value for each in lines for value in each.values], least=1)
    return chart.chart(
        title,
        lines,
        _sizes(unit),
        unit=float(unit.num_bytes),
        from_zero=True,
        marks=marks,
    )


def _sizes(unit: formatting.Unit) -> chart.Text:
    return lambda value, digits: f"{value / unit.num_bytes:.{max(digits, 6)}g} {unit.name}"


def _place(record: RunRecord, tier: str) -> str:
    if tier != "device":
        return {"host": "in host memory", "disk": "on disk"}[tier]
    is_cpu = (record.state.start or {}).get("device") == "cpu"
    return "in memory" if is_cpu else "on the device"


def _kinds(curves: Curves, tier: str, place: str) -> str:
    """Return what rank 0's buffers on a tier held, by kind."""
    moments = [
        (step, [float(held.get(tier, {}).get(kind, 0)) for kind in KINDS])
        for step, held in curves.memory.moments
    ]
    planned = curves.planned.get(tier)
    most = max([sum(sizes) for _, sizes in moments] + [planned or 0])
    unit = formatting.Unit.of([most], least=1)
    colors = {part.name: part.number for part in PARTS}
    return chart.stack(
        f"Buffers of rank 0 {place} (dashed: plan)",
        [(MEANINGS[kind], colors[kind]) for kind in KINDS],
        moments,
        _sizes(unit),
        unit=float(unit.num_bytes),
        level=None if planned is None else float(planned),
        marks=curves.went_on,
    )


def _charts(drawn: str) -> str:
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _notes(record: RunRecord) -> str:
    """Return what a reader of the curves should know, where there is such a thing."""
    curves = record.curves
    notes = []
    for series, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        number = curves.of(series).num_lacking
        if number:
            notes.append(
                f"the {name} was not a finite number in {several(number, 'step')}: red marks"
            )
    if curves.went_on:
        after = ", ".join(map(str, curves.went_on))
        notes.append(f"resumed after step {after}: dotted lines")
    if record.is_sampled:
        notes.append("events.jsonl is long: the curves are of evenly spaced parts of it")
    return document.soft(f"{'; '.join(notes)}.") if notes else ""
