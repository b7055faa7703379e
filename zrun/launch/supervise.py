"""From the agents' frames to the run's exit code: who ended, in which order, and who asked for it."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from zrun.launch.failures import (
    Failure,
    FailureNote,
    Hang,
    LostHost,
    WorkerExit,
    first_failure,
    is_cause,
)
from zrun.launch.hangs import HangInvestigation, HangWatch
from zrun.runs.rundir import RunDir
from zrun.system import signals
from zrun.system.deadlines import AwakeClock, StopDeadline
from zrun.system.output import notify
from zrun.transport.frames import BEAT_S, GRACE_S, PROGRESS_S, SILENCE_S, Frame, StopMode
from zrun_core.errors import ExitCode, RendezvousError
from zrun_core.spine.config import LimitsConfig
from zrun_core.spine.events import Event
from zrun_core.spine.flight_recorder import RankProgress
from zrun_core.spine.spec import LaunchPlan
from zrun_core.spine.stop_signals import SAVE

_TURN_S = 0.1  # how late an interrupt may be noticed
_ALONE_S = 5.0  # how long the others may run on after a rank left early; most notice by themselves
_MUTE_S = (
    GRACE_S + 1.0
)  # without a word from an agent that was told to stop: it tells of its ranks twice a second
_LAST_WORDS_S = 0.5  # that other hosts get to say why they fail too, after the first failure
_GARBAGE = 100_000  # objects that may gather before the launcher looks for cycles among them
_GENTLE = {
    ExitCode.STOPPED,
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
}  # a worker's, after a signal

OnEvent = Callable[[Event, bytes | None], None]  # and its line, where it can be recorded as it is
OnTurn = Callable[[], None]


class SupervisedAgents(Protocol):
    """What supervising needs of `zrun.transport.agents.AgentGroup`."""

    lost: dict[str, str]

    @property
    def hosts(self) -> list[str]: ...
    @property
    def all_ended(self) -> bool: ...
    @property
    def unfinished(self) -> list[str]: ...
    def drop_host(self, host: str) -> None: ...
    def frames(self, patience_s: float) -> list[tuple[str, Frame]]: ...
    def send(self, frame: Frame) -> None: ...
    def stop(self, how: StopMode) -> None: ...


@dataclass
class SupervisedRun:
    """What the agents have told so far."""

    num_ranks: int
    exits: list[WorkerExit] = field(default_factory=list)
    last_step: int = 0
    started: set[str] = field(default_factory=set)  # hosts that have begun to start their workers
    trains: bool = False  # rank 0 said that the first step begins: the ranks obey signals
    stopping: str = ""  # the signal that a rank got, which did not come through the launcher
    states: dict[int, RankProgress] = field(
        default_factory=dict
    )  # of the ranks that run, as their boards said last
    news: dict[int, RankProgress] = field(default_factory=dict)  # what of it nobody has looked at
    ended_ranks: set[int] = field(default_factory=set)
    first_well: WorkerExit | None = None  # the first exit with status 0
    is_failing: bool = False  # an exit with another one, or a lost host
    investigation: HangInvestigation | None = None
    hang: dict[str, Any] | None = None
    lost: dict[str, str] = field(default_factory=dict)  # hosts, with the reason
    lost_at: float = float("inf")  # unix seconds at which the first of them was missed
    ended: bool = False  # rank 0 said that training reached its end

    def fold(self, host: str, frame: Frame) -> Event | None:
        """Take in one frame; an event is handed back."""
        match frame["frame"]:
            case "event":  # most are
                return self._fold_event(frame["event"])
            case "board":
                for text, state in frame["states"].items():
                    if (rank := int(text)) not in self.ended_ranks:
                        self.states[rank] = self.news[rank] = RankProgress(*state)
            case "started":
                self.started.add(host)
            case "done":
                if host not in self.started:
                    why = "its agent could not start the workers; see its log in logs of the run directory there"
                    self.lose(host, f"{host}: {why}")
            case "exit":
                self._fold_exit(frame)
            case "testimony":
                if self.investigation is not None:
                    self.investigation.hear(frame)
            case "deaf":
                self._fold_silence(host, frame)
        return None

    def _fold_event(self, event: Event) -> Event:
        self.last_step = max(self.last_step, event.get("step") or 0)
        self.trains |= event.get("type") == "start"
        self.ended |= event.get("type") == "end"
        if event.get("type") == "stop" and not self.lost:  # else it is an agent that stops them
            self.stopping = self.stopping or str(event.get("signal"))
        return event

    def _fold_exit(self, frame: Frame) -> None:
        end = WorkerExit(
            rank=frame["rank"],
            status=frame["status"],
            time=time.time(),
            oom=frame["oom"],
            note=FailureNote.parse(frame["note"]),
            log=tuple(frame["log"]),
            shortage=frame.get("shortage", ""),
        )
        self.states.pop(end.rank, None)
        self.exits.append(end)
        self.ended_ranks.add(end.rank)
        self.is_failing |= end.status != 0
        if end.status == 0:
            self.first_well = self.first_well or end

    def _fold_silence(self, host: str, frame: Frame) -> None:
        """Tell a launcher that stood still, while the ranks went on, from a network that was cut."""
        why = f"{host}: its agent had no word from this launcher for {frame['silent_s']:.0f} s"
        if frame["stop"] == StopMode.FINISH:
            self.stopping = self.stopping or why
            return
        cause = "the network was cut, or this process or its host stood still"
        self.lose(host, f"{why}, and its ranks made no progress: {cause}")

    @property
    def left_early(self) -> WorkerExit | None:
        """A rank that ended well while others still train."""
        return None if self.ended or len(self.exits) == self.num_ranks else self.first_well

    def lose(self, host: str, why: str) -> None:
        """A host is no longer there."""
        self.lost[host] = why
        self.lost_at = min(self.lost_at, time.time())
        self.is_failing = True


class LauncherSignals:
    """Signals that ask the launcher to end, counted instead of obeyed at once.

    Attributes:
        first: the one that came first.
        first_at: unix seconds at which it came.
        level: 0 none; 1 finish the step and save; 2 now; 3 kill. Only SIGINT and SIGTERM go beyond 1: a closing
            terminal and a scheduler warn more than once.
        forced_at: unix seconds at which level 2 was reached.
        wants_save: `zrun save` asked, and nobody has looked yet. It asks for no end.
        wants_pause: the terminal asked (ctrl-Z), and nobody has looked yet.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at: float | None = None
        self.level = 0
        self.forced_at: float | None = None
        self.wants_save = False
        self.wants_pause = False
        self._num_firm = 0

    def force(self) -> None:
        """What was asked for gently is now wanted at once."""
        self.level, self._num_firm = max(self.level, 2), max(self._num_firm, 2)
        self.forced_at = self.forced_at or time.time()

    @contextmanager
    def caught(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in signals.numbers()}
        signal.signal(SAVE, self._note_save)
        pausing = signal.getsignal(signal.SIGTSTP)
        if pausing is signal.SIG_DFL:  # a shell without job control ignores it
            signal.signal(signal.SIGTSTP, self._note_pause)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, pausing)
            signal.signal(SAVE, signal.SIG_IGN)
            for number, handler in before.items():
                # Whoever keeps on pressing must not cut the last words short.
                signal.signal(number, handler if self.first is None else signal.SIG_IGN)

    def _note_save(self, number: int, _: object) -> None:
        self.wants_save = True

    def _note_pause(self, number: int, _: object) -> None:
        self.wants_pause = True

    def _note(self, number: int, _: object) -> None:
        self.first = self.first or signal.Signals(number)
        self.first_at = self.first_at or time.time()
        if number == signals.STOP_NOW:  # level 2, whatever came before and however often it comes
            self.force()
            return
        self._num_firm += number in (signal.SIGINT, signal.SIGTERM)
        self.level = max(1, self._num_firm)
        if self.level > 1:
            self.forced_at = self.forced_at or time.time()


class Supervisor:
    """Follows the agents until all are done or gone, and stops them when asked to, or when one of them fails."""

    def __init__(
        self,
        agents: SupervisedAgents,
        run: SupervisedRun,
        interrupts: LauncherSignals,
        limits: LimitsConfig,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Follow `agents`, by a clock in seconds that leaves out what this process slept through."""
        self._agents, self._run, self._interrupts, self._limits = agents, run, interrupts, limits
        self._clock = clock = clock or AwakeClock()
        self._hangs = HangWatch(limits)
        self._late = clock() + limits.start_s
        self._beat_at = self._judge_at = float("-inf")
        self._alone_until: float | None = None
        self._patience: StopDeadline | None = (
            None  # with workers that were asked to end by themselves
        )
        self._stop_at: float | None = None  # the other hosts, after a failure
        self._heard: dict[str, float] = {}  # host -> when it said something last
        self._told_at = float("inf")  # to stop, after a failure or a hang
        self._give_up_at = float("inf")  # on hosts that do not even say that they are done
        self._obeyed = 0

    def watch(self, on_event: OnEvent, on_turn: OnTurn) -> None:
        """Return when it is over.

        Raises:
            RendezvousError: not all hosts have started their workers after `limits.start_s` seconds.
        """
        with _few_collections():
            self._watch(on_event, on_turn)

    def _watch(self, on_event: OnEvent, on_turn: OnTurn) -> None:
        agents, run = self._agents, self._run
        while not agents.all_ended:
            found = agents.frames(_TURN_S)
            now = self._clock()
            for host, frame in found:
                self._heard[host] = now
                event = run.fold(host, frame)
                if event is not None:
                    on_event(event, frame.get("line"))
            for host, why in agents.lost.items():
                if host not in run.lost:
                    run.lose(host, why)
            on_turn()
            now = self._clock()
            if self._gives_up(now):
                break
            self._check_start(now)
            self._beat(now)
            self._look_for_hangs(now)
            self._stop_after_a_failure(now)
            self._stop_when_asked(now)
            self._save_when_asked()
            self._pause_when_asked()

    def _gives_up(self, now: float) -> bool:
        """Stop waiting for hosts that do not end: all of them say nothing, or their time is over."""
        since = now - _MUTE_S
        are_mute = all(
            max(self._heard.get(host, 0.0), self._told_at) < since
            for host in self._agents.unfinished
        )
        if not are_mute and now <= self._give_up_at:
            return False
        for host in self._agents.unfinished:
            what = "its agent says nothing any more: it, or what it was started by, was killed or stands still"
            self._run.lose(host, f"{host}: {what}")
            self._agents.drop_host(host)
        return True

    def _check_start(self, now: float) -> None:
        if now > self._late:
            self._late = float("inf")
            missing = [
                host
                for host in self._agents.hosts
                if host not in {*self._run.started, *self._run.lost}
            ]
            if missing:
                raise RendezvousError(
                    f"{', '.join(missing)}: the workers had not started after {self._limits.start_s:.0f} s "
                    "(limits.start_s)"
                )

    def _beat(self, now: float) -> None:
        """Other hosts take silence for this launcher's death, or for that of the way to it."""
        if now > self._beat_at:
            self._beat_at = now + BEAT_S
            self._agents.send({"beat": True})

    def _look_for_hangs(self, now: float) -> None:
        """Time what the ranks do; once they hang, hear what their agents have to say, and kill them."""
        run = self._run
        news, run.news = run.news, {}
        self._hangs.see(now, news)
        if run.hang is not None or run.is_failing:
            return
        if run.investigation is None:
            if now < self._judge_at:
                return
            self._judge_at = now + PROGRESS_S
            verdict = self._hangs.judge(now, run.states)
            if verdict is not None:
                run.investigation = HangInvestigation(verdict, run.states, now)
                self._agents.send({"testify": True})
        elif run.investigation.is_over(now):
            run.hang = run.investigation.finding()
            self._agents.stop(StopMode.KILL)
            self._told_at, self._give_up_at = now, now + GRACE_S + SILENCE_S

    def _stop_after_a_failure(self, now: float) -> None:
        if self._run.left_early is not None:
            self._alone_until = self._alone_until or now + _ALONE_S
            if now > self._alone_until:
                self._agents.stop(StopMode.NOW)
                self._alone_until = float("inf")
        if self._run.is_failing and self._stop_at is None:
            self._stop_at = now + _LAST_WORDS_S
        if self._stop_at is not None and now > self._stop_at:
            self._stop_at = float("inf")
            self._told_at, self._give_up_at = now, now + GRACE_S + SILENCE_S
            if len(self._agents.hosts) > 1:  # a single agent does so by itself
                # Without a host nothing can be saved, and whoever waits for it listens to nothing else.
                self._agents.stop(StopMode.KILL if self._run.lost else StopMode.NOW)

    def _stop_when_asked(self, now: float) -> None:
        interrupts = self._interrupts
        if self._patience is None and (interrupts.level or self._run.stopping):
            self._patience = StopDeadline(now, self._limits)
            if not interrupts.level:
                notify(f"{self._run.stopping}: finishing the step")
        if self._patience is not None and interrupts.level < 2:
            self._wait_to_finish(now, self._patience)
        if interrupts.level > self._obeyed:
            self._obeyed = interrupts.level
            if (
                interrupts.level > 1 or not self._run.is_failing
            ):  # else all are being stopped already
                _obey(self._agents, interrupts)

    def _wait_to_finish(self, now: float, patience: StopDeadline) -> None:
        """Look whether the workers have had their time. A save is what it is there for: it is not cut off."""
        limits, was_due = self._limits, patience.was_due
        saves = any(state.phase == "save" for state in self._run.states.values())
        if patience.is_over(now, saves=saves):
            limit = (
                f"{limits.save_s:g} s (limits.save_s)"
                if saves
                else f"{limits.stop_s:g} s (limits.stop_s)"
            )
            notify(f"not {'saved' if saves else 'finished'} after {limit}: stopping now")
            self._interrupts.force()
        elif patience.was_due and not was_due:
            notify(
                f"a save is under way: it has {limits.save_s:g} s (limits.save_s) instead of {limits.stop_s:g} "
                "(limits.stop_s); once more stops at once"
            )

    def _pause_when_asked(self) -> None:
        """Stand still as the terminal asked for (ctrl-Z). The ranks train on meanwhile."""
        if not self._interrupts.wants_pause:
            return
        self._interrupts.wants_pause = False
        self._agents.send({"hold": True})
        notify("zrun is stopped, and its ranks train on: fg shows them again")
        os.kill(os.getpid(), signal.SIGSTOP)
        self._agents.send({"beat": True})

    def _save_when_asked(self) -> None:
        """Pass on what `zrun save` asked for. A run that ends says by itself what of it is saved."""
        if not self._interrupts.wants_save:
            return
        self._interrupts.wants_save = False
        run = self._run
        if self._interrupts.level or run.stopping or run.is_failing or run.ended:
            notify("zrun save: the run ends already")
        elif not run.trains:
            notify("zrun save: no rank trains yet, so there is nothing to save")
        else:
            notify("zrun save: saving at the end of the step")
            self._agents.send({"save": True})


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for cycles of garbage seldom: frames of thousands of ranks come and go, and their counts free them."""
    usual = gc.get_threshold()
    gc.set_threshold(_GARBAGE, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _obey(agents: SupervisedAgents, interrupts: LauncherSignals) -> None:
    name = interrupts.first.name if interrupts.first is not None else "a signal"
    if interrupts.level == 1:
        notify(f"{name}: finishing the step; once more stops at once")
        agents.stop(StopMode.FINISH)
    elif interrupts.level == 2:
        notify("stopping the workers; once more kills them")
        agents.stop(StopMode.NOW)
    else:
        notify("killing the workers")
        agents.stop(StopMode.KILL)


def judge(
    run: SupervisedRun,
    plan: LaunchPlan,
    rundir: RunDir,
    interrupts: LauncherSignals,
    committed: int = 0,
) -> tuple[int, Failure | Hang | LostHost | None]:
    """The run's exit code, and the failure behind it.

    Args:
        committed: the newest step that is saved; 0: none.
    """
    if run.hang is not None and interrupts.forced_at is None:
        return ExitCode.HANG, Hang(run.hang, plan, rundir.path)
    statuses = {each.status for each in run.exits}
    are_all = len(run.exits) == run.num_ranks
    if run.ended and statuses == {0} and are_all:
        return ExitCode.OK, None
    if statuses == {ExitCode.STOPPED} and are_all:
        return ExitCode.STOPPED, None
    asked = interrupts.first is not None or bool(run.stopping) or bool(statuses & _GENTLE)
    exits = [each for each in run.exits if not (asked and _was_asked_to(each, interrupts))]
    end = first_failure(exits, run.ended)
    came_first = interrupts.first_at is None or run.lost_at < interrupts.first_at
    if (
        run.lost
        and came_first
        and (end is None or end.time > run.lost_at or not is_cause(end, exits))
    ):
        host, why = next(iter(run.lost.items()))
        return ExitCode.HANG, LostHost(host, why, run.last_step)
    if end is not None:
        place = plan.ranks[end.rank]
        failure = Failure(end, place, plan.world_size, run.last_step, rundir.log(end.rank))
        return failure.exit_code, failure
    if not asked:
        return ExitCode.OK, None
    if (
        committed and committed >= run.last_step
    ):  # what was cut off came after the last step: nothing is lost
        return ExitCode.STOPPED, None
    by_hand = interrupts.first == signal.SIGINT or (
        interrupts.first is None and ExitCode.INTERRUPTED in statuses
    )
    return ExitCode.INTERRUPTED if by_hand else ExitCode.TERMINATED, None


def _was_asked_to(end: WorkerExit, interrupts: LauncherSignals) -> bool:
    """Whether a worker ended because of a signal that the run got, or because another one did."""
    if interrupts.forced_at is not None and end.time >= interrupts.forced_at:
        return True
    if end.status in _GENTLE or end.signal in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        return True
    return end.note is not None and end.note.is_echo
