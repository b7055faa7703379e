"""Ranks that no longer move: found by the agent, which is another process than the one that hangs.

Each rank counts its progress on the board (`zrun_core.board`). The agent times how long a count stands still, by its
own monotonic clock. A rank that works is given the limit of its phase; a rank that waits for others is not to blame
while one of them works, so waiting counts only when everyone waits.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zrun.launch import processes
from zrun.launch.processes import Process
from zrun_core.board import BoardView, RankState
from zrun_core.config import LimitsConfig

PERIOD_S = 0.25  # between two looks
_LEAST_AUTO_S = 60.0
_STEPS_AUTO = 5
_TIMES_KEPT = 200
_PAUSES = ("hook", "evaluation", "save")
_STACKS_S = 1.0  # that ranks get for writing their stacks


class StepTimes:
    """Recent durations of steps, as far as looking at the board now and then shows them."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._step, self._since = 0, 0.0
        self._is_clean = False

    def see(self, now: float, state: RankState) -> None:
        if state.step != self._step:
            if self._is_clean and self._step > state.first:  # which warms up
                self._times.append((now - self._since) / (state.step - self._step))
            self._step, self._since, self._is_clean = state.step, now, True
        if state.phase in _PAUSES:
            self._is_clean = False

    @property
    def p99(self) -> float:
        """Seconds; 0 before the second step ended."""
        ordered = sorted(self._times)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


@dataclass(frozen=True)
class Verdict:
    """Ranks that hang, and the limit that they passed."""

    ranks: list[int]
    limit_s: float
    key: str  # of the job file


class HangWatch:
    """Judges what the ranks of a host say of themselves. Knows no clock and no process."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._times = StepTimes()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its progress, and when that was new

    def limit(self, state: RankState) -> tuple[float, str]:
        """Seconds that a rank in this state may stand still, and the key that says so."""
        limits = self._limits
        if state.phase == "save":
            return limits.save_s, "limits.save_s"
        if state.phase in _PAUSES:
            return max(limits.eval_s, limits.first_step_s if state.step == 0 else 0.0), "limits.eval_s"
        if state.step <= state.first and state.phase != "end":
            return limits.first_step_s, "limits.first_step_s"
        if limits.hang_s is None:
            return max(_LEAST_AUTO_S, _STEPS_AUTO * self._times.p99), "limits.hang_s"
        return limits.hang_s, "limits.hang_s"

    def look(self, now: float, states: Mapping[int, RankState]) -> Verdict | None:
        """Take in what the running ranks say at `now`, in seconds of one monotonic clock."""
        if not states:
            return None
        self._times.see(now, states[min(states)])
        for rank, state in states.items():
            if self._seen.get(rank, (-1, 0.0))[0] != state.progress:
                self._seen[rank] = state.progress, now
        blamed = {rank: state for rank, state in states.items() if not state.waiting}
        if blamed:
            late = [rank for rank, state in blamed.items() if now - self._seen[rank][1] > self.limit(state)[0]]
            return Verdict(late, *self.limit(states[late[0]])) if late else None
        limit, key = max(self.limit(state) for state in states.values())
        moved = max(self._seen[rank][1] for rank in states)
        return Verdict(list(states), limit, key) if now - moved > limit else None


class HangGuard:
    """Looks at the board of a host, and reports on a hang."""

    def __init__(self, view: BoardView, limits: LimitsConfig, run_dir: Path) -> None:
        self._view, self._run_dir = view, run_dir
        self._watch = HangWatch(limits)

    def look(self, leaders: Mapping[int, Process]) -> dict[str, Any] | None:
        """The frame that tells of a hang, or None. `leaders` are the running workers by rank."""
        states = {rank: self._view.state(rank) for rank in leaders}
        verdict = self._watch.look(time.monotonic(), states)
        if verdict is None:
            return None
        halted = [rank for rank, leader in leaders.items() if leader.state in ("T", "t")]
        to_blame = [rank for rank in verdict.ranks if rank in halted] or verdict.ranks
        told = [
            {
                "rank": rank,
                "step": state.step,
                "phase": state.phase,
                "does": "is stopped" if rank in halted else "waits" if state.waiting else "runs",
                "last": str(self._view.last(rank) or "no collective"),
            }
            for rank, state in states.items()
        ]
        disagreement = None if halted else self._view.disagreement() or self._view.stalemate()
        return {
            "frame": "hang",
            "ranks": told,
            "to_blame": to_blame,
            "limit_s": verdict.limit_s,
            "key": verdict.key,
            "reason": disagreement,
            "stacks": self._dump_stacks(leaders, halted),
        }

    def _dump_stacks(self, leaders: Mapping[int, Process], halted: list[int]) -> dict[int, str]:
        """Have every worker write its stacks; faulthandler does so without Python's help. Text by rank."""
        folder = self._run_dir / "stacks"
        files = {rank: folder / f"rank-{rank}.txt" for rank in leaders}
        there = {rank: leader for rank, leader in leaders.items() if files[rank].exists()}  # it listens
        processes.send(list(there.values()), signal.SIGQUIT)
        processes.send([leaders[rank] for rank in halted], signal.SIGCONT)  # what is stopped cannot write
        deadline = time.monotonic() + _STACKS_S
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            now = {rank: files[rank].stat().st_size for rank in there}
            if now == sizes and all(now.values()):
                break
            sizes = now
            time.sleep(PERIOD_S / 5)
        return {rank: files[rank].read_text(errors="replace") for rank in there}
