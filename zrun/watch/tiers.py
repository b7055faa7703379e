"""Memory beside the device in words: what lies there, how fast it moves, who waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zrun.watch import formatting
from zrun.watch.run_state import RunState
from zrun_core.sizes import format_size

ELSEWHERE = {"host": "in host memory", "disk": "on disk"}


def planned_elsewhere(start: Mapping[str, Any]) -> str:
    """Return `6.0 GiB on disk` of a `start` event, by plan; empty where nothing is elsewhere."""
    planned = start.get("planned_tiers") or {}
    return " and ".join(
        f"{format_size(sum(planned[tier].values()))} {place}"
        for tier, place in ELSEWHERE.items()
        if planned.get(tier)
    )


def tier_use(state: RunState, tier: str) -> list[str]:
    """Return rank 0's use of a tier: `6.0 GiB`, `read 1.2 GB/s`, `wrote 900 MB/s`, `waited 20ms`.

    Bytes are of the memory in use, rates and waits of a step, as they were lately.
    """
    use = state.use_of(tier)
    if use is None:
        return []
    words = []
    held = (state.memory.get(0) or {}).get("tiers") or {}
    if tier in held:
        words.append(format_size(sum(held[tier]["allocated"].values())))
    if state.step_s:
        words.append(f"read {_rate(use.read / state.step_s)}")
        words.append(f"wrote {_rate(use.written / state.step_s)}")
    words.append(f"waited {formatting.seconds(use.waited_s)}/step")
    return words


def updates(state: RunState) -> list[str]:
    """Return what updates beside training took in a step, and what training waited for."""
    beside = state.updates("beside_s")
    if not beside:
        return []
    lag = state.updates("lag_s")
    return [
        f"{formatting.seconds(beside)}/step overlapped",
        f"waited {formatting.seconds(lag)}/step",
    ]


def in_short(state: RunState) -> list[str]:
    """Return what rank 0 does elsewhere for a line of a file, a text for each tier."""
    uses = {tier: tier_use(state, tier) for tier in ELSEWHERE} | {"updates": updates(state)}
    return [f"{name} {' '.join(words)}" for name, words in uses.items() if words]


def tier_rows(state: RunState) -> list[tuple[str, str]]:
    """Return the rows of a report: memory, bytes of a step and waits, of rank 0, by tier."""
    held = ((state.end or {}).get("memory") or {}).get("tiers") or {}
    rows = []
    for tier in ELSEWHERE:
        parts = []
        if tier in held:
            parts.append(_held(held[tier]))
        if tier in state.step.tiers:
            parts.append(_moved(state.step.tiers[tier]))
        if tier in state.tier_waits:
            parts.append(f"waited {formatting.duration(state.tier_waits[tier])} in all")
        rows.append((tier, "; ".join(parts)))
    beside = updates(state)
    if beside:
        waited = f"training waited {formatting.duration(state.update_lag)} for them in all"
        rows.append(("updates", f"{beside[0]}; {waited}"))
    return rows


def _held(tier: Mapping[str, Any]) -> str:
    allocated = sum(tier["allocated"].values())
    planned = sum(tier["planned"].values())
    line = f"{format_size(allocated)} of rank 0"
    if allocated == planned:
        return f"{line}, equal to plan"
    return f"{line}; {format_size(planned)} planned"


def _moved(tier: Mapping[str, Any]) -> str:
    """Return the bytes of the newest step."""
    moved = tier["moved"]
    read, written = (sum(moved[direction].values()) for direction in ("read", "written"))
    line = f"the last step read {format_size(read)} and wrote {format_size(written)}"
    planned = tier["planned"]
    if planned == moved:
        return f"{line}, equal to plan"
    read, written = (sum(planned[direction].values()) for direction in ("read", "written"))
    return f"{line}; {format_size(read)} and {format_size(written)} planned"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s < 1e9:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    return f"{bytes_per_s / 1e9:.1f} GB/s"
