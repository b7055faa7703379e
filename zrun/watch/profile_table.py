"""What a profile has found, as a table and in one line: largest parts, waits for other ranks."""

from __future__ import annotations

from collections.abc import Mapping

from zrun.watch import formatting
from zrun_core.sizes import format_size
from zrun_core.spine.events import Event
from zrun_core.spine.printable import printable

_LEAST = 0.001  # of all waits: that of an axis which is told


def profile_text(event: Event) -> str:
    """Return the table of a `profile` event."""
    seconds = float(event["seconds"])
    parts = event.get("parts") or []
    on_gpu = any(part.get("device_s") is not None for part in parts)
    head = f"profile of rank {event['rank']}, {_steps(event)} ({formatting.seconds(seconds)})"
    columns = f"{'by itself':>10}  {'share':>6}  {'calls':>6}  part"
    if on_gpu:
        columns = f"{'on the GPU':>10}  {columns}"
    lines = [f"{head}:", f"  {columns}"]
    for part in parts:
        own = float(part["self_s"])
        row = f"{formatting.seconds(own):>10}  {_share(own, seconds):>6}  {part['calls']:>6}"
        if on_gpu:
            row = f"{formatting.seconds(part.get('device_s') or 0.0):>10}  {row}"
        lines.append(f"  {row}  {printable(str(part['name']))}")
    lines.append(f"  {_waits(event.get('exposed_s') or {}, seconds)}")
    size = format_size(int(event.get("bytes") or 0))
    lines.append(f"  trace, for https://ui.perfetto.dev: {_place(event, 'path')} ({size})")
    if event.get("memory"):
        lines.append(f"  memory, for https://pytorch.org/memory_viz: {_place(event, 'memory')}")
    return "\n".join(lines)


def profile_line(event: Event) -> str:
    """Return the same in short, for a report."""
    seconds = float(event["seconds"])
    parts = [
        f"{printable(str(part['name']))} {_share(float(part['self_s']), seconds)}"
        for part in (event.get("parts") or [])[:3]
    ]
    waits = _waits(event.get("exposed_s") or {}, seconds)
    return f"rank {event['rank']}, {_steps(event)}: {', '.join([*parts, waits])}; {event['path']}"


def _steps(event: Event) -> str:
    first, last = event["steps"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _waits(by_axis: Mapping[str, float], seconds: float) -> str:
    """Say how long the rank waited for others, and along which axes."""
    total = sum(by_axis.values())
    if not total:
        return "waited for no other rank"
    told = [each for each in by_axis.items() if each[1] >= _LEAST * total]
    longest = sorted(told, key=lambda each: -each[1])
    axes = ", ".join(f"{printable(axis)} {formatting.seconds(each)}" for axis, each in longest)
    return f"waited for other ranks: {formatting.seconds(total)} ({_share(total, seconds)}): {axes}"


def _place(event: Event, field: str) -> str:
    """Return where a file is: on the host of its rank."""
    path = printable(str(event[field]))
    return f"{path} on {printable(str(event['host']))}" if event.get("host") else path
