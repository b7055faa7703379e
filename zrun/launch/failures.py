"""Which rank failed first, why, and what to do: from exit statuses and from the notes that dying workers leave.

When one rank ends, the others fail within milliseconds with errors of their own (connections close under them). What
is shown is the cause, once.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from zrun.transport.frames import GRACE_S
from zrun_core.errors import PEER_IS_GONE, ExitCode, OutOfMemoryError
from zrun_core.spine import tracebacks
from zrun_core.spine.spec import LaunchPlan, RankPlace

_DOES = {
    "is stopped": "stopped by a signal or a debugger",
    "is silent": "silent, as is the agent of its host",
}
_SHOWN_LINES = 15  # of a log, on screen, where there is no traceback

_PASSED_ON = {code for code in ExitCode if ExitCode.USAGE <= code <= ExitCode.DIVERGED}


class FailureNote(BaseModel):
    """What a worker writes to `failures/rank-<n>.json` before it ends with `exit_code`."""

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

    @classmethod
    def parse(cls, text: str | None) -> FailureNote | None:
        """The note that `text` is; None where there is none, or half of one."""
        try:
            return cls.model_validate_json(text) if text is not None else None
        except ValidationError:
            return None

    @property
    def is_echo(self) -> bool:
        """It tells of another rank's end."""
        return self.kind == "peer" or PEER_IS_GONE.search(self.message) is not None


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker, as its agent saw it."""

    rank: int
    status: int  # negative: the signal that ended it
    time: (
        float  # unix seconds at which the launcher heard of it: clocks of hosts are never compared
    )
    oom: bool = False  # the kernel, or the agent, took it because memory ran out
    note: FailureNote | None = None  # what it said why
    log: tuple[str, ...] = ()  # the end of its log
    shortage: str = ""  # what the agent saw when it took it

    @property
    def signal(self) -> signal.Signals | None:
        number = -self.status if self.status < 0 else self.status - 128
        try:
            return signal.Signals(number)
        except ValueError:
            return None


def first_failure(exits: list[WorkerExit], ended: bool) -> WorkerExit | None:
    """The exit that caused the others. `ended`: training reached its end, so that status 0 is no failure."""
    failed = [each for each in exits if each.status != 0 or not ended]
    if not failed:
        return None
    start = min(each.time for each in failed)
    return min(failed, key=lambda each: (_distance(each, start), each.time))


def is_cause(end: WorkerExit, exits: list[WorkerExit]) -> bool:
    """Whether an exit needs no other one to explain it."""
    return _distance(end, min(each.time for each in exits)) == 0


def _distance(end: WorkerExit, start: float) -> int:
    """How far an exit is from being the cause: 0 a cause, 1 perhaps, 2 an echo, 3 our own doing.

    `start` is the time of the first failure, at which the agent asks the other workers to end.
    """
    if end.note is not None:
        return 2 if end.note.is_echo else 1 if end.note.kind == "bug" else 0
    if end.time == start or end.status == 0 or end.oom:
        return 0
    if end.signal == signal.SIGKILL:
        return 3 if end.time - start > 0.9 * GRACE_S else 0  # the agent's own comes that late
    return 3 if end.signal == signal.SIGTERM else 2 if end.signal else 1


@dataclass(frozen=True)
class Failure:
    """The first failing rank, and what is known about it."""

    end: WorkerExit
    place: RankPlace
    num_ranks: int
    last_step: int  # that any event told of
    log: Path  # on the rank's host

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
        """On the host or on a device."""
        return self.end.oom or (
            self.note is not None and self.note.type == OutOfMemoryError.__name__
        )

    @property
    def headline(self) -> str:
        who = f"rank {self.place.rank} of {self.num_ranks} ({self.place.host}, {self.place.device})"
        return f"{who} {self._what()}{self._where()}"

    def _what(self) -> str:
        if self.note is not None:
            return "failed"
        if self.end.signal is not None:
            seen = f": {self.end.shortage}," if self.end.shortage else ""
            return (
                f"was killed by {self.end.signal.name}"
                + f" because memory ran out{seen}" * self.end.oom
            )
        return f"ended with status {self.end.status}"

    def _where(self) -> str:
        if self.note is None:
            if not self.last_step:
                return " before the first step ended"
            is_early = self.end.status == 0
            return f" after step {self.last_step}{', before training was over' if is_early else ''}"
        step = f" at step {self.note.step}" if self.note.step else ""
        return step + (f" in {self.note.phase}" if self.note.phase else "")

    @property
    def advice(self) -> str:
        if self.end.oom:
            return "lower batch.micro, raise zero.stage, or checkpoint activations"
        if self.note is None and tracebacks.crash_stack(self.end.log):
            return "native code crashed there: look at what the last line of yours hands to it"
        if self.note is None and self.end.signal is not None:
            return f"something outside the job sent {self.end.signal.name}, or native code crashed: see its log"
        if self.note is None:
            return "look for os._exit or a crash in the code that the job names: see its log"
        if self.note.is_echo:
            return "no rank says why it went away: look at the other logs, and for a time limit that is too short"
        if self.note.kind == "bug":
            return "this is a bug of zrun: report it with failure.json"
        if self.note.kind == "user" and tracebacks.names_users_code(self.note.traceback or ""):
            return "correct the code that the traceback names"
        return "correct what the message names"

    def describe(self) -> str:
        """What a person reads last."""
        if self.note is not None:
            body = (self.note.traceback or self.note.message).strip()
        else:
            lines = tracebacks.crash_stack(self.end.log) or self.end.log[-_SHOWN_LINES:]
            body = "\n".join(lines) or "(its log is empty)"
        return f"{body}\n\n{self.headline}\n  log: {self.log}\n  next: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """The content of failure.json."""
        note = self.note
        return {
            "rank": self.place.rank,
            "host": self.place.host,
            "device": self.place.device,
            "step": self.step,
            "phase": note.phase if note else None,
            "exit_code": int(self.exit_code),
            "status": self.end.status,
            "signal": self.end.signal.name if note is None and self.end.signal else None,
            "out_of_memory": self.end.oom,
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
    """Ranks that no longer move, as the agent of their host saw them.

    Attributes:
        frame: what was found, see `zrun.launch.hangs.HangInvestigation.finding`.
    """

    frame: dict[str, Any]
    plan: LaunchPlan
    run_dir: Path

    @property
    def first(self) -> dict[str, Any]:
        """What is known of the first rank that is to blame."""
        found: dict[str, Any] = next(
            told for told in self.frame["ranks"] if told["rank"] == self.frame["to_blame"][0]
        )
        return found

    @property
    def headline(self) -> str:
        limit = f"no progress for {self.frame['limit_s']:.3g} s ({self.frame['key']})"
        if self.links:
            return f"{limit}: {self.links[0]}"
        if all(told["does"] == "waits" for told in self.frame["ranks"]):
            step, phase = self.first["step"], self.first["phase"]
            return f"{limit}: all ranks wait for each other {f'at step {step}' if step else f'in {phase}'}"
        ranks = ", ".join(str(rank) for rank in self.frame["to_blame"])
        who = f"rank{'s' if len(self.frame['to_blame']) > 1 else ''} {ranks} of {self.plan.world_size}"
        does = _DOES.get(self.first["does"], "stuck")
        are = "are" if len(self.frame["to_blame"]) > 1 else "is"
        return f"{limit}: {who} {are} {does} in {_place(self.first)}"

    @property
    def links(self) -> list[str]:
        """Say between which hosts data is lost; each pair once, whichever end told of it."""
        pairs: dict[frozenset[str], str] = {}
        for link in self.frame.get("links", ()):
            here, address = self.plan.ranks[link["rank"]].host, link["address"]
            is_known = link["other"] is not None
            there = self.plan.ranks[link["other"]].host if is_known else address
            at = f" ({address})" if is_known else ""
            text = (
                f"the network between {here} and {there} is cut: {there}{at} does not answer {here}"
            )
            pairs.setdefault(frozenset((here, there)), text)
        return list(pairs.values())

    @property
    def advice(self) -> str:
        if self.links:
            return (
                "mend that network, or leave one of the two hosts out; the run can be started again"
            )
        if self.first["does"] == "is stopped":
            return "find who sent SIGSTOP; the run can be started again"
        if self.first["does"] == "is silent":
            return "look at that host: it is overloaded, or somebody stopped its processes"
        if self.frame["reason"] is not None:
            return "make every rank run the same modules, or name the one that chooses in zero.leaf"
        return f"see what the stack waits for; if it is merely slow, raise {self.frame['key']}"

    @property
    def stack(self) -> list[str]:
        """The main thread of the first rank that is to blame, innermost call first."""
        lines = str(self.frame["stacks"].get(self.first["rank"], "")).splitlines()
        starts = [
            number
            for number, line in enumerate(lines)
            if line.startswith(("Current thread", "Thread"))
        ]
        return lines[starts[-1] if starts else 0 :]  # faulthandler begins with the newest thread

    def describe(self) -> str:
        """What a person reads last."""
        ranks = [
            f"  rank {told['rank']} {told['does']} in {_place(told)}, last: {told['last']}"
            for told in self.frame["ranks"]
        ]
        reason = [*self.links[1:], *([self.frame["reason"]] if self.frame["reason"] else [])]
        stack = [line for line in self.stack if line.strip()][:_SHOWN_LINES]
        return "\n".join(
            [
                *stack,
                "",
                self.headline,
                *reason,
                *ranks,
                f"  stacks: {self.run_dir}/stacks",
                f"  next: {self.advice}",
            ]
        ).lstrip("\n")

    def to_json(self) -> dict[str, Any]:
        """The content of failure.json."""
        place = self.plan.ranks[self.first["rank"]]
        return {
            "rank": place.rank,
            "host": place.host,
            "device": place.device,
            "step": self.first["step"],
            "phase": self.first["phase"],
            "exit_code": int(ExitCode.HANG),
            "kind": "hang",
            "message": self.headline,
            "reason": self.frame["reason"],
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


def _place(told: dict[str, Any]) -> str:
    """What a rank does, and in which step, if it has begun any."""
    return f"{told['phase']} of step {told['step']}" if told["step"] else str(told["phase"])


@dataclass(frozen=True)
class LostHost:
    """A host whose agent is gone, and with it every rank there."""

    host: str
    why: str  # one line that begins with the host
    last_step: int

    exit_code = ExitCode.HANG

    @property
    def headline(self) -> str:
        return f"lost {self.why}" + (f", after step {self.last_step}" if self.last_step else "")

    @property
    def advice(self) -> str:
        return "see what became of that host; the run can be started again"

    def describe(self) -> str:
        """What a person reads last."""
        return f"{self.headline}\n  next: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """The content of failure.json."""
        return {
            "host": self.host,
            "step": self.last_step or None,
            "exit_code": int(self.exit_code),
            "kind": "lost host",
            "message": self.headline,
            "what_to_do": self.advice,
            "time": time.time(),
        }


@dataclass(frozen=True)
class Stopped:
    """A run that ended because a signal asked for it: no failure, but not its end either.

    Attributes:
        signal: its name, or the command that sent it; empty: only the workers know.
        last_step: that any event told of.
        committed: the newest step that is saved; 0: none.
        lost: hosts that were lost meanwhile, each with the reason.
    """

    exit_code: int
    signal: str
    last_step: int
    committed: int
    lost: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        last = max(self.last_step, self.committed)
        when = f"after step {last}" if last else "before the first step ended"
        return f"stopped {when}, {self._saved}"

    @property
    def _saved(self) -> str:
        if self.exit_code == ExitCode.STOPPED:
            return "saved"
        return "not saved" + (f", but step {self.committed} is" if self.committed else "")

    def describe(self, resume: str | None) -> str:
        """What a person reads last.

        Args:
            resume: the command that goes on.
        """
        lost = "".join(f"; lost {why}" for why in self.lost)
        return self.headline + (f"; resume: {resume}" if resume is not None else "") + lost

    def to_json(self) -> dict[str, Any]:
        """The content of failure.json."""
        return {
            "step": self.last_step or None,
            "saved_step": self.committed or None,
            "exit_code": int(self.exit_code),
            "signal": self.signal or None,
            "kind": "stopped",
            "message": f"{self.signal}: {self.headline}" if self.signal else self.headline,
            "what_to_do": f"go on with --resume auto: step {self.committed} is saved"
            if self.committed
            else "start again",
            "time": time.time(),
        }
