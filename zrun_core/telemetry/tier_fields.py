"""Fields of events about memory beside the device: what lies there, what moves, who waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zrun_core.memory.buffers import Kind, Tier
from zrun_core.memory.tier_traffic import Direction, Move
from zrun_core.tiers.tiers import TierCounts
from zrun_core.zero.wrap.sharding_config import MemoryAccount

_ELSEWHERE = (Tier.HOST, Tier.DISK)


def memory_by_tier(account: MemoryAccount) -> dict[str, dict[str, int]]:
    """Return the bytes of a rank as `{"disk": {"params": 4096}}`, without what holds nothing."""
    found: dict[str, dict[str, int]] = {}
    device = {(Tier.DEVICE, kind): size for kind, size in account.by_kind.items()}
    for (tier, kind), num_bytes in (device | dict(account.elsewhere)).items():
        if num_bytes:
            found.setdefault(tier.value, {})[kind.value] = num_bytes
    return found


def memory_beside_plan(planned: MemoryAccount, allocated: MemoryAccount) -> dict[str, Any]:
    """Return by tier the bytes by kind that were `planned` and `allocated`."""
    plan = memory_by_tier(planned)
    fact = memory_by_tier(allocated)
    return {
        tier.value: {
            "planned": plan.get(tier.value, {}),
            "allocated": fact.get(tier.value, {}),
        }
        for tier in Tier
        if tier.value in plan or tier.value in fact
    }


def moves_of_step(counts: TierCounts, planned: Mapping[Move, int]) -> dict[str, Any]:
    """Return the fields of a `step` event.

    Args:
        planned: bytes, by kind of transfer.
    """
    tiers = {
        tier.value: {
            "moved": _by_direction(counts.moved, tier),
            "planned": _by_direction(planned, tier),
            "waited_s": counts.waited_s[tier],
        }
        for tier in _ELSEWHERE
        if any(move.tier is tier for move in (*counts.moved, *planned))
    }
    return {
        "tiers": tiers,
        "updates": {"beside_s": counts.updating_s, "lag_s": counts.lag_s},
    }


def _by_direction(moved: Mapping[Move, int], tier: Tier) -> dict[str, dict[str, int]]:
    """Return the bytes of one tier as `{"read": {"params": 4096}, "written": {}}`."""
    found: dict[str, dict[str, int]] = {direction.value: {} for direction in Direction}
    for kind in Kind:
        for direction in Direction:
            num_bytes = moved.get(Move(tier, direction, kind), 0)
            if num_bytes:
                found[direction.value][kind.value] = num_bytes
    return found
