"""The report of a run as text: results, speed, traffic and memory beside what was foretold."""

from __future__ import annotations

import textwrap
from pathlib import Path

from zrun.watch import formatting
from zrun.watch.axis_traffic import theory_along
from zrun.watch.checks_left_out import checks_left_out
from zrun.watch.profile_table import profile_line
from zrun.watch.pushes import numerics_in_words, pushes_in_words
from zrun.watch.rank_digest import digest_of
from zrun.watch.run_state import RunState, number
from zrun.watch.stages import stage_rows
from zrun.watch.tiers import tier_rows
from zrun_core.sizes import format_size, several

_CURVE_WIDTH = 24  # characters
_LEAST_STEPS = 3  # of a curve


def report(
    state: RunState,
    run_dir: Path,
    width: int | None = None,
    *,
    page: Path | None = None,
    ascii_only: bool = False,
) -> str:
    """Sum up for the end of the output; each line says if it is of the whole run or this attempt.

    Args:
        state: of the run at its end.
        width: columns, so that lines are broken between words; None: one line each.
        page: the file with the curves; None: there is none.
    """
    rows = report_rows(state, _loss_curve(state, ascii_only))
    rows.append(("run", str(run_dir)))
    if page is not None:
        rows.append(("page", str(page)))
    margin = max(len(name) for name, _ in rows) + 2
    room = 10_000
    if width is not None:
        room = max(20, width - margin)
    wrapper = textwrap.TextWrapper(room, break_long_words=False, break_on_hyphens=False)
    lines = []
    for name, value in rows:
        first, *others = wrapper.wrap(value)
        lines.append(name.ljust(margin) + first)
        lines += [" " * margin + other for other in others]
    return "\n".join(lines)


def report_rows(state: RunState, curve: str = "") -> list[tuple[str, str]]:
    """Return what there is to say of a run, as names and texts.

    Args:
        state: of the run at its end, whichever that was.
        curve: of the loss, as text.
    """
    end = state.end or {}
    rows = _extent(state)
    rows.append(("loss", f"{_losses(state)} {curve}".strip()))
    if state.evals:
        rows += _evaluations(state)
    rows.append(("metrics", formatting.metrics(state.metrics)))
    rows.append(("speed", _speed(state)))
    sent = "sent by rank 0" + (" in this attempt" if state.resumed else "")
    for kind, traffic in (end.get("traffic") or {}).items():
        expected = traffic.get("expected_bytes")
        if expected is None:
            expected = theory_along(state, kind)
        rows.append((kind, _compared(traffic.get("measured_bytes"), expected, sent, "theory")))
    memory = end.get("memory") or {}
    sizes = memory.get("measured_bytes"), memory.get("planned_bytes")
    rows.append(("memory", _compared(*sizes, "in buffers of rank 0", "plan")))
    rows.append(("numerics", numerics_in_words(state.start)))
    rows.append(("checks", "; ".join(checks_left_out(state.start))))
    rows.append(("staleness", "; ".join(pushes_in_words(state.pushes))))
    rows += stage_rows(state)
    rows += tier_rows(state)
    rows.append(("fragmentation", _fragmentation(state)))
    rows.append(("inputs of blocks", _kept(state)))
    rows += [("profile", profile_line(event)) for _, event in sorted(state.profiles.items())[:4]]
    if state.estimate is not None:
        rows.append(("estimate", formatting.foretold(state.estimate)))
    return [(name, value) for name, value in rows if value]


def _loss_curve(state: RunState, ascii_only: bool) -> str:
    """Return the losses in block characters; empty where they are not known from the first step."""
    if state.resumed or len(state.losses.points) < _LEAST_STEPS:
        return ""
    return formatting.sparkline(state.losses.points, _CURVE_WIDTH, ascii_only)


def _extent(state: RunState) -> list[tuple[str, str]]:
    """Return the steps and their time, of the run and of this attempt."""
    end = state.end or {}
    step = state.step.step
    seconds = end.get("total_s") or 0.0
    if state.end is None:
        planned = f" of {state.total_steps}" if state.total_steps else ""
        return [("steps", f"{step}{planned}")]
    reason = end.get("reason")
    if end.get("why"):
        reason = f"{reason}: {end['why']}"
    if not state.resumed:
        return [("done", f"{several(step, 'step')} in {formatting.duration(seconds)} ({reason})")]
    before = state.resumed.get("seconds")
    in_all = ""
    if before is not None:
        in_all = f" in {formatting.duration(before + seconds)}"
    made = several(step - state.resumed["step"], "step")
    return [
        ("done", f"{several(step, 'step')}{in_all} ({reason})"),
        (
            "this attempt",
            f"{made} after step {state.resumed['step']}, in {formatting.duration(seconds)}",
        ),
    ]


def _fragmentation(state: RunState) -> str:
    """Return what a GPU's allocator held without use, on the rank where that is most."""
    on_gpus = [each for each in state.memory.events if each.get("device_fragmented") is not None]
    if not on_gpus:
        return ""
    worst = max(on_gpus, key=lambda event: (event["device_fragmented"], -event["rank"]))
    reserved = worst.get("device_reserved") or 0
    share = worst["device_fragmented"] / reserved if reserved else 0.0
    retries = digest_of(state)["alloc_retries"]
    again = ""
    if retries:
        again = f"; an allocation had to be retried {several(retries, 'time')}"
    size = format_size(worst["device_fragmented"])
    held = f"{format_size(reserved)} held by torch on rank {worst['rank']}"
    return f"{size} of {held} ({share:.0%}){again}"


def _kept(state: RunState) -> str:
    """Return the room that inputs of recomputed blocks took, on the rank with most.

    Those that wait on the device as they are count as activations.
    """
    kept = [event.get("kept_bytes") or {} for event in state.memory.events]
    most = max(kept, key=lambda sizes: sum(sizes.values()), default={})
    places = {"disk": "on disk", "host": "in host memory", "device": "in slices"}
    parts = [
        f"{format_size(most[tier])} {place}" for tier, place in places.items() if most.get(tier)
    ]
    return " and ".join(parts)


def _losses(state: RunState) -> str:
    """Return the loss of the run's very first step, where it is known, and of the newest one."""
    if not state.first.step or not state.step.has_loss:
        return ""
    first = state.first.loss
    at = state.first.step
    if state.resumed and state.resumed.get("first_loss") is not None:
        first = number(state.resumed["first_loss"])
        at = 1
    last = f"{state.step.loss:.4f} (step {state.step.step})"
    if at == state.step.step:
        return last
    return f"{first:.4f} (step {at}) -> {last}"


def _evaluations(state: RunState) -> list[tuple[str, str]]:
    """Return each number of the evaluations, in the first and in the last."""
    last = state.evals[-1]
    ends = [state.evals[0], last]
    if len(state.evals) == 1:
        ends = [last]
    rows = []
    for name in last.metrics:
        known = [each for each in ends if name in each.metrics]
        values = " -> ".join(f"{each.metrics[name]:.4f} (step {each.step})" for each in known)
        label = "validation"
        if name != "loss":
            label += f" {name}"
        rows.append((label, values))
    return rows


def _speed(state: RunState) -> str:
    """Return the speed of all that this attempt did, and of its last steps alone."""
    seconds = (state.end or {}).get("total_s")
    parts = []
    for unit, name in (("tokens", "tok/s"), ("samples", "samples/s")):
        first = getattr(state.first, f"total_{unit}")
        total = getattr(state.step, f"total_{unit}")
        made = total - first + getattr(state.first, unit)
        if made and seconds:
            of = "the run"
            if state.resumed:
                of = "this attempt"
            rate = f"{formatting.count(made / seconds)} {name}"
            parts.append(f"{rate} over {of}, evaluations and saves included")
            break
    lately = []
    if state.speed is not None:
        lately.append(f"{formatting.count(state.speed[0])} {state.speed[1]}")
    if state.step_s is not None:
        lately.append(f"{formatting.seconds(state.step_s)}/step")
    if state.mfu is not None:
        lately.append(f"MFU {state.mfu:.1%}")
    if lately:
        number_of = several(len(state.timed), "step")
        parts.append(f"{', '.join(lately)} over the last {number_of}")
    return "; ".join(parts)


def _compared(measured: int | None, expected: int | None, what: str, how: str) -> str:
    """Return `12.0 MiB sent by rank 0, 12.0 MiB in theory (+0.1%)`."""
    if measured is None:
        return ""
    line = f"{format_size(measured)} {what}"
    if expected is None:
        return line
    if measured == expected:
        return f"{line}, equal to {how}"
    line += f"; {format_size(expected)} in {how}"
    if expected:
        line += f" ({(measured - expected) / expected:+.2%})"
    return line
