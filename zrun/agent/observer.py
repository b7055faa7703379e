"""The agent's view of the ranks of its host.

How far they are is in the flight recorder, to which they write. Why one ended is in its note and at
the end of its log. While one hangs, all of them are asked for their stacks, and what holds their
memory before they are ended for want of it.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zrun.agent.nccl_abort import note_of_abort
from zrun.agent.unanswered import own_addresses, unanswered
from zrun.system import processes
from zrun.system.processes import Process
from zrun.system.tail_file import end_of_text, last_lines
from zrun.transport.frames import Frame
from zrun_core.spine.flight_page import RankProgress
from zrun_core.spine.flight_view import Awaited, FlightRecorderView
from zrun_core.spine.held_memory import HeldMemory, testimony_file
from zrun_core.spine.stop_signals import TESTIFY

_STACKS_S = 1.0  # that ranks get for writing their stacks
_TESTIMONY_S = 2.0  # for saying what holds their memory
_LARGEST_NOTE = 1 << 18  # characters


class Observer:
    """Reads the flight recorder, the notes and the logs of a host's ranks."""

    def __init__(self, view: FlightRecorderView, run_dir: Path) -> None:
        self._view = view
        self._run_dir = run_dir
        self._states: dict[int, RankProgress] = {}  # at the last look

    def look(self, ranks: Iterable[int]) -> Frame:
        """Return the frame that says how far the running `ranks` are, and which are halted."""
        before = self._states
        self._states = {rank: self._state(rank) for rank in ranks}
        still = [rank for rank, state in self._states.items() if state == before.get(rank)]
        return {
            "frame": "board",
            "states": {rank: list(state) for rank, state in self._states.items()},
            "halted": [rank for rank in still if self._states[rank].is_halted],
        }

    def _state(self, rank: int) -> RankProgress:
        """Return how far a rank is."""
        return self._view.state(rank)

    def phase(self, ranks: Iterable[int]) -> tuple[str, int]:
        """Return the phase and the step in which the first of the running `ranks` is."""
        state = self._view.state(min(ranks))
        return state.phase, state.step

    def have_allocated_all(self, ranks: Iterable[int]) -> bool:
        """Return whether each of `ranks` has made two steps: the first one makes the moments."""
        return all(0 < state.first < state.step - 1 for state in map(self._view.state, ranks))

    def status_of(self, rank: int, status: int) -> int:
        """Return the exit status that counts for a worker that has ended."""
        return status

    def last_words(self, rank: int, status: int) -> tuple[str | None, list[str]]:
        """Return why a worker ended, which may be on this host's disk only.

        Returns:
            Its own note, None if it left none; and the end of its log if it failed.
        """
        note: str | None = None
        path = self._run_dir / "failures" / f"rank-{rank}.json"
        with suppress(OSError), path.open(errors="replace") as file:
            note = file.read(_LARGEST_NOTE)
        if status == 0:
            return note, []
        if note is None and status == -signal.SIGABRT:
            note = self._note_of_abort(rank)
        return note, last_lines(self._log(rank))

    def _note_of_abort(self, rank: int) -> str | None:
        """Return the note of a rank that torch's watchdog has ended; None: something else did."""
        text = end_of_text(self._log(rank), _LARGEST_NOTE)
        awaits = self._view.awaits_in_words(rank)
        note = note_of_abort(rank, text, self._view.state(rank), awaits)
        return None if note is None else json.dumps(note)

    def report_hang(self, leaders: Mapping[int, Process]) -> Frame:
        """Return the frame that says what the running workers do, with stacks and ends of logs."""
        halted = [rank for rank, leader in leaders.items() if leader.state in ("T", "t")]
        awaited = self._view.awaited()
        own_words = self._ask(leaders, halted)
        told = []
        for rank in leaders:
            state = self._view.state(rank)
            told.append(
                {
                    "rank": rank,
                    "step": state.step,
                    "phase": state.phase,
                    "does": "is stopped" if rank in halted else self._does(rank, state),
                    "last": str(self._view.last(rank) or "no collective"),
                    "awaits": _in_frame(awaited.get(rank)),
                }
                | own_words.get(rank, {})
            )
        return {
            "frame": "testimony",
            "ranks": told,
            "disagreement": None if halted else self._view.disagreement(),
            "stalemate": None if halted else self._view.stalemate(),
            "stacks": self._dump_stacks(leaders, halted),
            "logs": {rank: last_lines(self._log(rank)) for rank in leaders},
            "addresses": own_addresses(),
            "unanswered": unanswered(leader.pid for leader in leaders.values()),
        }

    def _ask(self, leaders: Mapping[int, Process], halted: list[int]) -> dict[int, dict[str, Any]]:
        """Return what ranks say themselves of what they wait for; a job's have it on their pages.

        Those of the ranks that are in `halted` cannot answer.
        """
        return {}

    def ask_what_is_held(
        self, leaders: Mapping[int, Process], may_wait: Callable[[], bool]
    ) -> dict[int, HeldMemory]:
        """Have every worker say what holds its memory; return it by rank, of those that could.

        Args:
            may_wait: whether there is still memory for another while.
        """
        files = {rank: testimony_file(self._run_dir, rank) for rank in leaders}
        files = {rank: file for rank, file in files.items() if file.exists()}
        for file in files.values():
            with suppress(OSError):
                file.write_text("")  # what was said when they were asked before
        processes.send([leaders[rank] for rank in files], TESTIFY)
        deadline = time.monotonic() + _TESTIMONY_S
        found: dict[int, HeldMemory] = {}
        while len(found) < len(files) and time.monotonic() < deadline and may_wait():
            time.sleep(_TESTIMONY_S / 100)
            for rank, file in files.items():
                with suppress(OSError):
                    held = HeldMemory.from_json(file.read_bytes())
                    if held is not None:
                        found[rank] = held
        return found

    def _does(self, rank: int, state: RankProgress) -> str:
        """Return what a rank does, as a verb."""
        own_wait = self._view.tier_wait(rank)
        if own_wait is not None:
            return str(own_wait)
        return "waits" if state.waiting else "runs"

    def _log(self, rank: int) -> Path:
        return self._run_dir / "logs" / f"rank-{rank}.log"

    def _dump_stacks(self, leaders: Mapping[int, Process], halted: list[int]) -> dict[int, str]:
        """Have every worker write its stacks, and return them by rank.

        faulthandler writes them without Python's help, into a file that the worker opened.
        """
        folder = self._run_dir / "stacks"
        files = {rank: folder / f"rank-{rank}.txt" for rank in leaders}
        files = {rank: file for rank, file in files.items() if file.exists()}
        processes.send([leaders[rank] for rank in files], signal.SIGQUIT)
        # A stopped process cannot write.
        processes.send([leaders[rank] for rank in halted], signal.SIGCONT)
        deadline = time.monotonic() + _STACKS_S
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            now = {rank: file.stat().st_size for rank, file in files.items()}
            if now == sizes and all(now.values()):
                break  # nothing was added since the last look
            sizes = now
            time.sleep(_STACKS_S / 20)
        return {rank: file.read_text(errors="replace") for rank, file in files.items()}


def _in_frame(awaited: Awaited | None) -> dict[str, Any] | None:
    """Return what a rank waits for, and which ranks do not come."""
    if awaited is None:
        return None
    is_message = awaited.op.kind == "receive"
    what = awaited.op.name if is_message else str(awaited.op)
    return {"what": what, "ranks": list(awaited.ranks), "is_message": is_message}
