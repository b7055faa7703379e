"""A recorded step of a pipeline as a picture: a row for each stage, a box for each action."""

from __future__ import annotations

from html import escape

from zrun.watch import formatting
from zrun.watch.run_state import RunState
from zrun.watch.stages import Box, recorded, stage_rows

_WIDTH = 1000.0
_ROW = 30.0
_MARGIN = 70.0
_LEAST_NAMED = 22.0  # width of a box with room for its name
_COLORS = {"F": "var(--c0)", "B": "var(--c2)", "W": "var(--c1)", "U": "var(--c3)"}
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights", "U": "update"}
STYLE = """
.steps { min-width: 50em; max-width: 100em; display: block; width: 100%; }
"""


def picture(state: RunState) -> str:
    """Return the recorded step as SVG: a row for each stage, a box for each action, to scale."""
    rows = recorded(state)
    if not rows:
        return ""
    last = max(box.end for row in rows for box in row) or 1.0
    scale = (_WIDTH - _MARGIN) / last
    parts = []
    for stage, row in enumerate(rows):
        top = stage * _ROW
        parts.append(f'<text x="0" y="{top + 19:g}">stage {stage}</text>')
        parts += [_drawn(box, top, scale) for box in row]
    title = f"Step {state.schedules[0]['step']} by stage"
    height = len(rows) * _ROW
    return (
        f'<div class="wide"><svg class="steps" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg></div>'
        f'<p class="soft">{escape(_legend(rows, last))}</p>'
        f"<p>{escape(dict(stage_rows(state)).get('bubble', ''))}</p>"
    )


def _drawn(box: Box, top: float, scale: float) -> str:
    kind = box.action.kind.value
    width = max(0.5, (box.end - box.begin) * scale)
    left = _MARGIN + box.begin * scale
    name = f"{kind}{box.action.micro}"
    took = formatting.seconds(box.end - box.begin)
    told = f"{name} of chunk {box.action.chunk}: {took}, waited {formatting.seconds(box.waited)}"
    label = ""
    if width >= _LEAST_NAMED:
        label = f'<text x="{left + 3:.1f}" y="{top + 19:g}">{name}</text>'
    return (
        f'<g><title>{escape(told)}</title><rect x="{left:.1f}" y="{top + 3:g}" '
        f'width="{width:.1f}" height="{_ROW - 6:g}" fill="{_COLORS[kind]}" fill-opacity=".45" '
        f'stroke="var(--back)"/>{label}</g>'
    )


def _legend(rows: list[list[Box]], last: float) -> str:
    there = {box.action.kind.value for row in rows for box in row}
    kinds = [f"{kind}: {name}" for kind, name in _NAMES.items() if kind in there]
    words = "; ".join(kinds)
    whole = formatting.seconds(last)
    return f"{words}, of the micro-batch; without a box the stage waits; {whole} in all"
