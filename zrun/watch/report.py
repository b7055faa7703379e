"""What a finished run comes to: results, speed, and how well traffic and memory were foretold."""

from __future__ import annotations

from pathlib import Path

from zrun.watch import text
from zrun.watch.state import Evaluation, RunState
from zrun_core.sizes import format_size


def report(state: RunState, run_dir: Path) -> str:
    """A few lines for the end of the output."""
    end = state.end or {}
    steps = f"{state.step.step} step{'s' if state.step.step != 1 else ''}"
    reason = f"{end.get('reason')}: {end['why']}" if end.get("why") else end.get("reason")
    rows = [("done", f"{steps} in {text.duration(end.get('total_s') or 0.0)} ({reason})")]
    if state.losses.points:
        rows.append(("loss", f"{state.losses.points[0]:.4f} at the first step, {state.step.loss:.4f} at the last"))
    if state.evals:
        rows.append(("validation", " -> ".join(f"{each.loss:.4f} (step {each.step})" for each in _ends(state))))
    rows.append(("metrics", text.metrics(state.metrics)))
    rows.append(("speed", _speed(state)))
    for kind, traffic in (end.get("traffic") or {}).items():
        rows.append(
            (f"traffic {kind}", _compared(traffic.get("measured_bytes"), traffic.get("expected_bytes"), "theory"))
        )
    memory = end.get("memory") or {}
    if memory:
        rows.append(("memory", _compared(memory.get("measured_bytes"), memory.get("planned_bytes"), "planned")))
    if state.estimate is not None:
        rows.append(("estimate", text.foretold(state.estimate)))
    rows.append(("run", str(run_dir)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows if value)


def _ends(state: RunState) -> list[Evaluation]:
    first, last = state.evals[0], state.evals[-1]
    return [last] if first == last else [first, last]


def _speed(state: RunState) -> str:
    end = state.end or {}
    parts = []
    total_s = end.get("total_s")
    for total, name in ((state.step.total_tokens, "tok/s"), (state.step.total_samples, "samples/s")):
        if total and total_s:
            parts.append(f"{text.count(total / total_s)} {name} over the whole run")
            break
    if state.step_s is not None:
        parts.append(f"{text.seconds(state.step_s)}/step lately")
    if state.mfu is not None:
        parts.append(f"MFU {state.mfu:.1%}")
    return ", ".join(parts)


def _compared(measured: int | None, expected: int | None, what: str) -> str:
    """`12.0 MiB measured, 12.0 MiB planned (+0.1%)`."""
    if measured is None:
        return ""
    line = f"{format_size(measured)} measured"
    if expected is None:
        return line
    if measured == expected:
        return f"{line}, equal to {what}"
    error = f" ({(measured - expected) / expected:+.2%})" if expected else ""
    return f"{line}, {format_size(expected)} {what}{error}"
