"""From the agent's frames to the run's exit code: who ended, in which order, and who asked for it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from zrun.launch.failures import Exit, Failure, Note, first_failure
from zrun.launch.frames import Frame
from zrun.launch.rundir import RunDir
from zrun_core.errors import ExitCode, HangError, RendezvousError
from zrun_core.events import Event
from zrun_core.spec import LaunchPlan

_TURN_S = 0.1  # how late an interrupt may be noticed
_ALONE_S = 5.0  # how long the others may run on after a rank left early; most notice by themselves
_AGENT_LOG = "its last words are above, or in logs/agent-<host>.log of the run directory"

OnEvent = Callable[[Event], None]
OnTurn = Callable[[], None]


class Agent(Protocol):
    """What supervising needs of `zrun.launch.local.LocalAgent`."""

    def frames(self, patience_s: float) -> list[Frame] | None: ...
    def stop(self, number: signal.Signals) -> None: ...


@dataclass
class Run:
    """What the agent has told so far."""

    num_ranks: int
    exits: list[Exit] = field(default_factory=list)
    last_step: int = 0
    started: bool = False  # every worker process exists
    ended: bool = False  # rank 0 said that training reached its end
    done: bool = False  # the agent has cleaned up

    def fold(self, frame: Frame) -> Event | None:
        """Take in one frame; an event is handed back."""
        match frame["frame"]:
            case "started":
                self.started = True
            case "exit":
                self.exits.append(Exit(frame["rank"], frame["status"], frame["time"], frame["oom"]))
            case "done":
                self.done = True
            case "event":
                event: Event = frame["event"]
                self.last_step = max(self.last_step, event.get("step") or 0)
                self.ended |= event.get("type") == "end"
                return event
        return None

    @property
    def left_early(self) -> Exit | None:
        """A rank that ended well while others still train."""
        if self.ended or len(self.exits) == self.num_ranks:
            return None
        return next((each for each in self.exits if each.status == 0), None)


class Interrupts:
    """Signals that ask the launcher to end, counted instead of obeyed at once."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at = 0.0
        self.count = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it to stay ignored
            numbers.append(signal.SIGHUP)
        before = [signal.signal(number, self._note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.first is None:
            self.first, self.at = signal.Signals(number), time.time()
        self.count += 1


def watch(agent: Agent, run: Run, interrupts: Interrupts, start_s: float, on_event: OnEvent, on_turn: OnTurn) -> None:
    """Follow the agent until it is done, and stop it when asked to.

    Raises:
        RendezvousError: it has not started the workers after `start_s` seconds.
        HangError: it ended without cleaning up.
    """
    late = time.monotonic() + start_s
    alone: float | None = None
    obeyed = 0
    while not run.done:
        frames = agent.frames(_TURN_S)
        if frames is None:
            raise HangError(f"the agent of this host ended unexpectedly; {_AGENT_LOG}")
        for frame in frames:
            event = run.fold(frame)
            if event is not None:
                on_event(event)
        on_turn()
        if not run.started and time.monotonic() > late:
            raise RendezvousError(f"the workers had not started after {start_s:.0f} s (limits.start_s)")
        if run.left_early is not None:
            alone = alone or time.monotonic() + _ALONE_S
            if time.monotonic() > alone:
                agent.stop(signal.SIGTERM)
                alone = float("inf")
        if interrupts.count > obeyed:
            obeyed = interrupts.count
            _obey(agent, interrupts)
    if not run.started and interrupts.first is None:
        raise HangError(f"the agent of this host could not start the workers; {_AGENT_LOG}")


def _obey(agent: Agent, interrupts: Interrupts) -> None:
    assert interrupts.first is not None
    if interrupts.count == 1:
        print(f"{interrupts.first.name}: stopping the workers; once more kills them", file=sys.stderr)
        agent.stop(signal.SIGTERM)
    else:
        print("killing the workers", file=sys.stderr)
        agent.stop(signal.SIGKILL)


def judge(run: Run, plan: LaunchPlan, rundir: RunDir, interrupts: Interrupts) -> tuple[int, Failure | None]:
    """The run's exit code, and the failure behind it."""
    notes = {place.rank: Note.read(rundir.failure(place.rank)) for place in plan.ranks}
    exits = run.exits
    if interrupts.first is not None:
        exits = [each for each in exits if each.time < interrupts.at]  # later ones are what was asked for
        if run.ended and all(each.status == 0 for each in run.exits):
            return ExitCode.OK, None
    end = first_failure(exits, {rank: note for rank, note in notes.items() if note is not None}, run.ended)
    if end is not None:
        place = plan.ranks[end.rank]
        failure = Failure(end, notes[end.rank], place, plan.world_size, run.last_step, rundir.log(end.rank))
        return failure.exit_code, failure
    if interrupts.first is not None:
        return 128 + interrupts.first, None
    return ExitCode.OK, None
