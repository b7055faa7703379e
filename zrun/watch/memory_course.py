"""What rank 0's buffers held over a run, by tier and kind, in constant memory."""

from __future__ import annotations

from zrun.watch.memory_kinds import KINDS
from zrun.watch.thinned import Thinned
from zrun_core.spine.events import Event

_MOST_KEPT = 4000

Held = dict[str, dict[str, int]]  # bytes by tier and kind


class MemoryCourse:
    """Its moments, of which those with the least and the most in all are kept."""

    def __init__(self) -> None:
        self._totals = Thinned()
        self._held: dict[int, Held] = {}  # by step

    def take(self, step: int, held: Held) -> None:
        """Take in what was held after a step that is not before those that are there."""
        total = sum(sum(kinds.values()) for kinds in held.values())
        self._totals.add(step, total)
        self._held[step] = held
        if len(self._held) > _MOST_KEPT:
            self._held = dict(self.moments)

    def forget(self, step: int) -> None:
        """Drop what came from `step` on."""
        self._totals.forget(step)
        self._held = {each: held for each, held in self._held.items() if each < step}

    @property
    def moments(self) -> list[tuple[int, Held]]:
        """The steps that are kept, in order, with what was held after each."""
        kept = (step for step, _ in self._totals.points)
        return [(step, self._held[step]) for step in kept if step in self._held]


def held_by_kind(memory: Event) -> Held:
    """Return the bytes of a rank's buffers by tier and kind, from its `memory` event."""
    if tiers := memory.get("tiers"):
        return {tier: dict(use["allocated"]) for tier, use in tiers.items()}
    return {"device": {kind: memory.get(kind) or 0 for kind in KINDS}}
