"""The live panel: a pure function from what is known about a run to something rich can draw."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zrun.watch import text
from zrun.watch.state import MEMORY_KINDS, SPLIT, RunState
from zrun_core.events import Event

_MOST_ROWS = 8  # ranks shown one by one; of more, the fullest ones
_SPLIT_LETTERS = "dFBCO"
# Okabe and Ito's colours, told apart by any eye; letters carry the meaning without them.
_SPLIT_STYLES = ("#999999", "#56B4E9", "#0072B2", "#E69F00", "#009E73")
_GOOD, _ALERT, _QUIET = "#56B4E9", "#E69F00", "grey62"


@dataclass(frozen=True)
class Facts:
    """What is known before the first event."""

    name: str
    run_id: str
    num_ranks: int


def panel(state: RunState, facts: Facts, width: int, ascii_only: bool = False) -> Panel:
    """The whole panel, `width` characters wide."""
    inner = width - 4
    rows: list[RenderableType] = [_progress(state, facts, inner, ascii_only)]
    if state.step.step:
        rows += [_loss(state, inner, ascii_only), _numbers(state), _speed(state), _split(state, inner)]
    if state.metrics:
        rows.append(Text(text.metrics(state.metrics), no_wrap=True, overflow="ellipsis"))
    if state.memory:
        rows.append(_memory(state))
    if state.estimate is not None:
        rows.append(Text(text.foretold(state.estimate), _QUIET, no_wrap=True, overflow="ellipsis"))
    return Panel(
        Group(*rows),
        title=Text(_title(state, facts)),
        title_align="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        width=width,
        border_style=_QUIET,
    )


def _title(state: RunState, facts: Facts) -> str:
    ranks = f"{facts.num_ranks} rank{'s' if facts.num_ranks > 1 else ''}"
    title = f"{facts.name}  {facts.run_id}  {ranks}"
    if state.start is None:
        return title
    return f"{title}  zero {state.start.get('stage')}  {state.start.get('precision')}  {state.start.get('device')}"


def _progress(state: RunState, facts: Facts, width: int, ascii_only: bool) -> Text:
    if state.start is None:
        return Text(f"starting {facts.num_ranks} worker{'s' if facts.num_ranks > 1 else ''}")
    if not state.step.step:
        return Text(f"{text.count(state.start.get('params') or 0)} parameters ready; first step")
    total = state.total_steps
    if total is None:
        epoch = f"  epoch {state.step.epoch:.2f}" if state.step.epoch is not None else ""
        return Text(f"step {state.step.step}{epoch}  {_consumed(state)}")
    head = f"step {state.step.step}/{total} "
    eta = text.duration(state.eta_s) if state.eta_s is not None else "-"
    tail = f" {state.step.step / total:4.0%}  eta {eta}"
    room = max(4, width - len(head) - len(tail))
    filled = min(room, room * state.step.step // total)
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    return Text.assemble(head, (full * filled, _GOOD), (empty * (room - filled), _QUIET), tail)


def _consumed(state: RunState) -> str:
    step = state.step
    if step.total_tokens:
        return f"{text.count(step.total_tokens)} tokens"
    return f"{text.count(step.total_samples)} samples"


def _loss(state: RunState, width: int, ascii_only: bool) -> Text:
    head = f"loss {state.step.loss:.4f} "
    tail = f" eval {state.evals[-1].loss:.4f} at {state.evals[-1].step}" if state.evals else ""
    curve = text.sparkline(state.losses.points, min(60, width - len(head) - len(tail)), ascii_only)
    return Text.assemble(head, (curve, _GOOD), tail)


def _numbers(state: RunState) -> Text:
    step = state.step
    line = Text(f"lr {step.lr:.3g}" if step.lr is not None else "lr -")
    if step.grad_norm is not None:
        line.append(f"  grad norm {step.grad_norm:.3g}")
    if step.loss_scale is not None:
        line.append(f"  scale {step.loss_scale:g}")
    line.append(f"  skipped {step.skips}", _ALERT if step.skipped else "")
    if state.saved is not None:
        line.append(f"  ckpt {state.saved}")
    if state.num_messages:
        line.append(f"  messages {state.num_messages}", _QUIET)
    return line


def _speed(state: RunState) -> Text:
    parts = []
    if state.speed is not None:
        parts.append(f"{text.count(state.speed[0])} {state.speed[1]}")
    if state.step_s is not None:
        parts.append(f"{text.seconds(state.step_s)}/step")
    if state.tflops is not None:
        parts.append(f"{state.tflops:.3g} TFLOP/s per rank")
    if state.mfu is not None:
        parts.append(f"MFU {state.mfu:.1%}")
    return Text("  ".join(parts))


def _split(state: RunState, width: int) -> Text:
    shares = [state.split.get(part, 0.0) for part in SPLIT]
    legend = "  ".join(f"{part} {share:.0%}" for part, share in zip(SPLIT, shares, strict=True))
    line = Text()
    room = min(40, width - len(legend) - 7)
    if room >= 10:
        line.append("time ")
        for (letter, size), style in zip(text.share_bar(shares, _SPLIT_LETTERS, room), _SPLIT_STYLES, strict=True):
            line.append(letter * size, style)
        line.append("  ")
    return line.append(legend)


def _memory(state: RunState) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, header_style=_QUIET)
    events = state.memory.events
    on_device = any(event.get("device_allocated") is not None for event in events)
    for name in ("rank", *MEMORY_KINDS, "other", "device" if on_device else "rss", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = sorted(heapq.nlargest(_MOST_ROWS, events, key=_held), key=lambda event: int(event["rank"]))
    for event in shown:
        kinds = [event.get(kind) or 0 for kind in MEMORY_KINDS]
        peak = event.get("device_reserved") if on_device else event.get("peak_rss_bytes")
        other = max(0, _held(event) - sum(kinds))
        table.add_row(str(event["rank"]), *(text.size(value) for value in (*kinds, other, _held(event), peak or 0)))
    if len(events) > len(shown):
        table.add_row(f"+{len(events) - len(shown)}", *["-"] * (len(MEMORY_KINDS) + 1), "less", "-", style=_QUIET)
    if any(state.planned_bytes.values()):
        table.add_row("plan", *(text.size(value) for value in state.planned_bytes.values()), style=_QUIET)
    return table


def _held(event: Event) -> int:
    """Bytes that a rank holds where its model lives."""
    device = event.get("device_allocated")
    return int(device if device is not None else event.get("rss_bytes") or 0)
