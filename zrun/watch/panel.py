"""The live panel: a pure function from what is known about a run to lines that fit a terminal.

`ROWS` lists its rows in the order in which they are drawn. A row is a function that returns its
lines for the space that it gets, none where it has nothing to say. Values are never cut in words:
what does not fit on a line goes on the next one, and where the lines are too few, the rows that are
missed least are left out. To show something new, write such a function and name it there; columns
of the table of ranks are in `ranks_table.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from zrun.watch import formatting
from zrun.watch.panel_layout import ALERT, GAP, GOOD, LABEL, QUIET, Facts, PanelSpace, packed
from zrun.watch.pushes import numerics_in_words, pushes_in_words
from zrun.watch.ranks_table import ranks_table
from zrun.watch.remaining import remaining
from zrun.watch.run_state import SPLIT, RunState
from zrun.watch.stages import stage_rows
from zrun.watch.tiers import tier_use, updates
from zrun_core.sizes import several

WIDEST = 140  # columns: beyond, the eye has too far to go
_MOST_STAGES = 10  # lines about them
_LEAST_LINES = 3  # of a panel, however low the terminal
# columns
_LEAST_CURVE = 10
_MOST_CURVE = 60
_LEAST_BAR = 8
_SPLIT_LETTERS = "dFBCO"
_SPLIT_STYLES = ("#999999", "#56B4E9", "#0072B2", "#E69F00", "#009E73")


@dataclass(frozen=True)
class PanelRow:
    """A row of the panel.

    Attributes:
        label: in front of its first line; without one its lines take the whole width.
        importance: the lower, the longer it stays where lines are few.
    """

    label: str
    lines: Callable[[RunState, Facts, PanelSpace], list[Text]]
    importance: int


def panel(
    state: RunState,
    facts: Facts,
    width: int,
    height: int = 100,
    *,
    ascii_only: bool = False,
) -> Panel:
    """Draw the whole panel.

    Args:
        width: of the panel, in columns.
        height: of the terminal, in lines; the panel leaves a third of it to messages.
    """
    room = PanelSpace(width - 4, max(_LEAST_LINES, height * 2 // 3 - 2), ascii_only)
    return Panel(
        Group(*body(state, facts, room)),
        title=_title(state, facts, width - 6),
        title_align="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        width=width,
        border_style=QUIET,
    )


def body(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Return the lines of all rows that fit; a row's first one stands behind its label."""
    drawn: dict[PanelRow, list[Text]] = {}
    left = room.height
    for row in sorted(ROWS, key=lambda row: row.importance):
        if not left:
            drawn[row] = []
            continue
        width = room.width
        if row.label:
            width -= LABEL
        lines = row.lines(state, facts, replace(room, width=width, height=left))
        drawn[row] = [part for line in lines for part in packed([line], width)][:left]
        left -= len(drawn[row])
    body = []
    for row in ROWS:
        label = row.label.ljust(LABEL) if row.label else ""
        for number, line in enumerate(drawn[row]):
            head = label if number == 0 else " " * len(label)
            body.append(Text.assemble((head, QUIET), line, no_wrap=True, overflow="crop"))
    return body


def _title(state: RunState, facts: Facts, width: int) -> Text:
    """Name the run and its ranks; what is missed least goes first where the border is too short."""
    words = {"name": facts.name, "run": facts.run_id, "ranks": several(facts.num_ranks, "rank")}
    if state.start is not None and state.start.get("stage") is None:  # of a script
        words |= {"device": str(state.start.get("device"))}
    elif state.start is not None:
        words |= {"zero": f"zero {state.start.get('stage')}"}
        words |= {key: str(state.start.get(key)) for key in ("precision", "device")}
    for missed_least in ("run", "device", "precision", "zero", "ranks"):
        if len(GAP.join(words.values())) > width:
            words.pop(missed_least, None)
    return Text(GAP.join(words.values()))


def _progress(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    if not state.step.step:
        return packed(_beginning(state, facts), room.width)
    total = state.total_steps
    if total is None:
        return [Text(f"{state.step.step}")]
    fields: list[Text | str] = [f"{state.step.step}/{total}", f"{state.step.step / total:.0%}"]
    if (left := remaining(state)) is not None:
        fields.append(f"eta {left}")
    length = room.width - sum(len(field) + len(GAP) for field in fields)
    if length >= _LEAST_BAR:
        filled = min(length, length * state.step.step // total)
        full, empty = ("#", "-") if room.ascii_only else ("━", "─")
        parts = (full * filled, GOOD), (empty * (length - filled), QUIET)
        fields.insert(1, Text.assemble(*parts))
    return packed(fields, room.width)


def _beginning(state: RunState, facts: Facts) -> list[Text | str]:
    """Say how far the start has come, and what it waits for."""
    fields: list[Text | str] = [f"starting {several(facts.num_ranks, 'worker')}"]
    if facts.is_script:
        fields = ["not reported: zrun logs shows what the script prints"]
    elif state.start is not None:
        fields = [f"{formatting.count(state.start.get('params') or 0)} parameters ready"]
    return fields + _waited_for(state)


def _waited_for(state: RunState) -> list[Text | str]:
    """Say what takes a while just now."""
    doing = state.doing
    if doing is None or doing.step < state.step.step:
        return []
    is_training = state.step.step > 0
    if is_training and not doing.is_long:
        return []
    return [Text(f"{doing.what} {formatting.duration(doing.seconds)}", GOOD)]


def _so_far(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Say what the run has consumed, and which step is saved."""
    step = state.step
    fields = _waited_for(state) if step.step else []
    if state.elapsed_s is not None:
        fields.append(f"elapsed {formatting.duration(state.elapsed_s)}")
    if step.epoch is not None:
        fields.append(f"epoch {step.epoch:.2f}")
    if step.total_tokens:
        fields.append(f"{formatting.count(step.total_tokens)} tokens")
    elif step.total_samples:
        fields.append(f"{formatting.count(step.total_samples)} samples")
    if state.saved is not None:
        fields.append(f"saved at step {state.saved}")
    if state.num_warnings:
        fields.append(Text(several(state.num_warnings, "warning"), ALERT))
    return packed(fields, room.width)


def _loss(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    if not state.step.step or not state.step.has_loss:
        return []
    loss = f"{state.step.loss:.4f}"
    evals = [f"eval {each.loss:.4f} at step {each.step}" for each in state.evals[-1:]]
    left = room.width - len(GAP.join([loss, *evals])) - len(GAP)
    if left < _LEAST_CURVE:  # then the evaluation goes on a line of its own
        left = room.width - len(loss) - len(GAP)
    curve = formatting.sparkline(state.losses.points, min(_MOST_CURVE, left), room.ascii_only)
    line = Text.assemble(loss, GAP if curve else "", (curve, GOOD))
    return packed([line, *evals], room.width)


def _update(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    step = state.step
    if not step.step:
        return []
    fields: list[Text | str] = []
    if step.lr is not None:
        fields.append(f"lr {step.lr:.3g}")
    if step.grad_norm is not None:
        fields.append(f"grad norm {step.grad_norm:.3g}")
    if step.loss_scale is not None:
        fields.append(f"loss scale {step.loss_scale:g}")
    if step.skips:
        skipped = f"{several(step.skips, 'step')} skipped"
        fields.append(Text(skipped, ALERT if step.skipped else ""))
    return packed(fields, room.width)


def _speed(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    fields: list[Text | str] = []
    if state.speed is not None:
        fields.append(f"{formatting.count(state.speed[0])} {state.speed[1]}")
    if state.step_s is not None:
        fields.append(f"{formatting.seconds(state.step_s)}/step")
    if state.tflops is not None:
        number, unit = formatting.flops(state.tflops)
        fields.append(f"{number} {unit}FLOP/s per rank")
    if state.mfu is not None:
        fields.append(f"MFU {state.mfu:.1%}")
    return packed(fields, room.width)


def _time(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Draw the parts of a step's time, on rank 0."""
    split = state.split
    if not split:
        return []
    shares = [split[part] for part in SPLIT]
    legend = [f"{part} {share:.0%}" for part, share in zip(SPLIT, shares, strict=True)]
    width_of_bar = min(40, room.width - len(GAP.join([*legend, ""])))
    if width_of_bar < _LEAST_BAR:
        return packed(legend, room.width)
    bar = formatting.share_bar(shares, _SPLIT_LETTERS, width_of_bar)
    styled = zip(bar, _SPLIT_STYLES, strict=True)
    parts = [(letter * size, style) for (letter, size), style in styled]
    return packed([Text.assemble(*parts), *legend], room.width)


def _tier(tier: str, state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Say what rank 0 has on the host or on a disk, and how fast that comes and goes."""
    words = tier_use(state, tier)
    if words and facts.num_ranks > 1:
        words.append("(rank 0)")
    return packed(words, room.width)


def _updates(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    return packed(updates(state), room.width)


def _late(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Say that gradients are of older parameters, and how late they come to a server."""
    label = numerics_in_words(state.start)
    return packed([*([label] if label else []), *pushes_in_words(state.pushes)], room.width)


def _stages(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Say what each stage of a pipeline has, and how long they wait."""
    lines = [Text(f"{name.removeprefix('stage ')}: {text}") for name, text in stage_rows(state)]
    return lines if len(lines) <= _MOST_STAGES else lines[len(state.stages) :]


def _metrics(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    """Show the numbers of the newest evaluation and of the user's hooks, but for the loss."""
    metrics = state.newest_metrics
    if not metrics:
        return []
    return packed(formatting.metrics(metrics).split(GAP), room.width)


def _estimate(state: RunState, facts: Facts, room: PanelSpace) -> list[Text]:
    if state.estimate is None:
        return []
    parts = re.split("(?<=[,;]) ", formatting.foretold(state.estimate))
    return packed([Text(part, QUIET) for part in parts], room.width, " ")


ROWS = (
    PanelRow("step", _progress, 0),
    PanelRow("run", _so_far, 4),
    PanelRow("loss", _loss, 1),
    PanelRow("update", _update, 5),
    PanelRow("metrics", _metrics, 3),
    PanelRow("speed", _speed, 2),
    PanelRow("time", _time, 6),
    PanelRow("late", _late, 7),
    PanelRow("stages", _stages, 7),
    PanelRow("host", partial(_tier, "host"), 7),
    PanelRow("disk", partial(_tier, "disk"), 7),
    PanelRow("updates", _updates, 7),
    PanelRow("estimate", _estimate, 9),
    PanelRow("", ranks_table, 8),
)
