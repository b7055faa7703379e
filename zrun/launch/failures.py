"""Find the rank that failed first, and say why and what to do.

When one rank ends, the others fail within milliseconds with errors of their own (connections close
under them). From exit statuses, and the notes that dying workers leave, `first_failure` finds the
cause; it is shown once. `Failure`, `Hang`, `LostHost` and `Stopped` are the ways in which a run
ends early: each has a headline, an advice, a text for the terminal, and the content of
failure.json.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from zrun.launch.gpu_faults import GpuFault, lost_ranks
from zrun.launch.held import held_in_words
from zrun.transport.frames import GRACE_S
from zrun_core.errors import (
    PEER_IS_GONE,
    DivergedError,
    ExitCode,
    HangError,
    JobError,
    NumericError,
    OutOfMemoryError,
)
from zrun_core.spine import tracebacks
from zrun_core.spine.flight_recorder import listed
from zrun_core.spine.held_memory import HeldMemory
from zrun_core.spine.spec import LaunchPlan, RankPlace

_DOES = {
    "is stopped": "stopped by a signal or a debugger",
    "is silent": "silent, as is the agent of its host",
}
# Errors that all ranks raise together: they may be about another rank.
_FOUND_BY_ALL = {DivergedError.__name__, NumericError.__name__}
# What to do about errors for which no line of the job or of the code is to blame.
_ADVICE = {
    OutOfMemoryError.__name__: "make the first change above that you can accept, or free the "
    "largest items in your code",
    DivergedError.__name__: "check for bad memory or a broken link (dmesg, zrun doctor), and "
    "your code for parameters that only some ranks change",
    HangError.__name__: "make every rank reach the call that the message names; if one is only "
    "slow, raise the limit",
}
_SHOWN_LINES = 15  # of a log, on screen, where there is no traceback
_SHOWN_RANKS = 4  # of a lost host, and of those that wait for it

# How far an exit is from being the cause of a failed run.
_CAUSE, _PERHAPS, _ECHO, _OURS = range(4)

# Exit codes of a worker that the launcher reports as they are.
# What takes memory beside the steps, and what to do about it.
BESIDE_STEPS = {
    "hook": "a hook took the memory: see what it keeps, or raise limits.memory",
    "evaluation": "the evaluation took the memory: see what eval.metrics and on_eval keep, or "
    "raise limits.memory",
    "profile": "the profile took the memory: trace fewer steps, or raise limits.memory",
    "save": "the save took the memory: write checkpoint: {async: false}, or raise limits.memory",
}
_PASSED_ON = {code for code in ExitCode if ExitCode.USAGE <= code <= ExitCode.DIVERGED}


class FailureNote(BaseModel):
    """The content of `failures/rank-<n>.json`, which a worker writes before it ends."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: int
    kind: Literal["user", "zrun", "bug", "peer"]  # peer: it only felt another rank's end
    type: str
    message: str  # one line
    traceback: str | None = None  # all that a person should see, the message included
    whole_traceback: str | None = None  # with every frame, where that is more
    exit_code: int
    step: int | None = None
    phase: str | None = None
    held: dict[str, Any] | None = None  # memory, where that ran out

    @classmethod
    def parse(cls, text: str | None) -> FailureNote | None:
        """Return the note in `text`; None if there is none, or half of one."""
        if text is None:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    @property
    def is_echo(self) -> bool:
        """Return whether it only tells of another rank's end."""
        return self.kind == "peer" or PEER_IS_GONE.search(self.message) is not None


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker, as its agent saw it.

    Attributes:
        status: negative: the signal that ended it.
        time: unix seconds at which the launcher heard of it: clocks of hosts are never compared.
        oom: the kernel, or the agent, killed it because memory ran out.
        note: in which it said why it ends.
        log: the last lines of its log.
        shortage: of memory, as the agent saw it when it killed the worker.
        short_in: the phase in which that was.
        held: memory, when the agent was about to kill it; None: it did not, or could not tell.
    """

    rank: int
    status: int
    time: float
    oom: bool = False
    note: FailureNote | None = None
    log: tuple[str, ...] = ()
    shortage: str = ""
    short_in: str = ""
    held: HeldMemory | None = None

    @property
    def held_bytes(self) -> int:
        """Return what it held when memory ran out; 0: it did not, or is not known."""
        return 0 if self.held is None else self.held.num_bytes

    @property
    def signal(self) -> signal.Signals | None:
        """Return the signal that ended it; a shell reports 128 + its number."""
        number = -self.status if self.status < 0 else self.status - 128
        try:
            return signal.Signals(number)
        except ValueError:
            return None


def first_failure(
    exits: list[WorkerExit], ended: bool, lost: Collection[int] = ()
) -> WorkerExit | None:
    """Return the exit that caused the others; None: no worker failed.

    Args:
        ended: training reached its end, so that status 0 is no failure.
        lost: ranks whose GPU cannot go on: the others often fail before these do.
    """
    failed = [each for each in exits if each.status != 0 or not ended]
    if not failed:
        return None
    start = min(each.time for each in failed)
    return min(
        failed,
        # Of ranks that an agent has ended for want of memory together, the one that held most.
        key=lambda each: (
            each.rank not in lost,
            _distance(each, start),
            -each.held_bytes,
            each.time,
        ),
    )


def is_cause(end: WorkerExit, exits: list[WorkerExit]) -> bool:
    """Return whether an exit needs no other one to explain it."""
    return _distance(end, min(each.time for each in exits)) == 0


def _distance(end: WorkerExit, start: float) -> int:
    """Return how far an exit is from being the cause of a failed run.

    Example, GRACE_S 5: rank 2 raises, and its note says so (0). Rank 0 feels the connection close:
    its note is an echo (2). Rank 1 catches SIGTERM from the agent (3); rank 3 ignores it, and gets
    SIGKILL after 5 s (3).

    The agent asks the other workers to end at `start`, the time of the first failure.
    """
    if end.note is not None:
        if end.note.is_echo:
            return _ECHO
        return _PERHAPS if end.note.kind == "bug" else _CAUSE
    if end.time == start or end.status == 0 or end.oom:
        return _CAUSE
    if end.signal is None:
        return _PERHAPS
    if end.signal == signal.SIGKILL:
        was_agent = end.time - start > 0.9 * GRACE_S  # its own SIGKILL comes that late
        return _OURS if was_agent else _CAUSE
    return _OURS if end.signal == signal.SIGTERM else _ECHO


@dataclass(frozen=True)
class Failure:
    """The first failing rank, and what is known about it.

    Attributes:
        plan: of the run.
        last_step: that any event told of; 0: none.
        log: on the rank's host.
        fault: of a GPU, that explains it; None: none was reported.
        is_script: the rank has run a script, and not the loop of a job.
        done: ranks of a script that had ended with status 0.
    """

    end: WorkerExit
    plan: LaunchPlan
    last_step: int
    log: Path
    fault: GpuFault | None = None
    is_script: bool = False
    done: tuple[int, ...] = ()

    @property
    def place(self) -> RankPlace:
        return self.plan.ranks[self.end.rank]

    @property
    def note(self) -> FailureNote | None:
        return self.end.note

    @property
    def exit_code(self) -> ExitCode:
        if self.note is not None and self.note.kind != "bug" and self.note.exit_code in _PASSED_ON:
            return ExitCode(self.note.exit_code)
        return ExitCode.WORKER

    @property
    def step(self) -> int | None:
        return self.note.step if self.note is not None else self.last_step or None

    @property
    def is_out_of_memory(self) -> bool:
        """Return whether memory ran out, on the host or on a device."""
        if self.end.oom:
            return True
        return self.note is not None and self.note.type == OutOfMemoryError.__name__

    @property
    def held(self) -> HeldMemory | None:
        """Return what the rank held when memory ran out; None: it did not, or is not known."""
        if self.end.held is not None or self.note is None:
            return self.end.held
        return HeldMemory.of_data(self.note.held)

    @property
    def headline(self) -> str:
        rank = self.end.rank
        who = f"rank {rank} of {self.plan.world_size} ({self.plan.place_in_words(rank)})"
        is_job = not self.is_script
        if is_job and self.note is not None and self.note.type == JobError.__name__:
            return f"an error of the job, found{self._where()}"
        if self.note is not None and self.note.type in _FOUND_BY_ALL:
            return f"found by {who}{self._where()}"
        because = f": {self.fault.describe(self.plan)}" if self.fault is not None else ""
        return f"{who} {self._what()}{self._where()}{because}"

    def _what(self) -> str:
        if self.note is not None:
            return "failed"
        if self.end.signal is None:
            return f"ended with status {self.end.status}"
        is_lost = self.fault is not None and self.end.rank in lost_ranks([self.fault])
        if is_lost and self.end.signal == signal.SIGKILL and not self.end.oom:
            return "was ended"
        killed = f"was killed by {self.end.signal.name}"
        if not self.end.oom:
            return killed
        seen = f": {self.end.shortage}," if self.end.shortage else ""
        return f"{killed} because memory ran out{seen}"

    def _where(self) -> str:
        if self.is_script and self._misses_others:
            return f" after {ranks_in_words(self.done)} had ended with status 0"
        if self.is_script and not self.last_step:
            return ""
        if self.note is None:
            if not self.last_step:
                return " before the first step ended"
            where = f" after step {self.last_step}"
            if self.end.status == 0:
                where += ", before the end of training"
            return where
        step = f" at step {self.note.step}" if self.note.step else ""
        phase = f" in {self.note.phase}" if self.note.phase else ""
        return step + phase

    @property
    def _misses_others(self) -> bool:
        """Return whether the rank of a script felt the end of others that ended well."""
        return bool(self.done) and self.note is not None and self.note.is_echo

    @property
    def advice(self) -> str:
        if self._misses_others:
            return "make every rank reach the same collectives before it ends"
        if self.end.oom and self.is_script:
            return "use less memory: a smaller batch, fewer ranks or loader processes"
        if self.end.oom:
            batch = "lower batch.micro, raise zero.stage, or checkpoint activations"
            if self.held is not None and self.held.holders and not self.held.changes:
                batch = "have your code free the item listed first, or raise limits.memory"
            return BESIDE_STEPS.get(self.end.short_in, batch)
        if self.fault is not None:
            return self.fault.fault.advice
        if self.note is None:
            return self._advice_without_note()
        if self.note.is_echo:
            return (
                "no rank reported why it ended: look at the other logs, or for a time limit that "
                "is too short"
            )
        if self.note.kind == "bug":
            return "this is a bug of zrun: report it with failure.json"
        if self.note.kind == "user" and tracebacks.names_users_code(self.note.traceback or ""):
            return "correct the code that the traceback names"
        return _ADVICE.get(self.note.type or "", "correct what the message names")

    def _advice_without_note(self) -> str:
        if tracebacks.crash_stack(self.end.log):
            return (
                "native code crashed: check what the last line of your code in the stack passes "
                "to it"
            )
        if self.end.signal is not None:
            name = self.end.signal.name
            if not self.end.log:
                return f"something outside the job sent {name}: see dmesg and the scheduler's log"
            return f"something outside the job sent {name}, or native code crashed: see its log"
        if self.is_script:
            return "the script ended itself: look for sys.exit or os._exit in it"
        return "look for os._exit or a crash in the code that the job names: see its log"

    def describe(self, planned: Sequence[str] = ()) -> str:
        """Return the last words on the terminal.

        Args:
            planned: lines on the memory that was expected.
        """
        if self.note is not None:
            body = (self.note.traceback or self.note.message).strip()
        elif self.end.held is not None:
            body = "\n".join(held_in_words(self.end.held))
        else:
            lines = tracebacks.crash_stack(self.end.log) or self.end.log[-_SHOWN_LINES:]
            body = "\n".join(lines)
        if not body:
            return f"{self.headline}\n  log: {self.log} (empty)\n  next: {self.advice}"
        body = "\n".join([body, *planned])
        return f"{body}\n\n{self.headline}\n  log: {self.log}\n  next: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of failure.json."""
        note = self.note
        return {
            **_who(self.place),
            "step": self.step,
            "phase": note.phase if note else None,
            "exit_code": int(self.exit_code),
            "status": self.end.status,
            "signal": self.end.signal.name if note is None and self.end.signal else None,
            "out_of_memory": self.end.oom,
            "held": None if self.held is None else self.held.to_json(),
            "gpu_fault": None if self.fault is None else self.fault.to_json(),
            "kind": note.kind if note else None,
            "type": note.type if note else None,
            "message": note.message if note else self.headline,
            "traceback": note.traceback if note else None,
            "whole_traceback": note.whole_traceback if note else None,
            "log": str(self.log),
            "last_lines": list(self.end.log),
            "what_to_do": self.advice,
            "time": self.end.time,
        }


@dataclass(frozen=True)
class Hang:
    """Ranks that make no progress, as the agents of their hosts saw them.

    Attributes:
        frame: the finding of a `zrun.launch.hangs.HangInvestigation`.
        fault: of a GPU, that explains it; None: none was reported.
    """

    frame: dict[str, Any]
    plan: LaunchPlan
    run_dir: Path
    fault: GpuFault | None = None

    @property
    def first(self) -> dict[str, Any]:
        """Return what is known of the first rank that is to blame."""
        blamed = self.frame["to_blame"][0]
        found: dict[str, Any] = next(told for told in self.frame["ranks"] if told["rank"] == blamed)
        return found

    @property
    def headline(self) -> str:
        limit = f"no progress for {self.frame['limit_s']:.3g} s ({self.frame['key']})"
        if self.links:
            return f"{limit}: {self.links[0]}"
        if all(told["does"] == "waits" for told in self.frame["ranks"]):
            step = self.first["step"]
            where = f"at step {step}" if step else f"in {self.first['phase']}"
            return f"{limit}: all ranks wait for each other {where}"
        blamed = self.frame["to_blame"]
        if self._waits_for_tier:
            who = f"rank {blamed[0]} of {self.plan.world_size}"
            return f"{limit}: {who} {self.first['does']} in {_place(self.first)}"
        where = self.plan.place_in_words(blamed[0])
        who = f"rank {blamed[0]} of {self.plan.world_size} ({where}) is"
        if len(blamed) > 1:
            ranks = ", ".join(str(rank) for rank in blamed)
            who = f"ranks {ranks} of {self.plan.world_size} are"
        does = _DOES.get(self.first["does"], "stuck")
        return f"{limit}: {who} {does} in {_place(self.first)}"

    @property
    def _waits_for_tier(self) -> bool:
        """Return whether the first rank to blame waits for its own memory on a host or a disk."""
        return str(self.first["does"]).startswith("has waited")

    @property
    def links(self) -> list[str]:
        """Return a sentence for each pair of hosts between which data is lost."""
        pairs: dict[frozenset[str], str] = {}
        for link in self.frame.get("links", ()):
            here = self.plan.ranks[link["rank"]].host
            there = silent = link["address"]
            if link["other"] is not None:
                there = self.plan.ranks[link["other"]].host
                silent = f"{there} ({link['address']})"
            text = f"the network between {here} and {there} is cut: {silent} does not answer {here}"
            pairs.setdefault(frozenset((here, there)), text)  # once, whichever end told of it
        return list(pairs.values())

    @property
    def advice(self) -> str:
        key = self.frame["key"]
        if self.fault is not None:
            return self.fault.fault.advice
        if self.links:
            return (
                "repair the network between them, or leave one of the two hosts out; the run can "
                "be started again"
            )
        if self.first["does"] == "is stopped":
            return "find who sent SIGSTOP; the run can be started again"
        if self.first["does"] == "is silent":
            return "look at that host: it is overloaded, or somebody stopped its processes"
        if self._waits_for_tier:
            return f"check the disk or the host that it waits for; if it is only slow, raise {key}"
        if self.frame["reason"] is not None:
            return "make every rank run the same modules, or list the branching module in zero.leaf"
        return f"see in the stack what it waits for; if it is only slow, raise {key}"

    @property
    def stack(self) -> list[str]:
        """Return the main thread of the first rank that is to blame, innermost call first."""
        return self._main_thread(self.first["rank"])

    def _main_thread(self, rank: int) -> list[str]:
        """Return the stack of a rank's main thread as faulthandler wrote it."""
        lines = str(self.frame["stacks"].get(rank, "")).splitlines()
        start = 0
        for number, line in enumerate(lines):
            if line.startswith(("Current thread", "Thread")):
                start = number  # the last one: faulthandler begins with the newest thread
        return lines[start:]

    def _doing(self, told: dict[str, Any]) -> str:
        """Return what a rank does, in words."""
        return _doing(self.plan, told)

    def describe(self) -> str:
        """Return the last words on the terminal."""
        ranks = [
            f"  {_named(self.plan, told['rank'])} {self._doing(told)}"
            for told in self.frame["ranks"]
        ]
        stack = [line for line in self.stack if line.strip()][:_SHOWN_LINES]
        reasons = self.links[1:]
        if self.frame["reason"]:
            reasons.append(self.frame["reason"])
        if self.fault is not None:
            reasons.append(self.fault.describe(self.plan))
        files = [f"  stacks: {self.run_dir}/stacks", f"  next: {self.advice}"]
        text = "\n".join([*stack, "", self.headline, *reasons, *ranks, *files])
        return text.lstrip("\n")

    def to_json(self) -> dict[str, Any]:
        """Return the content of failure.json."""
        place = self.plan.ranks[self.first["rank"]]
        return {
            **_who(place),
            "step": self.first["step"],
            "phase": self.first["phase"],
            "exit_code": int(ExitCode.HANG),
            "kind": "hang",
            "message": self.headline,
            "reason": self.frame["reason"],
            "gpu_fault": None if self.fault is None else self.fault.to_json(),
            "limit": self.frame["key"],
            "limit_s": self.frame["limit_s"],
            "ranks": self.frame["ranks"],
            "traceback": "\n".join(self.stack),
            "stacks": str(self.run_dir / "stacks"),
            "log": str(self.run_dir / "logs" / f"rank-{place.rank}.log"),
            "last_lines": self.frame["logs"].get(place.rank, []),
            "what_to_do": self.advice,
            "time": time.time(),
        }


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks with their noun: "rank 1", "ranks 1 and 2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def _who(place: RankPlace) -> dict[str, Any]:
    """Return what failure.json says of a rank."""
    return {
        "rank": place.rank,
        "host": place.host,
        "device": place.device,
        "pp": place.pp,
        "dp": place.dp,
        "tp": place.tp,
    }


def _named(plan: LaunchPlan, rank: int) -> str:
    """Return a rank in words, with its place along the axes."""
    where = plan.along_axes(rank)
    return f"rank {rank} ({where})" if where else f"rank {rank}"


def _doing(plan: LaunchPlan, told: dict[str, Any]) -> str:
    """Return what a rank does, with what it waits for and who does not come."""
    where = f"in {_place(told)}"
    awaits = told.get("awaits")
    if awaits is None:
        return f"{told['does']} {where}, last: {told['last']}"
    if awaits["is_message"]:
        sender = plan.ranks[awaits["ranks"][0]]
        source = f"from rank {sender.rank} (stage {sender.pp})"
        return f"waits for {awaits['what']} {source} {where}, last: {told['last']}"
    ranks = "rank" if len(awaits["ranks"]) == 1 else "ranks"
    return f"waits for {ranks} {listed(awaits['ranks'])} {where}: {awaits['what']}"


def _awaited_ranks(told: dict[str, Any]) -> set[int]:
    """Return whom a rank waits for, as far as its host knows."""
    awaits = told.get("awaits")
    return set() if awaits is None else set(awaits["ranks"])


def _place(told: dict[str, Any]) -> str:
    """Return the phase that a rank is in, and the step if it has begun any."""
    if told["step"]:
        return f"{told['phase']} of step {told['step']}"
    return str(told["phase"])


@dataclass(frozen=True)
class LostHost:
    """A host whose agent has exited or is cut off, and with it every rank there.

    Attributes:
        why: one line that begins with the host.
        last_step: that any event told of; 0: none.
        plan: None: no rank had begun.
        survivors: what ranks of other hosts did when it was missed, as far as they could still say.
    """

    host: str
    why: str
    last_step: int
    plan: LaunchPlan | None = None
    survivors: tuple[dict[str, Any], ...] = ()

    exit_code = ExitCode.HANG

    @property
    def headline(self) -> str:
        if not self.last_step:
            return f"lost {self.why}"
        return f"lost {self.why}, after step {self.last_step}"

    @property
    def advice(self) -> str:
        return "check that host; the run can be started again"

    @property
    def ranks(self) -> list[RankPlace]:
        """Return the ranks that were there."""
        return [] if self.plan is None else [p for p in self.plan.ranks if p.host == self.host]

    def describe(self) -> str:
        """Return the last words on the terminal: with the ranks there, and who waits for them."""
        return "\n".join([self.headline, *self._with_it(), f"  next: {self.advice}"])

    def _with_it(self) -> list[str]:
        """Return lines that name the ranks there, and what the others did, the first few of both.

        Of the others those come first that wait for one that is gone.
        """
        if self.plan is None or not self.ranks:
            return []
        gone = {place.rank for place in self.ranks}
        named = [self.plan.named(rank) for rank in sorted(gone)[:_SHOWN_RANKS]]
        if len(gone) > _SHOWN_RANKS:
            named.append(f"and {len(gone) - _SHOWN_RANKS} more")
        lines = [f"  gone with it: rank {', '.join(named)}"]
        others = sorted(
            self.survivors,
            key=lambda told: not gone & set((told.get("awaits") or {}).get("ranks", ())),
        )
        lines += [
            f"  {_named(self.plan, told['rank'])} {_doing(self.plan, told)}"
            for told in others[:_SHOWN_RANKS]
        ]
        if len(others) > _SHOWN_RANKS:
            more = len(others) - _SHOWN_RANKS
            lines.append(f"  {more} more {'rank' if more == 1 else 'ranks'}: see failure.json")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the content of failure.json."""
        return {
            "host": self.host,
            "lost_ranks": [_who(place) for place in self.ranks],
            "ranks": list(self.survivors),
            "step": self.last_step or None,
            "exit_code": int(self.exit_code),
            "kind": "lost host",
            "message": self.headline,
            "what_to_do": self.advice,
            "time": time.time(),
        }


@dataclass(frozen=True)
class Stopped:
    """A run that ended before its end because a signal asked for it: no failure.

    Attributes:
        signal: its name, or the command that sent it, or what an agent saw that stopped its ranks;
            empty: only the workers got it.
        last_step: that any event told of.
        committed: the newest step that is saved; 0: none.
        lost: hosts that were lost meanwhile, each with the reason.
        seen: by an agent, in words for the terminal: too little memory, or no launcher.
        is_script: nobody knows what it has saved.
        held: by the fullest rank, where that was memory; None: it was not, or nobody could tell.
    """

    exit_code: int
    signal: str
    last_step: int
    committed: int
    lost: tuple[str, ...] = ()
    seen: str = ""
    is_script: bool = False
    held: HeldMemory | None = None

    @property
    def headline(self) -> str:
        if self.is_script and not self.last_step:
            return "stopped"
        if self.is_script:
            return f"stopped after step {self.last_step}"
        last = max(self.last_step, self.committed)
        when = f"after step {last}" if last else "before the first step ended"
        return f"stopped {when}, {self._saved}"

    @property
    def _saved(self) -> str:
        if self.exit_code == ExitCode.STOPPED:
            return "saved"
        if not self.committed:
            return "not saved"
        return f"not saved, but step {self.committed} is"

    def describe(self, resume: str | None, planned: Sequence[str] = ()) -> str:
        """Return the last words on the terminal.

        Args:
            resume: the command that goes on; None: there is none.
            planned: lines on the memory that was expected.
        """
        lost = "".join(f"; lost {why}" for why in self.lost)
        how = f"; resume: {resume}" if resume is not None else ""
        seen = f" ({self.seen})" if self.seen else ""
        said = self.headline + seen + how + lost
        if self.held is None:
            return said
        return "\n".join([*held_in_words(self.held), *planned, said])

    def to_json(self) -> dict[str, Any]:
        """Return the content of failure.json."""
        advice = "start again"
        if self.committed:
            advice = f"continue with --resume auto: step {self.committed} is saved"
        return {
            "step": self.last_step or None,
            "saved_step": self.committed or None,
            "exit_code": int(self.exit_code),
            "signal": self.signal or None,
            "kind": "stopped",
            "message": f"{self.signal}: {self.headline}" if self.signal else self.headline,
            "held": None if self.held is None else self.held.to_json(),
            "what_to_do": advice,
            "time": time.time(),
        }
