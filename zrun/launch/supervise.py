"""Follow the agents of a run until all have ended, and judge how it did.

agents --frames--> SupervisedRun.update          what is known of the run
                        |
signals, clock  --> Supervisor, each turn        stop, kill, save, report a hang, give up
                        |
                      judge                      the exit code, and the failure behind it
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from zrun.launch.gpu_faults import GpuFault, add, explaining, lost_ranks
from zrun.launch.hangs import HangInvestigation, HangWatch
from zrun.launch.script_hang import ScriptHang
from zrun.runs.rundir import RunDir
from zrun.system.deadlines import AwakeClock, StopDeadline
from zrun.system.output import notify
from zrun.system.signals import LauncherSignals
from zrun.transport.frames import BEAT_S, GRACE_S, PROGRESS_S, SILENCE_S, Frame, StopMode
from zrun_core.errors import ExitCode, RendezvousError
from zrun_core.sizes import several
from zrun_core.spine import profile_request
from zrun_core.spine.events import Event
from zrun_core.spine.flight_page import RankProgress
from zrun_core.spine.held_memory import HeldMemory
from zrun_core.spine.sections.guards import LimitsConfig
from zrun_core.spine.spec import LaunchPlan

_TURN_S = 0.1  # how late a signal may be noticed
_ALONE_S = 5.0  # that others may run on after a rank left early; most notice by themselves
# Without a word from an agent that was told to stop: it tells of its ranks twice a second.
_MUTE_S = GRACE_S + 1.0
_LAST_WORDS_S = 0.5  # that other hosts get to say why they fail too, after the first failure
_GARBAGE = 100_000  # objects that may gather before the launcher looks for cycles among them
# Exit codes of a worker that ended because of a signal.
_ENDED_BY_SIGNAL = {ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED}
_STOPPING_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

OnEvent = Callable[[Event, bytes | None], None]  # and its line, where it can be recorded as it is
OnTurn = Callable[[], None]


class SupervisedAgents(Protocol):
    """The part of `zrun.transport.agents.AgentGroup` that supervising needs."""

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
    """The state of a run, as its agents have told it so far.

    Attributes:
        exits: workers that have ended, in the order in which the launcher heard of them.
        ended_ranks: the ranks of `exits`.
        first_clean_exit: the first of them with status 0.
        is_failing: one had another status, or a host is lost.
        last_step: that any event told of.
        started: hosts that have begun to start their workers.
        is_training: rank 0 said that the first step begins: the ranks obey signals.
        ended: rank 0 said that training reached its end.
        is_script: the ranks run a script: each ends by itself, and says nothing.
        stop_reason: the signal that a rank got, but not through the launcher, or what an agent saw
            that made it stop its ranks; empty: none.
        seen: that of an agent; empty: nothing.
        held: memory of the fullest rank, where an agent saw too much of that.
        states: of the ranks that run, as their agents saw them last.
        new_states: those of them that the supervisor has not seen yet.
        halted: those that a signal or a debugger has stopped.
        investigation: of a hang that was found, while agents testify.
        hang: its finding; None: no rank hangs.
        faults: that GPUs have reported.
        lost: hosts that do not answer, with the reason.
        lost_at: unix seconds at which the first of them was missed.
        survivors: what ranks of the other hosts did then, as their agents tell it.
    """

    num_ranks: int
    exits: list[WorkerExit] = field(default_factory=list)
    ended_ranks: set[int] = field(default_factory=set)
    first_clean_exit: WorkerExit | None = None
    is_failing: bool = False
    last_step: int = 0
    started: set[str] = field(default_factory=set)
    is_training: bool = False
    ended: bool = False
    is_script: bool = False
    stop_reason: str = ""
    seen: str = ""
    held: HeldMemory | None = None
    states: dict[int, RankProgress] = field(default_factory=dict)
    new_states: dict[int, RankProgress] = field(default_factory=dict)
    halted: set[int] = field(default_factory=set)
    investigation: HangInvestigation | None = None
    hang: dict[str, Any] | None = None
    faults: list[GpuFault] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    lost_at: float = float("inf")
    survivors: list[dict[str, Any]] = field(default_factory=list)

    def update(self, host: str, frame: Frame) -> Event | None:
        """Take in a frame of a host's agent. Returns the event that it carries, if any."""
        match frame["frame"]:
            case "event":  # most are
                return self._see_event(frame["event"])
            case "board":
                self._see_progress(frame)
            case "fault":
                add(self.faults, GpuFault.of_frame(frame, time.time()))
            case "started":
                self.started.add(host)
            case "done":
                if host not in self.started:
                    log = "see its log there, in logs of the run directory"
                    why = f"its agent could not start the workers; {log}"
                    self.lose_host(host, f"{host}: {why}")
            case "exit":
                self._see_exit(frame)
            case "testimony":
                self._hear(frame)
            case "deaf":
                self._see_silence(host, frame)
            case "short":
                self._see_stop(f"{host}: {frame['why']}")
                self.held = self.held or HeldMemory.of_data(frame.get("held"))
        return None

    def _hear(self, testimony: Frame) -> None:
        """Take in what an agent tells of a hang, or of those whom a lost host leaves behind."""
        if self.investigation is not None:
            self.investigation.hear(testimony)
        elif self.lost:
            self.survivors += testimony["ranks"]

    def lose_host(self, host: str, why: str) -> None:
        """Record that a host does not answer; `why` is one line that begins with its name."""
        self.lost[host] = why
        self.lost_at = min(self.lost_at, time.time())
        self.is_failing = True

    @property
    def may_end(self) -> bool:
        """Return whether a rank that ends with status 0 is at the end of its work."""
        return self.ended or self.is_script

    @property
    def done_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have ended with status 0."""
        return tuple(sorted(each.rank for each in self.exits if each.status == 0))

    @property
    def left_early(self) -> WorkerExit | None:
        """Return the exit of a rank that ended with status 0 while others still train."""
        if self.may_end or len(self.exits) == self.num_ranks:
            return None
        return self.first_clean_exit

    def _see_event(self, event: Event) -> Event:
        kind = event.get("type")
        self.last_step = max(self.last_step, event.get("step") or 0)
        if kind == "start":
            self.is_training = True
        elif kind == "end":
            self.ended = True
        elif kind == "stop" and not self.lost:  # else it is an agent that stops them
            self.stop_reason = self.stop_reason or str(event.get("signal"))
        return event

    def _see_progress(self, frame: Frame) -> None:
        for text, state in frame["states"].items():
            rank = int(text)
            if rank not in self.ended_ranks:
                self.states[rank] = self.new_states[rank] = RankProgress(*state)
                self.halted.discard(rank)
        self.halted.update(frame["halted"])

    def _see_exit(self, frame: Frame) -> None:
        end = WorkerExit(
            rank=frame["rank"],
            status=frame["status"],
            time=time.time(),
            oom=frame["oom"],
            note=FailureNote.parse(frame["note"]),
            log=tuple(frame["log"]),
            shortage=frame.get("shortage", ""),
            short_in=frame.get("short_in", ""),
            held=HeldMemory.of_data(frame.get("held")),
        )
        self.states.pop(end.rank, None)
        self.exits.append(end)
        self.ended_ranks.add(end.rank)
        if end.status != 0:
            self.is_failing = True
        elif self.first_clean_exit is None:
            self.first_clean_exit = end

    def _see_stop(self, why: str) -> None:
        """Note that an agent stops its ranks, which end all after the same step."""
        self.seen = self.seen or why
        self.stop_reason = self.stop_reason or why

    def _see_silence(self, host: str, frame: Frame) -> None:
        """Tell a launcher that stood still while the ranks went on from a network that was cut."""
        why = f"{host}: its agent heard nothing from this launcher for {frame['silent_s']:.0f} s"
        if frame["stop"] == StopMode.FINISH:
            self._see_stop(why)
            return
        cause = "the network was cut, or this process or its host hung"
        self.lose_host(host, f"{why}, and its ranks made no progress: {cause}")


class Supervisor:
    """Follows the agents until all have ended; stops them when asked to, or when one of them fails.

    All times are seconds of one clock of the launcher, which leaves out what it slept through.
    """

    def __init__(
        self,
        agents: SupervisedAgents,
        run: SupervisedRun,
        signals: LauncherSignals,
        limits: LimitsConfig,
        clock: Callable[[], float] | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """Prepare to follow `agents`.

        Args:
            agents: of all hosts; they have been told to start their workers.
            run: state of the run, kept current.
            clock: gives seconds; None: an `AwakeClock`.
            run_dir: where `zrun profile` leaves its request; None: nobody asks.
        """
        self._agents = agents
        self._run_dir = run_dir
        self._run = run
        self._signals = signals
        self._limits = limits
        self._clock = clock or AwakeClock()
        self._hangs = HangWatch(limits)
        self._start_deadline = self._clock() + limits.start_s
        self._last_beat = float("-inf")
        self._last_hang_check = float("-inf")
        self._heard: dict[str, float] = {}  # host -> when its agent said something last
        # A rank left early: until when the others may run on alone.
        self._alone_until: float | None = None
        # Stopping because a signal asked for it.
        self._stop_deadline: StopDeadline | None = None
        self._obeyed_level = 0
        # Stopping after a failure or a hang: when to do so, when that was, when to give up.
        self._stop_at: float | None = None
        self._stopped_at = float("inf")
        self._give_up_at = float("inf")

    def watch(self, on_event: OnEvent, on_turn: OnTurn) -> None:
        """Follow the agents until all have ended or been given up.

        Args:
            on_event: called with each event, and its line where that can be recorded as it is.
            on_turn: called after each look at the agents, about ten times a second.

        Raises:
            RendezvousError: not all hosts have started their workers after `limits.start_s`.
        """
        with _few_collections():
            while not self._agents.all_ended:
                self._receive(on_event)
                on_turn()
                now = self._clock()
                if self._gives_up(now):
                    break
                self._check_start(now)
                self._send_beat(now)
                self._look_for_hangs(now)
                self._stop_after_failure(now)
                self._stop_when_asked(now)
                self._save_when_asked()
                self._profile_when_asked()
                self._pause_when_asked()

    def _receive(self, on_event: OnEvent) -> None:
        """Take in what the agents have said, and which of them are lost."""
        run = self._run
        frames = self._agents.frames(_TURN_S)
        now = self._clock()
        for host, frame in frames:
            self._heard[host] = now
            event = run.update(host, frame)
            if event is not None:
                on_event(event, frame.get("line"))
        for host, why in self._agents.lost.items():
            if host not in run.lost:
                run.lose_host(host, why)

    def _gives_up(self, now: float) -> bool:
        """Stop waiting for hosts that do not end: all of them are silent, or their time is over."""
        unfinished = self._agents.unfinished
        last_words = (max(self._heard.get(host, 0.0), self._stopped_at) for host in unfinished)
        all_silent = all(at < now - _MUTE_S for at in last_words)
        if not all_silent and now <= self._give_up_at:
            return False
        for host in unfinished:
            what = "its agent no longer answers"
            cause = "it or its parent process was killed or is suspended"
            self._run.lose_host(host, f"{host}: {what}: {cause}")
            self._agents.drop_host(host)
        return True

    def _check_start(self, now: float) -> None:
        if now <= self._start_deadline:
            return
        self._start_deadline = float("inf")
        known = self._run.started | self._run.lost.keys()
        missing = [host for host in self._agents.hosts if host not in known]
        if missing:
            raise RendezvousError(
                f"{', '.join(missing)}: the workers had not started after "
                f"{self._limits.start_s:.0f} s (limits.start_s)"
            )

    def _send_beat(self, now: float) -> None:
        """Send other hosts a word: silence is the death of this launcher, or of the way to it."""
        if now > self._last_beat + BEAT_S:
            self._last_beat = now
            self._agents.send({"beat": True})

    # Hangs.

    def _look_for_hangs(self, now: float) -> None:
        """Time what the ranks do. Once some hang, ask their agents about them, then kill them."""
        run = self._run
        self._hangs.see(now, run.new_states, run.halted)
        run.new_states = {}
        if run.hang is not None or run.is_failing:
            return
        if run.investigation is None:
            if now < self._last_hang_check + PROGRESS_S:
                return
            self._last_hang_check = now
            hung = self._hangs.judge(now, run.states)
            if hung is not None:
                run.investigation = HangInvestigation(hung, run.states, now)
                self._agents.send({"testify": True})
        elif run.investigation.is_over(now):
            run.hang = run.investigation.finding()
            self._stop(now, StopMode.KILL)

    # Failures.

    def _stop_after_failure(self, now: float) -> None:
        """Stop the other ranks once one has failed or left early, or a host is lost."""
        if self._run.left_early is not None:
            if self._alone_until is None:
                self._alone_until = now + _ALONE_S
            if now > self._alone_until:
                self._alone_until = float("inf")
                self._agents.stop(StopMode.NOW)
        if not self._run.is_failing:
            return
        if self._stop_at is None:
            self._stop_at = now + _LAST_WORDS_S
            if self._run.lost and self._run.states and not self._run.is_script:
                self._agents.send({"testify": True})  # those who wait for that host
        if now > self._stop_at:
            self._stop_at = float("inf")
            # Without a host nothing can be saved, and a rank that waits for it obeys no signal.
            how = StopMode.KILL if self._run.lost else StopMode.NOW
            self._stop(now, how, asks_agents=len(self._agents.hosts) > 1)

    def _stop(self, now: float, how: StopMode, *, asks_agents: bool = True) -> None:
        """End the run, and give the hosts a time to do so.

        `asks_agents` is false where a single agent has stopped its ranks by itself.
        """
        self._stopped_at = now
        self._give_up_at = now + GRACE_S + SILENCE_S
        if asks_agents:
            self._agents.stop(how)

    # Signals.

    def _stop_when_asked(self, now: float) -> None:
        """Pass on what signals ask for, level by level."""
        signals = self._signals
        run = self._run
        if self._stop_deadline is None and (signals.level or run.stop_reason):
            self._stop_deadline = StopDeadline(now, self._limits)
            if not signals.level:
                how = "the ranks got SIGTERM" if run.is_script else "finishing the step"
                notify(f"{run.stop_reason}: {how}")
        if self._stop_deadline is not None and signals.level < 2:
            self._wait_to_finish(now, self._stop_deadline)
        if signals.level > self._obeyed_level:
            self._obeyed_level = signals.level
            # At level 1 a run that fails is being stopped already.
            if signals.level > 1 or not run.is_failing:
                self._obey()

    def _obey(self) -> None:
        signals = self._signals
        agents = self._agents
        if signals.level == 1:
            name = signals.first.name if signals.first is not None else "a signal"
            how = "finishing the step" if self._run.is_training else "ending before the first step"
            if self._run.is_script:
                how = "the ranks got SIGTERM"
            notify(f"{name}: {how}; once more stops at once")
            agents.stop(StopMode.FINISH)
        elif signals.level == 2:
            notify("stopping the workers; once more kills them")
            agents.stop(StopMode.NOW)
        else:
            notify("killing the workers")
            agents.stop(StopMode.KILL)

    def _wait_to_finish(self, now: float, deadline: StopDeadline) -> None:
        """Stop the workers once they have had their time; a save gets a time of its own."""
        limits = self._limits
        was_due = deadline.was_due
        saves = any(state.phase == "save" for state in self._run.states.values())
        if deadline.is_over(now, saves=saves):
            late = f"not finished after {limits.stop_s:g} s (limits.stop_s)"
            if saves:
                late = f"not saved after {limits.save_s:g} s (limits.save_s)"
            notify(f"{late}: stopping now")
            self._signals.force()
        elif deadline.was_due and not was_due:
            notify(
                f"a save is under way: it has {limits.save_s:g} s (limits.save_s) instead of "
                f"{limits.stop_s:g} (limits.stop_s); once more stops at once"
            )

    def _save_when_asked(self) -> None:
        """Pass on `zrun save`. A run that ends says by itself which step of it is saved."""
        if not self._signals.wants_save:
            return
        self._signals.wants_save = False
        run = self._run
        if self._signals.level or run.stop_reason or run.is_failing or run.ended:
            notify("zrun save: the run is already ending")
        elif not run.is_training:
            why = "no rank trains yet, so there is nothing to save"
            if run.is_script:
                why = "the script has not called zrun_core.init(), so it cannot be asked to save"
            notify(f"zrun save: {why}")
        else:
            how = "saving at the end of the step"
            if run.is_script:
                how = "the script was asked"
            notify(f"zrun save: {how}")
            self._agents.send({"save": True})

    def _profile_when_asked(self) -> None:
        """Pass on `zrun profile`. Rank 0 answers in the record."""
        if not self._signals.wants_profile:
            return
        self._signals.wants_profile = False
        run = self._run
        if run.is_script:
            notify("zrun profile: a script calls torch's profiler by itself")
            return
        if self._run_dir is None or not run.is_training or self._signals.level or run.ended:
            notify("zrun profile: the run does not train, so there is nothing to profile")
            return
        try:
            request = profile_request.read(self._run_dir)
        except (OSError, ValueError) as error:
            notify(f"zrun profile: the request cannot be read: {error}")
            return
        of_ranks = ", ".join(map(str, request.ranks))
        notify(f"zrun profile: {several(request.steps, 'step')}, traced on rank {of_ranks}")
        self._agents.send({"profile": request.to_text(), "run_dir": str(self._run_dir)})

    def _pause_when_asked(self) -> None:
        """Stop this process as the terminal asked for (ctrl-Z). The ranks train on meanwhile."""
        if not self._signals.wants_pause:
            return
        self._signals.wants_pause = False
        self._agents.send({"hold": True})
        notify("zrun is suspended, and its ranks keep training: fg brings it back")
        os.kill(os.getpid(), signal.SIGSTOP)
        self._agents.send({"beat": True})


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for cycles of garbage seldom.

    Frames of thousands of ranks come and go; reference counts free them, and there are no cycles.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_GARBAGE, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def judge(
    run: SupervisedRun,
    plan: LaunchPlan,
    rundir: RunDir,
    signals: LauncherSignals,
    committed: int = 0,
) -> tuple[int, Failure | Hang | LostHost | None]:
    """Return the exit code of a run that is over, and the failure behind it.

    Args:
        committed: the newest step that is saved; 0: none.
    """
    if run.hang is not None and signals.forced_at is None:
        return ExitCode.HANG, _hang(run, run.hang, plan, rundir)
    statuses = {each.status for each in run.exits}
    if len(run.exits) == run.num_ranks:
        if run.may_end and statuses == {0}:
            return ExitCode.OK, None
        if statuses == {ExitCode.STOPPED}:
            return ExitCode.STOPPED, None
    was_asked = (
        signals.first is not None or bool(run.stop_reason) or bool(statuses & _ENDED_BY_SIGNAL)
    )
    exits = run.exits
    if was_asked:
        exits = [each for each in exits if not _was_asked_to(each, signals)]
    end = first_failure(exits, run.may_end, lost_ranks(run.faults))
    if _is_lost_host(run, signals, end, exits):
        host, why = next(iter(run.lost.items()))
        return ExitCode.HANG, LostHost(host, why, run.last_step, plan, tuple(run.survivors))
    if end is not None:
        failure = _failure(run, end, plan, rundir)
        return failure.exit_code, failure
    if not was_asked:
        return ExitCode.OK, None
    if committed and committed >= run.last_step:  # what was cut off came after the last step
        return ExitCode.STOPPED, None
    if signals.first == signal.SIGINT:
        return ExitCode.INTERRUPTED, None
    if signals.first is None and ExitCode.INTERRUPTED in statuses:
        return ExitCode.INTERRUPTED, None
    return ExitCode.TERMINATED, None


def _hang(run: SupervisedRun, finding: dict[str, Any], plan: LaunchPlan, rundir: RunDir) -> Hang:
    """Return the hang of a run from its finding."""
    alive_at = time.time() - finding["limit_s"]
    fault = explaining(run.faults, finding["to_blame"], alive_at)
    if run.is_script:
        return ScriptHang(finding, plan, rundir.path, fault, ended=run.done_ranks)
    return Hang(finding, plan, rundir.path, fault)


def _failure(run: SupervisedRun, end: WorkerExit, plan: LaunchPlan, rundir: RunDir) -> Failure:
    """Return the failure of the worker that ended first."""
    fault = explaining(run.faults, [end.rank], end.time)
    failure = Failure(end, plan, run.last_step, rundir.log(end.rank), fault)
    if run.is_script:
        return replace(failure, is_script=True, done=run.done_ranks)
    return failure


def _is_lost_host(
    run: SupervisedRun,
    signals: LauncherSignals,
    end: WorkerExit | None,
    exits: Sequence[WorkerExit],
) -> bool:
    """Return whether the run failed because a host was lost.

    A host that is lost after a signal is a consequence of it. `end` is the exit that caused the
    others, None where there was none; `exits` are those that no signal explains.
    """
    if not run.lost:
        return False
    if signals.first_at is not None and run.lost_at >= signals.first_at:
        return False
    return end is None or end.time > run.lost_at or not is_cause(end, list(exits))


def _was_asked_to(end: WorkerExit, signals: LauncherSignals) -> bool:
    """Return whether a worker ended because of a signal of the run, or because another ended."""
    if signals.forced_at is not None and end.time >= signals.forced_at:
        return True
    if end.status in _ENDED_BY_SIGNAL or end.signal in _STOPPING_SIGNALS:
        return True
    return end.note is not None and end.note.is_echo
