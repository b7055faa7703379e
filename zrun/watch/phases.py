"""The phase that the ranks are in and for how long, from the flight recorders that agents pass on.

    phases = PhaseWatch(compiles=job.compile)
    phases.see(now, run.states)
    phases.doing                  # for a panel: "building the model", 12 s
    event = phases.news(now)      # for a record: once it takes longer than it ever has

The launcher times what it sees, twice a second: no rank is asked, and none waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from zrun_core.spine.events import Event
from zrun_core.spine.flight_page import PHASES, RankProgress

_LOOK_S = 0.25
_LONG_S = 2.0  # that are worth a place in the panel
_WORTH_A_LINE_S = 5.0
_LONGER = 1.5  # times what it has taken before: unusual
_WORDS = {
    "start": "importing torch",
    "import": "importing the job's code",
    "rendezvous": "waiting for all ranks to arrive",
    "build": "building the model",
    "shard": "sharding the model",
    "load": "loading weights",
    "data": "reading data",
    "hook": "in a hook",
    "evaluation": "evaluating",
    "save": "saving",
    "profile": "writing a profile",
    "end": "ending",
    "script": "running the script",
}


@dataclass(frozen=True)
class Doing:
    """The work that a run is waiting for.

    Attributes:
        kind: what is compared with what it took before: a phase of the board, "step", "first step".
        what: the same in words, with the rank that others wait for.
        is_long: as a part of every step, longer than it used to be; else longer than a moment.
    """

    rank: int
    step: int
    kind: str
    what: str
    seconds: float
    is_long: bool


class PhaseWatch:
    """Times what the run is waiting for. Knows no clock.

    Attributes:
        doing: as of the newest look; None: no rank runs.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        """
        Args:
            compiles: the first step compiles the model.
        """
        self.doing: Doing | None = None
        self._compiles = compiles
        self._since = self._looked = float("-inf")
        self._longest: dict[str, float] = {}  # seconds by kind
        self._told_s = 0.0  # the seconds that were told of what is being done

    def see(self, now: float, states: Mapping[int, RankProgress]) -> None:
        """Take in what the running ranks say of themselves.

        Args:
            now: seconds of a monotonic clock.
        """
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        before = self.doing
        if not states:
            self.doing = None
            return
        rank = _slowest(states)
        state = states[rank]
        kind = _kind(state)
        if before is None or (before.kind, before.step) != (kind, state.step):
            self._since = now
            self._told_s = 0.0
            if before is not None:
                self._longest[before.kind] = max(
                    before.seconds, self._longest.get(before.kind, 0.0)
                )
        seconds = now - self._since
        usual = 0.0
        if kind in ("step", "data"):
            usual = _LONGER * self._longest.get(kind, 0.0)
        is_long = seconds >= max(_LONG_S, usual)
        self.doing = Doing(
            rank, state.step, kind, self._in_words(kind, rank, states), seconds, is_long
        )

    def news(self) -> Event | None:
        """Return a `phase` event if this takes longer than it ever has.

        It comes again each time that the seconds have doubled.
        """
        doing = self.doing
        if doing is None:
            return None
        usual = _LONGER * self._longest.get(doing.kind, 0.0)
        if doing.seconds < max(_WORTH_A_LINE_S, usual, 2 * self._told_s):
            return None
        self._told_s = doing.seconds
        return {
            "type": "phase",
            "time": time.time(),
            "rank": doing.rank,
            "step": doing.step,
            "phase": doing.kind,
            "what": doing.what,
            "seconds": doing.seconds,
        }

    def _in_words(self, kind: str, rank: int, states: Mapping[int, RankProgress]) -> str:
        state = states[rank]
        words = _WORDS.get(kind, f"step {state.step}")
        if kind == "first step":
            words = kind
            if self._compiles:
                words = "first step, which compiles the model"
        there = sum((_kind(each), each.step) == (kind, state.step) for each in states.values())
        if there == len(states):
            return words
        if there == 1:
            return f"{words} (rank {rank})"
        return f"{words} ({there} of {len(states)} ranks)"


def _slowest(states: Mapping[int, RankProgress]) -> int:
    """Return the rank that is behind all others, of those that do not wait themselves."""
    at_work = [rank for rank, state in states.items() if not state.waiting] or list(states)
    return min(
        at_work, key=lambda rank: (states[rank].step, PHASES.index(states[rank].phase), rank)
    )


def _kind(state: RankProgress) -> str:
    """Return what is timed as one: the parts of a step follow each other too fast to tell apart."""
    if state.phase not in ("forward", "backward", "update"):
        return state.phase
    if state.step == state.first:
        return "first step"
    return "step"
