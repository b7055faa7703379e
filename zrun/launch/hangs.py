"""Find ranks that make no progress, and ask their agents why.

Each rank counts its progress in the flight recorder of its host
(`zrun_core.spine.flight_recorder`), which the agent passes on. The launcher times how long a count
stands still, by its own monotonic clock: clocks of hosts are never compared.

    a rank works     it may stand still for the limit of its phase
    a script's rank  waits while it neither uses the CPU nor prints (`agent/script_observer.py`)
    a rank is halted it waits for no disk and for no code: `hang_s`, in a save too
    a rank waits     the others are to blame while one of them works ...
    all ranks wait   ... so waiting counts only then, and all of them hang
    a host is silent it is lost, or not: its connection decides that first
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from zrun.transport.frames import SILENCE_S
from zrun_core.spine.flight_page import RankProgress

if TYPE_CHECKING:  # an agent is there sooner without pydantic
    from zrun_core.spine.sections.guards import LimitsConfig

_QUIET_S = 2.0  # without a look at its board, a host may be lost
_LOST_S = SILENCE_S + 5.0  # in which its connection has said so
_LEAST_AUTO_S = 60.0
_STEPS_AUTO = 5
_TIMES_KEPT = 200
_PAUSES = ("hook", "evaluation", "save", "profile")
_TESTIMONY_S = 4.0  # that agents get
_NEVER = (-1, 0.0)  # progress, and when it was seen


class StepTimes:
    """Recent durations of steps, as precise as looking at the progress now and then allows.

    Attributes:
        p99: seconds; 0 before the second step ended.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._step = 0
        self._since = 0.0
        self._is_clean = False  # nothing but training has happened in this step
        self.p99 = 0.0

    def see(self, now: float, state: RankProgress) -> None:
        """Take in the progress of one rank at `now`."""
        if state.step != self._step:
            is_warm = self._step > state.first
            if self._is_clean and is_warm:
                self._times.append((now - self._since) / (state.step - self._step))
                self.p99 = sorted(self._times)[math.ceil(0.99 * len(self._times)) - 1]
            self._step = state.step
            self._since = now
            self._is_clean = True
        if state.phase in _PAUSES:
            self._is_clean = False


@dataclass(frozen=True)
class HungRanks:
    """Ranks that hang, and the limit that they exceeded.

    Attributes:
        key: of the job file, which sets the limit.
    """

    ranks: list[int]
    limit_s: float
    key: str


class HangWatch:
    """Judges the progress of all ranks. Pure: times are given, in seconds of one clock."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._times = StepTimes()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its progress, and when that was new
        self._heard: dict[int, float] = {}  # rank -> when it was seen last
        self._halted: dict[int, float] = {}  # rank -> since when it is halted

    def limit(self, state: RankProgress) -> tuple[float, str]:
        """Return the seconds that a rank in this state may stand still, and the key for them."""
        limits = self._limits
        if state.phase == "script":  # nobody knows what it waits for: longer than a collective may
            if limits.hang_s is None:
                return limits.collective_s, "limits.collective_s"
            return limits.hang_s, "limits.hang_s"
        if state.phase == "save":
            return limits.save_s, "limits.save_s"
        if state.phase in _PAUSES:
            limit_s = limits.eval_s
            if state.step == 0:
                limit_s = max(limit_s, limits.first_step_s)
            return limit_s, "limits.eval_s"
        if state.step <= state.first and state.phase != "end":
            return limits.first_step_s, "limits.first_step_s"
        return self._hang_s(), "limits.hang_s"

    def _hang_s(self) -> float:
        """Return `limits.hang_s`; auto is some steps as long as the slowest in a hundred."""
        if self._limits.hang_s is not None:
            return self._limits.hang_s
        return max(_LEAST_AUTO_S, _STEPS_AUTO * self._times.p99)

    def see(
        self, now: float, states: Mapping[int, RankProgress], halted: Collection[int] = ()
    ) -> None:
        """Take in the progress of some ranks at `now`, and which of them are halted."""
        for rank, state in states.items():
            self._heard[rank] = now
            if rank in halted:
                self._halted.setdefault(rank, now)
            else:
                self._halted.pop(rank, None)
            if self._seen.get(rank, _NEVER)[0] != state.progress:
                self._seen[rank] = state.progress, now

    def judge(self, now: float, states: Mapping[int, RankProgress]) -> HungRanks | None:
        """Return the ranks that hang at `now`; None: none does.

        Args:
            now: in seconds.
            states: of all ranks that run, each of which `see` was told of.
        """
        if not states:
            return None
        self._times.see(now, states[min(states)])
        quiet_s = now - min(self._heard[rank] for rank in states)
        if _QUIET_S < quiet_s < _LOST_S:
            return None  # a host may be lost: its connection decides that
        if halted := self._halted_ranks(now, states):
            return HungRanks(halted, self._hang_s(), "limits.hang_s")
        working = [rank for rank, state in states.items() if not state.waiting]
        if not working:
            limit_s, key = max(self.limit(state) for state in states.values())
            moved = max(self._seen[rank][1] for rank in states)
            return HungRanks(list(states), limit_s, key) if now - moved > limit_s else None
        # Almost all moved just now: of thousands, few need a closer look.
        limits = self._limits
        least = min(limits.save_s, limits.eval_s, limits.first_step_s, self._hang_s())
        late: list[int] = []
        for rank in working:
            still_s = now - self._seen[rank][1]
            if still_s > least and still_s > self.limit(states[rank])[0]:
                late.append(rank)
        if not late:
            return None
        return HungRanks(late, *self.limit(states[late[0]]))

    def _halted_ranks(self, now: float, states: Mapping[int, RankProgress]) -> list[int]:
        """Return the ranks that a signal or a debugger stopped, and that nobody lets go on.

        A disk that is slow does not look like that, nor does code that takes long. Before the first
        step a debugger has all the time that starting may take.
        """
        return [
            rank
            for rank, since in self._halted.items()
            if rank in states
            and now - since > self._hang_s()
            and self.limit(states[rank])[1] != "limits.first_step_s"
        ]


class HangInvestigation:
    """The testimonies of agents about a hang, until all ranks are told of or the time is over."""

    def __init__(self, hung: HungRanks, states: Mapping[int, RankProgress], now: float) -> None:
        """Begin to ask.

        Args:
            now: in seconds, by any clock that `is_over` is told too.
        """
        self.hung = hung
        self._states = dict(states)
        self._late = now + _TESTIMONY_S
        self._told: dict[int, dict[str, Any]] = {}
        self._frames: list[Mapping[str, Any]] = []

    def hear(self, frame: Mapping[str, Any]) -> None:
        """Take in a `testimony` frame."""
        self._frames.append(frame)
        self._told |= {each["rank"]: each for each in frame["ranks"]}

    def is_over(self, now: float) -> bool:
        return now > self._late or self._told.keys() >= self._states.keys()

    def finding(self) -> dict[str, Any]:
        """Return all that is known of the hang; a rank that no agent told of is silent.

        The content goes into `zrun.launch.failures.Hang`: ranks, to_blame, limit_s, key, reason,
        stacks, logs and links.
        """
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
            for rank in self.hung.ranks
            if self._told[rank]["does"] in ("is stopped", "is silent")
        ]
        return {
            "ranks": told,
            "to_blame": halted or self.hung.ranks,
            "limit_s": self.hung.limit_s,
            "key": self.hung.key,
            "reason": self._reason(told),
            "stacks": self._merged("stacks"),
            "logs": self._merged("logs"),
            "links": self._cut_links(),
        }

    def _reason(self, told: list[dict[str, Any]]) -> str | None:
        reasons: list[str | None] = [frame["disagreement"] for frame in self._frames]
        # If a rank works, or another host has ranks too, the others may wait for that.
        is_stalemate = len(self._frames) == 1 and all(each["does"] == "waits" for each in told)
        if is_stalemate:
            reasons.append(self._frames[0]["stalemate"])
        return next((reason for reason in reasons if reason is not None), None)

    def _merged(self, key: str) -> dict[int, Any]:
        """Return what all testimonies have under `key`, by rank."""
        found: dict[int, Any] = {}
        for frame in self._frames:
            found |= {int(rank): value for rank, value in frame[key].items()}
        return found

    def _cut_links(self) -> list[dict[str, Any]]:
        """Return the ways between two hosts on which data is lost.

        Each has a rank of the one host, the address of the other, and a rank there if one is known.
        """
        frames = [frame for frame in self._frames if frame["ranks"]]
        first_ranks = [min(each["rank"] for each in frame["ranks"]) for frame in frames]
        by_address: dict[str, int] = {}
        for frame, first in zip(frames, first_ranks, strict=True):
            for address in frame.get("addresses", ()):
                if not ip_address(address).is_loopback:
                    by_address[address] = first
        links = []
        for frame, first in zip(frames, first_ranks, strict=True):
            for address in frame.get("unanswered", ()):
                link = {"rank": first, "address": address, "other": by_address.get(address)}
                links.append(link)
        return links
