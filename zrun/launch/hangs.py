"""Ranks that no longer move: found by the launcher, from what the agents of all hosts see on their boards.

Each rank counts its progress on the board of its host (`zrun_core.spine.flight_recorder`), which the agent
passes on. The launcher times how long a count stands still, by its own monotonic clock: clocks of
hosts are never compared. A rank that works
is given the limit of its phase; a rank that waits for others is not to blame while one of them works, so waiting counts
only when everyone waits. While a host is not heard at all, its connection has the first word: the host may be lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from zrun.transport.frames import SILENCE_S
from zrun_core.spine.flight_recorder import RankProgress

if TYPE_CHECKING:  # an agent is there sooner without pydantic
    from zrun_core.spine.config import LimitsConfig

_QUIET_S = 2.0  # without a look at its board, a host may be lost
_LOST_S = SILENCE_S + 5.0  # in which its connection has said so
_LEAST_AUTO_S = 60.0
_STEPS_AUTO = 5
_TIMES_KEPT = 200
_PAUSES = ("hook", "evaluation", "save")
_TESTIMONY_S = 4.0  # that agents get
_NEVER = -1, 0.0


class StepTimes:
    """Recent durations of steps, as far as looking at the board now and then shows them."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._step, self._since = 0, 0.0
        self._is_clean = False
        self.p99 = 0.0  # seconds; 0 before the second step ended

    def see(self, now: float, state: RankProgress) -> None:
        if state.step != self._step:
            if self._is_clean and self._step > state.first:  # which warms up
                self._times.append((now - self._since) / (state.step - self._step))
                self.p99 = sorted(self._times)[math.ceil(0.99 * len(self._times)) - 1]
            self._step, self._since, self._is_clean = state.step, now, True
        if state.phase in _PAUSES:
            self._is_clean = False


@dataclass(frozen=True)
class HungRanks:
    """Ranks that hang, and the limit that they passed."""

    ranks: list[int]
    limit_s: float
    key: str  # of the job file


class HangWatch:
    """Judges what all ranks say of themselves. Knows no clock and no process."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._times = StepTimes()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its progress, and when that was new
        self._heard: dict[int, float] = {}  # rank -> when it was seen last

    def limit(self, state: RankProgress) -> tuple[float, str]:
        """Seconds that a rank in this state may stand still, and the key that says so."""
        limits = self._limits
        if state.phase == "save":
            return limits.save_s, "limits.save_s"
        if state.phase in _PAUSES:
            return max(
                limits.eval_s, limits.first_step_s if state.step == 0 else 0.0
            ), "limits.eval_s"
        if state.step <= state.first and state.phase != "end":
            return limits.first_step_s, "limits.first_step_s"
        return self._hang_s(), "limits.hang_s"

    def _hang_s(self) -> float:
        if self._limits.hang_s is None:
            return max(_LEAST_AUTO_S, _STEPS_AUTO * self._times.p99)
        return self._limits.hang_s

    def see(self, now: float, states: Mapping[int, RankProgress]) -> None:
        """Take in what some ranks say at `now`, in seconds of one monotonic clock."""
        for rank, state in states.items():
            self._heard[rank] = now
            if self._seen.get(rank, _NEVER)[0] != state.progress:
                self._seen[rank] = state.progress, now

    def judge(self, now: float, states: Mapping[int, RankProgress]) -> HungRanks | None:
        """Which of the running ranks, all of which were seen, stand still at `now`."""
        if not states:
            return None
        self._times.see(now, states[min(states)])
        if _QUIET_S < now - min(self._heard[rank] for rank in states) < _LOST_S:
            return None
        blamed = {rank: state for rank, state in states.items() if not state.waiting}
        if blamed:
            # Almost all moved just now: of thousands, few need a closer look.
            limits = self._limits
            since = now - min(limits.save_s, limits.eval_s, limits.first_step_s, self._hang_s())
            still = [rank for rank in blamed if self._seen[rank][1] < since]
            late = [
                rank for rank in still if now - self._seen[rank][1] > self.limit(states[rank])[0]
            ]
            return HungRanks(late, *self.limit(states[late[0]])) if late else None
        limit, key = max(self.limit(state) for state in states.values())
        moved = max(self._seen[rank][1] for rank in states)
        return HungRanks(list(states), limit, key) if now - moved > limit else None


class HangInvestigation:
    """What the agents testify once the launcher has found a hang, until all have, or have had their time."""

    def __init__(self, verdict: HungRanks, states: Mapping[int, RankProgress], now: float) -> None:
        self.verdict = verdict
        self._states = dict(states)
        self._late = now + _TESTIMONY_S
        self._told: dict[int, dict[str, Any]] = {}
        self._frames: list[Mapping[str, Any]] = []

    def hear(self, frame: Mapping[str, Any]) -> None:
        """Take in a `testimony`."""
        self._frames.append(frame)
        self._told |= {each["rank"]: each for each in frame["ranks"]}

    def is_over(self, now: float) -> bool:
        return now > self._late or self._told.keys() >= self._states.keys()

    def finding(self) -> dict[str, Any]:
        """All that is known of the hang; what no agent told of is silent."""
        for rank, state in self._states.items():
            silent = {
                "rank": rank,
                "step": state.step,
                "phase": state.phase,
                "does": "is silent",
                "last": "not known",
            }
            self._told.setdefault(rank, silent)
        told = [self._told[rank] for rank in sorted(self._told)]
        halted = [
            rank
            for rank in self.verdict.ranks
            if self._told[rank]["does"] in ("is stopped", "is silent")
        ]
        reasons = [frame["disagreement"] for frame in self._frames]
        # Where one works, or another host has ranks too, it may be what the others wait for.
        if len(self._frames) == 1 and all(each["does"] == "waits" for each in told):
            reasons.append(self._frames[0]["stalemate"])
        return {
            "ranks": told,
            "to_blame": halted or self.verdict.ranks,
            "limit_s": self.verdict.limit_s,
            "key": self.verdict.key,
            "reason": next((reason for reason in reasons if reason is not None), None),
            "stacks": {
                int(rank): text for frame in self._frames for rank, text in frame["stacks"].items()
            },
            "logs": {
                int(rank): lines for frame in self._frames for rank, lines in frame["logs"].items()
            },
            "links": self._cut_links(),
        }

    def _cut_links(self) -> list[dict[str, Any]]:
        """Ways between two hosts on which data is lost: a rank of the one, the other's address and a rank there."""
        first_ranks = {
            address: min(each["rank"] for each in frame["ranks"])
            for frame in self._frames
            for address in frame.get("addresses", ())
            if frame["ranks"] and not ip_address(address).is_loopback
        }
        return [
            {
                "rank": min(each["rank"] for each in frame["ranks"]),
                "address": address,
                "other": first_ranks.get(address),
            }
            for frame in self._frames
            for address in frame.get("unanswered", ())
            if frame["ranks"]
        ]
