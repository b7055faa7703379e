"""From the agent's frames to the run's exit code: who ended, in which order, and who asked for it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from zrun.launch import processes
from zrun.launch.failures import Exit, Failure, Hang, Note, first_failure
from zrun.launch.frames import Frame, Stop
from zrun.launch.rundir import RunDir
from zrun_core.config import LimitsConfig
from zrun_core.errors import ExitCode, HangError, RendezvousError
from zrun_core.events import Event
from zrun_core.spec import LaunchPlan

_TURN_S = 0.1  # how late an interrupt may be noticed
_ALONE_S = 5.0  # how long the others may run on after a rank left early; most notice by themselves
_GENTLE = {ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED}  # a worker's, after a signal
_AGENT_LOG = "its last words are above, or in logs/agent-<host>.log of the run directory"

OnEvent = Callable[[Event], None]
OnTurn = Callable[[], None]


class Agent(Protocol):
    """What supervising needs of `zrun.launch.local.LocalAgent`."""

    def frames(self, patience_s: float) -> list[Frame] | None: ...
    def stop(self, how: Stop) -> None: ...


@dataclass
class Run:
    """What the agent has told so far."""

    num_ranks: int
    exits: list[Exit] = field(default_factory=list)
    last_step: int = 0
    started: bool = False  # every worker process exists
    leaders: list[processes.Process] = field(default_factory=list)  # the workers
    stopping: bool = False  # a rank got a signal that did not come through the launcher
    hang: Frame | None = None
    ended: bool = False  # rank 0 said that training reached its end
    done: bool = False  # the agent has cleaned up

    def fold(self, frame: Frame) -> Event | None:
        """Take in one frame; an event is handed back."""
        match frame["frame"]:
            case "started":
                self.started = True
                found = (processes.Process.find(pid) for pid in frame["pids"].values())
                self.leaders = [process for process in found if process is not None]
            case "exit":
                self.exits.append(Exit(frame["rank"], frame["status"], frame["time"], frame["oom"]))
            case "hang":
                self.hang = frame
            case "done":
                self.done = True
            case "event":
                event: Event = frame["event"]
                self.last_step = max(self.last_step, event.get("step") or 0)
                self.ended |= event.get("type") == "end"
                self.stopping |= event.get("type") == "stop"
                return event
        return None

    @property
    def left_early(self) -> Exit | None:
        """A rank that ended well while others still train."""
        if self.ended or len(self.exits) == self.num_ranks:
            return None
        return next((each for each in self.exits if each.status == 0), None)


STOP_NOW = signal.SIGRTMIN  # from `zrun stop --now`: level 2, whatever came before and however often it comes


class Interrupts:
    """Signals that ask the launcher to end, counted instead of obeyed at once.

    Attributes:
        first: the one that came first.
        level: 0 none; 1 finish the step and save; 2 now; 3 kill. Only SIGINT and SIGTERM go beyond 1: a closing
            terminal and a scheduler warn more than once.
        forced_at: unix seconds at which level 2 was reached.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.level = 0
        self.forced_at: float | None = None
        self._num_firm = 0

    def force(self) -> None:
        """What was asked for gently is now wanted at once."""
        self.level, self._num_firm = max(self.level, 2), max(self._num_firm, 2)
        self.forced_at = self.forced_at or time.time()

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, STOP_NOW]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it to stay ignored
            numbers.append(signal.SIGHUP)
        before = [signal.signal(number, self._note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                # Whoever keeps on pressing must not cut the last words short.
                signal.signal(number, handler if self.first is None else signal.SIG_IGN)

    def _note(self, number: int, _: object) -> None:
        self.first = self.first or signal.Signals(number)
        if number == STOP_NOW:
            self.force()
            return
        self._num_firm += number in (signal.SIGINT, signal.SIGTERM)
        self.level = max(1, self._num_firm)
        if self.level > 1:
            self.forced_at = self.forced_at or time.time()


def watch(
    agent: Agent, run: Run, interrupts: Interrupts, limits: LimitsConfig, on_event: OnEvent, on_turn: OnTurn
) -> None:
    """Follow the agent until it is done, and stop it when asked to.

    Raises:
        RendezvousError: it has not started the workers after `limits.start_s` seconds.
        HangError: it ended without cleaning up.
    """
    late = time.monotonic() + limits.start_s
    alone: float | None = None
    patience: float | None = None  # until when the workers may finish
    obeyed = 0
    while not run.done:
        frames = agent.frames(_TURN_S)
        if frames is None:
            _end_sessions(run)
            raise HangError(f"the agent of this host ended unexpectedly; {_AGENT_LOG}")
        for frame in frames:
            event = run.fold(frame)
            if event is not None:
                on_event(event)
        on_turn()
        now = time.monotonic()
        if not run.started and now > late:
            raise RendezvousError(f"the workers had not started after {limits.start_s:.0f} s (limits.start_s)")
        if run.left_early is not None:
            alone = alone or now + _ALONE_S
            if now > alone:
                agent.stop(Stop.NOW)
                alone = float("inf")
        if patience is None and (interrupts.level or run.stopping):
            patience = now + limits.stop_s
        if patience is not None and now > patience:
            patience = float("inf")
            _say(f"not finished after {limits.stop_s:g} s (limits.stop_s): stopping now")
            interrupts.force()
        if interrupts.level > obeyed:
            obeyed = interrupts.level
            _obey(agent, interrupts)
    if not run.started and interrupts.first is None:
        raise HangError(f"the agent of this host could not start the workers; {_AGENT_LOG}")


def _obey(agent: Agent, interrupts: Interrupts) -> None:
    name = interrupts.first.name if interrupts.first is not None else "a signal"
    if interrupts.level == 1:
        _say(f"{name}: finishing the step; once more stops at once")
        agent.stop(Stop.FINISH)
    elif interrupts.level == 2:
        _say("stopping the workers; once more kills them")
        agent.stop(Stop.NOW)
    else:
        _say("killing the workers")
        agent.stop(Stop.KILL)


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)


def _end_sessions(run: Run) -> None:
    """Workers die with their agent; what they started does not."""
    processes.send([each for leader in run.leaders for each in processes.session_of(leader)], signal.SIGKILL)


def judge(run: Run, plan: LaunchPlan, rundir: RunDir, interrupts: Interrupts) -> tuple[int, Failure | Hang | None]:
    """The run's exit code, and the failure behind it."""
    if run.hang is not None and interrupts.forced_at is None:
        return ExitCode.HANG, Hang(run.hang, plan, rundir.path)
    notes = {place.rank: Note.read(rundir.failure(place.rank)) for place in plan.ranks}
    statuses = {each.status for each in run.exits}
    if run.ended and statuses == {0}:
        return ExitCode.OK, None
    if statuses == {ExitCode.STOPPED} and len(run.exits) == run.num_ranks:
        return ExitCode.STOPPED, None
    asked = interrupts.first is not None or run.stopping or bool(statuses & _GENTLE)
    exits = [each for each in run.exits if not (asked and _was_asked_to(each, notes[each.rank], interrupts))]
    end = first_failure(exits, {rank: note for rank, note in notes.items() if note is not None}, run.ended)
    if end is not None:
        place = plan.ranks[end.rank]
        failure = Failure(end, notes[end.rank], place, plan.world_size, run.last_step, rundir.log(end.rank))
        return failure.exit_code, failure
    if not asked:
        return ExitCode.OK, None
    by_hand = interrupts.first == signal.SIGINT or (interrupts.first is None and ExitCode.INTERRUPTED in statuses)
    return ExitCode.INTERRUPTED if by_hand else ExitCode.TERMINATED, None


def _was_asked_to(end: Exit, note: Note | None, interrupts: Interrupts) -> bool:
    """Whether a worker ended because of a signal that the run got, or because another one did."""
    if interrupts.forced_at is not None and end.time >= interrupts.forced_at:
        return True
    if end.status in _GENTLE or end.signal in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        return True
    return note is not None and note.is_echo
